"""Run by test_mesh.py in several processes: trains each case on the mesh, writes what the leader saw.

torchrun --nproc-per-node 4 tests/mesh_worker.py CASES.json OUT.json
"""

import json
import sys
from pathlib import Path

from diloco.cli.shared import loading

with loading():
    import torch
    from alone import train as train_alone
    from largest import Largest
    from reads import Reads
    from scarce import Scarce

    from diloco.config.file import parse_config
    from diloco.data.batches import validation_batches
    from diloco.island.flat import Shards
    from diloco.island.island import next_token_loss
    from diloco.island.mesh import open_mesh
    from diloco.island.parallel import tied_names, whole

LIMIT = 1000  # values in a bucket: embeddings are larger, norms go together


def train(config, place, stop_at=None, rows=None):
    tree, config = config, parse_config(config)
    if rows is not None and place.rank == place.world - 1:
        # at the end of a step: what comes between two of them, the others would wait for
        with Scarce(rows, late=True):
            return train(tree, place, stop_at)
    lives = [] if stop_at is None else [train_alone(config, place=place, until=stop_at)]
    lives.append(train_alone(config, place=place, resume=stop_at is not None))
    trainer, told = lives[-1].trainer, [event.plain() for life in lives for event in life.heard.events]
    local = torch.empty(trainer.island.layout.size) if place.leader else None
    trainer.island.shards.read(local)
    return {
        "losses": [event["loss"] for event in told if event["event"] == "step"],
        "validation": [event["validation_loss"] for event in told if event["event"] == "validation"],
        "parameters": next(event["parameters"] for event in told if event["event"] == "start"),
        "trained": trainer.island.layout.size,
        "gradients": gradient_norms(trainer),
        "ties": tied_names(trainer.island.module),
        "agrees": place.leader and torch.equal(local, trainer.rounds.outer()["parameters"]),
        "skipped": trainer.island.skipped.item(),
        "accumulate": trainer.config.island.accumulate,
        "reads": reads_in_a_step(trainer),
        "buckets": through_small_buckets(trainer.island),
    }


def reads_in_a_step(trainer) -> int:
    """How often two micro-batches and the optimizer read a value from the device."""
    (tokens,) = validation_batches(trainer.samples, trainer.config.island, trainer.place, count=1)
    with Reads() as reads:
        trainer.island.step([tokens, tokens], lr=0.0)
    return reads.count


def through_small_buckets(island) -> dict[str, object]:
    """Out, and back changed by a rule of two vectors; whether that is what whole parameters say, and what it took."""
    shards = Shards(island.parameters, island.place, limit=LIMIT)
    expected = torch.cat([whole(p.detach()).flatten() for p in island.parameters.values()])
    out = torch.full_like(expected, -1) if island.place.leader else None
    twice, noise = (expected * 2, torch.sin(expected)) if island.place.leader else (None, None)
    with Largest() as largest:
        shards.read(out)
        shards.start_update(lambda local, one, other: one - (other - local), twice, noise)()
    after = torch.cat([whole(p.detach()).flatten() for p in island.parameters.values()])
    same = torch.equal(after, expected * 2 - (torch.sin(expected) - expected))
    shards.write(out)
    again = torch.cat([whole(p.detach()).flatten() for p in island.parameters.values()])
    return {
        "read": out is None or torch.equal(out, expected), "updated": same, "written": torch.equal(again, expected),
        "largest": largest.values, "limit": LIMIT,
    }  # fmt: skip


def gradient_norms(trainer) -> dict[str, float]:
    """Of one more batch, parameter by parameter. Adam hides a gradient that is wrong by a factor; this does not."""
    island = trainer.island
    (tokens,) = validation_batches(trainer.samples, trainer.config.island, trainer.place, count=1)
    with island._computing():
        next_token_loss(island.module, tokens).backward()
    return {name: whole(parameter.grad).norm().item() for name, parameter in island.parameters.items()}


def main() -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    first = parse_config(next(iter(cases.values()))["config"])
    with open_mesh(first.island) as place:
        results = {name: train(**case, place=place) for name, case in cases.items()}
        if place.leader:
            Path(sys.argv[2]).write_text(json.dumps(results))


main()
