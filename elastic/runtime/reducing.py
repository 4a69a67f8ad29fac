"""One attempt at an all-reduce as the driver sees it: a thread, its progress, and who is to blame when it fails."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from diloco.checkpoint.log.segments import Ahead
from diloco.checkpoint.log.store import Store
from diloco.comm.codec.noise import PAGE, NoiseKey
from diloco.comm.codec.rooms import CPU
from diloco.comm.reduce.allreduce import Reduction
from diloco.comm.reduce.grid import TwoLevelPlan
from diloco.comm.reduce.pages import PageStore
from diloco.comm.reduce.spans import (
    ReducePlan,
    Span,
    chunk_pages_for,
    spans_after_losses,
    spans_after_salvage,
    spans_by_bandwidth,
)
from diloco.comm.reduce.two_level import TwoLevelReduction
from diloco.comm.reduce.waiting import Stopped
from diloco.comm.transport.transport import Addresses, Transport
from diloco.elastic.protocol.messages import Begin, Received
from diloco.elastic.protocol.ranges import Ranges, normal, size
from diloco.elastic.protocol.record import canonical
from diloco.elastic.protocol.salvage import LARGEST_HOLE
from diloco.errors import ContributionRefused, PlanRefused, ReduceFailed

FLAT_UP_TO = 64  # members; more would have too many streams and too small chunks
CONNECT_S = 10.0
TOLD_BYTES = 80  # of each member, packed, in the *begin* that each member is sent
UNKNOWN_RATE = 1_000_000  # bytes a second, of a member that has not measured its link yet
FIRST_STALL_S = 30.0  # until the first round has shown how fast chunks come
SLACK = 4  # times the usual time of a chunk
MOST_PATIENT = 6  # doublings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """Describe how an attempt at an all-reduce ended at this member.

    `payload` is the result's digest, or "" after a failure; `blamed` is the member that this one could not work with.
    """

    payload: str
    result: Tensor | None = None
    ahead: Ahead | None = None  # what of it the store has written as it came
    blamed: str = ""
    reason: str = ""
    refused: bool = False  # what the blamed one contributed is bad
    local: bool = False  # others may well have the result
    stalled: bool = False  # no chunk came for too long, as far as this member can tell
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    kept: tuple[Received, ...] = ()  # after a failure: what has come of each member


class Follower(threading.Thread):
    """Give the result of a reduction to `take`, with offsets, as it becomes complete from its beginning on: `count`
    bytes so far."""

    def __init__(self, reduction: Reduction | TwoLevelReduction, take: Callable[[int, memoryview], None]) -> None:
        super().__init__(name="follow", daemon=True)
        self._parts = reduction.arriving() if isinstance(reduction, Reduction) else iter(())
        self._take, self.count = take, 0
        self.start()

    def run(self) -> None:
        """Run to the end of the result, or of the attempt."""
        with suppress(Stopped):
            for part in self._parts:
                self._take(self.count, memoryview(part.numpy()))  # type: ignore[arg-type]
                self.count += len(part)


class Attempt:
    """Run one all-reduce on a thread of its own, and report its outcome to `done` on that thread."""

    def __init__(
        self, begin: Begin, reduction: Reduction | TwoLevelReduction, done: Callable[[Begin, Outcome], None],
        store: Store | None = None,
    ) -> None:  # fmt: skip
        """Start. The result is hashed, and written to the `store`, as it comes."""
        self.begin, self.reduction, self._done, self._store = begin, reduction, done, store or Store()
        self.started, plan = reduction.level.began, reduction.level.plan
        self.chunks = max(len(plan.chunks(member)) for member in range(len(plan.members)))
        self._stalled = ""
        threading.Thread(target=self._run, name="reduce", daemon=True).start()

    def _run(self) -> None:
        digest, ahead = hashlib.sha256(), Ahead()
        takers = (lambda _, part: digest.update(part)), partial(self._store.write_ahead, ahead)
        try:
            followers = [Follower(self.reduction, take) for take in takers]
            result = self.reduction.run()
            for follower in followers:
                follower.join()
            digest.update(memoryview(result.numpy())[followers[0].count :])  # type: ignore[arg-type]
            outcome = Outcome(digest.hexdigest(), result, ahead)
        except ContributionRefused as bad:
            outcome = Outcome("", blamed=bad.peer, reason=str(bad), refused=True)
        except ReduceFailed as failed:
            blamed = self._stalled or failed.peer or failed.hung_up
            reason, stalled = str(failed), bool(self._stalled)
            outcome = Outcome("", blamed=blamed, reason=reason, local=failed.local, stalled=stalled)
        except Exception as error:  # a thread's outermost frame: memory, descriptors; another attempt may work
            log.exception("an all-reduce failed here")
            self.cancel()
            outcome = Outcome("", reason=f"{type(error).__name__}: {error}")
        seconds = time.monotonic() - self.started
        kept = tuple(
            Received(peer, _pages(pages.spans), _pages(pages.means), pages.whole)
            for peer, pages in self.reduction.kept.items()
        )
        sent, received = self.reduction.bytes_sent, self.reduction.bytes_received
        self._done(self.begin, replace(outcome, seconds=seconds, bytes_sent=sent, bytes_received=received, kept=kept))

    @property
    def received(self) -> int:
        """Return how many chunks have come from other members so far."""
        return sum(progress.received_chunks for progress in self.reduction.level.progress.values())

    def cancel(self) -> None:
        """Give up the all-reduce: another ballot takes its place, or the coordinator asks for that."""
        self.reduction.cancel("given up")

    def watch(self, stall_s: float) -> None:
        """Cancel the all-reduce if a member's chunks do not come for `stall_s`; blame the one longest behind."""
        level = self.reduction.level
        stall_s += level.began - self.started  # others may need as long again for what comes before
        last = {
            peer: max(level.began, progress.last_at)
            for peer, progress in level.progress.items()
            if progress.received_chunks < level.expected(peer)
        }
        slowest = min(last, key=lambda peer: last[peer], default="")
        if slowest and not self._stalled and time.monotonic() - last[slowest] > stall_s:
            self._stalled = slowest
            self.reduction.cancel(f"no chunk of {slowest} for {stall_s:.1f} s")


