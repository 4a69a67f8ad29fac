"""Draw harsher times: exchanges of up to 50 times `silence_s`, disks that lag, messages that are lost or overtaken."""

from functools import cache, partial
from math import inf

from diloco.elastic.protocol.messages import Begin, Heartbeat, Message
from diloco.simulate.virtual.chances import SILENCE_S, Chances
from diloco.simulate.virtual.costs import Timeline
from diloco.simulate.virtual.world import World

SHORTEST, LONGEST = 0.05, 50.0  # exchanges, times silence_s
LAGS_S = (0.0, 0.0, 0.02, 0.3, 4.0)  # of disks, at most
SNAPSHOT_S = 60.0
LOSSES = (0.0, 0.0, 0.01, 0.03)


class HarshChances(Chances):
    """Draw how long everything takes in a harsh disaster; each world has its own exchange time and loss."""

    joins_within_s = 5 * SILENCE_S

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        world = timeline.stream("harsh world")
        self.exchange_s = SILENCE_S * SHORTEST * (LONGEST / SHORTEST) ** world.random()
        self.loss, self.overtakes = world.choice(LOSSES), world.random() < 0.3
        self._lag = cache(lambda name: timeline.stream(f"disk {name}").choice(LAGS_S))
        self.slowest_write_s = 0.0  # of the disks that were written to

    def send(self, world: World, sender: str, to: str, message: Message) -> None:
        """Lose some messages, and let some overtake others; a few heartbeats come very late."""
        chance = self._chance(f"harsh {sender}{to}")
        is_lost, is_late = chance < self.loss and not self.calm, self.overtakes and chance > 0.9
        if isinstance(message, Heartbeat) and (is_lost or is_late):
            self.missed[sender, to] = self.timeline.now
        if is_lost:
            return
        if is_late:
            delay = SILENCE_S * (10 * (chance - 0.9)) ** 2
            self.timeline.after(delay, partial(world.deliver, sender, to, message))
        else:
            super().send(world, sender, to, message)
        if isinstance(message, Heartbeat) and chance > 0.995:
            self.timeline.after(30 * self._chance("very late"), partial(world.deliver, sender, to, message))

    def write_s(self, name: str) -> float:
        """Draw what a write takes on this island's disk."""
        lag = self._lag(name)
        self.slowest_write_s = max(self.slowest_write_s, lag)
        return lag * self._chance(f"write {name}") if lag else 0.0

    def snapshot_s(self, name: str) -> float:
        """Draw what it takes until a state that was taken over is on the disk: up to a minute."""
        return SNAPSHOT_S * self._chance(f"snapshot {name}") ** 2

    def fetch_s(self) -> float:
        return 0.05 + self.exchange_s * self._chance("fetch")

    def catch_up_s(self, name: str, missed: int) -> float:
        """Draw what catching up takes: about as long as an exchange."""
        return 0.1 + self.exchange_s * (0.3 + self._chance("catch up"))


class SteadyChances(Chances):
    """Draw the times of a usual disaster, but let exchanges, and what is said of disks, take as long as is given."""

    joins_within_s = 5 * SILENCE_S

    def __init__(self, timeline: Timeline, exchange_s: float = 0.0) -> None:
        super().__init__(timeline)
        self.exchange_s = exchange_s
        self.lags: dict[str, float] = {}  # seconds that a write takes
        self.snapshots: dict[str, float] = {}  # seconds until a state that was taken over is on the disk
        self.mean_s = inf  # until the mean is made; it then comes by way of the other one of each two

    def made_s(self, begin: Begin) -> float:
        return self.mean_s

    def group(self, begin: Begin, member: str) -> set[str]:
        first = begin.members.index(member) // 2 * 2
        return set(begin.members[first : first + 2])

    def fetch_s(self) -> float:
        return super().fetch_s() + 0.5 * self.exchange_s

    def catch_up_s(self, name: str, missed: int) -> float:
        """Draw what catching up takes: half of an exchange, for one result, one way."""
        return super().catch_up_s(name, missed) + 0.5 * self.exchange_s

    def write_s(self, name: str) -> float:
        return self.lags.get(name, 0.0)

    def snapshot_s(self, name: str) -> float:
        return self.snapshots.get(name, 0.0)
