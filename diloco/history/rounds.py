"""All rounds that a run has ever committed, as its islands on this machine have kept their headers.

States of old rounds may be gone (checkpoint.keep); their headers never are. Nothing heavy is imported here, unless a
folder was written by an earlier diloco, without a history: then its log is read.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.checkpoint.log.history import Line, RoundHeader, chain_of, read_history
from diloco.elastic.protocol.record import Amendment
from diloco.history.find import names_of
from diloco.run.folder import OUTER
from diloco.run.names import Names
from diloco.train.amend import in_words

SNAPSHOT = re.compile(r"snapshot-(\d+)-[0-9a-f]+")


@dataclass(frozen=True)
class RunHistory:
    """Hold the rounds of a run's chain, oldest first, and the names of its islands.

    Rounds of an earlier part of the run, before it was resumed with other settings, come first.
    """

    rounds: list[RoundHeader]
    names: Names
    states: tuple[int, int] | None  # the first and the last round whose states can be had; None: no snapshot is left
    part: int = 0  # at which place of `rounds` the part begins that the states are of

    def has_state(self, at: int) -> bool:
        """Tell whether the state after the round at this place can be had."""
        first, last = self.states or (1, 0)
        return at >= self.part and first <= self.rounds[at].round <= last

    def changes(self, header: RoundHeader) -> str:
        """Return what the run's owner changed by a round, in words; empty if nothing."""
        return in_words(Amendment(header.amendment, header.changes), self.names.of) if header.amendment else ""

    def plain(self) -> list[dict[str, Any]]:
        """Return all rounds for programs."""
        return [self._plain(at, header) for at, header in enumerate(self.rounds)]

    def _plain(self, at: int, header: RoundHeader) -> dict[str, Any]:
        parts = [
            {
                "name": self.names.of(part.island), "island": part.island, "tokens": part.tokens, "steps": part.steps,
                "weight": part.weight, "loss": part.loss, "late": part.late,
            }
            for part in header.contributions
        ]  # fmt: skip
        who = {kind: list(map(self.names.of, getattr(header, kind))) for kind in ("joined", "left", "silent")}
        return {
            "round": header.round, "digest": header.digest, "parent": header.parent, "time": header.time_ms / 1000,
            "step": header.step, "fragment": header.fragment, "tokens": header.tokens,
            "total_tokens": header.total_tokens, "bytes": header.size, "loss": header.loss,
            "contributors": [part["name"] for part in parts], "contributions": parts, "islands": header.islands, **who,
            "amendment": self.changes(header), "collect_s": header.collect_ms / 1000,
            "exchange_s": header.exchange_ms / 1000, "state": self.has_state(at),
        }  # fmt: skip


def history_of(logs: list[Path]) -> RunHistory:
    """Return the history of the run that these islands' logs are of: the chain of the one that leads furthest.

    What it lacks, because it joined late or took a whole state over, is taken from the others.
    """
    found = {log: _lines_of(log) for log in logs}
    longest = max(logs, key=lambda log: _reach(found[log]))
    others = [line for log in logs if log != longest for line in found[log] if isinstance(line, RoundHeader)]
    chain = chain_of(found[longest], others)
    earlier = [header for part in earlier_logs(longest.parent) for header in chain_of(read_history(part))]
    return RunHistory([*earlier, *chain], names_of(logs), _states(longest, chain), len(earlier))


def _lines_of(log: Path) -> Sequence[Line]:
    if found := read_history(log):
        return found
    from diloco.history.log import headers  # torch: an earlier diloco wrote this folder

    return headers(log)


def _reach(found: Sequence[Line]) -> tuple[int, int]:
    chain = chain_of(found)
    return (chain[-1].total_tokens, chain[-1].round) if chain else (-1, -1)


def earlier_logs(folder: Path) -> list[Path]:
    """List the logs of earlier parts of a run that was resumed with other settings, oldest first."""
    numbered = [path for path in folder.glob(f"{OUTER}.*") if path.suffix[1:].isdecimal()]
    return sorted(numbered, key=lambda path: int(path.suffix[1:]))


def _states(log: Path, chain: list[RoundHeader]) -> tuple[int, int] | None:
    """Return from which to which round states can be had: from the oldest snapshot on, unless there is a gap since."""
    kept = [int(match[1]) for path in log.glob("snapshot-*") if (match := SNAPSHOT.fullmatch(path.name))]
    if not kept:
        return None
    first, last = min(kept), max(kept)
    numbers = {header.round for header in chain}
    while last + 1 in numbers:
        last += 1
    return first, last
