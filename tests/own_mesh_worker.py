"""Run by test_own_mesh.py, the processes of one island under torchrun: somebody's loop on a model that they have cut.

torchrun --nproc-per-node 2 tests/own_mesh_worker.py JOB.json

The job says which loops, one after the other, and how. What the leader saw is written to its `out`.
"""

import json
import os
import sys
from pathlib import Path

from diloco.cli.shared import loading

with loading():
    import torch
    import torch.distributed as dist
    from own_loops import made
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel

    import diloco
    from diloco.config.file import parse_config
    from diloco.errors import DilocoError
    from diloco.island.island import materialise, next_token_loss
    from diloco.island.mesh import ProcessMesh
    from diloco.island.optimizer import build_optimizer
    from diloco.island.parallel import fill, shard
    from diloco.model.build import build_network
    from diloco.train.schedule import learning_rate

DATA = [(torch.sin(torch.arange(3.0) + at), torch.cos(torch.tensor([at * 1.0]))) for at in range(40)]


class Stopped(Exception):
    """The block is left at once."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([whole(parameter.detach()).flatten() for parameter in model.parameters()])


# The built-in model in a loop of one's own, on the samples that built-in trainers have had.


def decoder(config, mesh) -> nn.Module:
    network = build_network(config.model, data_vocab=256, sequence=config.data.sequence, seed=config.seed)
    place = ProcessMesh(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh)
    shard(network.module, network.anatomy, place, torch.float32)
    materialise(network.module, torch.device("cpu"))
    with torch.no_grad():
        for (name, parameter), (given, value) in zip(network.module.named_parameters(), network.initial(), strict=True):
            assert name == given
            fill(parameter, value)
    return network.module


def follow(job, mesh) -> dict:
    """Train on given batches. Keeps the outer parameters after each round."""
    config = parse_config(job["config"])
    model = decoder(config, mesh)
    optimizer = build_optimizer(model, config.inner)
    batches, outer = torch.load(job["batches"]), []
    ranks, rank = mesh["fsdp"].size(), mesh["fsdp"].get_local_rank()
    with diloco.connect(job.get("ticket") or config, model, optimizer, name=job["name"], dir=job["dir"]) as run:
        for step, tokens in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.inner, step + 1)
            with loss_parallel():
                loss = next_token_loss(model, tokens.chunk(ranks)[rank])
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            before = run.round
            run.step(tokens=len(tokens), loss=loss)
            if run.round != before or run.finished:
                with run.outer_parameters():
                    outer.append((run.step_count, vector(model)))
    torch.save(outer, job["out"] + f".{dist.get_rank()}")
    return {"step": run.step_count}


# A small network: plain, cut, or copied to each process.


def cut(model: nn.Module, mesh) -> nn.Module:
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh["fsdp"])
    return model


def network(mesh, kind: str, seed: int) -> nn.Module:
    model = made(seed).insert(2, nn.Dropout(0.5))
    return {"cut": lambda: cut(model, mesh), "copied": lambda: DistributedDataParallel(model)}[kind]()


def life(where, mesh, *, kind="cut", seed=0, until=None, **options) -> dict:
    """A program that is started, and leaves after so many steps."""
    model, losses = network(mesh, kind, seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(10 * seed + dist.get_rank())  # each process drops other units
    data = mesh["fsdp"] if kind == "cut" else init_device_mesh("cpu", (dist.get_world_size(),))
    with diloco.connect(where, model, optimizer, alone=True, **options) as run:
        first = run.step_count + 1
        for inputs, targets in run.batches(DATA, 4, mesh=data):
            loss = mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            run.step(loss=loss)
            if run.step_count == until:
                break
        trained = vector(model)
        with run.outer_parameters():
            outer = vector(model)
            model.eval()
            with torch.no_grad():
                seen = model(torch.stack([inputs for inputs, _ in DATA]))  # FSDP keeps what it gathers for this
            model.train()
        with torch.no_grad():
            model.eval()
            mine = model(torch.stack([inputs for inputs, _ in DATA]))
            model.train()
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, losses)
    numbers = {"trained": trained, "outer": outer, "seen": seen, "mine": mine}
    return {"first": first, "losses": everywhere, **{name: value.tolist() for name, value in numbers.items()}}


def lives(job, mesh) -> dict:
    """One that never stops, and one that is started again; of a cut and of a copied model."""
    found = {}
    for kind in ("cut", "copied"):
        where = {**job["config"], "checkpoint": {"dir": f"{job['dir']}/{kind}-whole"}}
        found[kind] = {"whole": life(where, mesh, kind=kind, seed=1)}
        where = {**job["config"], "checkpoint": {"dir": f"{job['dir']}/{kind}"}}
        found[kind] |= {"before": life(where, mesh, kind=kind, seed=1, until=7)}
        found[kind] |= {"after": life(where, mesh, kind=kind, seed=2)}
    return found


def refusals(job, mesh) -> dict:
    """What cannot work, and what each process is told."""

    def without_mesh(run):
        next(run.batches(DATA, 4))

    def uneven(run):
        next(run.batches(DATA, 3, mesh=mesh["fsdp"]))

    rank = dist.get_rank()
    cases = {
        "mesh": (made(), None, without_mesh),
        "uneven": (made(), None, uneven),
        "stages": (nn.Sequential(nn.Linear(3, 8)) if rank else made(), None, None),
        "file": (made(), f"{job['dir']}/missing.yaml", None),
    }
    found = {}
    for name, (model, where, use) in cases.items():
        try:
            where = where or {**job["config"], "checkpoint": {"dir": f"{job['dir']}/{name}"}}
            with diloco.connect(where, model, "SGD", alone=True) as run:
                use(run)
        except DilocoError as error:
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, f"{type(error).__name__}: {error}")
            found[name] = everywhere
    return found


def broken(job, mesh) -> dict:
    """One process fails in the midst of a phase."""
    model = network(mesh, "cut", 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with diloco.connect(job["config"], model, optimizer, alone=True) as run:
        for inputs, targets in run.batches(DATA, 4, mesh=mesh["fsdp"]):
            mse_loss(model(inputs), targets).backward()
            if run.step_count == 5 and dist.get_rank() == job["breaks"]:
                raise Stopped("this process has failed")
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    raise AssertionError("nobody noticed")


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    mesh = init_device_mesh("cpu", tuple(job["mesh"]), mesh_dim_names=("fsdp", "tp"))
    loops = {"follow": follow, "lives": lives, "refusals": refusals, "broken": broken}
    found = {name: loops[name](job, mesh) for name in job["loops"]}
    if int(os.environ["RANK"]) == 0:
        Path(job["out"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


main()
