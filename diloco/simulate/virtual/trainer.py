"""An island's inner loop as times: steps, then encoding, a round, applying its result."""

from dataclasses import dataclass
from functools import partial

from diloco.elastic.protocol.ranges import Ranges
from diloco.simulate.protocol.trainer import Blocking


@dataclass
class Modelled(Blocking):
    steps_s: float = 0.0  # of a phase
    jitter: float = 0.0  # of that
    encode_s: float = 0.0  # cut, encode
    apply_s: float = 0.0  # decode, apply, into the island
    computed_s: float = 0.0  # in inner steps so far
    until: float = 0.0  # when the phase under way ends

    def phase_s(self) -> float:
        chance = self.timeline.chance(f"phase {self.node.me}")
        duration = self.steps_s * (1 + self.jitter * (2 * chance - 1))
        self.computed_s += duration
        self.until = self.timeline.now + duration
        return duration

    def unfinished_s(self) -> float:
        return max(0.0, self.until - self.timeline.now) if self.training else 0.0

    def _reach_sync(self, samples: Ranges) -> None:
        self.timeline.after(self.encode_s, lambda: self.when_running(partial(self._encoded, samples)))

    def _encoded(self, samples: Ranges) -> None:
        super()._reach_sync(samples)

    def moved(self, *, only_leases: bool) -> None:
        wait_s = 0.0 if only_leases else self.apply_s
        again = partial(super().moved, only_leases=only_leases)
        self.timeline.after(wait_s, lambda: self.when_running(again))
