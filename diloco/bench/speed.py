"""Measure how fast one process trains, through the whole loop: tokens per second and MFU."""

from statistics import median

import torch

from diloco.bench.report import Report
from diloco.bench.team import trainer_of
from diloco.config.file import parse_config
from diloco.island.mesh import describe_device
from diloco.report.events import Step, of_kind
from diloco.run.join import alone

WARM_UP = 10


def measure(*, preset: str, batch: int, sequence: int, vocab: int, steps: int, compile: bool, device: str) -> Report:
    """Train a preset for so many steps after a warm-up, without rounds; return medians over the progress reports."""
    config = parse_config({
        "model": {"preset": preset, "vocab": vocab}, "data": {"sequence": sequence},
        "island": {"batch": batch, "device": device, "compile": compile},
        "inner": {"steps": WARM_UP + steps, "warmup": 2}, "sync": {"every": WARM_UP + steps + 1},
        "evaluate": {"every": 0}, "log": {"every": 5},
    })  # fmt: skip
    with trainer_of(config) as (trainer, heard), alone(trainer):
        while trainer.step_count < WARM_UP + steps:  # without samples yet, an advance is no step
            trainer.advance()
    reports = [event for event in of_kind(heard.events, Step) if event.step > WARM_UP]
    mfu = [event.mfu for event in reports if event.mfu is not None]
    tokens_per_s, place = median(event.tokens_per_s for event in reports), trainer.place
    return Report([], {
        "device": describe_device(place.device), "preset": preset, "parameters": trainer.island.layout.size,
        "dtype": str(trainer.island.compute_dtype).removeprefix("torch."), "tokens_per_step": batch * sequence,
        "flops_per_token": trainer.meter.flops_per_token, "step_s": batch * sequence / tokens_per_s,
        "tokens_per_s": tokens_per_s, "mfu": median(mfu) if mfu else None, "loss": reports[-1].loss,
        "memory_bytes": torch.cuda.max_memory_allocated() if place.device.type == "cuda" else None,
    })  # fmt: skip
