"""A training loop of one's own that takes part in a run: a small network learns to tell drawn shapes apart.

    python examples/own_loop.py                  trains alone, in a run that others can join
    python examples/own_loop.py --islands 2      founds a run whose rounds wait for a second island
    python examples/own_loop.py TICKET           joins it, from another terminal or another machine

The images are made here, the same on every machine. Islands share them by position: nobody trains on what another has.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import diloco

SIZE, NOISE = 16, 0.3
SHAPES = ("disc", "ring", "square", "cross")
RUN = {
    "run": "own-loop",
    "sync": {"every": 20, "delay": 4},  # results come in 4 steps after they were sent: nobody waits for the network
}


def drawn(count: int, seed: int) -> TensorDataset:
    """Images of one noisy shape each, at any place and of any size, and which of them it is."""
    random = torch.Generator().manual_seed(seed)
    kinds = torch.randint(len(SHAPES), (count,), generator=random)
    centres = 6 + 4 * torch.rand(count, 2, 1, 1, generator=random)
    radii = 3 + 2 * torch.rand(count, 1, 1, generator=random)
    grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
    across, down = (grid - centres).abs().unbind(1)  # [count, SIZE, SIZE]
    far, furthest, nearest = across.hypot(down), torch.maximum(across, down), torch.minimum(across, down)
    masks = torch.stack([
        far < radii, (far - radii).abs() < 1, furthest < radii, (nearest < 1) & (furthest < 1.2 * radii)
    ])  # fmt: skip
    images = masks[kinds, torch.arange(count)].float()
    images += NOISE * torch.randn(images.shape, generator=random)
    return TensorDataset(images.unsqueeze(1), kinds)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, len(SHAPES)),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, kinds: Tensor) -> float:
    return (model(images).argmax(1) == kinds).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="A training loop of one's own that takes part in a run.")
    parser.add_argument("ticket", nargs="?", help="of the run to join, or a file that holds it; without: found one")
    parser.add_argument("--islands", type=int, default=1, help="found: rounds wait until so many are there")
    parser.add_argument("--steps", type=int, default=800, help="found: how long the run is")
    parser.add_argument("--name", help="of this island")
    parser.add_argument("--dir", help="the run's folder")
    options = parser.parse_args()
    founded = RUN | {"inner": {"steps": options.steps}, "elastic": {"min_islands": options.islands}}
    where, own = options.ticket or founded, {"name": options.name, "dir": options.dir}

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = 0  # of this island: run.step_count is the run's clock, which can jump and repeat
    # fresh: a second start begins anew; without it, it would go on where the first one ended
    with diloco.connect(where, model, optimizer, fresh=True, **own) as run:
        for images, kinds in run.batches(drawn(8192, seed=1), batch_size=32):
            loss = cross_entropy(model(images), kinds)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)
            steps += 1
        with run.outer_parameters():
            reached = accuracy(model, *drawn(1000, seed=2).tensors)
            print(f"{steps} steps here, {run.round} rounds in all: accuracy {reached:.1%}")


if __name__ == "__main__":
    main()
