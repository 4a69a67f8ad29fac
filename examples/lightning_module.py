"""A Lightning module that takes part in a run: one callback more, and the rest as it was.

    python examples/lightning_module.py             founds a run and prints its ticket
    python examples/lightning_module.py TICKET      joins it, from another terminal or another machine

The network learns the values of another one with fixed weights. Started again, it resumes with the state of its
optimizer.
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from diloco.integrations.lightning import DilocoCallback


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


class Imitation(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network(seed=1)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return mse_loss(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def samples() -> TensorDataset:
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return TensorDataset(inputs, 3 * network(seed=2)(inputs))


def main() -> None:
    parser = argparse.ArgumentParser(description="A Lightning module that takes part in a run.")
    parser.add_argument("ticket", nargs="?", help="of the run to join, or a file that holds it; without: found one")
    parser.add_argument("--islands", type=int, default=1, help="found: rounds wait until so many are there")
    parser.add_argument("--steps", type=int, default=100, help="how long the run is")
    parser.add_argument("--stop", type=int, help="leave after so many steps; started again, it resumes")
    parser.add_argument("--name", help="of this island")
    parser.add_argument("--dir", help="the run's folder")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the samples: another one on each island")
    options = parser.parse_args()

    founded = {
        "run": "lightning", "inner": {"steps": options.steps}, "sync": {"every": 10},
        "elastic": {"min_islands": options.islands},
    }  # fmt: skip
    diloco = DilocoCallback(options.ticket or founded, name=options.name, dir=options.dir)

    module, order = Imitation(), torch.Generator().manual_seed(options.seed)
    loader = DataLoader(samples(), batch_size=16, shuffle=True, generator=order)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=options.stop or -1, max_epochs=-1, callbacks=[diloco], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    print(f"step {diloco.run.step_count} of {diloco.run.steps}, finished: {diloco.run.finished}")


if __name__ == "__main__":
    main()
