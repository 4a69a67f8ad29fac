"""How fast one process trains, through the whole loop: tokens a second and MFU."""

from statistics import median
from tempfile import TemporaryDirectory

import torch

from diloco.bench.report import Report
from diloco.config.file import parse_config
from diloco.island.mesh import describe_device, take_place
from diloco.report.events import Event, Events
from diloco.run.join import alone
from diloco.train.trainer import Trainer

WARM_UP = 10


def measure(*, preset: str, batch: int, sequence: int, vocab: int, steps: int, compile: bool, device: str) -> Report:
    with TemporaryDirectory() as folder:
        config = parse_config(
            {
                "model": {"preset": preset, "vocab": vocab},
                "data": {"sequence": sequence},
                "island": {"batch": batch, "device": device, "compile": compile},
                "inner": {"steps": WARM_UP + steps, "warmup": 2},
                "sync": {"every": WARM_UP + steps + 1},
                "evaluate": {"every": 0},
                "log": {"every": 5},
                "checkpoint": {"dir": folder},
            }
        )
        with take_place(config.island) as place:
            heard = Heard()
            trainer = Trainer(config, place, Events([heard]))
            with alone(trainer):
                for _ in range(WARM_UP + steps):
                    trainer.advance()
            trainer.batches.close()
            reports = [event for event in heard.events if event["event"] == "step" and event["step"] > WARM_UP]
            mfu = [event["mfu"] for event in reports if event["mfu"] is not None]
            figures = {
                "device": describe_device(place.device),
                "preset": preset,
                "parameters": trainer.island.layout.size,
                "dtype": str(trainer.island.compute_dtype).removeprefix("torch."),
                "tokens_per_step": batch * sequence,
                "flops_per_token": trainer.meter.flops_per_token,
                "step_s": batch * sequence / median(event["tokens_per_s"] for event in reports),
                "tokens_per_s": median(event["tokens_per_s"] for event in reports),
                "mfu": median(mfu) if mfu else None,
                "loss": reports[-1]["loss"],
                "memory_bytes": torch.cuda.max_memory_allocated() if place.device.type == "cuda" else None,
            }
    return Report([], figures)


class Heard:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def tell(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass
