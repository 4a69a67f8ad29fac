"""What our loop costs over the shortest PyTorch loop one could write, on the same model and data.

The two take turns in blocks of steps within one process, so that whatever else the machine does hits both.
"""

import time
from collections.abc import Callable
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import nn

from diloco.bench.report import Check, Report
from diloco.config.file import parse_config
from diloco.config.schema import Config
from diloco.data import Samples
from diloco.island.island import compute_dtype, next_token_loss
from diloco.island.mesh import take_place
from diloco.model.decoder import Decoder, initial_parameters, shape_of
from diloco.report.events import Events
from diloco.run.join import alone
from diloco.train.trainer import Trainer

STEPS_A_BLOCK = 10  # one progress report each
LIMIT = {"cpu": 1.03, "cuda": 1.01}


def measure(*, device: str, blocks: int) -> Report:
    with TemporaryDirectory() as folder:
        config = _config(device, folder, steps=(blocks + 2) * STEPS_A_BLOCK)
        with take_place(config.island) as place:
            trainer = Trainer(config, place, Events())
            bare = BareLoop(config, trainer.samples, place.device)
            with alone(trainer):
                ours_s, bare_s = _take_turns(trainer, bare, blocks, place.device)
            kind = place.device.type
            trainer.batches.close()
    ratio = median(ours_s) / median(bare_s)
    figures = {"device": kind, "step_s": median(ours_s), "bare_step_s": median(bare_s), "blocks": blocks}
    return Report([Check("overhead.step_ratio", ratio, LIMIT[kind], "lower")], figures)


def _config(device: str, folder: str, steps: int) -> Config:
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    size = {"preset": "150m", "vocab": 32768} if cuda else {"preset": "tiny"}
    return parse_config(
        {
            "model": size,
            "data": {"sequence": 1024 if cuda else 128},
            "island": {"batch": 32 if cuda else 8, "device": device, "compile": cuda},
            "inner": {"steps": steps, "warmup": 2},
            "sync": {"every": steps + 1},  # rounds are measured elsewhere
            "evaluate": {"every": 0},
            "log": {"every": STEPS_A_BLOCK},
            "checkpoint": {"dir": folder},
        }
    )


def _take_turns(
    trainer: Trainer, bare: "BareLoop", blocks: int, device: torch.device
) -> tuple[list[float], list[float]]:
    ours_s: list[float] = []
    bare_s: list[float] = []
    for block in range(blocks + 1):
        turns = [(trainer.advance, ours_s), (bare.advance, bare_s)]
        for advance, seconds in turns if block % 2 else reversed(turns):
            seconds.append(_time_block(advance, device))
    return ours_s[1:], bare_s[1:]  # the first block warms up


def _time_block(advance: Callable[[], None], device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(STEPS_A_BLOCK):
        advance()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS_A_BLOCK


class BareLoop:
    """What one would write without us: read, forward, backward, clip, step; print now and then."""

    def __init__(self, config: Config, samples: Samples, device: torch.device) -> None:
        self.config, self.samples, self.device = config, samples, device
        self.module = Decoder(shape_of(config.model, samples.source.vocab, config.data.sequence)).to(device)
        with torch.no_grad():
            for name, value in initial_parameters(self.module, config.seed):
                self.module.get_parameter(name).copy_(value)
        inner = config.inner
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=inner.lr, betas=inner.betas, weight_decay=inner.weight_decay, fused=True
        )
        self.dtype = compute_dtype(config.island.dtype, device)
        self.loss_of = torch.compile(next_token_loss) if config.island.compile else next_token_loss
        self.step = 0

    def advance(self) -> None:
        batch = self.config.island.batch
        tokens = torch.from_numpy(self.samples.train(self.step * batch, batch)).to(self.device)
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            loss = self.loss_of(self.module, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.config.inner.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.step % self.config.log.every == 0:
            self.last_loss = loss.item()
