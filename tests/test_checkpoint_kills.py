"""A writer killed at any moment, again and again: every restart opens, and nothing that was durable is lost."""

import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import checkpoint_writer
import pytest
from checkpoint_writer import Reference
from disks import fill, small_disk
from forked import FORKED

from diloco.checkpoint.log.segments import segment_paths

KILLS = int(os.environ.get("DILOCO_WRITER_KILLS", "15"))
PATIENCE_S = 60.0


class Life:
    """Of a writer, from its start to its death."""

    def __init__(self, folder: Path, calls: int = 0) -> None:
        self.pipe, theirs = FORKED.Pipe()
        self.process = FORKED.Process(target=checkpoint_writer.work, args=(folder, theirs, calls), daemon=True)
        self.process.start()
        theirs.close()
        self.said: list[tuple] = []

    def hear(self, wanted: str, timeout_s: float = PATIENCE_S) -> tuple | None:
        """The next message of this kind; None when it is dead."""
        deadline = time.monotonic() + timeout_s
        while self.pipe.poll(max(0.0, deadline - time.monotonic())):
            message = receive(self.pipe)
            if message is None:
                return None
            self.said.append(message)
            if message[0] == wanted:
                return message
        raise TimeoutError(f"nothing of it: {self.said[-3:]}")

    def end(self, *, at_once: bool = True) -> None:
        """What it said before it died is heard."""
        if at_once and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == -signal.SIGKILL
        while (message := receive(self.pipe)) is not None:
            self.said.append(message)

    @property
    def durable(self) -> tuple[int, str, int]:
        """The last round that was said to be, and how much of which file was synced by then."""
        last = [message[1:] for message in self.said if message[0] == "durable"]
        return last[-1] if last else (0, "", 0)


def receive(pipe: Connection) -> tuple | None:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def lose_what_was_not_synced(folder: Path, name: str, synced: int, chance: random.Random) -> None:
    """As a power cut may."""
    paths = segment_paths(folder)
    if paths and paths[-1].name == name and (size := paths[-1].stat().st_size) > synced:
        os.truncate(paths[-1], chance.randint(synced, size))


def test_kills_of_a_writer(tmp_path):
    """Three hundred by `make prove`. Some by the clock, some at a call that changes the disk."""
    chance, reference, durable, reached = random.Random(7), Reference(), 0, 0
    for number in range(KILLS):
        calls = chance.randint(1, 120) if number % 2 else 0
        life = Life(tmp_path, calls)
        if calls:
            while life.hear("durable") is not None:
                pass
        else:
            life.hear("durable")
            time.sleep(chance.uniform(0, 0.1))
        life.end(at_once=not calls)
        opened = [message for message in life.said if message[0] == "opened"]
        for _, found, digest, told in opened:
            assert found >= durable, "a round that was durable is lost"
            assert digest == reference.digest(found)
            assert [found for found in told if found[0] != "torn"] == []
            reached = max(reached, found)
        assert [message for message in life.said if message[0] == "told"] == []
        said, name, synced = life.durable
        durable = max(durable, said)
        if chance.random() < 0.5:
            lose_what_was_not_synced(tmp_path, name, synced, chance)
    assert reached > KILLS / 2  # it came on meanwhile


def test_kills_of_a_writer_whose_disk_is_full_now_and_then(tmp_path):
    chance, reference, durable = random.Random(8), Reference(), 0
    failures = 0
    with small_disk(tmp_path / "disk", "600k") as disk:
        for number in range(max(6, KILLS // 3)):
            ballast = fill(disk) if number % 3 == 1 else None
            life = Life(disk / "outer")
            for _ in range(chance.randint(1, 12)):
                life.hear("durable")
            if ballast is None and number % 3 == 2:  # full while it writes
                ballast = fill(disk)
                for _ in range(8):
                    life.hear("durable")
            life.end()
            (_, found, digest, told), *_ = (message for message in life.said if message[0] == "opened")
            assert found >= durable and digest == reference.digest(found)
            assert [found for found in told if found[0] not in ("torn", "result lost")] == []
            failures += any(message[:2] == ("told", "not durable") for message in life.said)
            durable = max(durable, life.durable[0])
            if ballast is not None:
                ballast.unlink()
    assert failures > 1


@pytest.mark.parametrize("calls", range(1, 12))
def test_a_writer_that_dies_while_it_begins_leaves_what_can_be_opened(tmp_path, calls):
    Life(tmp_path, calls).end(at_once=False)
    life = Life(tmp_path)
    assert life.hear("opened")[1:3] == (0, Reference().digest(0))
    assert life.hear("durable") is not None
    life.end()
