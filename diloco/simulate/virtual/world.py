"""Many islands on a virtual clock: real nodes and messages, modelled time. Invariants are checked at every commit.

Ticks with nothing to do are left out: an island that does not lead ticks when a heartbeat is due; one that leads looks
at what has come every 20 ms, or as often as so many islands let it. A heartbeat that says what the last one said is
taken in without asking the node, which would do nothing else (a test compares).
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.liveness import FRONT
from diloco.elastic.protocol.messages import (
    Append,
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
from diloco.elastic.protocol.peers import MINORITY_PATIENCE, LivenessReport
from diloco.elastic.protocol.record import Contribution, Head, Record, Settings
from diloco.elastic.protocol.state import RunState
from diloco.simulate.protocol.check import Checker
from diloco.simulate.protocol.timeline import Timeline
from diloco.simulate.protocol.trainer import PHASE_SAMPLES, Input
from diloco.simulate.virtual.network import Network
from diloco.simulate.virtual.reductions import Reductions
from diloco.simulate.virtual.setting import Setting
from diloco.simulate.virtual.shared import SharedPeers, SharedState
from diloco.simulate.virtual.trainer import Modelled

TICK_S = 0.02
IDLE_S = 0.25  # between two ticks of one that leads and has heard nothing
LOOK_S = 1e-4  # what looking at its answers takes a coordinator, for each island
KEEP_RECORDS = 16  # who lacks more takes the whole state
STATE_BYTES = 8  # a value: parameters and momentum
GENESIS = hashlib.sha256(b"a run of many").hexdigest()


@dataclass
class Disk:
    """What outlives a failure."""

    state: RunState
    memory: Memory | None = None
    lives: int = 0


@dataclass
class Life:
    node: Node
    peers: SharedPeers
    trainer: Modelled
    since: float
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=KEEP_RECORDS))  # records it has appended
    only_leases: bool = False  # the last one
    heard: bool = False  # something came since its last tick
    ticked_at: float = 0.0
    said: Heartbeat | None = None  # its last heartbeat
    heard_of: dict[str, tuple[Heartbeat, Head]] = field(
        default_factory=dict
    )  # the last one of each, heard at this head

    def is_no_news(self, sender: str, beat: Heartbeat, now: float) -> bool:
        """Of a heartbeat that was dealt with at this head. Then its sender is heard, and that is all.

        But a coordinator that lacks the sender's answer would ask again.
        """
        node = self.node
        if beat.head != node.state.head or node.leaving or node.diverged:
            return False
        if node.term is not None and node.term.answers.get(sender) is None:
            return False
        return self.peers.touch(sender, now)


@dataclass
class Tally:
    """What has happened so far."""

    commits: list[float] = field(default_factory=list)  # when rounds with contributions were first committed
    contributors: list[int] = field(default_factory=list)
    failures: int = 0
    setbacks: list[float] = field(default_factory=list)  # failures of a coordinator, or in an all-reduce
    wrongly_lost: int = 0  # islands that were thought dead, and were not
    notes: Counter[str] = field(default_factory=Counter)
    alive_s: float = 0.0  # of lives that are over
    computed_s: float = 0.0  # in them
    catch_ups: int = 0
    leader: str = ""  # of the last round


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.timeline = Timeline(setting.seed, smooth=False)
        self.network = Network(setting, self.timeline, self._deliver, self._hear)
        self.reductions = Reductions(self)
        self.checker = Checker(strict=False)
        self.checker.genesis(GENESIS)
        self.tally = Tally()
        self.steady = set(setting.names)  # alive all the time
        self.lives: dict[str, Life] = {}
        self._directory = dict.fromkeys(setting.names)
        genesis = SharedState(Head(0, 0, GENESIS), setting.names, Ledger(epoch=1 << 40))
        self.disks = {name: Disk(genesis) for name in setting.names}
        self._rounds: set[str] = set()

    def run(self) -> None:
        for name in self.setting.names:
            self.start(name)
        if self.setting.mtbf_s is not None:
            self._fail_later()
        self.timeline.run(self.setting.seconds)

    # islands come and go

    def start(self, name: str) -> None:
        disk, now = self.disks[name], self.timeline.now
        disk.lives += 1
        self.checker.restarted = self.checker.restarted or disk.lives > 1
        setting = self.setting
        options = Options(
            _decide, silence_s=setting.silence_s, straggler=setting.straggler, want=2 * PHASE_SAMPLES,
            flat_up_to=setting.flat_up_to,
        )  # fmt: skip
        peers = SharedPeers(setting.silence_s, name, self._directory, now)
        node = Node(
            name, disk.state, options, now=now, incarnation=disk.lives, memory=disk.memory, peers=peers
        )  # fmt: skip
        life = self.lives[name] = Life(node, peers, self._trainer(name, node), now)
        self._tick(name, life, at=now + options.heartbeat_s * self.timeline.chance("first tick"))
        life.trainer.train()

    def _trainer(self, name: str, node: Node) -> Modelled:
        def when_running(work: Callable[[], None]) -> None:
            life = self.lives.get(name)
            if life is not None and life.node is node:
                work()

        def contained(state: RunState, fragment: int) -> int:
            return state.mark(name, node.incarnation, fragment)

        setting, host = self.setting, self.setting.host
        encode_ns, decode_ns = host.codec_ns[setting.codec]
        return Modelled(
            node, self.timeline, partial(self.enter, name), when_running, contained,
            steps_s=setting.phase_s * setting.pace(int(name)),
            jitter=setting.jitter,
            encode_s=1e-9 * setting.values * (host.cut_ns + encode_ns),
            apply_s=1e-9 * setting.values * (decode_ns + host.apply_ns),
        )  # fmt: skip

    def _fail_later(self) -> None:
        assert self.setting.mtbf_s is not None
        self.timeline.after(self.timeline.stream("failures").expovariate(1 / self.setting.mtbf_s), self._fail_one)

    def _fail_one(self) -> None:
        chance = self.timeline.stream("failures")
        if self.lives:
            name = chance.choice(list(self.lives))
            self.fail(name, noticed=chance.random() >= self.setting.silent)
            self.timeline.after(chance.expovariate(1 / self.setting.back_s), partial(self.start, name))
        self._fail_later()

    def fail(self, name: str, *, noticed: bool) -> None:
        life, now = self.lives.pop(name), self.timeline.now
        self.steady.discard(name)
        self.tally.failures += 1
        self.tally.alive_s += now - life.since
        self.tally.computed_s += life.trainer.computed_s - life.trainer.unfinished_s()
        if self.reductions.lost(name, noticed=noticed) or life.node.term is not None:
            self.tally.setbacks.append(now)
        if noticed:
            for other, theirs in self.lives.items():
                if theirs.node.broadcasts or life.node.broadcasts:  # only those have a stream to each other
                    self.timeline.after(self.setting.line.delay_s, partial(self._notice, other, name))

    def _notice(self, other: str, name: str) -> None:
        if name not in self.lives:
            self.enter(other, lambda node, now: node.closed(name, now))

    # inputs and effects

    def enter(self, name: str, step: Input) -> None:
        if (life := self.lives.get(name)) is not None:
            self._carry_out_all(name, life, step(life.node, self.timeline.now))

    def _deliver(self, sender: str, to: str, message: Message) -> None:
        if (life := self.lives.get(to)) is not None:
            life.heard = True
            effects = life.node.receive(sender, message, self.timeline.now)
            if effects:
                self._carry_out_all(to, life, effects)

    def _tick(self, name: str, life: Life, at: float) -> None:
        self.timeline.at(at, partial(self._on_tick, name, life))

    def _on_tick(self, name: str, life: Life) -> None:
        if self.lives.get(name) is not life:
            return
        node, now = life.node, self.timeline.now
        if node.term is None or life.heard or now - life.ticked_at >= IDLE_S:
            life.heard, life.ticked_at = False, now
            self._carry_out_all(name, life, node.tick(now))
        self._tick(name, life, now + (node.options.heartbeat_s if node.term is None else self._look_s))

    @property
    def connections(self) -> int:
        """Of an ordinary island: bulk streams, and control streams to and from those it speaks with."""
        few = self.setting.islands <= self.setting.flat_up_to
        return self.reductions.connections + 2 * (self.setting.islands - 1 if few else FRONT)

    @property
    def _look_s(self) -> float:
        return max(TICK_S, LOOK_S * len(self.lives))

    def _carry_out_all(self, name: str, life: Life, effects: list[Effect]) -> None:
        told: list[str] = []
        for effect in effects:
            if not isinstance(effect, Send):
                self._carry_out(name, life, effect)
            elif isinstance(effect.message, Heartbeat):
                told.append(effect.to)
                beat = effect.message
            else:
                self.network.send(name, effect.to, effect.message)
        if told:
            if beat != life.said:
                life.said = beat
            self.network.beat(name, told, life.said)

    def _hear(self, sender: str, peers: list[str], beat: Heartbeat) -> None:
        """Most heartbeats say what the last one said. Then all that comes of it is that its sender was heard."""
        now, words = self.timeline.now, dict[int, LivenessReport]()
        for peer in peers:
            if (life := self.lives.get(peer)) is None:
                continue
            node = life.node
            if life.heard_of.get(sender) != (beat, node.state.head) or not life.is_no_news(sender, beat, now):
                life.heard_of[sender] = beat, node.state.head
                self._carry_out_all(peer, life, node.receive(sender, beat, now))
            elif beat.missed is not None and not node.broadcasts:
                places = node.state.places
                report = LivenessReport(now, frozenset(beat.missed), places)
                word = words.get(id(places)) or words.setdefault(id(places), report)
                node.peers.accept_report(sender, word)

    def _carry_out(self, name: str, life: Life, effect: Effect) -> None:
        match effect:
            case Remember(memory):
                self.disks[name].memory = memory
            case Reduce(begin):
                self.reductions.join(name, begin)
            case Cancel(ballot):
                self.reductions.cancel(name, ballot)
            case FetchResult():
                wait_s = self._fetch_s(self.reductions.result_bytes)
                self.timeline.after(wait_s, partial(self._fetched, name, effect))
            case CatchUp(donor, head):
                missed = head.round - life.node.state.head.round
                whole = missed > KEEP_RECORDS
                size = STATE_BYTES * self.setting.values if whole else missed * self.reductions.result_bytes
                self.timeline.after(self._fetch_s(size), partial(self._switch, name, life, donor, whole))
            case Append(record):
                self._append(name, life, record)
            case Moved(switched):
                only_leases = life.only_leases and not switched
                self.timeline.after(0, partial(self._moved, name, life, only_leases))
            case Note(kind, peer, _):
                self.tally.notes[kind] += 1
                self.tally.wrongly_lost += kind == "lost" and self._was_there(peer)

    def _was_there(self, name: str) -> bool:
        """One that failed, and is just back, was lost for good reason."""
        life, patience_s = self.lives.get(name), MINORITY_PATIENCE * self.setting.silence_s
        return life is not None and self.timeline.now - life.since > patience_s

    def _fetch_s(self, size: int) -> float:
        line = self.setting.line
        return 8 * size / line.down_bits_per_s + 4 * line.delay_s

    def _moved(self, name: str, life: Life, only_leases: bool) -> None:
        if self.lives.get(name) is life:
            life.trainer.moved(only_leases=only_leases)

    def _append(self, name: str, life: Life, record: Record) -> None:
        state = self.disks[name].state.after(record)
        self.disks[name].state = state
        life.recent.append(record.digest)
        proposal = record.proposal
        life.only_leases = not proposal.contributions
        calm = not self.tally.wrongly_lost
        self.checker.appended(name, record, state.ledger.overlaps, self.steady, calm=calm)
        if record.digest not in self._rounds:
            self._rounds.add(record.digest)
            if proposal.contributions:
                self.tally.commits.append(self.timeline.now)
                self.tally.contributors.append(len(proposal.contributions))
                self.tally.leader = name

    def _fetched(self, name: str, effect: FetchResult) -> None:
        holder, record = effect.holder, effect.record
        life = self.lives.get(holder)
        held = life is not None and life.node.held
        if life is not None and ((held and held.record.digest == record.digest) or record.digest in life.recent):
            self.enter(name, lambda node, now: node.fetched(record, now))
        else:
            self.enter(name, lambda node, now: node.fetch_failed(holder, record, "gone", now))

    def _switch(self, name: str, life: Life, donor: str, whole: bool) -> None:
        if self.lives.get(name) is not life:
            return
        theirs = self.lives.get(donor)
        if theirs is None:
            self.enter(name, lambda node, now: node.catch_up_failed(donor, now))
            return
        state = theirs.node.state
        self.tally.catch_ups += 1
        if state.head > life.node.state.head:
            self.disks[name].state = state
            life.recent.extend(theirs.recent)
        self.enter(name, lambda node, now: node.caught_up(state, now, whole=whole))


def _decide(state: RunState, fragment: int, contributions: tuple[Contribution, ...]) -> tuple[Settings, int]:
    return Settings(), state.step + bool(contributions)
