"""A virtual network of islands that run the real protocol core, with numbers for vectors.

Every effect of a node is carried out one by one, and a crash or a stop may come between any two. Invariants are checked
at every commit.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from diloco.comm.peers.identity import Identity
from diloco.elastic.protocol.amendment import Amendment
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.messages import (
    Append,
    Begin,
    Cancel,
    CatchUp,
    Effect,
    FetchResult,
    Heartbeat,
    Memory,
    Message,
    Moved,
    Note,
    Reduce,
    Remember,
    Send,
)
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.record import Contribution, Head, Record, Settings
from diloco.elastic.protocol.rules import ALL, Rules
from diloco.elastic.protocol.state import RunState
from diloco.simulate.protocol.check import Checker, Violation
from diloco.simulate.protocol.reductions import Reductions
from diloco.simulate.protocol.streaming import USUAL, Pace, Streaming
from diloco.simulate.protocol.timeline import SILENCE_S, Timeline
from diloco.simulate.protocol.trainer import Blocking, Input, Trainer
from diloco.simulate.protocol.transcript import Transcript

TICK_S = 0.35
SMOOTH_TICK_S = 0.25  # scenarios are few, and can be finer
KEEP_RECORDS = 16  # who lacks more takes the whole state
GENESIS = hashlib.sha256(b"genesis").hexdigest()

Pair = tuple[str, str]  # from, to
Watcher = Callable[[str, Effect], None]


@dataclass(frozen=True)
class Setup:
    islands: int = 4
    partition: str = "merge"
    seed: int = 0
    rules: Rules = ALL
    pace: Pace = USUAL
    smooth: bool = False  # no chance at all: for scenarios

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(chr(ord("A") + index) for index in range(self.islands))


@dataclass
class Disk:
    """What outlives a crash."""

    log: list[Record] = field(default_factory=list)
    states: list[RunState] = field(default_factory=list)
    memory: Memory | None = None
    lives: int = 0
    own: set[str] = field(default_factory=set)  # records that it has appended itself
    amendments: list[Amendment] = field(default_factory=list)  # that were handed in here


@dataclass
class Life:
    """One incarnation."""

    node: Node
    trainer: Trainer


class World:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.timeline = Timeline(setup.seed, smooth=setup.smooth)
        self.transcript = Transcript()
        self.checker = Checker(strict=setup.partition == "pause", fragments=setup.pace.fragments)
        self.checker.genesis(GENESIS)
        self.reductions = Reductions(self)
        self.names = setup.names
        self.disks: dict[str, Disk] = {}
        self.lives: dict[str, Life] = {}
        self.stopped: dict[str, list[Callable[[], None]]] = {}  # what waits until they go on
        self.cut: set[Pair] = set()
        self.lasting: set[Pair] = set()  # cut for ever
        self.mute: set[str] = set()  # they give signs of life, and do nothing else
        self.speeds: dict[str, float] = {}  # of training
        self.unreliable: set[str] = set()  # crashed, stopped or cut off at some time
        self.calm = True  # crashes at most: nobody was ever suspected wrongly
        self.watchers: list[Watcher] = []
        self.commits = 0
        self.amendments = 0  # of the owner so far
        self._labels: dict[str, str] = {}  # of records: 2a, and where there is a fork, 2b
        self._clocks = cache(self._clock_of)
        self._arrival: defaultdict[Pair, float] = defaultdict(float)  # links keep the order
        self._crash_after: dict[str, int] = {}  # effects until then

    @property
    def now(self) -> float:
        return self.timeline.now

    def clock(self, name: str) -> float:
        start, pace = self._clocks(name)
        return start + pace * self.timeline.now

    def _clock_of(self, name: str) -> tuple[float, float]:
        """Islands' clocks run at slightly different speeds from different beginnings."""
        if self.setup.smooth:
            return 0.0, 1.0
        skew = self.timeline.chance(f"clock {name}")
        return 10_000 * skew, 0.97 + 0.06 * skew

    def tell(self, text: str) -> None:
        self.transcript.tell(self.now, text)

    # islands come and go

    def found(self, founders: tuple[str, ...]) -> None:
        """These begin the run, with record 0."""
        genesis = RunState(Head(0, 0, GENESIS), founders, Ledger(epoch=10**9), owner=owner().public_key.hex())
        self.disks = {name: Disk(states=[genesis]) for name in founders}
        for name in founders:
            self.start(name)

    def start(self, name: str) -> None:
        """From the disk. Who has never been there fetches the state of somebody who has it."""
        disk = self.disks.setdefault(name, Disk())
        if not disk.states and not self._copy_log(name):
            self.timeline.after(1.0, lambda: self.start(name))
            return
        disk.lives += 1
        self.checker.restarted = self.checker.restarted or disk.lives > 1
        fragments = self.setup.pace.fragments
        options = Options(
            _decide, silence_s=SILENCE_S, partition=self.setup.partition, fragments=fragments,
            want=self.setup.pace.want,
        )  # fmt: skip
        node = Node(
            name, disk.states[-1], options, now=self.clock(name), incarnation=disk.lives, memory=disk.memory,
            rules=self.setup.rules,
        )  # fmt: skip
        life = self.lives[name] = self._live(name, node)
        self.tell(f"{name} starts, incarnation {disk.lives}, at round {node.state.head.round}")
        self.enter(name, lambda node, now: node.know(self.names, now))
        for amendment in disk.amendments:
            self._bring(name, amendment)
        self._tick(name, node)
        life.trainer.when_running(life.trainer.train)

    def amend(self, names: Iterable[str]) -> None:
        """The owner changes settings, and hands that in at these islands, as far as they are known by now."""
        known = [name for name in names if name in self.disks]
        self.amendments += bool(known)
        amendment = Amendment.sign(owner(), self.amendments, "{}")
        for name in known:
            self.tell(f"{name} is handed amendment {amendment.number}")
            self.disks[name].amendments.append(amendment)
            self._bring(name, amendment)

    def _bring(self, name: str, amendment: Amendment) -> None:
        self.enter(name, lambda node, now: node.amend(amendment, now))

    def _live(self, name: str, node: Node) -> Life:
        def when_running(work: Callable[[], None]) -> None:
            self.when_running(name, lambda: work() if self._runs(name, node) else None)

        pace, contained_in, speed = self.setup.pace, partial(self._contained, node), self.speeds.get(name, 1.0)
        around = node, self.timeline, partial(self.enter, name), when_running, contained_in, speed
        return Life(node, Blocking(*around) if pace == USUAL else Streaming(*around, pace))

    def _contained(self, node: Node, state: RunState, fragment: int) -> int:
        """How much of its own progress the state contains, to a trainer. Without marks, it knows what it has seen."""
        if self.setup.rules.marks_decide:
            return state.mark(node.me, node.incarnation, fragment)
        disk = self.disks[node.me]
        seen = (record.proposal.contributions for record in disk.log if record.digest in disk.own)
        mine = (part.offer for parts in seen for part in parts if part.island == node.me)
        key = node.incarnation, fragment
        return max((offer.hi for offer in mine if (offer.incarnation, offer.fragment) == key), default=0)

    def _copy_log(self, name: str) -> bool:
        donors = [other for other in self.lives if self.connected(other, name) and other not in self.stopped]
        if not donors:
            return False
        donor = self.disks[min(donors)]
        self.disks[name].log, self.disks[name].states = list(donor.log), list(donor.states)
        return True

    def crash(self, name: str) -> None:
        if name not in self.lives:
            return
        self.tell(f"{name} crashes")
        self._end(name)

    def leave(self, name: str) -> None:
        """Says goodbye, then ends."""
        self.enter(name, lambda node, now: node.leave(now))
        self.tell(f"{name} leaves")
        self._end(name)

    def _end(self, name: str) -> None:
        del self.lives[name]
        self.stopped.pop(name, None)
        self._crash_after.pop(name, None)
        self.unreliable.add(name)
        self.reductions.lost(name)
        for other in self.lives:
            if self.timeline.chance("noticed") < 0.8:  # that its connections closed
                self.timeline.after(0.05 + 0.2 * self.timeline.chance("closed"), partial(self._notice, other, name))

    def _notice(self, other: str, name: str) -> None:
        if name not in self.lives:
            self.enter(other, lambda node, now: node.closed(name, now))

    def stop(self, name: str) -> None:
        if name in self.lives and name not in self.stopped:
            self.tell(f"{name} is stopped")
            self.stopped[name] = []
            self.calm = False
            self.unreliable.add(name)

    def resume(self, name: str) -> None:
        if name in self.stopped:
            self.tell(f"{name} goes on")
            for work in self.stopped.pop(name):
                self.when_running(name, work)

    def sever(self, pairs: Iterable[Pair]) -> None:
        pairs = set(pairs)
        self.cut |= pairs
        self.calm = self.calm and not pairs
        self.unreliable |= {name for pair in pairs for name in pair}
        self.reductions.severed(pairs)

    def heal(self) -> None:
        if self.cut - self.lasting:
            self.tell("the network is whole again")
        self.cut = set(self.lasting)

    def connected(self, one: str, other: str) -> bool:
        return (one, other) not in self.cut

    def reaches(self, one: str, other: str) -> bool:
        """Bytes can be fetched: both ways are open and the other one runs."""
        open_both_ways = self.connected(one, other) and self.connected(other, one)
        return open_both_ways and other in self.lives and other not in self.stopped

    # inputs and effects

    def _runs(self, name: str, node: Node) -> bool:
        return name in self.lives and self.lives[name].node is node

    def when_running(self, name: str, work: Callable[[], None]) -> None:
        if name in self.stopped:
            self.stopped[name].append(work)
        elif name in self.lives:
            work()

    def enter(self, name: str, step: Input) -> None:
        """An input of an island's node. A stopped one gets it when it goes on."""
        if name in self.stopped:
            self.stopped[name].append(partial(self.enter, name, step))
        elif (life := self.lives.get(name)) is not None:
            self._carry_out_all(name, life, step(life.node, self.clock(name)))

    def _carry_out_all(self, name: str, life: Life, effects: list[Effect]) -> None:
        for index, effect in enumerate(effects):
            if name in self._crash_after and self._crashes_now(name):
                return
            for watcher in self.watchers[:]:
                watcher(name, effect)
            if self.lives.get(name) is not life:
                return
            if name in self.stopped:
                self.stopped[name].append(partial(self._carry_out_all, name, life, effects[index:]))
                return
            self._carry_out(name, life, effect)

    def crash_soon(self, name: str, effects: int) -> None:
        self._crash_after[name] = effects

    def _crashes_now(self, name: str) -> bool:
        self._crash_after[name] -= 1
        if self._crash_after[name] > 0:
            return False
        self.crash(name)
        return True

    def _carry_out(self, name: str, life: Life, effect: Effect) -> None:
        match effect:
            case Send(to, message):
                self._send(name, to, message)
            case Remember(memory):
                self.disks[name].memory = memory
            case Reduce(begin):
                self._check_bytes(name, life, begin)
                self.reductions.join(name, begin)
            case Cancel(ballot):
                self.reductions.cancel(name, ballot)
            case FetchResult():
                self.timeline.after(0.05 + 0.3 * self.timeline.chance("fetch"), partial(self._fetched, name, effect))
            case CatchUp(donor):
                self.timeline.after(
                    0.1 + 1.5 * self.timeline.chance("catch up"),
                    lambda: self.when_running(name, partial(self._switch, name, donor)),
                )
            case Append(record):
                self._append(name, life, record)
            case Moved(switched):
                self.timeline.after(0, partial(self._tell_trainer, name, life.trainer, switched))
            case Note(kind, peer, text):
                self.tell(f"{name}: {kind} {peer}: {text}")

    def _tell_trainer(self, name: str, trainer: Trainer, switched: bool) -> None:
        log = self.disks[name].log
        only_leases = not switched and bool(log) and not log[-1].proposal.contributions
        trainer.when_running(lambda: trainer.moved(only_leases=only_leases))

    def _check_bytes(self, name: str, life: Life, begin: Begin) -> None:
        for contribution in begin.proposal.contributions:
            offer = contribution.offer
            if contribution.island == name and not life.trainer.has_bytes_of(offer):
                raise Violation(f"I3: {name} has no bytes of {offer.lo}..{offer.hi}, fragment {offer.fragment}")

    def _append(self, name: str, life: Life, record: Record) -> None:
        who = ",".join(record.proposal.islands) or "nobody"
        if self.setup.pace.fragments > 1 and record.proposal.contributions:
            who += f", fragment {record.proposal.fragment}"
        if record.proposal.amendment is not None:
            who += f", amendment {record.proposal.amendment.number}"
        self.tell(f"{name} commits round {record.proposal.key.round} of {who} = {self._label(record)}")
        self.commits += 1
        disk, state = self.disks[name], life.node.state
        if record.proposal.key.parent != disk.states[-1].head.digest:
            raise Violation(f"I1: {name} appended a record of another branch")
        if state.head.digest != record.digest:  # the same input has made it append the next one, too
            state = disk.states[-1].after(record)
        disk.own.add(record.digest)
        disk.log.append(record)
        disk.states.append(state)
        life.trainer.appended(record)
        steady = self.lives.keys() - self.unreliable
        self.checker.appended(name, record, state.ledger.overlaps, steady, calm=self.calm)

    def _label(self, record: Record) -> str:
        if record.digest not in self._labels:
            number = str(record.proposal.key.round)
            rivals = sum(label[:-1] == number for label in self._labels.values())
            self._labels[record.digest] = f"{number}{chr(ord('a') + min(rivals, 25))}"
        return self._labels[record.digest]

    def _tick(self, name: str, node: Node) -> None:
        if not self._runs(name, node):
            return
        if name not in self.stopped:
            self.enter(name, Node.tick)
        wait = SMOOTH_TICK_S if self.setup.smooth else TICK_S * (0.8 + 0.4 * self.timeline.chance(f"tick {name}"))
        self.timeline.after(wait, partial(self._tick, name, node))

    # the network

    def _send(self, sender: str, to: str, message: Message) -> None:
        if not isinstance(message, Heartbeat):
            if sender in self.mute:
                return
            self.transcript.sent(self.now, sender, to, message)
        chance = self.timeline.chance(f"link {sender}{to}")
        delay = 0.01 if self.setup.smooth else 0.005 + 0.1 * chance**3
        arrival = self._arrival[sender, to] = max(self._arrival[sender, to], self.now + delay)
        deliver = partial(self._deliver, sender, to, message)
        self.timeline.at(arrival, deliver)
        if chance > 0.98:  # and once more, late
            self.timeline.after(20 * self.timeline.chance("late"), deliver)

    def _deliver(self, sender: str, to: str, message: Message) -> None:
        if (sender, to) not in self.cut:
            self.enter(to, lambda node, now: node.receive(sender, message, now))

    def _fetched(self, name: str, effect: FetchResult) -> None:
        holder, record = effect.holder, effect.record
        if self.reaches(name, holder) and self._has(holder, record):
            self.enter(name, lambda node, now: node.fetched(record, now))
        else:
            self.enter(name, lambda node, now: node.fetch_failed(holder, record, "gone", now))

    def _has(self, name: str, record: Record) -> bool:
        held = self.lives[name].node.held
        logged = (entry.digest for entry in reversed(self.disks[name].log))
        return (held is not None and held.record.digest == record.digest) or record.digest in logged

    def _switch(self, name: str, donor: str) -> None:
        """The whole log at once: nobody is ever between two branches."""
        if not self.reaches(name, donor):
            self.enter(name, lambda node, now: node.catch_up_failed(donor, now))
            return
        theirs, mine = self.disks[donor], self.disks[name]
        state = theirs.states[-1]
        if state.head > self.lives[name].node.state.head:
            self._tell_switch(self.lives[name].trainer, mine.states[-1], theirs)
            mine.log, mine.states = list(theirs.log), list(theirs.states)
            self.tell(f"{name} moves to round {state.head.round} of {donor}")
        self.enter(name, lambda node, now: node.caught_up(state, now))

    def _tell_switch(self, trainer: Trainer, mine: RunState, theirs: Disk) -> None:
        """By the records that are missing, where they are few; else by the whole state."""
        recent = range(max(0, len(theirs.log) - KEEP_RECORDS), len(theirs.log) + 1)
        known = next((index for index in recent if theirs.states[index].head == mine.head), None)
        if known is None:
            trainer.replaced(theirs.states[-1])
        else:
            for record in theirs.log[known:]:
                trainer.appended(record)


@cache
def owner() -> Identity:
    """Of every run here."""
    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"owner").digest())
    return Identity(Path("owner.key"), key.public_key().public_bytes_raw(), key)


def _decide(state: RunState, fragment: int, contributions: tuple[Contribution, ...]) -> tuple[Settings, int]:
    return Settings(), state.step + bool(contributions)
