from hashlib import sha256
from itertools import pairwise

import pytest
import torch

from diloco.comm.codec.noise import PAGE, NoiseKey
from diloco.comm.codec.registry import codec_named
from diloco.config.schema import Config, InnerConfig, OuterConfig, SyncConfig
from diloco.elastic.protocol.record import Key, Proposal, Record, Settings
from diloco.elastic.runtime.fragments import Fragments
from diloco.island.layout import Layout
from diloco.train.outer import CHUNK, apply, apply_record, outer_pace, outer_settings, outer_vectors, preview

WHOLE = Fragments.whole


def nesterov(lr: float = 0.7, momentum: float = 0.9) -> Settings:
    return Settings(lr, momentum)


def state_of(parameters: torch.Tensor, optimizer: str = "nesterov") -> dict[str, torch.Tensor]:
    return outer_vectors(OuterConfig(optimizer=optimizer, lr=0.1), parameters.clone())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_torchs_nesterov(momentum):
    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(1000))
    ours = state_of(theirs.detach())
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for _ in range(5):
        theirs.grad = torch.randn(1000)
        apply(ours, WHOLE(1000), 0, theirs.grad, nesterov(momentum=momentum))
        sgd.step()
    torch.testing.assert_close(ours["parameters"], theirs.detach())


def test_equals_torchs_adam():
    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(1000))
    config = Config(outer=OuterConfig(optimizer="adam", lr=0.1, momentum=0.9, second=0.99))
    ours = state_of(theirs.detach(), "adam")
    adam = torch.optim.Adam([theirs], lr=0.1, betas=(0.9, 0.99))
    for number in range(1, 8):
        theirs.grad = torch.randn(1000)
        apply(ours, WHOLE(1000), 0, theirs.grad, outer_settings(config, 1, number))
        adam.step()
    torch.testing.assert_close(ours["parameters"], theirs.detach())


def test_bits_are_the_same_on_every_platform():
    """The golden digest: integer arithmetic makes the input, so that nothing but `apply` is under test."""
    state = golden_rounds("nesterov", lambda number: nesterov())
    digest = sha256(state["parameters"].numpy().tobytes() + state["momentum"].numpy().tobytes()).hexdigest()
    assert digest == "1532ff83980ef0c28c7f00975e08a2752d1c300f293bfbe1c75ff21fb3129fe0"


def test_adams_bits_are_the_same_on_every_platform():
    config = Config(outer=OuterConfig(optimizer="adam", lr=0.01))
    state = golden_rounds("adam", lambda number: outer_settings(config, 4, number))
    digest = sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()
    assert digest == "f43a1e1a6803edf501d42256f49a5cd9763f9bc90b04c4ca35214b5539e8d31f"


def golden_rounds(optimizer, settings_of):
    indices = torch.arange(CHUNK + 3, dtype=torch.int64)
    state = state_of(((indices * 2654435761) % 65536).float() / 65536 - 0.5, optimizer)
    for number in range(1, 21):
        mean = ((indices * 40503 + number * 977) % 65536).float() / 65536 - 0.5
        apply(state, WHOLE(CHUNK + 3), 0, mean, settings_of(number))
    return state


def test_vanishing_momentum_becomes_zero():
    state = state_of(torch.zeros(2))
    apply(state, WHOLE(2), 0, torch.tensor([2.0**-101, 2.0**-99]), nesterov())
    assert state["momentum"].tolist() == [0.0, 2.0**-99]


def test_a_fragments_update_leaves_the_others_alone_and_a_preview_everything():
    fragments = Fragments((((0, 2), (5, 6)), ((2, 5),)))
    state = state_of(torch.zeros(6))
    settings = nesterov(lr=1.0, momentum=0.0)
    seen = [preview(state, torch.tensor(mean), settings, at) for at, mean in ((0, [1.0, 2.0]), (5, [3.0]))]
    assert torch.cat(seen).tolist() == [-1, -2, -3] and not state["parameters"].any() and not state["momentum"].any()
    apply(state, fragments, 0, torch.tensor([1.0, 2.0, 3.0]), nesterov(lr=1.0, momentum=0.0))
    assert state["parameters"].tolist() == [-1, -2, 0, 0, 0, -3]


