"""Work on a GPU beside training: on a stream of its own, which waits for nothing that training queues later.

All threads of a process queue on one stream where they name none. What another thread than training's reads from there
would wait for all steps that are queued by then, each time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def beside_training(device: torch.device, *, after: bool = False) -> Iterator[None]:
    """Let the calling thread's work on a device, inside, run beside training; it is done when the block ends. With
    `after`, it begins when the device has done what training has queued so far."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    if after:
        stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
