"""Every codec is held to its declared size and error bound, and to bytes that depend on nothing else."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from golden import GOLDEN, KEY, golden_digest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.comm.codec import chunks_cpu, cpu
from diloco.comm.codec.base import whole_units
from diloco.comm.codec.dense import BLOCK
from diloco.comm.codec.feedback import ErrorFeedback
from diloco.comm.codec.noise import PAGE, NoiseKey, add_noise
from diloco.comm.codec.registry import CODECS, codec_named
from diloco.errors import CodecError

NAMES = [name for name, codec in CODECS.items() if codec.closed]
UNIONS = ["union:64", "union:256", "union:320", "union:384", "union:4096"]  # of the results of sparse contributions
ALL = [*CODECS, *UNIONS]
ROOT = Path(__file__).parent.parent
COUNT = 2 * PAGE + 1000


def normal(count: int = COUNT) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def student_t(count: int = COUNT) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.distributions.StudentT(3.0).sample((count,))


INPUTS = {
    "normal": normal(),
    "heavy tails": student_t(),
    "zeros": torch.zeros(1000),
    "one huge outlier": torch.cat((normal(999) * 1e-6, torch.tensor([2.9e38]))),
    "denormals": normal(1000) * 2.0**-140,
    "near the smallest scale": normal(1000) * 2.0**-100,
    "the largest": torch.full((300,), -2.9e38),
    **{f"length {n}": normal(n) for n in (0, 1, 255, 257, PAGE - 1, PAGE, PAGE + 1)},
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", NAMES)
def test_size_is_exact_and_error_within_the_bound(name, kind):
    codec, values = CODECS[name], INPUTS[kind]
    payload = codec.encode(values, KEY)
    decoded = codec.decode(payload, len(values))
    assert payload.numel() == codec.size(len(values))
    bound = codec.bound(whole_units(values, BLOCK)).flatten()[: len(values)] if len(values) else values
    assert ((decoded - values).abs() <= bound).all()


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", NAMES[1:])
def test_compiled_loops_and_torch_give_the_same_bytes(name, kind, plain):
    codec, values = CODECS[name], INPUTS[kind]
    payload, sums = codec.encode(values, KEY, start=PAGE), torch.ones(len(values))
    codec.accumulate(payload, sums, share=0.3)
    plain()
    expected, expected_sums = codec.encode(values, KEY, start=PAGE), torch.ones(len(values))
    codec.accumulate(payload, expected_sums, share=0.3)
    assert torch.equal(payload, expected)
    assert torch.equal(sums, expected_sums)


@pytest.mark.parametrize("name", [*CODECS, "union:64"])
def test_compiled_loops_compute_what_they_say_in_python(name, monkeypatch):
    """Compilers widen and wrap integers by rules of their own."""
    codec, values = codec_named(name), torch.cat((normal(PAGE + 300), torch.tensor([*SPECIAL[:-2], 2.0**99])))

    def everything() -> list[torch.Tensor]:
        payload, sums = codec.encode(values, KEY, start=PAGE), torch.ones(len(values))
        codec.accumulate(payload, sums, share=0.3)
        rows = torch.stack([payload, codec.encode(-3 * values, KEY, start=PAGE)])
        mean = torch.empty_like(payload)
        if codec.closed:
            codec.mean(rows, (0.7, 0.3), KEY, PAGE, len(values), mean)
        return [payload, sums, codec.decode(payload, len(values)), mean[: len(payload) * codec.closed]]

    compiled = everything()
    loops = [
        (module, each, loop.py_func)
        for module in (cpu, chunks_cpu)
        for each, loop in vars(module).items()
        if hasattr(loop, "py_func")
    ]
    assert len(loops) > 20
    for module, each, loop in loops:
        monkeypatch.setattr(module, each, loop)
    assert all(map(torch.equal, everything(), compiled))


SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 2.0**-100, -(2.0**-106), 2.0**-6, 1.0, -1.0, 255.99998, 2.9e38, -2.9e38]


@pytest.mark.parametrize("name", NAMES[1:])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_compiled_loops_and_torch_agree_on_any_values_of_any_length_from_any_page(name, data):
    codec, seed = CODECS[name], data.draw(st.integers(0, 2**32))
    count = data.draw(st.one_of(st.integers(1, 600), st.integers(PAGE - 300, PAGE + 300)))
    noise = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=noise) * 2.0 ** data.draw(st.integers(-149, 120))
    for _ in range(data.draw(st.integers(0, 8))):
        values[data.draw(st.integers(0, count - 1))] = data.draw(st.sampled_from(SPECIAL))
    start, key = PAGE * data.draw(st.integers(0, 2**20)), NoiseKey(seed, 0, "any")
    before, share = torch.randn(count, generator=noise), data.draw(st.sampled_from([1.0, 0.5, 1 / 3, 1e-30]))

    def done() -> tuple[torch.Tensor, ...]:
        payload, sums = codec.encode(values, key, start), before.clone()
        codec.accumulate(payload, sums, share)
        return payload, sums, codec.decode(payload, count)

    compiled = done()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diloco.comm.codec.dense.dense_kernels", lambda device: None)
        expected = done()
    for ours, torchs in zip(compiled, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), torchs.view(torch.uint8))  # -0 is not 0 here


@pytest.mark.parametrize("name", ["fp4", "bf16"])
@given(st.binary(min_size=528, max_size=528))
@settings(max_examples=100, deadline=None)
def test_compiled_loops_and_torch_agree_on_any_bytes(name, raw):
    """Of four blocks or two. A peer may write what we never do, a negative zero or a negative scale, say."""
    codec, payload = CODECS[name], torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    payload = payload[: len(payload) // codec.unit_bytes * codec.unit_bytes]
    count = len(payload) // codec.unit_bytes * codec.unit

    def done() -> bytes:
        try:
            return codec.decode(payload, count).numpy().tobytes()
        except CodecError:
            return b""

    compiled = done()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diloco.comm.codec.dense.dense_kernels", lambda device: None)
        assert compiled == done()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_and_a_cpu_give_the_same_bytes_and_sums(name, kind):
    codec, values = CODECS[name], INPUTS[kind]
    payload, sums = codec.encode(values, KEY, start=PAGE), torch.ones(len(values))
    codec.accumulate(payload, sums, share=0.3)
    on_gpu, gpu_sums = codec.encode(values.cuda(), KEY, start=PAGE), torch.ones(len(values), device="cuda")
    codec.accumulate(on_gpu, gpu_sums, share=0.3)
    assert torch.equal(on_gpu.cpu(), payload)
    assert torch.equal(gpu_sums.cpu(), sums)
    into = torch.full((len(values),), float("nan"), device="cuda")  # memory that was used before
    assert torch.equal(codec.decode(on_gpu, len(values), out=into).cpu(), codec.decode(payload, len(values)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_are_refused_on_a_gpu(name, bad):
    values = normal(PAGE + 10).cuda()
    values[PAGE + 3] = bad
    with pytest.raises(CodecError, match="NaN or infinity"):
        CODECS[name].encode(values, KEY)


@pytest.mark.parametrize("name", [*NAMES, "sparse", "sign", *UNIONS])
def test_bytes_do_not_depend_on_what_a_processor_does_with_denormals(name):
    values = normal(2 * PAGE) * torch.where(torch.arange(2 * PAGE) % 3 > 0, 2.0**-135, 1.0)
    kept = codec_named(name).encode(values, KEY)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = codec_named(name).encode(values, KEY)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(kept, flushed)


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_compiled_mean_and_torchs_give_the_same_bytes(name, plain):
    codec, count = CODECS[name], PAGE + 300
    rows = torch.stack([codec.encode(student_t(count) * scale, KEY) for scale in (1.0, 1e-3, 40.0)])
    compiled, expected = torch.empty_like(rows[0]), torch.empty_like(rows[0])
    codec.mean(rows, (0.5, 0.3, 0.2), KEY, 2 * PAGE, count, compiled)
    plain()
    codec.mean(rows, (0.5, 0.3, 0.2), KEY, 2 * PAGE, count, expected)
    assert torch.equal(compiled, expected)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_strided_vectors_encode_as_their_values_do(name):
    codec, values = CODECS[name], normal(2000)
    expected = codec.encode(values[::2].clone(), KEY)
    assert torch.equal(codec.encode(values[::2], KEY), expected)
    assert torch.equal(codec.encode(values[::2].clone().requires_grad_(), KEY), expected)
    assert not codec.decode(expected, 1000).requires_grad


@pytest.mark.parametrize("name, levels, lowest", [("int8", 127, 0x80), ("int4", 7, 0x88)])
def test_a_number_that_we_never_write_cannot_make_infinity(name, levels, lowest):
    codec = CODECS[name]
    payload = codec.encode(torch.ones(256), KEY)
    payload[:4].view(torch.float32).fill_(torch.finfo(torch.float32).max / (levels + 0.5))
    payload[4:] = lowest  # -128, -8: once more than `levels` scales
    with pytest.raises(CodecError, match="NaN or infinity"):
        codec.decode(payload, 256)


@pytest.mark.soak
def test_a_damaged_cache_of_compiled_code_costs_time_only(tmp_path):
    """As a power cut leaves it."""
    script = "import torch; from golden import *; print(golden_digest('int8', 'cpu') == GOLDEN['int8'])"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == "True", done.stderr
        indices = list(tmp_path.rglob("*.nbi"))
        assert indices
        for index in indices:
            index.write_bytes(b"")


def test_declared_sizes():
    assert {name: CODECS[name].size(BLOCK) for name in NAMES} == {
        "fp32": 1024, "bf16": 512, "int8": 260, "int4": 132, "fp4": 132,
    }  # fmt: skip
    assert CODECS["int4"].size(0) == 0
    assert CODECS["int4"].size(257) == 264


@pytest.mark.parametrize("name", ALL)
def test_bytes_do_not_depend_on_how_the_vector_is_cut(name):
    codec, values = codec_named(name), normal(5 * PAGE + 77)
    whole = codec.encode(values, KEY)
    for edges in ([0, PAGE, 2 * PAGE], [0, 3 * PAGE], [0, PAGE, 4 * PAGE, 5 * PAGE]):
        cuts = list(pairwise([*edges, len(values)]))
        pieces = [codec.encode(values[lo:hi], KEY, start=lo) for lo, hi in cuts]
        assert torch.equal(torch.cat(pieces), whole)
        decoded = [codec.decode(piece, hi - lo) for piece, (lo, hi) in zip(pieces, cuts, strict=True)]
        assert torch.equal(torch.cat(decoded), codec.decode(whole, len(values)))
    for lo, hi in ((0, 1), (PAGE - 1, PAGE + 1), (PAGE, 4 * PAGE), (3 * PAGE + 5, len(values)), (7, len(values) - 7)):
        part = codec.decode_part(whole, lo, hi, len(values))
        assert torch.equal(part, codec.decode(whole, len(values))[lo:hi])


@pytest.mark.parametrize("name", NAMES[1:])
def test_rounding_depends_on_the_key_and_is_unbiased(name):
    codec, values = CODECS[name], normal(40 * PAGE)
    first, again, other = (codec.encode(values, NoiseKey(r, 0, "a")) for r in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    error = (codec.decode(first, len(values)) - values).double()
    assert abs(error.mean().item()) < 1e-3
    assert abs((error * values.sign()).mean().item()) < 1e-3


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_bits_are_the_same_on_every_platform(name, device):
    assert golden_digest(name, device) == GOLDEN[name]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ALL)
def test_nan_and_infinity_are_refused_before_encoding(name, bad, plain):
    values = normal(PAGE + 10)
    values[PAGE + 3] = bad
    for _ in range(2):
        with pytest.raises(CodecError, match="NaN or infinity"):
            codec_named(name).encode(values, KEY)
        plain()


@pytest.mark.parametrize("name", NAMES)
def test_a_share_is_a_factor_and_sums_add_up(name):
    codec, values = CODECS[name], normal()
    payload = codec.encode(values, KEY)
    total = torch.ones(len(values))
    codec.accumulate(payload, total, share=0.25)
    torch.testing.assert_close(total, 1 + 0.25 * codec.decode(payload, len(values)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_bytes_from_elsewhere_give_finite_values_or_our_error(name, data):
    codec = codec_named(name)
    payload = codec.encode(normal(300), KEY)
    size = len(payload)
    if data.draw(st.booleans()):
        noise = Random(data.draw(st.integers())).randbytes(data.draw(st.sampled_from([size, size, 1, 700])))
        payload = torch.frombuffer(bytearray(noise), dtype=torch.uint8)
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.sampled_from([size, size, size - 1]))]
    total = torch.zeros(300)
    try:
        codec.accumulate(payload, total, share=1.0)
    except CodecError:
        assert not total.any()
    assert torch.isfinite(total).all()


def test_noise_walks_through_every_step_once():
    noise = add_noise(torch.zeros(2 * PAGE), KEY, first=0)
    assert noise.min() >= 0 and noise.max() < 1
    assert len((noise[:PAGE] * 65536).unique()) == PAGE
    assert not torch.equal(noise[:PAGE], noise[PAGE:])
    assert not torch.equal(noise, add_noise(torch.zeros(2 * PAGE), NoiseKey(3, 0, "b"), first=0))


def test_error_feedback_brings_back_what_was_lost():
    values = normal(1000)
    feedback = ErrorFeedback(CODECS["int4"], 1000)
    total = torch.zeros(1000)
    for round in range(200):
        payload = feedback.encode([values[:300], values[300:]], NoiseKey(round, 0, "a"))
        total += feedback.codec.decode(payload, 1000)
    plain = CODECS["int4"].bound(whole_units(values, BLOCK)).max()
    assert (total / 200 - values).abs().max() < plain / 50


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e30])
@pytest.mark.parametrize("name", CODECS)
def test_the_norm_of_bytes_is_that_of_what_they_decode_to(name, scale):
    codec, count = CODECS[name], 18 * PAGE + 300
    payload = codec.encode(torch.randn(count) * scale, NoiseKey(1, 0, "a"))
    assert codec.norm(payload, count) == pytest.approx(float(codec.decode(payload, count).double().norm()), rel=1e-4)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_compiled_norm_is_torchs_whatever_lies_behind_the_last_value(name, kind, plain):
    codec, values = CODECS[name], INPUTS[kind]
    payload = codec.encode(values, KEY)
    if behind := -len(values) % BLOCK:
        packed = payload[-(codec.unit_bytes - codec.scale_bytes) :]  # of the last block
        packed[BLOCK - behind :] = 0x77  # of its second half as nibbles, from its value on as bytes
    compiled = codec.sum_of_squares(payload, len(values))
    exact = float(codec.decode(payload, len(values)).double().square().sum())
    assert compiled == pytest.approx(exact, rel=1e-6, abs=1e-80)
    plain()
    assert compiled == pytest.approx(codec.sum_of_squares(payload, len(values)), rel=1e-4, abs=1e-80)
