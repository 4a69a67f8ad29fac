"""Somebody's training loop, as small as it gets: for tests of `diloco.connect`."""

import torch
from torch import nn

PLAIN = {"optimizer": "sgd", "lr": 1.0}  # one island that applies this at every step is ordinary training
DATA = [(torch.randn(3), torch.randn(1)) for _ in range(40)]


def made(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def run_of(tmp_path, **sections) -> dict:
    """A run whose rounds lose nothing: what they make of a loop can be compared with plain training."""
    tree = {"inner": {"steps": 12}, "log": {"every": 1}, "checkpoint": {"dir": f"{tmp_path}/run"}}
    return {**tree, **sections, "sync": {"every": 4, "codec": "fp32", **sections.get("sync", {})}}


def train(model, optimizer, batch) -> torch.Tensor:
    inputs, targets = batch
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train_all(run, model, optimizer=None, batch_size=4) -> list[torch.Tensor]:
    """What the README's five lines do."""
    losses = []
    for batch in run.batches(DATA, batch_size):
        losses.append(train(model, optimizer or run.optimizer, batch))
        run.step(loss=losses[-1])
    return losses


def vector(model) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
