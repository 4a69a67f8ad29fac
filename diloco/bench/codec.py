"""Codecs: speed against a plain copy of the same tensor, error and bias on three distributions.

Those that need error feedback are biased by design: only their error is told.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from diloco.bench.report import Check, Report
from diloco.comm.codec.base import Codec
from diloco.comm.codec.noise import NoiseKey
from diloco.comm.codec.registry import CODECS, codec_named, result_codec_for
from diloco.island.mesh import describe_device, pick_device

KEY = NoiseKey(round=1, fragment=0, role="bench")
REPEATS = {"cpu": 25, "cuda": 200}
IN_A_ROW = {"cpu": 1, "cuda": 10}  # calls that are timed together: a GPU's work, not Python's way to its launch
FEW = 3  # repeats, of codecs that take a second
SPARSE_LIMIT = 0.195  # bytes for each value: a contribution and the mean of four
SPEED_LIMIT = {"cpu": 0.10, "cuda": 0.8}


def measure(*, device: str, count: int, repeats: int | None) -> Report:
    place = pick_device(device)
    repeats = repeats or REPEATS[place.type]
    data = {name: make(count, place) for name, make in DISTRIBUTIONS.items()}
    few = min(repeats, FEW)
    speed = {
        name: _speed(codec, data["normal"], few if codec.needs_feedback else repeats, place)
        for name, codec in CODECS.items()
    }
    error = {name: _error(codec, data) for name, codec in CODECS.items()}
    checks = [
        Check(f"codec.{name}.encode_over_memcpy", speed[name]["over_memcpy"], SPEED_LIMIT[place.type], "higher")
        for name in ("int8", "int4")
    ]
    checks += [
        Check(f"codec.{name}.bias_sigma", row["normal bias"], 1e-3, "lower")
        for name, row in error.items()
        if not CODECS[name].needs_feedback
    ]
    checks.append(Check("codec.sparse.bytes_per_value", _sparse_bytes_per_value(members=4), SPARSE_LIMIT, "lower"))
    return Report(checks, {"device": describe_device(place), "values": count, "speed": speed, "error": error})


def _sparse_bytes_per_value(members: int) -> float:
    both = codec_named("sparse"), codec_named(result_codec_for("sparse", members))
    return sum(codec.bits_per_value for codec in both) / 8


def _speed(codec: Codec, values: Tensor, repeats: int, device: torch.device) -> dict[str, Any]:
    """The copy is timed in turn with the codec: what slows this machine for a while slows both.

    Encoding is timed as a trainer uses it on a GPU: without waiting for it. `checked_s` has the wait, `alone_s` all of
    the host's work for a single call.
    """
    payload, target = codec.encode(values, KEY), torch.empty_like(values)
    works = {
        "copy_s": lambda: target.copy_(values),
        "encode_s": lambda: codec.encode(values, KEY, defer=True),
        "alone_s": lambda: codec.encode(values, KEY, defer=True),
        "checked_s": lambda: codec.encode(values, KEY),
        "decode_s": lambda: codec.decode(payload, len(values), out=target),
    }
    calls = [1 if name == "alone_s" else IN_A_ROW[device.type] for name in works]
    row = dict(zip(works, _medians_s(list(works.values()), calls, repeats, device), strict=True))
    bits = 8 * payload.numel() / len(values)
    return {"bits": bits, "bytes": payload.numel(), **row, "over_memcpy": row["copy_s"] / row["encode_s"]}


def _error(codec: Codec, data: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 error, and bias in standard deviations: of the error itself and of the error towards zero."""
    row = {}
    for name, values in data.items():
        error = (codec.decode(codec.encode(values, KEY), len(values)) - values).double()
        row[f"{name} L2"] = (error.square().sum() / values.double().square().sum()).sqrt().item()
        if not codec.needs_feedback:
            bias = max(abs(error.mean().item()), abs((error * values.sign()).mean().item()))
            row[f"{name} bias"] = bias / values.double().std().item()
    return row


def _medians_s(
    works: Sequence[Callable[[], object]], calls: Sequence[int], repeats: int, device: torch.device
) -> list[float]:
    both = list(zip(works, calls, strict=True))
    seconds = [[_time_s(work, times, device) for work, times in both] for _ in range(repeats + 1)]
    return [median(column) for column in zip(*seconds[1:], strict=True)]  # the first round warms up


def _time_s(work: Callable[[], object], calls: int, device: torch.device) -> float:
    """Of one of so many calls."""
    _synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronize(device)
    return (time.perf_counter() - started) / calls


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _normal(count: int, device: torch.device) -> Tensor:
    return torch.randn(count, generator=_generator(device), device=device)


def _laplace(count: int, device: torch.device) -> Tensor:
    uniform = torch.rand(count, generator=_generator(device), device=device).sub_(0.5)
    return -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp_(max=0.4999999))


def _student_t3(count: int, device: torch.device) -> Tensor:
    """Normal over the root of a chi-squared with 3 degrees of freedom, divided by 3."""
    generator = _generator(device)
    normals = torch.randn(4, count, generator=generator, device=device)
    return normals[0] / (normals[1:].square().sum(0) / 3).sqrt()


DISTRIBUTIONS: dict[str, Callable[[int, torch.device], Tensor]] = {
    "normal": _normal,
    "laplace": _laplace,
    "t(3)": _student_t3,
}
