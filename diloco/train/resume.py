"""What an earlier life of an island has saved, for its return to the run.

A save counts if the log that the island's disk gives back leads past it. One that a pause has made holds all that the
island ever offered: the same incarnation continues from there, with its samples, its progress that nobody else has yet
and what is on offer, as if nothing had happened. It does so once: training on makes other bytes, and nothing is offered
twice. From any other save (the island died, or left) the inner optimizer, the random numbers and the count of steps are
taken; its parameters are those that all agree on.

Where the run was founded anew since (`moved`), nobody knows what was on offer: that progress counts as not cut yet.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from diloco.atomic import sync_path
from diloco.checkpoint.log.journal import Entry
from diloco.checkpoint.save.facts import age, among_others, read_facts, saves
from diloco.comm.codec.registry import codec_named
from diloco.elastic.protocol.ranges import normal
from diloco.elastic.protocol.record import Head
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.work import StepsDone, trained
from diloco.errors import SaveError

TAKEN = "taken"  # a file in a save: an island has gone on from it
CONTAINED = "contained.json"  # beside the log of a run that was founded anew
Uncontained = list[tuple[int, Tensor, StepsDone]]  # fragment, progress, what is behind it


@dataclass(frozen=True)
class EarlierSave:
    """Describe the save with which an island returns to its run."""

    path: Path
    facts: dict[str, Any]
    paused: dict[str, Any] | None  # what a pause has left besides; None: it was none, or has been gone on from
    moved: dict[str, Any] | None = None  # its run was founded anew since: what its state contains of the progress

    @property
    def incarnation(self) -> int | None:
        """Return the incarnation that continues, or None if a new one begins."""
        return None if self.paused is None or self.moved is not None else int(self.paused["session"]["incarnation"])

    def mark_taken(self) -> None:
        """Mark the save as used, before anything is trained: until then nothing but the same bytes can be offered."""
        try:
            (self.path / TAKEN).touch()
            sync_path(self.path)
        except OSError as error:
            raise SaveError(f"{self.path} cannot be written ({error.strerror}): free some space") from None

    def uncontained(self, vectors: Mapping[str, Tensor], fragments: Fragments) -> Uncontained:
        """Return the progress that was launched and that the outer state does not contain."""
        assert self.paused is not None and self.moved is not None
        codec, session = codec_named(self.facts["config"]["sync"]["codec"]), self.paused["session"]
        marks = {fragment: mark for life, fragment, mark in self.moved["marks"] if life == session["incarnation"]}
        return [
            (fragment, codec.decode(vectors[f"piece.{fragment}.{lo}.{hi}"], fragments.counts[fragment]), trained(done))
            for fragment, work in enumerate(session["works"])
            for lo, hi, _, *done in work["pieces"]
            if hi > marks.get(fragment, 0)
        ]

    def behind(self) -> list[int]:
        """Return the fragments that had an outer update which this island had not applied yet."""
        versions = self.moved["versions"] if self.moved is not None else []
        taken = self.paused["session"]["taken"] if self.paused is not None and versions else []
        return [fragment for fragment, (now, then) in enumerate(zip(versions, taken, strict=True)) if now != then]


def fold_back(
    counts: Mapping[str, Any], vectors: dict[str, Tensor], pieces: Uncontained, fragments: Fragments
) -> dict[str, Any]:
    """Count this progress as not cut yet: the anchor moves back to where it began. Return the exchange's facts."""
    anchor = vectors.get("anchor", vectors["parameters"]).clone()
    tokens, cut_at, used = list(counts["tokens"]), list(counts["cut_at"]), [tuple(part) for part in counts["used"]]
    for fragment, progress, done in pieces:
        for lo, hi, part in fragments.pieces(progress, fragment):
            anchor[lo:hi] += part
        tokens[fragment] += done.tokens
        cut_at[fragment] -= done.steps
        used += done.samples
    vectors["anchor"] = anchor
    return {**counts, "in_flight": [], "tokens": tokens, "cut_at": cut_at, "used": normal(used)}


def find_earlier(folder: Path, head: Head, entries: Iterable[Entry], parent: str = "") -> EarlierSave | None:
    """Find the newest save on the chain of these entries, which lead to this head; else one at the head of the run that
    this one was founded from (`parent`)."""
    known = {head.digest, *(digest for entry in entries for digest in (entry.parent, entry.digest))}
    newest_first = sorted(saves(folder), key=age, reverse=True)
    for path in newest_first:
        together = among_others(path)
        if together is not None and together["head"] in known:
            return EarlierSave(path, read_facts(path), None if (path / TAKEN).exists() else together["paused"])
    for path in newest_first if parent else ():
        together = among_others(path)
        if together is not None and together["head"] == parent:
            contained = json.loads((folder / "outer" / CONTAINED).read_text())
            paused = None if (path / TAKEN).exists() else together["paused"]
            return EarlierSave(path, read_facts(path), paused, contained)
    return None
