"""The trainer's side of a driver: hand in progress, learn how the outer state has changed, draw leased samples."""

import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from diloco.comm.codec.feedback import ErrorFeedback
from diloco.comm.codec.noise import NoiseKey
from diloco.comm.codec.registry import codec_named
from diloco.comm.codec.rooms import prepare
from diloco.comm.codec.streams import beside_training
from diloco.elastic.protocol.messages import Begin
from diloco.elastic.protocol.ranges import Ranges, minus, normal, size
from diloco.elastic.protocol.record import Contribution, Head, Offer, Record, holder_name
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import from_plain, to_plain
from diloco.elastic.runtime.driver import Driver, check
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.work import DISK_SHARE, KEEP_BYTES, Owed, PendingProgress, Progress, StepsDone, parts_of

HEADS = 256  # whose marks are known
WAIT_S = 0.1  # how soon a waiting trainer sees that it is asked to stop
BEATS_WHILE_SAVING = 1000  # heartbeats that may still be sent after a save has noted their number


class Update(NamedTuple):
    """Describe where a fragment is after its outer parameters were taken."""

    step: int  # the run's clock after the update that brought it there
    owed: Owed | None = None  # the sum of this island's progress up to its last cut that it does not contain
    owed_steps: int = 0  # and the inner steps behind that


