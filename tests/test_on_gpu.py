"""A run of one on each device, with the outer state on the host or on the device: what a round leaves in the island."""

import pytest
import torch

from diloco.bench.team import trainer_of
from diloco.comm.codec.noise import PAGE, NoiseKey
from diloco.comm.codec.registry import codec_named
from diloco.comm.codec.streams import beside_training, lock_pages
from diloco.elastic.protocol.record import Key, Proposal, Record, Settings
from diloco.elastic.runtime.fragments import Fragments
from diloco.errors import CodecError
from diloco.run.join import alone
from diloco.train import outer as updates
from diloco.train.outer import CHUNK_ON_GPU, apply_record

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
PLACES = [
    ("cpu", "host"),
    pytest.param("cuda", "host", marks=NO_GPU),
    pytest.param("cuda", "device", marks=NO_GPU),
]


@pytest.mark.parametrize(("device", "outer"), PLACES)
@pytest.mark.parametrize("sync", [{}, {"delay": 2}, {"apply": "eager"}, {"fragments": 2}, {"codec": "sparse"}], ids=str)
def test_after_its_rounds_the_island_holds_the_outer_parameters(small, device, outer, sync):
    config = small(
        island={"device": device, "outer": outer}, sync={"every": 4, "codec": "int4", **sync}, inner={"steps": 12}
    )
    with trainer_of(config) as (trainer, _), alone(trainer):
        while not trainer.finished:
            trainer.advance()
        replica = trainer.rounds.driver.replica
        held = torch.empty(trainer.layout.size, device=replica.vectors["parameters"].device)
        trainer.shards.read(held)
        assert trainer.sync.view.updates >= 3
        assert replica.vectors["parameters"].device.type == (device if outer == "device" else "cpu")
        if sync.get("apply") != "eager":  # there it goes on from a preview
            assert torch.allclose(held, replica.vectors["parameters"], atol=1e-6)
        assert len(replica.digest()) == 64


@NO_GPU
@pytest.mark.parametrize("locked", [True, False])
def test_vectors_on_the_host_that_stream_through_the_gpu_get_the_bits_of_the_host(locked, monkeypatch):
    monkeypatch.setattr(updates, "UPLOAD_BYTES", 5 << 20)  # two chunks
    count, gpu = 7 * CHUNK_ON_GPU + 5 * PAGE + 17, torch.device("cuda")
    values = torch.Generator().manual_seed(0)
    outer = {name: torch.randn(count, generator=values) for name in ("parameters", "momentum")}
    mine = {name: vector.clone() for name, vector in outer.items()}
    payload = codec_named("int4").encode(torch.randn(count, generator=values), NoiseKey(1, 0, "result"))
    record = Record(Proposal(Key(1, ""), 0, (), (), (), (), Settings(0.7, 0.9, "int4"), 1), "")
    apply_record(outer, record, payload, Fragments.whole(count))
    if locked:
        assert all(lock_pages(vector, gpu).is_pinned() for vector in mine.values())
    with beside_training(gpu, after=True):
        apply_record(mine, record, payload, Fragments.whole(count), gpu)
    assert all(torch.equal(mine[name], outer[name]) for name in outer)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
@pytest.mark.parametrize("name", ["int4", "bf16", "sparse"])
def test_progress_with_a_nan_that_comes_in_parts_is_not_encoded(name, device):
    values, codec = torch.randn(5 * PAGE + 17, generator=torch.Generator().manual_seed(0)).to(device), codec_named(name)
    key = NoiseKey(1, 0, "a")
    whole = codec.encode(values, key)
    assert torch.equal(codec.encode_parts(values.split(PAGE // 3), len(values), key), whole)
    values[3 * PAGE + 5] = float("nan")
    with pytest.raises(CodecError, match="NaN or infinity"):
        codec.encode_parts(values.split(PAGE // 3), len(values), key)
