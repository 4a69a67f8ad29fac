"""The inner side in one process. What several processes do is in test_mesh.py."""

import time
from typing import Any

import pytest
import torch
from alone import train
from largest import Largest
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from diloco.comm.codec.base import Codec
from diloco.config.file import own_island
from diloco.data.batches import Batches, open_samples, validation_batches
from diloco.errors import ConfigError, ModelError
from diloco.island.flat import Shards
from diloco.island.island import Island, next_token_loss
from diloco.island.layout import Layout, buckets_of
from diloco.island.mesh import ProcessMesh
from diloco.island.parallel import slices
from diloco.model.build import build_network, refuse_float_buffers

ALONE = ProcessMesh(rank=0, world=1, device=torch.device("cpu"), mesh=None)


def make_island(config) -> Island:
    network = build_network(config.model, data_vocab=256, sequence=32, seed=config.seed)
    return Island(network, ALONE, config.island, config.inner)


def batches(config, count: int) -> list[list[torch.Tensor]]:
    reader = Batches(open_samples(config), config.island, ALONE)
    try:
        size = config.island.batch
        return [reader.read(((n * size, (n + 1) * size),)) for n in range(count)]
    finally:
        reader.close()


def losses(config, steps: int = 6) -> list[float]:
    island = make_island(config)
    return [island.step(batch, lr=3e-3).item() for batch in batches(config, steps)]


def test_the_loss_falls(small):
    curve = losses(small(), steps=40)
    assert curve[-1] < curve[0] - 1.0


def test_accumulated_micro_batches_equal_one_batch(small):
    assert losses(small(island={"accumulate": 4})) == pytest.approx(losses(small()), rel=1e-5)


def test_recomputing_activations_changes_nothing(small):
    assert losses(small(island={"activation_checkpointing": True})) == losses(small())


def test_bf16_computes_close_to_fp32_with_fp32_parameters(small):
    config = small(island={"dtype": "bf16"})
    assert losses(config) == pytest.approx(losses(small()), rel=2e-2)
    assert losses(config) != losses(small())
    assert {p.dtype for p in make_island(config).module.parameters()} == {torch.float32}


@pytest.mark.soak
def test_compiled_equals_eager(small):
    assert losses(small(island={"compile": True}), steps=3) == pytest.approx(losses(small(), steps=3), rel=1e-5)


def test_gradients_are_clipped_to_the_given_norm(small):
    config = small(inner={"clip": 0.01})
    island = make_island(config)
    seen = []
    island.optimizer.register_step_pre_hook(
        lambda *_: seen.append(nn.utils.get_total_norm([p.grad for p in island.parameters.values()]).item())
    )
    island.step(batches(config, 1)[0], lr=1e-3)
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_a_step_with_infinite_gradients_changes_nothing_and_is_counted(small):
    config = small()
    island = make_island(config)
    good = batches(config, 2)
    island.step(good[0], lr=1e-3)
    before = island.state()["model"]
    before = {name: tensor.clone() for name, tensor in before.items()}
    poison = island.parameters["norm.weight"].register_hook(lambda gradient: gradient * float("inf"))
    island.step(good[1], lr=1e-3)
    poison.remove()
    assert island.skipped.item() == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in island.state()["model"].items())
    island.step(good[1], lr=1e-3)
    assert island.skipped.item() == 1
    assert not torch.equal(before["norm.weight"], island.parameters["norm.weight"])


def test_frozen_parameters_stay_and_are_not_in_the_outer_state(small):
    config = small(model={"freeze": ["embed.*", "blocks.0.*"]})
    island = make_island(config)
    embed = island.module.get_parameter("embed.weight").clone()
    for batch in batches(config, 2):
        island.step(batch, lr=1e-2)
    assert torch.equal(embed, island.module.get_parameter("embed.weight"))
    assert not any(name.startswith(("embed", "blocks.0.", "head")) for name in island.layout.names)
    assert any(name.startswith("blocks.1.") for name in island.layout.names)


