"""Publish this process' signs of life, outside of the collectives, and end an island in which one hangs.

Where `diloco/launch` has started the processes, they write their signs to files of its temporary folder
(`DILOCO_SIGNS`), and it watches. Under torchrun they put them into torchrun's store, and the first two processes of
each machine watch all: whoever finds one that hangs names it and ends, so torchrun ends and restarts the island.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from diloco.island.activity import Activity, Sign
from diloco.island.hangs import SIGN_S, Hang, HangDetector, process_state

FOLDER = "DILOCO_SIGNS"
ENDED = "DILOCO_ENDED"  # tells a new life of an island how the last one ended
HUNG = 70  # the exit code of a process that ends because another one hangs
SIGN_BYTES = 4096
CONNECT_S = 300.0
UNANSWERED_S = 120.0  # of torchrun's store, which may be slow without harm
WATCHERS = 2  # processes of each machine: if one is stopped, there is another
log = logging.getLogger(__name__)


class Signs(Protocol):
    """Carry signs of life between the processes of an island."""

    def put(self, rank: int, sign: Sign) -> None:
        """Publish the newest sign of a process in place of the one before."""

    def get(self, rank: int) -> Sign | None:
        """Return the newest sign of a process; None if there is none."""


class FolderSigns:
    """Keep the signs of one machine's processes in files, each overwritten in place: a full disk does not stop that."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, rank: int, sign: Sign) -> None:
        """Overwrite the file of a process."""
        file = os.open(self._folder / f"sign-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, sign.encode()[:SIGN_BYTES].ljust(SIGN_BYTES), 0)
        finally:
            os.close(file)

    def get(self, rank: int) -> Sign | None:
        """Read the file of a process."""
        try:
            return Sign.decode((self._folder / f"sign-{rank}").read_bytes())
        except FileNotFoundError:
            return None


class StoreSigns:
    """Keep the signs in the store at which torchrun's processes meet, over a connection of their own."""

    def __init__(self, host: str, port: int) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        life = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        wait = timedelta(seconds=CONNECT_S)
        self._store = PrefixStore(f"diloco/signs/{life}", TCPStore(host, port, timeout=wait, wait_for_workers=False))

    def put(self, rank: int, sign: Sign) -> None:
        """Set the value of a process."""
        self._store.set(str(rank), sign.encode().decode())

    def get(self, rank: int) -> Sign | None:
        """Ask for the value of a process, without waiting for one that it has not set yet."""
        return Sign.decode(self._store.get(str(rank))) if self._store.check([str(rank)]) else None


@contextmanager
def giving_signs(activity: Activity, rank: int, world: int, hang_s: float) -> Iterator[None]:
    """Give signs of life for as long as this is open, to whoever has started this process."""
    if (folder := os.environ.get(FOLDER)) is not None:
        giver: _Giver = _Giver(activity, rank, FolderSigns(Path(folder)))
    elif "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        giver = _StoreGiver(activity, rank, world, hang_s)
    else:  # nobody has said where the processes of this island meet
        yield
        return
    giver.start()
    try:
        yield
    finally:
        giver.stop()


class _Giver(threading.Thread):
    """Put a sign of this process every second."""

    def __init__(self, activity: Activity, rank: int, signs: Signs | None) -> None:
        super().__init__(name="signs of life", daemon=True)
        self.activity, self.rank, self.signs, self.ending = activity, rank, signs, threading.Event()

    def run(self) -> None:
        while not self.ending.wait(SIGN_S):
            self.turn()

    def turn(self) -> None:
        if self.signs is not None:
            try:
                self.signs.put(self.rank, self.activity.sign())
            except OSError as error:  # there may be space again for the next one
                log.warning("no sign of life could be written: %s", error)

    def stop(self) -> None:
        self.ending.set()
        self.activity.leave()
        self.turn()


class _StoreGiver(_Giver):
    """Put signs into torchrun's store; on the first processes of a machine, a second thread watches all of them.

    A store whose process is stopped answers no more, and a call that has been sent waits for ever: hence two threads.
    """

    def __init__(self, activity: Activity, rank: int, world: int, hang_s: float) -> None:
        super().__init__(activity, rank, None)
        self.world, self.hang_s, self.host = world, hang_s, socket.gethostname()
        self.watches = int(os.environ.get("LOCAL_RANK", 0)) < WATCHERS
        self.newest: list[Sign | None] = [None] * world
        self.answered: float | None = None  # when the store last was

    def start(self) -> None:
        super().start()
        if self.watches:
            threading.Thread(target=self.watch, name="watch of the island", daemon=True).start()

    def run(self) -> None:
        """Connect, then put and read signs until the end, or until the store is gone: whoever served it has ended, and
        torchrun sees that."""
        try:
            self.signs = StoreSigns(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            while True:
                self.signs.put(self.rank, self.activity.sign())
                if self.watches:
                    self.newest = [self.signs.get(rank) for rank in range(self.world)]
                    self.answered = time.monotonic()
                if self.ending.wait(SIGN_S):
                    break
            self.signs.put(self.rank, self.activity.sign())
        except RuntimeError as error:
            log.warning("no more signs of life: the store of this island does not answer (%s)", error)
            self.answered = None

    def stop(self) -> None:
        self.activity.leave()
        self.ending.set()
        self.join(SIGN_S)

    def watch(self) -> None:
        detector = HangDetector(self.world, self.hang_s, time.monotonic())
        while not self.ending.wait(SIGN_S):
            now = time.monotonic()
            slept_s, answered = detector.wake(now), self.answered
            if slept_s and answered is not None:
                answered = self.answered = answered + slept_s
            for rank, sign in enumerate(self.newest):
                near = sign is not None and sign.host == self.host and not sign.done
                detector.observe(rank, sign, process_state(sign.pid) if near and sign is not None else None, now)
            if answered is not None and (hang := detector.find(now, answered) or self.unanswered(now, answered)):
                self.end_island(hang)

    def unanswered(self, now: float, answered: float) -> Hang | None:
        """Blame the machine of the store where that has not answered for long: signs of others are then unknown."""
        if now - answered < UNANSWERED_S:
            return None
        store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        served = self.newest[0].host if self.newest[0] is not None else os.environ["MASTER_ADDR"]
        text = (
            f"process 0 of {self.world} (host {served}), or torchrun there, is stopped or cut off: "
            f"the store at {store} has not answered for {now - answered:.0f} s"
        )
        return Hang(0, text)

    def end_island(self, hang: Hang) -> None:
        """Print which process hangs and end this one at once: its main thread may wait for that process for ever.

        If that is one of this machine, it is ended, too: it does not heed the signal by which torchrun asks it to.
        """
        os.write(sys.stderr.fileno(), f"error[process]: {hang.text}; the island ends\n".encode())
        sign = self.newest[hang.rank]
        if (
            sign is not None
            and sign.host == self.host
            and hang.rank != self.rank
            and self._is_ours(sign.pid, hang.rank)
        ):
            with suppress(ProcessLookupError):
                os.kill(sign.pid, signal.SIGKILL)
        os._exit(HUNG)

    def _is_ours(self, pid: int, rank: int) -> bool:
        """Tell whether a process was started with this island's variables, as the one of that rank."""
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        wanted = {"RANK": str(rank), **{name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}}
        return {f"{name}={value}".encode() for name, value in wanted.items()} <= set(variables)
