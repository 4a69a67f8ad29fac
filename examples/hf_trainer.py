"""A Hugging Face `Trainer` that takes part in a run: one callback more, and the rest as it was.

    python examples/hf_trainer.py             founds a run and prints its ticket
    python examples/hf_trainer.py TICKET      joins it, from another terminal or another machine

A small Llama learns to count in steps. Started again, it resumes with the state of its optimizer.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from diloco.integrations.hf import DilocoCallback

VOCAB, LENGTH = 32, 12


class Counting(Dataset):
    """Rows that count from a number, in steps of one size, modulo VOCAB."""

    def __len__(self) -> int:
        return VOCAB * 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (index // 8 + (index % 8 + 1) * torch.arange(LENGTH)) % VOCAB
        return {"input_ids": row, "labels": row}


def main() -> None:
    parser = argparse.ArgumentParser(description="A Hugging Face Trainer that takes part in a run.")
    parser.add_argument("ticket", nargs="?", help="of the run to join, or a file that holds it; without: found one")
    parser.add_argument("--islands", type=int, default=1, help="found: rounds wait until so many are there")
    parser.add_argument("--steps", type=int, default=100, help="how long the run is")
    parser.add_argument("--stop", type=int, help="leave after so many steps; started again, it resumes")
    parser.add_argument("--name", help="of this island")
    parser.add_argument("--dir", help="the run's folder")
    parser.add_argument("--seed", type=int, default=1, help="of the order of the samples: another one on each island")
    options = parser.parse_args()

    founded = {
        "run": "hf-trainer", "inner": {"steps": options.steps}, "sync": {"every": 10},
        "elastic": {"min_islands": options.islands},
    }  # fmt: skip
    diloco = DilocoCallback(options.ticket or founded, name=options.name, dir=options.dir)

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **size))
    arguments = TrainingArguments(
        "hf-trainer", max_steps=options.stop or options.steps, learning_rate=1e-2, per_device_train_batch_size=16,
        seed=options.seed, save_strategy="no", report_to="none", logging_steps=10, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=Counting(), callbacks=[diloco]).train()
    print(f"step {diloco.run.step_count} of {diloco.run.steps}, finished: {diloco.run.finished}")


if __name__ == "__main__":
    main()