def reduction_of(
    begin: Begin, contribution: Tensor, count: int, transport: Transport, addresses: Addresses,
    pages: PageStore | None = None, device: torch.device = CPU,
) -> Reduction | TwoLevelReduction:  # fmt: skip
    """Build the all-reduce that *begin* asks for; raise PlanRefused if what a peer has proposed cannot be right.

    `pages` has what earlier attempts at this round have left. Means are worked out on `device`, but for those of more
    than 64 members.
    """
    plan = plan_of(begin, count)
    if len(contribution) != plan.codec.size(count):
        raise PlanRefused(f"{plan.channel}: {plan.codec_name} is not what this island has encoded")
    if isinstance(plan, TwoLevelPlan):
        return TwoLevelReduction(plan, contribution, transport, addresses, patience_s=_patience_s(begin))
    return Reduction(
        plan, contribution, transport, addresses, patience_s=_patience_s(begin), pages=pages, device=device
    )


def _patience_s(begin: Begin) -> float:
    """Return how long whoever hears *begin* first waits for the others: the last one hears it much later."""
    rates = dict(zip(begin.members, begin.bytes_per_s, strict=False))
    return connect_s(len(begin.members), rates.get(begin.ballot.coordinator, 0) or UNKNOWN_RATE)


def connect_s(members: int, bytes_per_s: float) -> float:
    """Return the time to connect: ten seconds, and what it takes a coordinator with such a link to tell all members."""
    return CONNECT_S + members * members * TOLD_BYTES / bytes_per_s


def plan_of(begin: Begin, count: int) -> ReducePlan | TwoLevelPlan:
    """Return the plan for an all-reduce, which has two levels if there are more than 64 members.

    It is the same on all members, because all of it follows from *begin*.
    """
    proposal = begin.proposal
    if len(begin.bytes_per_s) != len(begin.members):
        raise PlanRefused("a rate for each member was due")
    rates = tuple(float(rate or UNKNOWN_RATE) for rate in begin.bytes_per_s)
    weights = tuple(contribution.weight for contribution in proposal.contributions)
    ballot, key = begin.ballot, begin.key
    channel = f"reduce/{key.round}/{key.parent[:16]}/{ballot.term}.{ballot.attempt}/{ballot.coordinator}"
    noise = NoiseKey(key.round, proposal.fragment, "result")
    codec, result = proposal.settings.codec, proposal.settings.result
    norms = tuple(contribution.offer.norm for contribution in proposal.contributions)
    if len(begin.members) > FLAT_UP_TO:
        return TwoLevelPlan(channel, begin.members, weights, rates, count, codec, noise, result, norms)
    spans, owners, in_hole = spans_by_bandwidth(count, rates), tuple[int, ...](), tuple[Span, ...]()
    first, hole = [(name, float(rate or UNKNOWN_RATE)) for name, rate in begin.first], proposal.hole
    if hole is not None:
        values = (size(hole.pages) - 1) * PAGE  # at least
        if tuple(name for name, _ in first) != proposal.islands or LARGEST_HOLE * count < len(first) * values:
            raise PlanRefused(f"{channel}: its hole cannot be right")
        spans, owners, in_hole = spans_after_salvage(count, first, hole.island, begin.owners, hole.pages)
        if normal(_pages(in_hole)) != hole.pages:
            raise PlanRefused(f"{channel}: its hole is not where the lost member's pages are")
    elif begin.first:
        spans, owners = spans_after_losses(count, first, begin.members, rates)
    names, result_name = _names(begin)
    return ReducePlan(
        channel, proposal.islands, weights, spans, codec, noise, chunk_pages_for(spans), result,
        owners=owners, names=names, result_name=result_name, resumes=bool(begin.first),
        lost=hole.island if hole is not None else "", hole=in_hole, norms=norms,
    )  # fmt: skip


def _pages(spans: Iterable[Span]) -> Ranges:
    return tuple((span.lo // PAGE, -(-span.hi // PAGE)) for span in spans)


def _names(begin: Begin) -> tuple[tuple[str, ...], str]:
    """Return names of the contributions and of their mean, such that equal names mean equal bytes.

    What an island has offered for a key is frozen and encoded once; the mean follows from that and from the weights.
    """
    settings, proposal = begin.proposal.settings, begin.proposal
    codecs = (settings.codec, settings.result_codec)
    parts = [(begin.key, proposal.fragment, codecs[0], part.island, part.offer) for part in proposal.contributions]
    of_mean = canonical([begin.key, proposal.fragment, codecs, proposal.contributions])
    return tuple(hashlib.sha256(canonical(part)).hexdigest() for part in parts), hashlib.sha256(of_mean).hexdigest()


def stall_after(silence_s: float, last: Outcome | None, chunks: int, stalls: int = 0) -> float:
    """Return after how many seconds without a chunk an attempt is given up, from measured rates.

    That is `silence_s`, plus several times what a chunk took in the last round. After stalls in a row it may be the
    deadline that is wrong: it doubles each time.
    """
    usual_s = max(silence_s, FIRST_STALL_S) if last is None else silence_s + SLACK * last.seconds / max(1, chunks)
    return usual_s * 2 ** min(stalls, MOST_PATIENT)
