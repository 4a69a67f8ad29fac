"""Processes for test_checkpoint_save.py.

torchrun --nproc-per-node 2 tests/save_worker.py mesh CONFIG.json     changes everything while a save is being written
python tests/save_worker.py endless FOLDER                            saves until it is killed
"""

import json
import os
import sys
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from diloco.bench.team import Heard
from diloco.checkpoint.save.facts import FACTS, saves
from diloco.checkpoint.save.saver import Saver, read_inner
from diloco.config.file import parse_config
from diloco.island.mesh import open_mesh
from diloco.report.events import Note, Saved, of_kind
from diloco.report.sinks import Events
from diloco.run.join import alone
from diloco.train.trainer import Trainer


def leaves(tree) -> dict[str, torch.Tensor]:
    """This process' part of every tensor."""
    if isinstance(tree, DTensor):
        return {"": tree._local_tensor}
    if isinstance(tree, torch.Tensor):
        return {"": tree}
    return {f"{key}/{name}": leaf for key, part in tree.items() for name, leaf in leaves(part).items()}


def mesh(config: Path) -> None:
    config = parse_config(json.loads(config.read_text()))
    with open_mesh(config.island) as place, ExitStack() as stack:
        heard = Heard()
        trainer = Trainer(config, place, Events([heard]))
        stack.enter_context(alone(trainer))
        while trainer.step_count < 3:
            trainer.advance()
        state = trainer.island.state()
        then = {name: leaf.clone() for name, leaf in leaves(state).items()}
        trainer.begin_save()
        with torch.no_grad():
            for leaf in leaves(state).values():
                leaf.zero_()
        trainer.saver.wait()
        (save,) = saves(Path(config.dir))
        read_inner(save, into=state)
        found = leaves(state)
        assert found.keys() == then.keys() and len(then) > 20
        assert all(torch.equal(found[name], value) for name, value in then.items())
        assert [event.step for event in of_kind(heard.events, Saved)] == [3]
        # a disk that refuses is told of on every process, and nobody waits for another
        Path(config.dir).rename(f"{config.dir}.gone") if place.leader else None
        Path(config.dir).write_text("in the way") if place.leader else None
        trainer.begin_save()
        trainer.saver.wait()
        assert [event.text[:17] for event in of_kind(heard.events, Note)] == ["training goes on,"]
        trainer.batches.close()


def endless(folder: Path) -> None:
    """The value of everything in a save is its step."""
    saver = Saver(folder, lambda step, path, seconds: print(step, flush=True), lambda error: os._exit(1))
    for step in count(1):
        value = torch.full((300_000,), float(step))
        facts = {**dict.fromkeys(FACTS), "round": step, "step": step}
        saver.begin(step, inner={"model": value}, outer={"parameters": value}, facts=facts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"mesh": mesh, "endless": endless}[sys.argv[1]](Path(sys.argv[2]))
