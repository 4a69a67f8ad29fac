"""Keep the contribution of a member that is lost late in an attempt, where the others have received it.

An owner of a span has every contribution to it, but for the lost member's own span: there nobody has its bytes, and
some may have the means that it worked out. Pages of which no survivor has the mean are the *hole*: there the mean is
over the others. The next attempt has the same contributions, so that all means that were received stay good.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

from diloco.elastic.protocol.liveness import Liveness
from diloco.elastic.protocol.messages import Begin, Halt, Received
from diloco.elastic.protocol.protocol_state import ProtocolState, Term
from diloco.elastic.protocol.ranges import Range, both, is_normal, minus, normal, size
from diloco.elastic.protocol.record import Hole

REPORT = 4  # the part of silence_s in which members say what they have received
LARGEST_HOLE = 2  # n-ths of the vector, of n members
MAX_PIECES = 1024  # of the lost member's span


class Salvage:
    """Decide, as coordinator, whether the next attempt keeps a lost member's contribution."""

    def __init__(self, own: ProtocolState, liveness: Liveness) -> None:
        self.own, self.liveness = own, liveness

    def awaits_reports(self, term: Term, begin: Begin, lost: Collection[str], now: float) -> bool:
        """Return whether to wait for what the others have received. They are asked once, and give the attempt up."""
        if not self._is_possible(term, begin, lost, now):
            return False
        survivors = [member for member in begin.members if member not in lost]
        if term.halted_at is None:
            term.halted_at = now
            for member in survivors:
                self.own.send(member, Halt(begin.key, begin.ballot))
        missing = set(survivors) - term.kept.keys() - term.done.keys()
        return bool(missing) and now - term.halted_at < self.own.options.silence_s / REPORT

    def _is_possible(self, term: Term, begin: Begin, lost: Collection[str], now: float) -> bool:
        own = self.own
        if not own.rules.salvage or not own.needs_quorum or term.salvaged or begin.first:
            return False
        few = 2 < len(begin.members) <= own.options.flat_up_to
        if not few or not begin.bytes_per_s or len(lost) != 1:
            return False
        return all(own.peers.views[peer].banned_until <= now for peer in lost)  # one that is banned is not believed

    def prepare(self, term: Term, begin: Begin, lost: Collection[str], now: float) -> None:
        """Work out the next attempt from the members' reports, if it can keep the lost one's contribution."""
        if self._is_possible(term, begin, lost, now):
            term.salvaged = True
            term.prepared = attempt_with(begin, next(iter(lost)), term.kept, term.done)

    def next_attempt(self, term: Term, now: float) -> Begin | None:
        """Return the attempt that keeps a lost member's contribution; None if there is none, or that one is back."""
        prepared, term.prepared = term.prepared, None
        if prepared is None or prepared.proposal.hole is None:
            return None
        lost, promised = prepared.proposal.hole.island, term.promised()
        if lost in term.answers or lost in term.elsewhere or lost in self.liveness.alive(now):
            return None
        return replace(prepared, ballot=term.ballot) if set(prepared.members) <= promised.keys() else None


def attempt_with(
    begin: Begin, lost: str, kept: Mapping[str, tuple[Received, ...]], done: Collection[str]
) -> Begin | None:
    """Return the attempt that follows `begin` without its lost member but with its contribution; None if none can.

    `kept` is what members have received, `done` are those that have the whole result.
    """
    survivors = tuple(member for member in begin.members if member != lost)
    reports = {member: _of(lost, kept.get(member, ())) for member in survivors if member not in done}
    known = [report for report in reports.values() if report is not None and report.whole]
    pages = known[0].pages if known else ()
    if len(known) < len(reports) or not known or not is_normal(pages) or any(each.pages != pages for each in known):
        return None
    means = {member: report.means for member, report in reports.items() if report is not None}
    if not all(map(is_normal, means.values())):
        return None
    owners, hole = list[tuple[int, int, int]](), list[Range]()
    for piece in _pieces(pages, means.values()):
        holders = [member for member in survivors if member in done or not minus((piece,), means[member])]
        if not holders:
            hole.append(piece)
        places = [survivors.index(member) for member in holders or survivors]
        owners += [(lo, hi, place) for place, (lo, hi) in zip(places, _divided(piece, len(places)), strict=True)]
    total = min(sum(size(report.pages) for report in kept[member]) for member in reports)
    if size(tuple(hole)) * len(begin.members) > LARGEST_HOLE * total or len(owners) > MAX_PIECES:
        return None
    rates = dict(zip(begin.members, begin.bytes_per_s, strict=True))
    return replace(
        begin, members=survivors, bytes_per_s=tuple(rates[member] for member in survivors),
        proposal=replace(begin.proposal, hole=Hole(lost, normal(hole))), first=tuple(rates.items()),
        owners=tuple(part for part in owners if part[0] < part[1]),
    )  # fmt: skip


def _of(lost: str, reports: Iterable[Received]) -> Received | None:
    return next((report for report in reports if report.peer == lost), None)


def _pieces(pages: tuple[Range, ...], means: Iterable[tuple[Range, ...]]) -> list[Range]:
    """Cut pages into pieces, each of which a member has the means of completely, or not at all."""
    bounds = {edge for ranges in (pages, *(both(pages, each) for each in means)) for part in ranges for edge in part}
    return [piece for piece in pairwise(sorted(bounds)) if not minus((piece,), pages)]


def _divided(piece: Range, parts: int) -> list[Range]:
    lo, count = piece[0], piece[1] - piece[0]
    return list(pairwise(lo + number * count // parts for number in range(parts + 1)))
