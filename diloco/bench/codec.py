"""Measure codecs: speed against a plain copy of the same tensor, error and bias on three distributions.

Codecs that need error feedback are biased by design: only their error is reported.
"""

from statistics import median
from typing import Any

import torch
from torch import Tensor

from diloco.bench.report import Check, Report, time_s
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


def measure(*, device: str, values: int, repeats: int | None) -> Report:
    """Measure all codecs on vectors of so many values; `repeats` None: as many as suit the device."""
    place = pick_device(device)
    repeats = repeats or REPEATS[place.type]
    data = _distributions(values, place)
    times = {name: min(repeats, FEW) if codec.needs_feedback else repeats for name, codec in CODECS.items()}
    speed = {name: _speed(codec, data["normal"], times[name], place) for name, codec in CODECS.items()}
    error = {name: _error(codec, data) for name, codec in CODECS.items()}
    checks = [
        Check(f"codec.{name}.encode_over_memcpy", speed[name]["over_memcpy"], SPEED_LIMIT[place.type], "higher")
        for name in ("int8", "int4", "fp4", "bf16")
    ]
    checks += [
        Check(f"codec.{name}.bias_sigma", row["normal bias"], 1e-3, "lower")
        for name, row in error.items()
        if not CODECS[name].needs_feedback
    ]
    both = codec_named("sparse"), codec_named(result_codec_for("sparse", 4))
    sparse_bytes = sum(codec.bits_per_value for codec in both) / 8
    checks.append(Check("codec.sparse.bytes_per_value", sparse_bytes, SPARSE_LIMIT, "lower"))
    return Report(checks, {"device": describe_device(place), "values": values, "speed": speed, "error": error})


def _speed(codec: Codec, values: Tensor, repeats: int, device: torch.device) -> dict[str, Any]:
    """Time a codec and a copy in turn, so that what slows this machine for a while slows both.

    Encoding is timed as a trainer uses it on a GPU: without waiting for it. `checked_s` includes the wait, `alone_s`
    all of the host's work for a single call.
    """
    payload, target = codec.encode(values, KEY), torch.empty_like(values)
    works = {
        "copy_s": lambda: target.copy_(values),
        "encode_s": lambda: codec.encode(values, KEY, defer=True),
        "alone_s": lambda: codec.encode(values, KEY, defer=True),
        "checked_s": lambda: codec.encode(values, KEY),
        "decode_s": lambda: codec.decode(payload, len(values), out=target),
    }
    calls = {name: 1 if name == "alone_s" else IN_A_ROW[device.type] for name in works}
    seconds = [[time_s(works[name], device, times) for name, times in calls.items()] for _ in range(repeats + 1)]
    row = dict(zip(works, map(median, zip(*seconds[1:], strict=True)), strict=True))  # the first round warms up
    bits = 8 * payload.numel() / len(values)
    return {"bits": bits, "bytes": payload.numel(), **row, "over_memcpy": row["copy_s"] / row["encode_s"]}


def _error(codec: Codec, data: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative L2 error, and the bias in standard deviations: of the error, and of it towards zero."""
    row = {}
    for name, values in data.items():
        error = (codec.decode(codec.encode(values, KEY), len(values)) - values).double()
        row[f"{name} L2"] = (error.square().sum() / values.double().square().sum()).sqrt().item()
        if not codec.needs_feedback:
            bias = max(abs(error.mean().item()), abs((error * values.sign()).mean().item()))
            row[f"{name} bias"] = bias / values.double().std().item()
    return row


def _distributions(count: int, device: torch.device) -> dict[str, Tensor]:
    """Draw values of three distributions, from fixed seeds.

    The third is Student's t: normal over the root of a chi-squared with 3 degrees of freedom, divided by 3.
    """
    seeded = [torch.Generator(device).manual_seed(0) for _ in range(3)]
    uniform = torch.rand(count, generator=seeded[1], device=device).sub_(0.5)
    normals = torch.randn(4, count, generator=seeded[2], device=device)
    return {
        "normal": torch.randn(count, generator=seeded[0], device=device),
        "laplace": -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp_(max=0.4999999)),
        "t(3)": normals[0] / (normals[1:].square().sum(0) / 3).sqrt(),
    }
