"""Run by test_checkpoint_pause.py under torchrun with two processes: one island trains a while on the one mesh, stops,
and goes on on the other, in one folder.

torchrun --nproc-per-node 2 tests/pause_worker.py CASES.json OUT.json
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lives import Life
from torch.distributed.device_mesh import init_device_mesh

from diloco.comm.transport.memory import MemoryNetwork
from diloco.config.file import parse_config
from diloco.island.mesh import ProcessMesh


def train(tree, stop_at: int) -> dict[int, float]:
    config = parse_config(tree)
    shape = (config.island.fsdp, config.island.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp"))
    life = Life("A", ("A",), config, MemoryNetwork(), ProcessMesh(dist.get_rank(), 2, torch.device("cpu"), mesh))
    life.train(lambda step: step >= stop_at, lambda: True)
    if life.together is not None:
        life.driver.close()
        life.store.close()
    dist.barrier()
    return life.losses


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        losses |= train(case["config"], case["stop_at"])
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(losses))
    dist.destroy_process_group()


main()
