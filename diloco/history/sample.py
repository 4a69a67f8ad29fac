"""`diloco sample`: text continued from a prompt, by a run's outer parameters.

There is no key-value cache: each token is computed from the whole window, exactly as in training.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from diloco.config.schema import DataConfig
from diloco.data.source import source_kind
from diloco.data.tokenizer import Tokenizer
from diloco.errors import ConfigError, ModelError

UNFINISHED = "\ufffd"  # what a decoder makes of a character whose last bytes are still to come


@dataclass(frozen=True)
class Sampling:
    """Specify how the next token is chosen."""

    temperature: float = 0.8  # 0: the likeliest
    top_k: int = 50  # of the likeliest only; 0: of all
    seed: int = 0


def encode_prompt(prompt: str, tokenizer: Tokenizer, data: DataConfig) -> list[int]:
    """Encode a prompt as tokens. An empty one becomes what training put before each document; raise ConfigError where
    it put nothing there."""
    if prompt:
        return np.asarray(tokenizer.encode([prompt])[0]).tolist()
    begin = tokenizer.end if source_kind(data).separated(data) else None
    if begin is None:
        raise ConfigError("the prompt is empty, and this model has no token that begins a text: give a few characters")
    return [begin]


def continued(
    module: nn.Module, tokens: Sequence[int], *, context: int, vocab: int, choice: Sampling, end: int | None = None
) -> Iterator[int]:
    """Yield the tokens that follow, without end or up to `end`; of `tokens` the last `context` count."""
    device = next(module.parameters()).device
    dice = torch.Generator().manual_seed(choice.seed)  # on the CPU: the same text on every device
    window = list(tokens)
    while True:
        window = window[-context:]
        with torch.inference_mode():
            output = module(torch.tensor([window], device=device))
            logits = output if isinstance(output, Tensor) else output.logits  # [1, S, vocab]
            token = choose(logits[0, -1, :vocab].float().cpu(), choice, dice)
        if token == end:
            return
        window.append(token)
        yield token


def choose(logits: Tensor, choice: Sampling, dice: torch.Generator) -> int:
    """Choose the next token by its logits; raise ModelError where they are not finite."""
    if not torch.isfinite(logits).all():
        raise ModelError("the model's output is not finite: its training has diverged, sample an earlier run")
    if choice.temperature == 0:
        return int(logits.argmax())
    likeliest = logits.topk(min(choice.top_k or len(logits), len(logits)))
    chances = ((likeliest.values - likeliest.values[0]) / choice.temperature).softmax(-1)
    return int(likeliest.indices[torch.multinomial(chances, 1, generator=dice)])


def spoken(tokens: Iterator[int], before: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield the text of each token as soon as its characters are whole.

    Decoders look at neighbours (spaces, bytes of one character), so a token is decoded together with those before it
    and what is new is the difference.
    """
    row = list(before)
    start, said = 0, len(row)  # row[start:said] is the context of what comes next
    for token in tokens:
        row.append(token)
        text = decode(row[start:])
        if not text.endswith(UNFINISHED):
            yield text[len(decode(row[start:said])) :]
            start, said = said, len(row)
    yield decode(row[start:])[len(decode(row[start:said])) :]
