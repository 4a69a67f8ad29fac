"""Codecs for error feedback and those of their means: exact sizes, the same bytes everywhere, no harm by strangers."""

import pytest
import torch
from golden import KEY

from diloco.comm.codec.base import whole_units
from diloco.comm.codec.feedback import ErrorFeedback
from diloco.comm.codec.lowrank import HEIGHT, RANK, WIDTH
from diloco.comm.codec.noise import PAGE, NoiseKey
from diloco.comm.codec.registry import CODECS, codec_named, result_codec_for, warm_up
from diloco.errors import CodecError

BIASED = [name for name, codec in CODECS.items() if codec.needs_feedback]
UNIONS = ["union:64", "union:256", "union:320", "union:384", "union:4096"]
NAMES = BIASED + UNIONS
PLACED = ["sparse", "dct", *UNIONS]


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def only_few(values: torch.Tensor, keep: int = 64) -> torch.Tensor:
    """At most `keep` of each 4096 are not zero: what a union of so many must carry whole."""
    return torch.where(torch.arange(len(values)) % 4096 < keep, values, 0.0)


INPUTS = {
    "normal": normal(2 * PAGE + 1000),
    "heavy tails": normal(2 * PAGE + 1000) / normal(2 * PAGE + 1000, seed=1).abs().clamp(min=0.01),
    "zeros": torch.zeros(5000),
    "one huge outlier": torch.cat((normal(4999) * 1e-6, torch.tensor([1e36]))),
    "one value": torch.where(torch.arange(5000) == 4321, -3.0, 0.0),
    "denormals": normal(5000) * 2.0**-140,
    "near the smallest scale": normal(5000) * 2.0**-100,
    "equals": torch.full((5000,), -0.25),
    "large": torch.full((300,), -1e36),
    **{f"length {n}": normal(n) for n in (0, 1, 63, 65, 4095, 4097, PAGE - 1, PAGE, PAGE + 1)},
}


def test_sizes_are_those_declared():
    bits = {name: codec_named(name).size(PAGE) * 8 / PAGE for name in NAMES}
    assert bits == pytest.approx(
        {
            "sparse": 0.234375, "sign": 1.125, "dct": 0.1640625, "lowrank": 0.37890625, "union:64": 0.3203125,
            "union:256": 1.2578125, "union:320": 1.5703125, "union:384": 1.7578125, "union:4096": 9.0078125,
        }
    )  # fmt: skip
    assert codec_named("sparse").size(4097) == 2 * 120
    assert codec_named("lowrank").size(1) == 1552


def test_four_members_move_less_than_a_fifth_of_a_byte_for_each_value():
    assert codec_named("sparse").size(PAGE) + codec_named(result_codec_for("sparse", 4)).size(PAGE) <= 0.195 * PAGE


def test_how_means_travel():
    assert [result_codec_for(name, 4) for name in ("int4", "sparse", "sign", "dct", "lowrank")] == [
        "int4", "union:256", "int8", "int8", "int8",
    ]  # fmt: skip
    assert result_codec_for("sparse", 1) == "union:64"
    assert [result_codec_for("sparse", n) for n in (56, 57, 1000)] == ["union:3584", "int8", "int8"]
    assert all(not codec_named(result_codec_for(name, n)).needs_feedback for name in CODECS for n in (1, 4, 100))


@pytest.mark.parametrize("name", ["", "int3", "union:", "union:5", "union:0", "union:8192", "union:+64", "union:６４"])
def test_other_names_are_refused(name):
    with pytest.raises(CodecError, match="there is no codec"):
        codec_named(name)


def test_names_are_resolved_once():
    assert codec_named("union:128") is codec_named("union:128")
    assert codec_named("int8") is CODECS["int8"]
    for name in CODECS:
        warm_up(name)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", NAMES)
def test_size_is_exact_and_error_within_the_bound(name, kind):
    codec, values = codec_named(name), INPUTS[kind]
    values = only_few(values) if name in UNIONS else values
    payload = codec.encode(values, KEY)
    decoded = codec.decode(payload, len(values))
    assert payload.numel() == codec.size(len(values))
    bound = codec.bound(whole_units(values, codec.unit)).flatten()[: len(values)] if len(values) else values
    assert ((decoded - values).abs() <= bound).all()


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", BIASED)
def test_no_unit_is_further_off_than_sending_nothing(name, kind):
    """What error feedback needs, or residuals grow for ever."""
    codec, values = codec_named(name), INPUTS[kind]
    error = values - codec.decode(codec.encode(values, KEY), len(values))
    before, after = (whole_units(x, codec.unit).double().norm(dim=1) for x in (values, error))
    assert (after <= before * (1 + 1e-6)).all()


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", ["sparse", *UNIONS])
def test_compiled_loops_and_torch_encode_the_same_bytes(name, kind, plain):
    codec, values = codec_named(name), INPUTS[kind]
    compiled = codec.encode(values, KEY, start=PAGE)
    plain()
    assert torch.equal(codec.encode(values, KEY, start=PAGE), compiled)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", NAMES)
def test_compiled_loops_and_torch_decode_the_same_values(name, kind, plain):
    codec, values = codec_named(name), INPUTS[kind]
    payload, sums, expected = codec.encode(values, KEY), torch.ones(len(values)), torch.ones(len(values))
    codec.accumulate(payload, sums, share=0.3)
    decoded = codec.decode(payload, len(values))
    plain()
    codec.accumulate(payload, expected, share=0.3)
    assert torch.equal(sums, expected)
    assert torch.equal(decoded.view(torch.int32), codec.decode(payload, len(values)).view(torch.int32))  # never -0


