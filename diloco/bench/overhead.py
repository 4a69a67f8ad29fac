"""Measure what our loop costs over the shortest PyTorch loop one could write, on the same model and data.

The two take turns of a few steps within one process, so that whatever else the machine does hits both. A block is a
turn of each; with rounds, as many turns as there are between two rounds, and our loop's round: the bare one has none.
"""

from collections.abc import Callable
from statistics import fmean, median

import torch
from torch import nn

from diloco.bench.report import Check, Report, time_s
from diloco.bench.team import trainer_of
from diloco.bench.viewers import measure_viewers
from diloco.config.file import parse_config
from diloco.config.schema import Config, SyncConfig
from diloco.data.samples import Samples
from diloco.island.island import compute_dtype, next_token_loss
from diloco.island.mesh import pick_device
from diloco.model.decoder import Decoder, initial_parameters, shape_of
from diloco.run.join import alone
from diloco.train.trainer import Trainer

STEPS_A_TURN = 10  # one progress report each
EVERY = SyncConfig().phase_steps  # inner steps between two rounds, where a config does not say it
LIMIT = {"cpu": 1.03, "cuda": 1.01}
ROUNDS_LIMIT = 1.03


def measure(*, device: str, blocks: int, rounds: bool = False, viewers: int = 0) -> Report:
    """Compare the step times over so many blocks; `rounds`: with an outer update in each block of our loop.

    With viewers it is our loop with them that is compared, with the same without.
    """
    if viewers:
        turns = EVERY // STEPS_A_TURN  # an odd number: rounds fall into both kinds of turns alike
        steps = (2 * turns * blocks + 2) * STEPS_A_TURN
        config = _config(device, steps, every=EVERY if rounds else steps + 1)
        return measure_viewers(config, viewers=viewers, blocks=blocks, steps=STEPS_A_TURN, turns=turns)
    turns = EVERY // STEPS_A_TURN if rounds else 1
    steps = (blocks + 2) * turns * STEPS_A_TURN
    config = _config(device, steps, every=EVERY if rounds else steps + 1)
    with trainer_of(config) as (trainer, _), alone(trainer):
        bare = BareLoop(config, trainer.samples, trainer.place.device)
        ours_s, bare_s = _take_turns(trainer, bare, blocks, turns)
    kind, ratio = trainer.place.device.type, ours_s / bare_s
    figures = {"device": kind, "step_s": ours_s, "bare_step_s": bare_s, "blocks": blocks}
    if not rounds:
        return Report([Check("overhead.step_ratio", ratio, LIMIT[kind], "lower")], figures)
    figures |= {"every": EVERY, "rounds": trainer.sync.view.updates}
    return Report([Check("overhead.with_rounds_ratio", ratio, ROUNDS_LIMIT, "lower")], figures)


def _config(device: str, steps: int, every: int) -> Config:
    cuda = pick_device(device).type == "cuda"
    return parse_config({
        "model": {"preset": "150m", "vocab": 32768} if cuda else {"preset": "tiny"},
        "data": {"sequence": 1024 if cuda else 128},
        "island": {"batch": 32 if cuda else 8, "device": device, "compile": cuda},
        "inner": {"steps": steps, "warmup": 2}, "sync": {"every": every}, "evaluate": {"every": 0},
        "log": {"every": STEPS_A_TURN}, "checkpoint": {"snapshot_every": 1000000},  # saves are measured elsewhere
    })  # fmt: skip


def _take_turns(trainer: Trainer, bare: "BareLoop", blocks: int, turns: int) -> list[float]:
    """Return the seconds of a step of either loop, the median over blocks; the first block warms up."""
    loops: list[tuple[Callable[[], None], list[float]]] = [(trainer.advance, []), (bare.advance, [])]
    for turn in range((blocks + 1) * turns):
        for advance, seconds in loops if turn % 2 else reversed(loops):
            seconds.append(time_s(advance, trainer.place.device, STEPS_A_TURN))
    starts = range(turns, len(loops[0][1]), turns)
    return [median(fmean(seconds[start : start + turns]) for start in starts) for _, seconds in loops]


class BareLoop:
    """Train as one would without us: read, forward, backward, clip, step; print the loss now and then."""

    def __init__(self, config: Config, samples: Samples, device: torch.device) -> None:
        self.config, self.samples, self.device = config, samples, device
        with device:
            self.module = Decoder(shape_of(config.model, samples.source.vocab, config.data.sequence))
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
        """Run one step on the next batch; every `log.every` steps it waits for the loss, as printing it would."""
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
