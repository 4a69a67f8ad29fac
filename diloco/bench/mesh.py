"""Measure what a mesh costs a step: FSDP2 over NCCL, forced on one GPU, over the same step without FSDP2.

Both are compiled as a run compiles them, train the same model on the same samples and take turns of a few steps, so
that whatever else the machine does hits both. On a mesh of 1 x 1 no bytes travel, and torch gathers by plain copies
instead of NCCL: what is left are FSDP2's hooks, casts and copies, and compilation that is cut into blocks. Blocks stay
gathered for the backward pass there, which they do not where FSDP2 really cuts them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from diloco.bench.report import Check, Report, time_s
from diloco.bench.team import trainer_of
from diloco.config.file import parse_config
from diloco.config.schema import Config
from diloco.errors import DeviceError
from diloco.island.mesh import ProcessMesh, describe_device
from diloco.report.events import Step, of_kind
from diloco.run.join import alone
from diloco.train.trainer import Trainer

STEPS_A_TURN = 10
WARM_UP = 2  # turns
LIMIT = 1.03


def measure(*, preset: str, batch: int, sequence: int, vocab: int, blocks: int) -> Report:
    """Compare the step times over so many turns of each."""
    if not torch.cuda.is_available():
        raise DeviceError("bench mesh needs an NVIDIA GPU, and torch sees none here: see `diloco doctor`")
    config = config_of(preset, batch, sequence, vocab, steps=(blocks + WARM_UP + 1) * STEPS_A_TURN)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with forced_mesh(device, "cpu:gloo,cuda:nccl") as place:
        plain_s, forced_s, losses = compare(config, ProcessMesh(0, 1, device, None), place, blocks)
    ratio = median(forced_s) / median(plain_s)
    figures = {
        "device": describe_device(device), "preset": preset, "tokens_per_step": batch * sequence, "blocks": blocks,
        "step_s": median(plain_s), "forced_step_s": median(forced_s), "losses": losses,
        "ratio_of_each": [forced / plain for plain, forced in zip(plain_s, forced_s, strict=True)],
    }  # fmt: skip
    return Report([Check("mesh.forced_step_ratio", ratio, LIMIT, "lower")], figures)


def config_of(preset: str, batch: int, sequence: int, vocab: int, steps: int) -> Config:
    """Configure a run without a round, and compiled where there is a GPU."""
    cuda = torch.cuda.is_available()
    return parse_config({
        "model": {"preset": preset, "vocab": vocab}, "data": {"sequence": sequence},
        "island": {"batch": batch, "device": "auto", "compile": cuda},
        "inner": {"steps": steps, "warmup": 2}, "sync": {"every": steps + 1}, "evaluate": {"every": 0},
        "log": {"every": STEPS_A_TURN}, "checkpoint": {"snapshot_every": 1000000},
    })  # fmt: skip


@contextmanager
def forced_mesh(device: torch.device, backend: str) -> Iterator[ProcessMesh]:
    """Open a mesh of 1 x 1, on which a model is sharded nevertheless."""
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield ProcessMesh(0, 1, device, init_device_mesh(device.type, (1, 1), mesh_dim_names=("fsdp", "tp")))
    finally:
        dist.destroy_process_group()


def compare(
    config: Config, plain: ProcessMesh, forced: ProcessMesh, blocks: int
) -> tuple[list[float], list[float], list[float | None]]:
    """Return the seconds of a step of either, turn by turn, and the last loss of each; the first turns warm up."""
    with ExitStack() as stack:
        loops: list[tuple[Trainer, list[float]]] = []
        heard = []
        for place in (plain, forced):
            trainer, events = stack.enter_context(trainer_of(config, place))
            stack.enter_context(alone(trainer))
            while not trainer.step_count:  # until its samples are leased
                trainer.advance()
            loops.append((trainer, []))
            heard.append(events)
        for turn in range(blocks + WARM_UP):
            for trainer, seconds in loops if turn % 2 else reversed(loops):
                seconds.append(time_s(trainer.advance, plain.device, STEPS_A_TURN))
    losses = [of_kind(each.events, Step)[-1].loss for each in heard]
    return loops[0][1][WARM_UP:], loops[1][1][WARM_UP:], losses
