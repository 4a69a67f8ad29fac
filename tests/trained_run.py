"""Runs of a second for tests of what is made of them, and commands without a process of their own."""

import sys
from dataclasses import dataclass

import pytest
import tokenizers
from alone import train as train_alone

from diloco.cli import main
from diloco.config.schema import Config

TEXT = "the cat sat on the mat\nthe dog sat on the cat\n"


def train(config: Config) -> list[float]:
    """Its validation losses, first to last."""
    return train_alone(config).outcome.validation_losses


def byte_pairs() -> tokenizers.Tokenizer:
    """272 tokens, the last of which ends a text."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=271, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TEXT] * 9, trainer)
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


@dataclass
class Said:
    code: int
    out: str
    err: str


class Command:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> Said:
        self._monkeypatch.setattr(sys, "argv", ["diloco", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        said = self._capsys.readouterr()
        return Said(int(end.value.code or 0), said.out, said.err)

    def refused(self, *arguments: object) -> str:
        said = self(*arguments)
        assert said.code == 2
        assert said.err.startswith("error[") and len(said.err.splitlines()) == 1, said.err
        return said.err
