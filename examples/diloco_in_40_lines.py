"""DiLoCo (https://arxiv.org/abs/2311.08105): replicas of a model train apart, each on data of its own. Now and then
they send how far they went, the pseudo-gradient; one shared model moves by the mean, and all go on from there.

    python examples/diloco_in_40_lines.py        seconds on a CPU

`diloco` is the whole algorithm; `tests/test_algorithms.py` holds the trainer to it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from diloco.model.decoder import Decoder, Shape

REPLICAS, BATCH, CONTEXT = 4, 8, 32


def diloco(
    shared: nn.Module,
    replicas: Sequence[nn.Module],
    inner_step: Callable[[int, int], None],  # of which replica, and which step
    *,
    rounds: int,
    every: int,  # H, the inner steps between two rounds
    lr: float = 0.7,
    momentum: float = 0.9,
) -> Iterator[nn.Module]:
    """Train the shared model; yields it after each round."""
    outer = torch.optim.SGD(shared.parameters(), lr=lr, momentum=momentum, nesterov=True)
    for first in range(0, rounds * every, every):
        for number, replica in enumerate(replicas):  # on computers that sit far apart, at the same time
            replica.load_state_dict(shared.state_dict())
            for step in range(first, first + every):
                inner_step(number, step)
        for base, *local in zip(shared.parameters(), *(replica.parameters() for replica in replicas), strict=True):
            base.grad = torch.stack([base.data - one.data for one in local]).mean(0)  # all that is communicated
        outer.step()
        yield shared


def loss_on(model: nn.Module, text: Tensor, count: int = BATCH) -> Tensor:
    """Return the mean loss of the next byte, on so many random pieces of a text."""
    starts = torch.randint(len(text) - CONTEXT, (count,)).tolist()
    pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()
    return cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def main(rounds: int = 10, every: int = 20) -> list[float]:
    """Learn to write Python from the standard library; returns the loss after each round."""
    torch.manual_seed(0)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    library = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    texts = library.chunk(REPLICAS)
    shared = Decoder(Shape(blocks=2, heads=4, width=32, feed_forward=96, context=CONTEXT))
    nn.init.normal_(shared.embed.weight, std=0.02)
    replicas = [deepcopy(shared) for _ in texts]
    optimizers = [torch.optim.AdamW(replica.parameters(), lr=5e-3) for replica in replicas]  # kept from round to round

    def inner_step(number: int, step: int) -> None:
        loss_on(replicas[number], texts[number]).backward()
        optimizers[number].step()
        optimizers[number].zero_grad()

    losses = []
    for model in diloco(shared, replicas, inner_step, rounds=rounds, every=every):
        with torch.no_grad():
            losses.append(loss_on(model, library, 32 * BATCH).item())
        print(f"round {len(losses)}: loss {losses[-1]:.2f}")
    return losses


if __name__ == "__main__":
    main()