@pytest.mark.parametrize("name", NAMES)
def test_what_is_near_the_denormals_becomes_zero(name):
    codec, values = codec_named(name), INPUTS["denormals"]
    assert not codec.decode(codec.encode(values, KEY), len(values)).view(torch.int32).any()


def test_sparse_keeps_the_largest_and_of_equals_the_first():
    values = torch.ones(4096)
    values[100:200] = -5.0
    decoded = codec_named("sparse").decode(codec_named("sparse").encode(values, KEY), 4096)
    assert torch.equal(decoded.nonzero().flatten(), torch.arange(100, 164))
    assert (decoded[100:164] == -5.0).all()


def test_sparse_has_two_magnitudes_and_an_outlier_does_not_spoil_the_rest():
    values = torch.zeros(4096)
    values[:60], values[60:64] = -1.0, 100.0
    assert torch.equal(codec_named("sparse").decode(codec_named("sparse").encode(values, KEY), 4096), values)


def test_a_union_keeps_the_largest_if_there_are_too_many_and_is_unbiased():
    codec, values = codec_named("union:256"), normal(40 * PAGE)
    decoded = codec.decode(codec.encode(values, KEY), len(values))
    kept = whole_units(values.abs(), 4096).topk(256).values[:, -1:].expand(-1, 4096).flatten() <= values.abs()
    assert not decoded[~kept].any()
    error = (decoded - values)[kept].double()
    assert abs(error.mean().item()) < 1e-3
    assert abs((error * values[kept].sign()).mean().item()) < 1e-3


def test_dct_sends_a_few_waves_nearly_whole():
    n = torch.arange(64.0)
    wave = torch.cos(torch.pi * (2 * n + 1) * 5 / 128)[:, None] * torch.cos(torch.pi * (2 * n + 1) * 9 / 128) + 0.5
    decoded = codec_named("dct").decode(codec_named("dct").encode(wave.flatten(), KEY), 4096)
    assert (decoded - wave.flatten()).norm() < 0.01 * wave.norm()


def test_lowrank_sends_four_outer_products_nearly_whole():
    tile = (normal(128 * 4).view(128, 4) @ normal(4 * 256, seed=1).view(4, 256)).flatten()
    decoded = codec_named("lowrank").decode(codec_named("lowrank").encode(tile, KEY), PAGE)
    assert (decoded - tile).norm() < 0.03 * tile.norm()


@pytest.mark.parametrize("name", PLACED)
def test_places_that_do_not_rise_are_refused(name, plain):
    codec = codec_named(name)
    payload = codec.encode(normal(4096), KEY)
    getattr(codec, "kept", codec).map(payload.view(1, -1)).fill_(0)  # all the same place, or none at all
    for _ in range(2):
        with pytest.raises(CodecError, match="do not rise"):
            codec.decode(payload, 4096)
        plain()


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_that_bytes_can_say_is_finite_or_refused(name):
    """Every number as large as it can be, all of one sign, and the scale at the edge."""
    codec = codec_named(name)
    payload = codec.encode(normal(codec.unit), KEY)
    head = 4 * getattr(codec, "scales", 1)
    if name not in ("sparse", "sign"):
        numbers = RANK * (HEIGHT + WIDTH) if name == "lowrank" else getattr(codec, "kept", codec).keep
        payload[-numbers:] = 0x80  # -128: what we never write
    taken = []
    for power in range(90, 128):
        payload[:head].view(torch.float32).fill_(2.0**power * 1.99)
        try:
            decoded = codec.decode(payload, codec.unit)
        except CodecError:
            continue
        taken.append(power)
        assert torch.isfinite(decoded).all()
    assert taken


LEFT = {"sparse": 0.16, "sign": 0.07, "dct": 0.3, "lowrank": 0.12}  # relative error of the mean of 200 rounds


def send(feedback: ErrorFeedback, values: torch.Tensor, rounds: int) -> torch.Tensor:
    """The mean of what was sent."""
    total = torch.zeros(len(values))
    for number in range(rounds):
        payload = feedback.encode([values], NoiseKey(number, 0, "a"))
        total += feedback.codec.decode(payload, len(values))
    return total / rounds


@pytest.mark.parametrize("name", BIASED)
def test_with_error_feedback_all_of_a_vector_arrives(name):
    """Of noise, the hardest: nothing in it can be left out. What is under way is bounded, so its share falls."""
    values, codec = normal(PAGE), codec_named(name)
    errors = [(send(ErrorFeedback(codec, PAGE), values, rounds) - values).norm() for rounds in (100, 200)]
    assert errors[1] < LEFT[name] * values.norm()
    assert errors[1] < 0.75 * errors[0]


@pytest.mark.parametrize("name", BIASED)
def test_without_it_most_never_does(name):
    codec, values = codec_named(name), normal(PAGE)
    assert (codec.decode(codec.encode(values, KEY), PAGE) - values).norm() > 0.5 * values.norm()


def test_error_feedback_may_forget():
    codec, values = codec_named("sparse"), normal(4096)
    feedback = ErrorFeedback(codec, 4096, decay=0.95)
    send(feedback, values, 1)
    residual = feedback.residual.clone()
    sent = codec.decode(feedback.encode([values], KEY), 4096)
    assert torch.equal(feedback.residual, values + residual * 0.95 - sent)
