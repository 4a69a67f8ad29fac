"""What an earlier life of an island has saved, for when it comes back into its run.

A save counts if the log that the island's disk gives back leads past it. One that a pause has made holds all that the
island ever offered: the same incarnation goes on from there, with its samples, its progress that nobody has yet and
what is on offer, as if nothing had happened. It does so once: training on makes other bytes, and nothing is offered
twice. Of any other save (the island died, or left) the inner optimizer, the random numbers and the count of steps are
taken; its parameters are those that all agree on.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.atomic import sync_path
from diloco.checkpoint.log.entries import Entry
from diloco.checkpoint.save import age, read_facts, saves
from diloco.elastic.protocol.record import Head
from diloco.errors import SaveError

TAKEN = "taken"  # a file in a save: an island has gone on from it


@dataclass(frozen=True)
class Earlier:
    path: Path
    facts: dict[str, Any]
    paused: dict[str, Any] | None  # what a pause has left besides; None: it was none, or has been gone on from

    @property
    def incarnation(self) -> int | None:
        """The one that goes on; None: a new one begins."""
        return None if self.paused is None else int(self.paused["session"]["incarnation"])

    def take(self) -> None:
        """For good, and before anything is trained: until then nothing but the same bytes can be offered."""
        try:
            (self.path / TAKEN).touch()
            sync_path(self.path)
        except OSError as error:
            raise SaveError(f"{self.path} cannot be written ({error.strerror}): free some space") from None


def find_earlier(folder: Path, head: Head, entries: Iterable[Entry]) -> Earlier | None:
    """The newest save on the chain of these entries, which lead to this head."""
    known = {head.digest, *(digest for entry in entries for digest in (entry.parent, entry.digest))}
    for path in sorted(saves(folder), key=age, reverse=True):
        together = among_others(path)
        if together is not None and together["head"] in known:
            return Earlier(path, read_facts(path), None if (path / TAKEN).exists() else together["paused"])
    return None


def among_others(save: Path) -> dict[str, Any] | None:
    """What a save says of the island's part in a run; None: there is none, or it cannot be read."""
    try:
        found: dict[str, Any] | None = read_facts(save)["together"]
    except SaveError:
        return None
    return found
