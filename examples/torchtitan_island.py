"""torchtitan in a run: its own `Trainer`, unmodified, as one island.

    torchrun --standalone --nproc-per-node 4 examples/torchtitan_island.py --parallelism.tensor_parallel_degree 2
    DILOCO_RUN=TICKET torchrun --standalone --nproc-per-node 4 examples/torchtitan_island.py

Without DILOCO_RUN it founds a run and prints its ticket. All other options are torchtitan's (`pip install torchtitan
triton`, 0.2.2 here; it wants GPUs). What joins is `Island`; below it stand a small Llama and its data, so that there is
nothing to download.
"""

import os
import sys

import torch
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.train import Trainer

import diloco
from diloco.integrations.open_run import follow_clock

STEPS = int(os.environ.get("DILOCO_STEPS", 40))
RUN = {"run": "torchtitan", "inner": {"steps": STEPS}, "sync": {"every": 10}}


class Island(Trainer):
    """Take part in a run while torchtitan trains."""

    def train(self) -> None:
        where, name = os.environ.get("DILOCO_RUN") or RUN, os.environ.get("DILOCO_NAME")
        (model,), (optimizer,) = self.model_parts, self.optimizers.optimizers
        with diloco.connect(where, model, optimizer, name=name, dir=name and f"runs/{name}") as self.run:
            self.follow()
            super().train()

    def train_step(self, data_iterator) -> None:
        before = self.ntokens_seen
        super().train_step(data_iterator)
        processes = self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard  # that have samples of their own
        self.run.step(tokens=(self.ntokens_seen - before) * processes)
        self.follow()

    def follow(self) -> None:
        """Follow the run's clock: an island that resumes or joins late is where the others are."""
        self.step = self.run.step_count
        for scheduler in self.lr_schedulers.schedulers:
            follow_clock(scheduler, self.step)

    def should_continue_training(self) -> bool:
        return not self.run.finished


class Counting:
    """Rows that count from a number, in steps of one size; each process has rows of its own."""

    def __init__(self, rank: int, batch: int, length: int) -> None:
        self._random = torch.Generator().manual_seed(rank + 100 * int(os.environ.get("DILOCO_SEED", 0)))
        self._batch, self._length = batch, length

    def __iter__(self):
        while True:
            start, stride = (torch.randint(1, 64, (self._batch, 1), generator=self._random) for _ in range(2))
            row = (start + stride * torch.arange(self._length + 1)) % 64
            yield {"input": row[:, :-1]}, row[:, 1:]

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def counting(dp_world_size, dp_rank, tokenizer, job_config, **_) -> Counting:
    return Counting(dp_rank, job_config.training.local_batch_size, job_config.training.seq_len)


def main() -> None:
    register_train_spec("counting", TrainSpec(
        model_cls=Transformer, model_args={"small": TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=64)},
        parallelize_fn=parallelize_llama, pipelining_fn=None, build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers, build_dataloader_fn=counting, build_tokenizer_fn=None,
        build_loss_fn=build_cross_entropy_loss,
    ))  # fmt: skip
    small = {
        "model.name": "counting", "model.flavor": "small", "training.steps": STEPS, "training.local-batch-size": 8,
        "training.seq-len": 32, "lr-scheduler.warmup-steps": 2, "optimizer.lr": 1e-2, "metrics.log-freq": 5,
    }  # fmt: skip
    config = ConfigManager().parse_args([f"--{name}={value}" for name, value in small.items()] + sys.argv[1:])
    trainer = Island(config)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
