"""The trainer's side of a driver: hand in a displacement, learn where the outer state went, draw leased samples."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from diloco.comm.codec import CODECS
from diloco.comm.noise import NoiseKey
from diloco.elastic.driver import Driver, check
from diloco.elastic.messages import Begin, Effect
from diloco.elastic.ranges import Ranges, minus
from diloco.elastic.record import Contribution, Record, holder_name
from diloco.elastic.state import RunState
from diloco.elastic.work import Work

WAIT_S = 0.1  # how soon a waiting trainer sees that it is asked to stop


@dataclass(frozen=True)
class Change:
    """The outer state went on. Unless all of the island's progress is `contained` in it, its displacement
    (base - local) goes along, plus `adjust`: progress that was contained before, or is only now."""

    contained: bool
    adjust: Tensor | None
    told: tuple[dict[str, Any], ...] = ()  # for people: the rounds since the last one


class Session:
    """For one trainer thread."""

    def __init__(self, driver: Driver, codec_name: str) -> None:
        self.driver, self.codec = driver, CODECS[codec_name]
        node, count = driver.node, driver.run.count
        role = holder_name(node.me, node.incarnation)
        self.work = Work(
            node.incarnation,
            lambda vector, hi: self.codec.encode(vector, NoiseKey(hi, 0, role)),
            lambda payload: self.codec.decode(payload, count),
        )
        self.state = driver.applied  # what the trainer's base is
        driver.contribution = self._contribution
        self._offered_at = self._offered_lo = -1  # updates, and the mark, when the last offer was made

    @property
    def owes(self) -> bool:
        """Progress of earlier phases is not contained: it can be offered without training first."""
        return bool(self.work.owed(self.work.mark))

    def _contribution(self, begin: Begin) -> Tensor:
        me = self.driver.node.me
        (offer,) = (c.offer for c in begin.proposal.contributions if c.island == me)
        return self.work.payload(offer)

    def start(self, fragment: int, displacement: Tensor, *, tokens: int, samples: Ranges, step_ms: int = 0) -> None:
        """Contribute all progress that `state` does not contain: base - local."""
        check(self.driver)
        offer = self.work.cut(displacement, tokens, samples, step_ms=step_ms, usual_norm=self._usual_norm())
        self._offered_at, self._offered_lo = self.state.updates, offer.lo
        self.driver.post(lambda now: self.driver.node.offer(offer, now))

    def _usual_norm(self) -> float:
        """The median of the last round with contributions; 0: there was none."""
        last = self.last_round()
        return median([contribution.offer.norm for contribution in last]) if last else 0.0

    def last_round(self) -> tuple[Contribution, ...]:
        """Who contributed what to the last round that had contributions."""
        rounds = (record.proposal.contributions for record in reversed(self.records()))
        return next((contributions for contributions in rounds if contributions), ())

    def finish(self, fragment: int, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until a round is over, with or without this island's part. False: asked to stop before."""
        with self.driver.changed:
            while not self._over():
                check(self.driver)
                if should_stop():
                    return False
                self.driver.changed.wait(WAIT_S)
        if not self._is_contained(self.driver.applied):
            self.driver.post(lambda now: self._withdraw(fragment))
        return True

    def _withdraw(self, fragment: int) -> list[Effect]:
        self.driver.node.withdraw(fragment)
        return []

    def _over(self) -> bool:
        """A round was committed, or the offer no longer stands: it is contained, or another branch is."""
        applied = self.driver.applied
        return applied.updates > self._offered_at or self._mark(applied) != self._offered_lo

    def _is_contained(self, state: RunState) -> bool:
        return self._mark(state) >= self.work.hi

    def _mark(self, state: RunState) -> int:
        node = self.driver.node
        return state.mark(node.me, node.incarnation, 0)

    def poll(self) -> bool:
        """Whether the outer state went on."""
        check(self.driver)
        return self.driver.applied.head != self.state.head

    def wait(self, seconds: float) -> None:
        with self.driver.changed:
            if not self.poll():
                self.driver.changed.wait(seconds)

    def take(self, base: Tensor) -> tuple[bool, Tensor | None]:
        """Where the outer state is now: its parameters are written to `base`. Whether all progress up to the last cut
        is contained in it, and what to add to the displacement if not."""
        with self.driver.replica.reading() as vectors, self.driver.changed:
            base.copy_(vectors["parameters"])
            self.state = self.driver.applied
        adjust = self.work.rebase(self._mark(self.state))
        return self.work.clean, adjust

    def available(self, used: Ranges) -> Ranges:
        """Samples that this island may train on, besides those it has used since its last cut."""
        node = self.driver.node
        lease = self.state.ledger.lease_of(holder_name(node.me, node.incarnation))
        return minus(minus(lease, self.work.used(self._mark(self.state))), used)

    def records(self) -> list[Record]:
        """The last ones, oldest first."""
        return list(self.driver.records)
