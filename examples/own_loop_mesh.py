"""A training loop of one's own on several processes: a model cut by FSDP2 and tensor parallelism is one island.

    torchrun --standalone --nproc-per-node 4 examples/own_loop_mesh.py --tp 2             founds a run: fsdp 2 x tp 2
    torchrun --standalone --nproc-per-node 2 examples/own_loop_mesh.py TICKET             joins it, cut in another way

Everything but the three lines with `run` is what such a program has anyway. The network learns the values of a larger
one with fixed weights, so there is nothing to download.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu, mse_loss
from torch.utils.data import TensorDataset

import diloco

WIDTH, HIDDEN = 16, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, blocks: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def samples(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, Network(blocks=3, seed=7)(inputs))


def main() -> None:
    parser = argparse.ArgumentParser(description="A loop of one's own on a mesh that takes part in a run.")
    parser.add_argument("ticket", nargs="?", help="of the run to join, or a file that holds it; without: found one")
    parser.add_argument("--tp", type=int, default=1, help="processes that share each block; the others share samples")
    parser.add_argument("--islands", type=int, default=1, help="found: rounds wait until so many are there")
    parser.add_argument("--steps", type=int, default=200, help="found: how long the run is")
    parser.add_argument("--name", help="of this island")
    parser.add_argument("--dir", help="the run's folder")
    options = parser.parse_args()
    founded = {
        "run": "own-loop-mesh", "inner": {"steps": options.steps}, "sync": {"every": 10},
        "elastic": {"min_islands": options.islands},
    }  # fmt: skip

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (int(os.environ["WORLD_SIZE"]) // options.tp, options.tp)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("fsdp", "tp"))
    model = Network(blocks=2, seed=1).to(device)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    where, own = options.ticket or founded, {"name": options.name, "dir": options.dir}
    with diloco.connect(where, model, optimizer, **own) as run:
        for inputs, targets in run.batches(samples(4096, seed=2), batch_size=32, mesh=mesh["fsdp"]):
            loss = mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
        with run.outer_parameters(), torch.no_grad():
            inputs, targets = samples(256, seed=3).tensors
            error = mse_loss(model(inputs.to(device)), targets.to(device)).item()
    if dist.get_rank() == 0:
        print(f"step {run.step_count}: mean squared error {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
