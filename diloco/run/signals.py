"""Signals that ask an island to stop, to pause or to leave at once."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

PAUSE = signal.SIGUSR1  # asks an island to stop in a way that it can go on from; SIGINT and SIGTERM ask it to leave
ASKED = (signal.SIGINT, signal.SIGTERM, PAUSE)
TRAINER_STOPS = "finishing this step, then saving (once more to leave at once without saving)"
WITNESS_STOPS = "saying goodbye (once more to leave at once)"
LEFT = 75  # exit code of an island that has left before the run's end: it can be started again (EX_TEMPFAIL)
REPEAT_S = 1.0  # launchers pass on a signal that the terminal has already sent to everybody


@contextmanager
def signals() -> Iterator[list[int]]:
    """Collect the signals that ask to stop; one within a second of the one before is its echo, and not counted."""
    heard: list[int] = []
    last = -REPEAT_S

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last > REPEAT_S:
            last = time.monotonic()
            heard.append(number)

    with handled(on_signal):
        yield heard


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None], numbers: Sequence[int] = ASKED) -> Iterator[None]:
    """Install a handler for these signals, for as long as this is open."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@dataclass
class Stop:
    """Hold when an island was asked to stop, and whether it is to pause."""

    asked_at: float | None = None
    pausing: bool = False
    on_pause: Callable[[], None] | None = None  # called at once, in the midst of a step
    said: str = ""  # what the person who asked is answered
    shown: Callable[[], bool] = lambda: False  # whether a live view shows that now: then nothing else is printed

    @property
    def asked(self) -> bool:
        """Tell whether a signal has come."""
        return self.asked_at is not None


@contextmanager
def stop_on_signal(stop: Stop, announce: str, *, always_pause: bool = False) -> Iterator[None]:
    """Stop the loop after its step at the first SIGINT or SIGTERM; leave at once at a later one.

    `announce` is the answer to the first: a live view shows it, else it is printed. PAUSE asks an island among others
    to stop without contributing what it has: it will come back. `always_pause`: every signal does. One within a second
    of the first is ignored: launchers pass on a signal that the terminal has already sent to everybody.
    """

    def on_signal(number: int, _: FrameType | None) -> None:
        if stop.asked_at is None:
            stop.asked_at, stop.pausing = time.monotonic(), always_pause or number == PAUSE
            if stop.pausing and stop.on_pause is not None:
                stop.on_pause()
            stop.said = announce
            if announce and not stop.shown():  # a plain write: the handler may have interrupted any other output
                os.write(2, f"\n{announce}\n".encode())
        elif time.monotonic() - stop.asked_at > REPEAT_S:
            if sys.stdout.isatty():
                os.write(1, b"\x1b[?25h\n")  # the live view had hidden the cursor
            os._exit(128 + number)

    with handled(on_signal):
        yield


@contextmanager
def stop_on_sigterm(stop: Stop) -> Iterator[None]:
    """Note the first SIGTERM for a loop of somebody's own; a second one ends the process.

    Where the program has a handler of its own, or this is not its main thread, nothing is changed.
    """
    if not heeds_sigterm():
        yield
        return

    def on_signal(number: int, _: FrameType | None) -> None:
        if stop.asked_at is None:
            stop.asked_at = time.monotonic()
        elif time.monotonic() - stop.asked_at > REPEAT_S:
            os._exit(128 + number)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def heeds_sigterm() -> bool:
    """Tell whether SIGTERM is ours to handle: in the main thread of a program that has no handler of its own for it.

    One that is ignored was so when the program began: torchrun in a job does not hear it, nor do its processes.
    """
    found = signal.getsignal(signal.SIGTERM)
    ours = found in (signal.SIG_DFL, signal.SIG_IGN) or getattr(found, "__module__", "") == __name__
    return ours and threading.current_thread() is threading.main_thread()


@contextmanager
def exit_on_signal(code: int) -> Iterator[None]:
    """Exit with this code at a signal that asks to stop, as long as nothing is trained that would have to be saved."""

    def on_signal(number: int, _: FrameType | None) -> None:
        raise SystemExit(code)

    with handled(on_signal):
        yield


@contextmanager
def exit_on_signals_while_joining(code: int | None) -> Iterator[None]:
    """Exit with this code at a signal while a loop of somebody's own gets into its run: nothing is trained yet.

    Without a code only SIGTERM is handled, and ends the process as it would end any. Where that is not ours to handle,
    nothing is changed.
    """
    if not heeds_sigterm():
        yield
        return

    def on_signal(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number if code is None else code)

    with handled(on_signal, (signal.SIGTERM,)) if code is None else handled(on_signal):
        yield
