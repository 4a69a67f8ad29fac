"""What our loop costs over the shortest PyTorch loop one could write, on the same model and data.

The two take turns of a few steps within one process, so that whatever else the machine does hits both. A block is a
turn of each; with rounds, as many turns as there are between two rounds, and our loop's round: the bare one has none.
"""

import time
from collections.abc import Callable
from statistics import fmean, median
from tempfile import TemporaryDirectory

import torch
from torch import nn

from diloco.bench.report import Check, Report
from diloco.config.file import parse_config
from diloco.config.schema import Config, SyncConfig
from diloco.data.samples import Samples
from diloco.island.island import compute_dtype, next_token_loss
from diloco.island.mesh import take_place
from diloco.model.decoder import Decoder, initial_parameters, shape_of
from diloco.report.events import Events
from diloco.run.join import alone
from diloco.train.trainer import Trainer

STEPS_A_TURN = 10  # one progress report each
EVERY = SyncConfig().phase_steps  # inner steps between two rounds, where a config does not say it
LIMIT = {"cpu": 1.03, "cuda": 1.01}
ROUNDS_LIMIT = 1.03


def measure(*, device: str, blocks: int, rounds: bool = False) -> Report:
    turns = EVERY // STEPS_A_TURN if rounds else 1
    with TemporaryDirectory() as folder:
        steps = (blocks + 2) * turns * STEPS_A_TURN
        config = _config(device, folder, steps, every=EVERY if rounds else steps + 1)
        with take_place(config.island) as place:
            trainer = Trainer(config, place, Events())
            bare = BareLoop(config, trainer.samples, place.device)
            with alone(trainer):
                ours_s, bare_s = _take_turns(trainer, bare, blocks, turns)
                kind, updates = place.device.type, trainer.sync.view.updates
            trainer.batches.close()
    ratio = median(ours_s) / median(bare_s)
    figures = {"device": kind, "step_s": median(ours_s), "bare_step_s": median(bare_s), "blocks": blocks}
    if not rounds:
        return Report([Check("overhead.step_ratio", ratio, LIMIT[kind], "lower")], figures)
    figures |= {"every": EVERY, "rounds": updates}
    return Report([Check("overhead.with_rounds_ratio", ratio, ROUNDS_LIMIT, "lower")], figures)


def _config(device: str, folder: str, steps: int, every: int) -> Config:
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    size = {"preset": "150m", "vocab": 32768} if cuda else {"preset": "tiny"}
    return parse_config(
        {
            "model": size,
            "data": {"sequence": 1024 if cuda else 128},
            "island": {"batch": 32 if cuda else 8, "device": device, "compile": cuda},
            "inner": {"steps": steps, "warmup": 2},
            "sync": {"every": every},
            "evaluate": {"every": 0},
            "log": {"every": STEPS_A_TURN},
            "checkpoint": {"dir": folder, "snapshot_every": 1000000},  # saves are measured elsewhere
        }
    )


def _take_turns(trainer: Trainer, bare: "BareLoop", blocks: int, turns: int) -> tuple[list[float], list[float]]:
    """Return the seconds of a step in each block, of either loop; the first block warms up."""
    ours_s: list[float] = []
    bare_s: list[float] = []
    for turn in range((blocks + 1) * turns):
        loops = [(trainer.advance, ours_s), (bare.advance, bare_s)]
        for advance, seconds in loops if turn % 2 else reversed(loops):
            seconds.append(_time_turn(advance, trainer.place.device))
    return _by_block(ours_s, turns)[1:], _by_block(bare_s, turns)[1:]


def _by_block(seconds: list[float], turns: int) -> list[float]:
    return [fmean(seconds[first : first + turns]) for first in range(0, len(seconds), turns)]


def _time_turn(advance: Callable[[], None], device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(STEPS_A_TURN):
        advance()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / STEPS_A_TURN


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
