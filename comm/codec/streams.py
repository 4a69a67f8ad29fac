"""Work on a GPU beside training: on a stream of its own, which waits for nothing that training queues later.

All threads of a process queue on one stream where they name none. What another thread than training's reads from there
would wait for all steps that are queued by then, each time.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from weakref import finalize

import torch
from torch import Tensor

LANES = 3  # while one computes, the others copy to the device and back

log = logging.getLogger(__name__)


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


@contextmanager
def taking_turns(device: torch.device) -> Iterator[Callable[[int], AbstractContextManager[object]]]:
    """Yield a function that puts the work of a number 0, 1, … onto a stream, after what the present one was given
    before number 0. On a GPU, what one number copies goes on beside the work of the next; all is done when number 0
    comes round, and when the block ends."""
    if device.type != "cuda":
        yield lambda number: nullcontext()
        return
    lanes = [_stream(device, 1 + lane) for lane in range(LANES)]

    def turn(number: int) -> AbstractContextManager[object]:
        for lane in lanes if number == 0 else ():
            lane.synchronize()
            lane.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(lanes[number % LANES])

    try:
        yield turn
    finally:
        for lane in lanes:
            lane.synchronize()


def lock_pages(vector: Tensor, device: torch.device) -> Tensor:
    """Lock the pages of a vector on the host, as it is: copies between it and a GPU are several times as fast and hold
    nobody up. Where the driver refuses, and without a GPU, it stays pageable."""
    if device.type == "cuda" and vector.device.type == "cpu" and vector.numel() and not vector.is_pinned():
        driver, place, size = torch.cuda.cudart(), vector.data_ptr(), vector.numel() * vector.element_size()
        with torch.cuda.device(device):
            refused = int(driver.cudaHostRegister(place, size, 0))
        if refused:
            log.warning("%d bytes on the host stay pageable: error %d", size, refused)
            with suppress(RuntimeError):  # the driver remembers the error, and the next launch would raise it
                torch.zeros(1, device=device)
        else:
            finalize(vector, driver.cudaHostUnregister, place).atexit = False
    return vector


@cache
def _stream(device: torch.device, lane: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