@pytest.mark.parametrize(
    ("patterns", "complaint"),
    [(["embd.*"], "matches no parameter: names look like embed.weight"), (["*"], "everything")],
)
def test_freezing_nothing_or_everything_is_refused(small, patterns, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_island(small(model={"freeze": patterns}))


def test_running_statistics_are_refused_by_name():
    with pytest.raises(ModelError, match=r"1\.running_mean"):
        refuse_float_buffers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_parameters_go_out_and_come_back(small):
    island = make_island(small())
    vector = torch.empty(island.layout.size)
    island.shards.read(vector)
    views = dict(island.layout.views(vector))
    assert torch.equal(views["norm.weight"], island.parameters["norm.weight"])
    island.shards.write(vector * 2)
    assert torch.equal(views["norm.weight"] * 2, island.parameters["norm.weight"])
    assert island.layout == Layout.of(island.parameters.items())


LAYOUT = Layout(("a", "b", "c", "d", "e"), ((3,), (40, 5), (), (2, 3, 30), (4,)))


@pytest.mark.parametrize("config", [{}, {"model": {"tied": True}}, {"inner": {"optimizer": "muon"}}], ids=str)
def test_a_saves_tensors_have_the_names_and_order_that_torch_gives_them(small, config):
    island = make_island(small(**config))
    island.step([torch.zeros(2, 33, dtype=torch.long)], lr=1e-3)
    state, (model, optimizer) = island.state(), get_state_dict(island.module, island.optimizer)
    assert list(state)[:2] == ["model", "optimizer"] and list(state["model"]) == list(model)
    assert all(torch.equal(value, model[name]) for name, value in state["model"].items())
    expected = optimizer["state"]
    assert [(n, list(s)) for n, s in state["optimizer"].items()] == [(n, list(s)) for n, s in expected.items()]
    assert all(torch.equal(v, expected[name][key]) for name, s in state["optimizer"].items() for key, v in s.items())


@pytest.mark.parametrize("limit", [1, 7, 31, 100, 10**9])
@pytest.mark.parametrize("names", [None, {"a", "d"}])
def test_buckets_hold_everything_once_in_order_and_none_is_too_large(limit, names):
    buckets = buckets_of(LAYOUT, names, limit)
    found = [n for bucket in buckets for lo, hi in bucket.stretches() for n in range(lo, hi)]
    wanted = torch.arange(LAYOUT.size)
    views = [view.flatten() for name, view in LAYOUT.views(wanted) if names is None or name in names]
    assert found == torch.cat(views).tolist()
    assert all(bucket.count <= limit for bucket in buckets)
    for piece in (piece for bucket in buckets for piece in bucket.pieces):
        part = dict(LAYOUT.views(wanted))[piece.name][slices(piece.box)]
        assert part.flatten().tolist() == list(range(piece.start, piece.start + piece.count))


def test_small_parameters_travel_together_and_large_ones_in_few_parts():
    assert [bucket.count for bucket in buckets_of(LAYOUT, None, 10**9)] == [LAYOUT.size]
    assert [[piece.name for piece in bucket.pieces] for bucket in buckets_of(LAYOUT, None, 200)] == [
        ["a"], ["b"], ["c", "d", "e"]
    ]  # fmt: skip
    assert [bucket.count for bucket in buckets_of(LAYOUT, {"b"}, 64)] == [60, 60, 60, 20]


def test_a_rule_of_two_vectors_takes_no_more_memory_than_a_bucket(small):
    island = make_island(small())
    shards = Shards(island.parameters, ALONE, limit=100)
    before = torch.empty(island.layout.size)
    shards.read(before)
    one, other = before * 2, torch.sin(before)
    with Largest() as largest:
        shards.start_update(lambda local, one, other: one - (other - local), one, other)()
    after = torch.empty(island.layout.size)
    shards.read(after)
    assert torch.equal(after, one - (other - before))
    assert 0 < largest.values <= 100


def test_an_island_that_does_not_know_its_batch_yet_may_have_any_shape():
    assert own_island({"island": {"fsdp": 3}}).fsdp == 3
    with pytest.raises(ConfigError, match=r"island\.batch=4 cannot be divided by island\.fsdp=3"):
        own_island({"island": {"fsdp": 3, "batch": 4}})
    with pytest.raises(ConfigError, match=r"island\.fsdp"):
        own_island({"island": {"fsdp": "many"}})


@pytest.mark.parametrize("apply", ["rebase", "mix"])
def test_what_is_launched_is_what_was_there_then_whenever_it_is_worked_out(small, apply, tmp_path, monkeypatch):
    """A thread that is slow to encode works a cut out long after training has gone on."""
    sync = {"every": 4, "fragments": 2, "delay": 3, "apply": apply, "codec": "fp32"}
    expected = train(small(sync=sync, checkpoint={"dir": str(tmp_path / "a")})).losses
    assert len(expected) == 12
    encode_parts = Codec.encode_parts

    def late(*arguments: Any) -> torch.Tensor:
        time.sleep(0.1)
        return encode_parts(*arguments)

    monkeypatch.setattr("diloco.train.exchange.stages", lambda on_gpu, config: True)  # as beside a GPU
    monkeypatch.setattr(Codec, "encode_parts", late)
    assert train(small(sync=sync, checkpoint={"dir": str(tmp_path / "b")})).losses == expected
    first = train(small(sync=sync, checkpoint={"dir": str(tmp_path / "c")}), until=7)
    second = train(small(sync=sync, checkpoint={"dir": str(tmp_path / "c")}), resume=True)
    assert first.losses + second.losses == expected


def test_validation_takes_the_same_samples_at_once_or_in_small_batches(small, monkeypatch):
    config = small()
    samples, batch = open_samples(config), config.island.batch

    def batches(count: int) -> list[torch.Tensor]:
        return list(validation_batches(samples, config.island, ALONE, count))

    (whole,) = batches(3 * batch - 1)
    monkeypatch.setattr("diloco.data.batches.AT_ONCE", 0)
    assert [len(rows) for rows in batches(3 * batch - 1)] == [batch] * 3
    assert torch.equal(torch.cat(batches(3 * batch - 1)), whole)


def test_evaluation_is_the_mean_loss_and_leaves_training_alone(small):
    config = small()
    island = make_island(config)
    rows = list(validation_batches(open_samples(config), config.island, ALONE, 16))
    expected = sum(next_token_loss(island.module, tokens).item() for tokens in rows) / len(rows)
    assert island.evaluate(rows) == pytest.approx(expected)
    assert island.module.training
    assert all(p.grad is None for p in island.parameters.values())