class Session:
    """Connect one trainer thread with the driver: offer progress, take outer parameters, draw samples."""

    def __init__(
        self, driver: Driver, fragments: Fragments, codec_name: str, *, feedback: float | None = None,
        spill: Path | None = None,
    ) -> None:  # fmt: skip
        """Begin a session for one trainer thread.

        With `feedback`, what encoding loses is added to the next contribution, multiplied by that factor. Progress that
        is contained, and may be owed again, goes to the folder `spill`, if there is one.
        """
        self._spill = spill
        if spill is not None:  # of an earlier life: its progress is over
            shutil.rmtree(spill, ignore_errors=True)
        self.driver, self.fragments, self.codec = driver, fragments, codec_named(codec_name)
        prepare(self.codec.size(max(fragments.counts)), driver.run.device)
        self._feedback: list[ErrorFeedback] = []  # of each fragment, if any
        self._residuals = threading.Lock()  # the trainer's thread and the encoding one change them
        if feedback is not None:
            self._feedback = [ErrorFeedback(self.codec, count, feedback) for count in fragments.counts]
        self._encoding = ThreadPoolExecutor(1, "encode")
        self.works = [self._work(fragment) for fragment in range(len(fragments))]
        self.state = driver.applied  # as last seen
        driver.contribution = self._contribution
        self._taken = [""] * len(fragments)  # which update of each fragment the trainer's base contains
        self._wanted, self._late = driver.node.own.want, 0  # samples to train on, and those behind late progress
        self._offered_at = [("", 0)] * len(fragments)
        self._offers: dict[int, Offer] = {}  # by fragment: the last one
        self._encoded: list[Future[None]] = []  # the last one
        self._islands: set[str] = set()  # of the rosters seen, but this one
        self._marks_at: dict[str, list[int]] = {}  # of each fragment at the last heads that were taken, by digest

    def _work(self, fragment: int) -> PendingProgress:
        node, count = self.driver.node, self.fragments.counts[fragment]
        role = holder_name(node.me, node.incarnation)
        feedback = self._feedback[fragment] if self._feedback else None

        def plain(progress: Progress, hi: int) -> Tensor:
            return self.codec.encode_parts(parts_of(progress), count, NoiseKey(hi, fragment, role))

        def feeding_back(progress: Progress, hi: int) -> Tensor:
            assert feedback is not None
            with self._residuals:  # a piece is kept until it is contained: what its encoding lost is known at once
                return feedback.encode(parts_of(progress), NoiseKey(hi, fragment, role))

        def on_loss(loss: Tensor) -> None:
            assert feedback is not None
            with self._residuals:
                feedback.residual += loss.to(feedback.residual.device)

        decode = partial(self.codec.decode, count=count)
        keep_bytes = 0 if self._spill is not None else KEEP_BYTES // len(self.fragments)
        work = partial(
            PendingProgress, fragment, node.incarnation, keep_bytes=keep_bytes, spill=self._spill, later=self._later,
            disk_share=DISK_SHARE / len(self.fragments), measure=partial(self.codec.norm, count=count),
            decode_part=partial(self.codec.decode_part, count=count), count=count,
        )  # fmt: skip
        if feedback is None:
            return work(plain, decode)
        return work(feeding_back, decode, join=plain, on_loss=on_loss)

    def _later(self, act: Callable[[], None]) -> None:
        self._encoding.submit(self.driver.guarded, act)

    def owes(self, fragment: int = 0) -> bool:
        """Return whether progress of earlier phases is not contained yet.

        It can be offered without training first.
        """
        work = self.works[fragment]
        return bool(work.owed(work.mark))

    def _contribution(self, begin: Begin) -> Tensor:
        me = self.driver.node.me
        (offer,) = (c.offer for c in begin.proposal.contributions if c.island == me)
        return self.works[offer.fragment].payload(offer)

    def start(
        self, fragment: int, progress: Progress, done: StepsDone, *, step_ms: int = 0, at_once: bool = False
    ) -> None:
        """Contribute what was trained since the last cut, and what is owed from before.

        It returns before anything is encoded, and nobody changes what `progress` is worked out from; with `at_once` it
        returns when that was gone through. If nothing was trained, it is not encoded, but gone through.
        """
        check(self.driver)
        work = self.works[fragment]
        last = self.last_round()
        usual_norm = median([contribution.offer.norm for contribution in last]) if last else 0.0
        make_offer = work.cut(progress, done, usual_norm=usual_norm)
        self._offered_at[fragment] = self.driver.applied.version(fragment).digest, work.mark
        if done.tokens and at_once:
            self.driver.guarded(work.encode_last)
        if at_once or not done.tokens:
            deque(parts_of(progress), maxlen=0)
        check(self.driver)

        def encode_and_offer() -> None:
            with beside_training(self.driver.run.device, after=True):
                offer = self._offers[fragment] = replace(make_offer(), step_ms=step_ms)
            self.driver.post(partial(self.driver.node.offer, offer))

        self._encoded = [self._encoding.submit(self.driver.guarded, encode_and_offer)]

    def last_round(self) -> tuple[Contribution, ...]:
        """Return the contributions of the last round that had any; empty if no such round is known."""
        rounds = (record.proposal.contributions for record in reversed(self.records()))
        return next((contributions for contributions in rounds if contributions), ())

    def finish(self, fragment: int, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the fragment's round is over, with or without this island's part.

        Returns False if asked to stop before.
        """
        with self.driver.changed:
            while not self.over(fragment):
                if not self.wait_for_news(self.driver.applied.head, should_stop):
                    return False
        return True

    def wait_for_news(self, seen: Head, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait for another head than `seen`; return False if asked to stop before."""
        with self.driver.changed:
            while self.driver.applied.head == seen:
                check(self.driver)
                if should_stop():
                    return False
                self.driver.changed.wait(WAIT_S)
        return True

    def over(self, fragment: int) -> bool:
        """Return whether a round of the fragment was committed since the last offer, or the offer no longer stands.

        It does not if it is contained, or if another branch is followed now.
        """
        state = self.driver.applied
        return (state.version(fragment).digest, self._mark(state, fragment)) != self._offered_at[fragment]

    def _mark(self, state: RunState, fragment: int) -> int:
        node = self.driver.node
        return state.mark(node.me, node.incarnation, fragment)

    def refresh(self) -> None:
        """Take over the latest applied state, and adapt the lease to progress that is late.

        Samples behind late progress are held besides those that the island wants to train on.
        """
        check(self.driver)
        self.state = self.driver.applied
        late = size(self._used()) if any(len(work.owed(work.mark)) > 1 for work in self.works) else 0
        if late != self._late:
            self._late = late
            self.request_samples(self._wanted)

    def request_samples(self, samples: int) -> None:
        """Ask for this many samples to train on; those behind late progress are held in addition."""
        self._wanted, both = samples, samples + self._late
        self.driver.post(lambda now: self.driver.node.request_samples(both, now))

    def has_changed(self, fragment: int) -> bool:
        """Return whether a fragment's outer parameters are no longer those that were last taken."""
        return self.driver.applied.version(fragment).digest != self._taken[fragment]

    def forget_taken(self, fragments: Iterable[int]) -> None:
        """Count these fragments as changed, because the trainer does not hold their present values."""
        for fragment in fragments:
            self._taken[fragment] = ""

    def wait(self, seconds: float) -> None:
        """Wait for another head than the one last seen, for so many seconds at most."""
        with self.driver.changed:
            check(self.driver)
            if self.driver.applied.head == self.state.head:
                self.driver.changed.wait(seconds)

    def apply_result(self, fragment: int, into: Tensor | None = None) -> Update:
        """Write a fragment's outer parameters to their place in a vector, if one is given; return what it still owes.

        What was on offer is withdrawn: it is contained now, or owed.
        """
        with self.driver.replica.reading() as vectors, self.driver.changed:
            if into is not None:
                for lo, hi in self.fragments.ranges[fragment]:
                    into[lo:hi].copy_(vectors["parameters"][lo:hi])
            self.state = self.driver.applied
        version = self.state.version(fragment)
        self._taken[fragment] = version.digest
        work = self.works[fragment]
        node = self.driver.node
        hole = self.state.hole(node.me, node.incarnation, fragment)
        owed = work.rebase(self._mark(self.state, fragment), settled=self._settled(fragment), hole=hole)
        self.driver.post(lambda now: self.driver.node.withdraw(fragment))
        return Update(version.step, owed, sum(piece.done.steps for piece in work.owed(work.mark)))

    def _settled(self, fragment: int) -> int:
        """Return up to which mark no other branch can take the place of this state.

        Without a latch these are the marks at the heads that all islands of its rosters last told, but for those that
        have left: an island that is not heard may have gone on from its last head.
        """
        node, state = self.driver.node, self.state
        if state.latch:
            return self._mark(state, fragment)
        self._marks_at[state.head.digest] = [self._mark(state, each) for each in range(len(self.works))]
        if len(self._marks_at) > HEADS:
            del self._marks_at[next(iter(self._marks_at))]
        for record in self.records():  # an earlier life's, too
            self._islands.update(record.proposal.roster)
        self._islands = (self._islands | set(state.roster)) - {node.me}
        views = [node.own.peers.views.get(island) for island in self._islands]
        heads = [view.head if view else None for view in views if view is None or not view.said_goodbye]
        told = [self._marks_at.get(head.digest) if head else None for head in heads]
        return min((marks[fragment] if marks else 0 for marks in told), default=self._mark(state, fragment))

    def available(self, used: Ranges) -> Ranges:
        """Return the samples that this island may train on: leased, and not used yet.

        `used` are those since its last cut; samples behind progress that is not contained do not count either.
        """
        node = self.driver.node
        lease = self.state.ledger.lease_of(holder_name(node.me, node.incarnation))
        return minus(minus(lease, self._used()), used)

    def _used(self) -> Ranges:
        """Return the samples behind progress that is not contained."""
        return normal(part for work in self.works for part in work.used(self._mark(self.state, work.fragment)))

    def records(self) -> list[Record]:
        """Return the last records that were committed, oldest first."""
        return list(self.driver.records)

    # what a save holds of it, for the same incarnation to go on

    def facts(self) -> dict[str, Any]:
        """Return what a save holds besides `tensors`, for the same incarnation to resume from.

        It waits until everything is encoded.
        """
        self.finish_encoding()
        return {
            "incarnation": self.driver.node.incarnation, "wanted": self._wanted, "taken": list(self._taken),
            "offered_at": list(self._offered_at), "works": [work.facts() for work in self.works],
            "offers": [to_plain(offer) for offer in self._offers.values()],
            "beats": self.driver.node.own.sequence + BEATS_WHILE_SAVING,
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Return encoded progress that is not contained, and what its encoding has lost, for a save."""
        self.finish_encoding()
        payloads = {
            f"piece.{work.fragment}.{lo}.{hi}": payload
            for work in self.works
            for (lo, hi), payload in work.payloads().items()
        }
        residuals = {f"residual.{number}": feedback.residual for number, feedback in enumerate(self._feedback)}
        return payloads | residuals

    def restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Resume from a save of the same incarnation.

        What was on offer is offered again, with the same bytes, unless a round has contained it meanwhile.
        """
        assert facts["incarnation"] == self.driver.node.incarnation
        self._taken, self._offered_at = list(facts["taken"]), [(version, mark) for version, mark in facts["offered_at"]]
        for work, known in zip(self.works, facts["works"], strict=True):
            names = [name.split(".") for name in tensors if name.startswith(f"piece.{work.fragment}.")]
            work.restore(known, {(int(lo), int(hi)): tensors[f"piece.{f}.{lo}.{hi}"] for _, f, lo, hi in names})
        for number, feedback in enumerate(self._feedback):
            feedback.residual.copy_(tensors[f"residual.{number}"])
        self.driver.post(partial(self.driver.node.number_beats_after, facts.get("beats", 0)))
        self.request_samples(facts["wanted"])
        self.refresh()
        for offer in (from_plain(Offer, plain) for plain in facts["offers"]):
            self._offers[offer.fragment] = offer
            if not self.over(offer.fragment) and self.state.fits(self.driver.node.me, offer):
                self.driver.post(partial(self.driver.node.offer, offer))

    def finish_encoding(self) -> None:
        """Wait until what was started last is encoded."""
        wait(self._encoded)
        check(self.driver)

    def close(self) -> None:
        """Stop encoding, without waiting for an offer that is not made yet."""
        self._encoding.shutdown(wait=False, cancel_futures=True)
