"""Simulate a network of islands that run the real protocol core, with numbers for vectors.

Every effect of a node is carried out one by one, and a crash or a stop may come between any two. Invariants are checked
at every commit. How long things take is not decided here, but by the world's costs.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import inf
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from diloco.comm.peers.identity import Identity
from diloco.elastic.protocol import messages as m
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.member import LINEAGE
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.record import Amendment, Contribution, Head, Latch, Proposal, Record, Settings
from diloco.elastic.protocol.rules import ALL, Rules
from diloco.elastic.protocol.state import Mark, RunState
from diloco.simulate.virtual.check import Checker, Violation
from diloco.simulate.virtual.costs import Costs
from diloco.simulate.virtual.disk import Disk
from diloco.simulate.virtual.lies import FORGED
from diloco.simulate.virtual.reductions import Reductions
from diloco.simulate.virtual.trainer import USUAL, Input, SyncPace, Trainer
from diloco.simulate.virtual.transcript import Transcript

SEEN_LATE_S = 10.0  # so long after signs of life came again, their sender may be left out of a round
SEEMS_GONE = 0.95  # times silence_s: an island's clock may be fast
KEEP_RECORDS = 16  # who lacks more takes the whole state
GENESIS = hashlib.sha256(b"genesis").hexdigest()

Pair = tuple[str, str]  # from, to
Watcher = Callable[[str, m.Effect], None]  # of whom, what


@dataclass(frozen=True)
class SharedState(RunState):
    """Share states among the islands that hold the same one: each is kept, and computed, once."""

    @cached_property
    def _after(self) -> dict[str, RunState]:
        return {}

    def after(self, record: Record) -> RunState:
        """Return the state that follows with this record, computed once for all islands."""
        if record.digest not in self._after:
            self._after[record.digest] = super().after(record)
        return self._after[record.digest]


class UnprunedState(SharedState):
    """Keep the marks of every life, where the rule that prunes them is switched off."""

    def _pruned(self, marks: dict[Mark, int], proposal: Proposal) -> dict[Mark, int]:
        return marks


@dataclass
class Life:
    """Hold one incarnation of an island."""

    node: Node
    trainer: Trainer
    since: float
    heard: bool = False  # something but heartbeats came since its last tick
    ticked_at: float = 0.0


@dataclass(frozen=True)
class Past:
    """Describe a life that is over."""

    ended: float
    alive_s: float
    computed_s: float
    setback: bool  # it led, or an all-reduce had counted on it


class World:
    """Run islands on a timeline: start, stop and crash them, deliver their messages, carry out their effects."""

    def __init__(
        self, names: tuple[str, ...], options: Options, costs: Costs, *, rules: Rules = ALL, pace: SyncPace = USUAL
    ) -> None:
        self.names, self.options, self.costs, self.rules, self.pace = names, options, costs, rules, pace
        self.timeline = costs.timeline
        self.transcript = Transcript(self.timeline, pace.fragments)
        self.checker = Checker(fragments=pace.fragments)
        self.checker.genesis(GENESIS)
        self.reductions = Reductions(self)
        self.disks: dict[str, Disk] = {}
        self.lives: dict[str, Life] = {}
        self.past: list[Past] = []
        self.stopped: dict[str, list[Callable[[], None]]] = {}  # what waits until they go on
        self.cut: set[Pair] = set()
        self.lasting: set[Pair] = set()  # cut for ever
        self.witnesses: set[str] = set()  # they store and vote, and train nothing
        self.mute: set[str] = set()  # they give signs of life, and do nothing else
        self.liars: dict[str, Callable[[m.Message], m.Message]] = {}  # what they say instead
        self.forgers: set[str] = set()  # they give states with settings that the owner has not changed
        self.steady: set[str] = set()  # alive and reachable all the time
        self.calm = True  # crashes at most: nobody was ever suspected wrongly
        self.watchers: list[Watcher] = []  # of what is about to be done
        self.observers: list[Watcher] = []  # of what is done
        self.commits = 0
        self.amendments = 0  # of the owner so far
        self._heard: dict[Pair, float] = {}  # when something last came
        self._silenced: dict[Pair, float] = {}  # when that ended which had made a sender seem gone
        self._unreliable: set[str] = set()  # crashed, stopped or cut off at some time
        self._crash_after: dict[str, int] = {}  # effects until then

    @property
    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self.timeline.now

    @property
    def newest(self) -> RunState:
        """Return the state of the greatest head, of the islands that live."""
        return max((life.node.state for life in self.lives.values()), key=lambda state: state.head)

    def note(self, text: str) -> None:
        """Add a line to the transcript at the current time."""
        self.transcript.note(text)

    # islands come and go

    def found(self, founders: tuple[str, ...], samples: int | None = None) -> None:
        """Begin the run with record 0, and start these founders; `samples` are all there are, where that is given."""
        latched = self.options.partition == "quorum" or (self.options.partition == "auto" and len(founders) >= 3)
        epoch = 10**9 if self.rules.lost_leases_come_last else 1  # at the end of an epoch, what was lost comes first
        genesis = (SharedState if self.rules.marks_are_pruned else UnprunedState)(
            Head(0, 0, GENESIS), founders, Ledger(epoch, limit=samples), owner=owner().public_key.hex(),
            latch=GENESIS if latched else "",
        )  # fmt: skip
        if latched:
            self.checker.latch(GENESIS)
        self.disks = {name: Disk(states=[genesis]) for name in founders}
        for disk in self.disks.values():
            disk.settle()
        for name in founders:
            self.start(name)

    def start(self, name: str) -> None:
        """Start an island from its disk, unless it lives.

        One that has never been there copies the log of a reachable island that lives; while there is none, it tries
        again every second.
        """
        if name in self.lives:
            return
        disk = self.disks.setdefault(name, Disk())
        if not disk.states:
            donors = [other for other in self.lives if (other, name) not in self.cut and other not in self.stopped]
            if not donors:
                self.timeline.after(1.0, lambda: self.start(name))
                return
            disk.copy(self.disks[min(donors)])
            disk.based = True
            disk.settle()
        disk.lives += 1
        self.checker.restarted = self.checker.restarted or disk.lives > 1
        self.steady |= {name} - self._unreliable
        now = self.costs.clock(name)
        peers = self.costs.peers(name, now)
        undone = disk.cut_off_void() if self.rules.void_records_are_undone else None
        node = Node(
            name, disk.states[-1], self._options_of(name), now=now, incarnation=disk.lives, memory=disk.memory,
            lineage=disk.lineage(LINEAGE), rules=self.rules, peers=peers,
        )  # fmt: skip
        if undone is not None:
            self.checker.undone(name, undone.digest, node.own.held)
        trainer = Trainer(self, node, self.pace)
        life = self.lives[name] = Life(node, trainer, self.now)
        self.note(f"{name} starts, incarnation {disk.lives}, at round {node.state.head.round}")
        if peers is None:
            self.enter(name, lambda node, now: node.know(self.names, now))
        for amendment in disk.amendments:
            self._bring(name, amendment)
        self.timeline.later(self.costs.first_tick_s(node), partial(self._tick, name, life))
        trainer.when_running(trainer.train)

    def _options_of(self, name: str) -> Options:
        """Return an island's options: the first one has the owner's key, and signs a latch when one is due."""
        options = replace(self.options, witness=True, want=0) if name in self.witnesses else self.options
        return options if name != self.names[0] else replace(options, sign_latch=partial(Latch.sign, owner()))

    def amend(self, names: Iterable[str], changes: str = "{}") -> None:
        """Change settings as the owner, and hand that in at these islands, as far as they exist by now."""
        known = [name for name in names if name in self.disks]
        self.amendments += bool(known)
        amendment = Amendment.sign(owner(), self.amendments, changes)
        for name in known:
            self.note(f"{name} is handed amendment {amendment.number}")
            self.disks[name].amendments.append(amendment)
            self._bring(name, amendment)

    def _bring(self, name: str, amendment: Amendment) -> None:
        """Hand an amendment to an island's node."""
        self.enter(name, lambda node, now: node.amend(amendment, now))

    def contained(self, node: Node, state: RunState, fragment: int) -> int:
        """Return how much of its own progress the state contains, as a trainer sees it.

        By the marks; where that rule is switched off, by the records that the island has appended itself.
        """
        if self.rules.marks_decide:
            return state.mark(node.me, node.incarnation, fragment)
        disk = self.disks[node.me]
        seen = (record.proposal.contributions for record in disk.log if record.digest in disk.own)
        mine = (part.offer for parts in seen for part in parts if part.island == node.me)
        key = node.incarnation, fragment
        return max((offer.hi for offer in mine if (offer.incarnation, offer.fragment) == key), default=0)

    def crash(self, name: str, *, silent: bool = False) -> None:
        """End an island at once, if it lives; `silent`: nobody notices that connections close."""
        if name in self.lives:
            self.note(f"{name} crashes")
            self._end(name, silent=silent)

    def leave(self, name: str) -> None:
        """Let an island say goodbye, then end it."""
        self.enter(name, lambda node, now: node.leave(now))
        if name in self.lives:  # a crash may have come first
            self.note(f"{name} leaves")
            self._end(name)

    def _end(self, name: str, *, silent: bool = False) -> None:
        """End a life, and let the others notice closed connections."""
        life = self.lives.pop(name)
        self.disks[name].lose()
        self.stopped.pop(name, None)
        self._crash_after.pop(name, None)
        self._doubt({name})
        setback = self.reductions.lost(name, silent=silent) or life.node.own.term is not None
        self.past.append(Past(self.now, self.now - life.since, life.trainer.computed_s, setback))
        for other, theirs in () if silent else self.lives.items():
            if (wait_s := self.costs.closed_s(life.node, theirs.node)) is not None:
                self.timeline.after(wait_s, partial(self._notice, other, name))

    def _notice(self, other: str, name: str) -> None:
        """Inform an island that a connection closed, unless the other one is back already."""
        if name not in self.lives:
            self.enter(other, lambda node, now: node.closed(name, now))

    def stop(self, name: str) -> None:
        """Freeze an island as SIGSTOP does: what comes in waits until it resumes."""
        if name in self.lives and name not in self.stopped:
            self.note(f"{name} is stopped")
            self.stopped[name] = []
            self.calm = False
            self._doubt({name})

    def resume(self, name: str) -> None:
        """Resume a stopped island, which then does all that has waited."""
        if name in self.stopped:
            self.note(f"{name} goes on")
            for work in self.stopped.pop(name):
                self.when_running(name, work)

    def sever(self, pairs: Iterable[Pair]) -> None:
        """Cut these directed pairs off; messages are lost and their all-reduces fail."""
        pairs = set(pairs)
        self.cut |= pairs
        self.calm = self.calm and not pairs
        self._doubt({name for pair in pairs for name in pair})
        self.reductions.severed(pairs)

    def heal(self) -> None:
        """Restore all paths but those that are cut for ever."""
        if self.cut - self.lasting:
            self.note("the network is whole again")
        self.cut = set(self.lasting)

    def _doubt(self, names: set[str]) -> None:
        """Count these islands as unreliable from now on: they are never steady again."""
        self._unreliable |= names
        self.steady -= names

    def reaches(self, one: str, other: str) -> bool:
        """Return whether bytes can be fetched: both ways are open and the other island runs."""
        open_both_ways = not {(one, other), (other, one)} & self.cut
        return open_both_ways and other in self.lives and other not in self.stopped

    # inputs and effects

    def when_running(self, name: str, work: Callable[[], None]) -> None:
        """Do the work now, or when a stopped island resumes; an island that is dead never does it."""
        if name in self.stopped:
            self.stopped[name].append(work)
        elif name in self.lives:
            work()

    def enter(self, name: str, step: Input) -> None:
        """Give an input to an island's node, and carry out its effects; a stopped one gets it when it resumes."""
        if name in self.stopped:
            self.stopped[name].append(partial(self.enter, name, step))
        elif (life := self.lives.get(name)) is not None:
            self._carry_out_all(name, life, step(life.node, self.costs.clock(name)))

    def deliver(self, sender: str, to: str, message: m.Message) -> None:
        """Hand a message to its receiver, unless the way is cut or it is dead."""
        if (sender, to) not in self.cut and (life := self.lives.get(to)) is not None:
            life.heard = life.heard or not isinstance(message, m.Heartbeat)
            if self._is_silenced((sender, to)):
                self._silenced[sender, to] = self.now
            self._heard[sender, to] = self.now
            self.enter(to, lambda node, now: node.receive(sender, message, now))

    def _is_silenced(self, pair: Pair) -> bool:
        """Tell whether a sender seems gone: nothing has come for so long, and signs of life got lost since."""
        heard = self._heard.get(pair, 0.0)
        return self.now - heard > SEEMS_GONE * self.options.silence_s and self.costs.missed.get(pair, -1.0) >= heard

    def _tick(self, name: str, life: Life) -> None:
        """Give an island its ticks, for as long as this life lasts."""
        if self.lives.get(name) is not life:
            return
        if name not in self.stopped and self.costs.ticks(life):
            life.heard, life.ticked_at = False, self.now
            if self.reductions.are_moving(name):
                self.enter(name, Node.moved)
            self.enter(name, Node.tick)
        self.timeline.after(self.costs.tick_s(life.node, len(self.lives)), partial(self._tick, name, life))

    def _carry_out_all(self, name: str, life: Life, effects: list[m.Effect]) -> None:
        """Carry out effects one by one; a crash ends them, and a stop defers the rest."""
        for index, effect in enumerate(effects):
            if name in self._crash_after:
                self._crash_after[name] -= 1
                if self._crash_after[name] <= 0:
                    self.crash(name)
                    break
            for watcher in self.watchers[:]:
                watcher(name, effect)
            if self.lives.get(name) is not life:
                break
            if name in self.stopped:
                self.stopped[name].append(partial(self._carry_out_all, name, life, effects[index:]))
                break
            self._carry_out(name, life, effect)
        self.costs.flush(self, name)

    def once(self, kind: type, blow: Callable[[str], None], doer: str = "") -> None:
        """Strike just before an island that lives, or `doer`, does a thing of this kind for the next time."""

        def watch(name: str, effect: m.Effect) -> None:
            done = effect.message if isinstance(effect, m.Send) else effect
            if name in ((doer,) if doer else self.lives) and isinstance(done, kind):
                self.watchers.remove(watch)
                blow(name)

        self.watchers.append(watch)

    def crash_soon(self, name: str, effects: int) -> None:
        """Let an island crash just before its effect number `effects` from now; 1 is the next one."""
        self._crash_after[name] = effects

    def _carry_out(self, name: str, life: Life, effect: m.Effect) -> None:
        """Carry out one effect; of a mute island, only heartbeats are sent."""
        if name in self.mute and isinstance(effect, m.Send) and not isinstance(effect.message, m.Heartbeat):
            return
        if name in self.liars and isinstance(effect, m.Send):
            effect = m.Send(effect.to, self.liars[name](effect.message))
        for observer in self.observers:
            observer(name, effect)
        match effect:
            case m.Send(to, m.Heartbeat() as beat):
                self.costs.send(self, name, to, beat)
            case m.Send(to, message) if to == name:
                self._write(name, life, 0.0, partial(self.timeline.after, 0, partial(self.deliver, name, to, message)))
            case m.Send(to, message):
                self._write(name, life, 0.0, partial(self.costs.send, self, name, to, message))
            case m.Remember(memory):
                if memory.latch is not None:
                    self.checker.latch(memory.latch.head.digest)
                self._write(name, life, self.costs.write_s(name), partial(self._remember, name, life, memory))
            case m.Reduce(begin):
                self._check_bytes(name, life, begin)
                self.reductions.join(name, begin)
            case m.Cancel(ballot):
                self.reductions.cancel(name, ballot)
            case m.FetchResult():
                self.timeline.after(self.costs.fetch_s(), partial(self._fetched, name, effect))
            case m.CatchUp(donor, head):
                given = self.costs.given(self.disks[donor])
                switch = partial(life.trainer.when_running, partial(self._switch, name, donor, given))
                seconds = self.costs.catch_up_s(name, head.round - life.node.state.head.round)
                life.node.expect_to_catch_up(seconds, self.costs.clock(name))
                self.timeline.after(seconds, switch)
            case m.GoBack(digest):
                go_back = partial(life.trainer.when_running, partial(self._go_back, name, digest))
                self.timeline.after(self.costs.fetch_s(), go_back)
            case m.Append(record, stored_by, _):
                self._append(name, life, record, stored_by)
                self._write(
                    name, life, self.costs.write_s(name), partial(self._stored, name, life, 1, self.disks[name].log)
                )
            case m.Note("lost", peer) if peer in self.lives:
                ended = self.now if self._is_silenced((peer, name)) else self._silenced.get((peer, name), -inf)
                self.calm = self.calm and self.now - ended > SEEN_LATE_S
            case m.Note("evicted", peer, _) if peer == name:
                self.timeline.after(0, partial(self.crash, name))
            case m.Moved(switched):
                self.timeline.after(0, partial(self._tell_trainer, name, life.trainer, switched))

    def _write(self, name: str, life: Life, seconds: float, write: Callable[[], None]) -> None:
        """Do something when everything before is on the disk, and it has been written, too."""
        disk = self.disks[name]
        if not seconds and not disk.pending:
            write()
            return
        disk.pending.append(write)

        def end() -> None:
            if self.lives.get(name) is life and disk.pending:
                disk.pending.popleft()()

        self.timeline.at(disk.end_of_write(self.now, seconds), partial(self.when_running, name, end))

    def _remember(self, name: str, life: Life, memory: m.Memory) -> None:
        """Note that what an island has promised and holds is on its disk, and inform the node."""
        self.disks[name].memory = memory
        life.node.remembered(self.costs.clock(name))

    def _stored(self, name: str, life: Life, records: int, log: list[Record]) -> None:
        """Note that so many more records, or the snapshot before them, are on the disk, and inform the node."""
        disk = self.disks[name]
        if disk.log is not log:  # another state was taken over
            return
        disk.written += records
        disk.based = disk.based or not records
        disk.settle()
        if disk.based:
            head = disk.states[disk.written].head
            self.timeline.after(0, lambda: self._tell_stored(name, life, head))

    def _tell_stored(self, name: str, life: Life, head: Head) -> None:
        if self.lives.get(name) is life:
            self.enter(name, lambda node, now: node.stored(head, now))

    def _tell_trainer(self, name: str, trainer: Trainer, switched: bool) -> None:
        """Inform the trainer that the head has changed."""
        log = self.disks[name].log
        only_leases = not switched and bool(log) and not log[-1].proposal.contributions
        trainer.when_running(lambda: trainer.on_update(only_leases=only_leases))

    def _check_bytes(self, name: str, life: Life, begin: m.Begin) -> None:
        """Check I3: the island still has the bytes of its contribution to this attempt."""
        for contribution in begin.proposal.contributions:
            offer = contribution.offer
            if contribution.island == name and not life.trainer.has_bytes_of(offer):
                raise Violation(f"I3: {name} has no bytes of {offer.lo}..{offer.hi}, fragment {offer.fragment}")

    def _append(self, name: str, life: Life, record: Record, stored_by: tuple[str, ...]) -> None:
        """Append a record to the island's log, and check the invariants."""
        self.commits += 1
        disk, state = self.disks[name], life.node.state
        if record.proposal.key.parent != disk.states[-1].head.digest:
            raise Violation(f"I1: {name} appended a record of another branch")
        if state.head.digest != record.digest:  # the same input has made it append the next one, too
            state = disk.states[-1].after(record)
        valid = disk.quorums[record.digest] = disk.states[-1].is_decided(record.proposal.amendment, stored_by)
        disk.own.add(record.digest)
        disk.log.append(record)
        disk.states.append(state)
        life.trainer.appended(record)
        self.checker.appended(name, record, state.ledger.overlaps, self.steady, calm=self.calm, valid=valid)
        self.checker.check_memory(state.marks)

    def _fetched(self, name: str, effect: m.FetchResult) -> None:
        """Hand a fetched result to the node, or the failure if the holder cannot be reached or lacks it."""
        holder, record = effect.holder, effect.record
        if self.reaches(name, holder) and self._has(holder, record):
            self.enter(name, lambda node, now: node.fetched(record, now))
        else:
            self.enter(name, lambda node, now: node.fetch_failed(holder, record, "gone", now))

    def _has(self, name: str, record: Record) -> bool:
        """Return whether an island holds the record's result, or has it in its log."""
        held = self.lives[name].node.own.held
        logged = (entry.digest for entry in reversed(self.disks[name].log))
        return (held is not None and held.record.digest == record.digest) or record.digest in logged

    def _switch(self, name: str, donor: str, theirs: Disk) -> None:
        """Copy the log that a donor gives at once: no island is ever between two branches."""
        mine, life = self.disks[name], self.lives[name]
        known = _known(mine.states[-1], theirs)
        if known is None and donor in self.forgers:
            theirs = replace(theirs, states=[*theirs.states[:-1], replace(theirs.states[-1], amendments=(FORGED,))])
        state = theirs.states[-1]
        if not self.reaches(name, donor) or not state.is_of(life.node.state.owner):
            self.enter(name, lambda node, now: node.catch_up_failed(donor, now))
            return
        followed_by: dict[str, bool] | None = None
        if life.node.member.is_better(state, donor):
            if state.forces == mine.states[-1].forces:  # the owner may undo anything
                self.checker.moved(name, mine.states[-1].head.digest, state.head.digest)
            if known is None:
                life.trainer.replaced(state)
                mine.copy(theirs)
                self.timeline.later(self.costs.snapshot_s(name), partial(self._snapshot, name, life, mine.log))
            else:
                for record in theirs.log[known:]:
                    life.trainer.appended(record)
                mine.extend(theirs, known)
                write = partial(self._stored, name, life, len(theirs.log) - known, mine.log)
                self._write(name, life, self.costs.write_s(name), write)
                followed_by = {record.digest: mine.quorums[record.digest] for record in theirs.log[known:]}
            self.note(f"{name} moves to round {state.head.round} of {donor}")
        self.enter(name, lambda node, now: node.caught_up(state, now, followed_by=followed_by))

    def _go_back(self, name: str, digest: str) -> None:
        """Cut an island's log off after a record, unless the island has moved meanwhile."""
        life, disk = self.lives[name], self.disks[name]
        wanted = life.node.member.undoing.is_wanted(digest)
        undone = disk.cut_off(digest) if wanted else None
        state = disk.states[-1]
        if undone is None:
            step = partial(Node.cannot_go_back, digest=digest) if wanted else partial(Node.went_back, state=state)
            self.enter(name, lambda node, now: step(node, now=now))
            return
        life.trainer.replaced(state)
        if disk.based:
            write = partial(self._stored, name, life, len(disk.log) - disk.written, disk.log)
            self._write(name, life, self.costs.write_s(name), write)
        else:
            self.timeline.later(self.costs.snapshot_s(name), partial(self._snapshot, name, life, disk.log))
        self.enter(name, lambda node, now: node.went_back(state, now))
        self.checker.undone(name, undone.digest, life.node.own.held)

    def _snapshot(self, name: str, life: Life, log: list[Record]) -> None:
        """Finish the snapshot of a state that was taken over, unless another one was taken over since."""
        if self.lives.get(name) is life and self.disks[name].log is log:
            self.when_running(name, partial(self._stored, name, life, 0, log))


def _known(mine: RunState, theirs: Disk) -> int | None:
    """Return how many of their records an island has; None where it lacks so many that it takes the whole state."""
    recent = range(max(0, len(theirs.log) - KEEP_RECORDS), len(theirs.log) + 1)
    return next((index for index in recent if theirs.states[index].head == mine.head), None)


@cache
def owner() -> Identity:
    """Return the owner's identity, the same for every simulated run."""
    key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"owner").digest())
    return Identity(Path("owner.key"), key.public_key().public_bytes_raw(), key)


def decide(state: RunState, fragment: int, contributions: tuple[Contribution, ...]) -> tuple[Settings, int]:
    """Decide a round's settings and clock: the clock advances by one if there are contributions."""
    return Settings(), state.step + bool(contributions)