def test_views_cover_the_vector_in_order():
    layout = Layout(("a", "b"), ((2, 3), (4,)))
    vector = torch.arange(10.0)
    views = dict(layout.views(vector))
    assert views["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    views["b"].zero_()
    assert vector[6:].tolist() == [0, 0, 0, 0]
    assert layout.size == 10


def pace(islands: int = 4, *, rounds: int = 1000, muon: bool = False, **outer: object) -> tuple[float, float]:
    inner = InnerConfig(optimizer="muon" if muon else "adamw", steps=rounds * 30, warmup=0)
    config = Config(inner=inner, sync=SyncConfig(every=30), outer=OuterConfig(**outer))  # type: ignore[arg-type]
    lr, momentum = outer_pace(config, islands)
    return round(lr, 3), round(momentum, 3)


def test_the_outer_pace_follows_the_published_optimum():
    rates = [pace(islands)[0] for islands in (1, 2, 3, 4, 6, 8, 100)]
    assert rates == [0.4, 0.6, 0.6, 0.6, 0.7, 0.8, 0.8]
    assert pace(3) == (0.6, 0.9)
    assert pace(3, lr=0.55, momentum=0.8) == (0.55, 0.8)


def test_with_muon_inside_one_island_follows_muloco():
    assert pace(1, muon=True) == (0.7, 0.6)
    assert pace(2, muon=True) == (0.6, 0.9)  # nothing is published for more: as without Muon
    assert pace(1, muon=True, lr=0.5, momentum=0.8) == (0.5, 0.8)


def test_a_short_run_remembers_less():
    assert pace(rounds=200) == (0.6, 0.9)
    assert pace(rounds=100) == (0.644, 0.8)
    assert pace(rounds=30) == (0.852, 0.333)
    assert pace(rounds=20) == pace(rounds=3) == (1.0, 0.0)  # plain averaging
    assert pace(rounds=3, momentum=0.9) == (0.6, 0.9)
    few = Config(
        inner=InnerConfig(steps=2000, lr=1e-3), sync=SyncConfig(every=5, growth=0.03)
    )  # phases of 900 and more
    assert outer_pace(few, 4) == (1.0, 0.0)
    assert pace(rounds=3, lr=0.5) == (0.5, 0.0)
    assert pace(rounds=3, optimizer="adam", lr=1e-3)[1] == 0.9


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "fp4", "union:256"])
def test_a_record_is_applied_chunk_by_chunk_with_the_bits_of_the_whole_mean(codec):
    """Fragments begin and end anywhere: inside of chunks and of pages."""
    edges = [0, 1000, CHUNK + 77, CHUNK + PAGE, 2 * CHUNK + 5, 3 * CHUNK + 1234]
    parts = list(pairwise(edges))
    fragments = Fragments((tuple(parts[::2]), tuple(parts[1::2])))
    count = fragments.counts[0]
    values = torch.randn(count, generator=torch.Generator().manual_seed(3))
    payload = codec_named(codec).encode(values, NoiseKey(1, 0, "result"))
    settings = Settings(0.7, 0.9, "int8", codec)
    record = Record(Proposal(Key(1, ""), 0, (), (), (), (), settings, 1), "")
    expected, got = state_of(torch.ones(edges[-1])), state_of(torch.ones(edges[-1]))
    for _ in range(2):
        apply(expected, fragments, 0, codec_named(codec).decode(payload, count), settings)
        apply_record(got, record, payload, fragments)
    assert all(torch.equal(got[name], vector) for name, vector in expected.items())
    assert got["momentum"].any()
