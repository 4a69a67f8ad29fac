"""Play the operator of a soak: start the islands, do to them what the plan says, heal, and write down what is seen.

Each island is a process by itself: one founds the run, the others join by a ticket. An island that ends unasked is
started again, as a person would do.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from diloco.bench.processes import WorkerFailed
from diloco.bench.soak_checks import (
    TOGETHER_S,
    Observation,
    Sample,
    SeenRecord,
    SeenWork,
    Told,
    chain_to,
    lives_in,
    work_lost,
)
from diloco.bench.soak_island import SoakIsland, diloco_command
from diloco.bench.soak_network import SoakNetwork
from diloco.bench.soak_plan import CUTS, Fault
from diloco.bench.soak_timeline import Moment
from diloco.checkpoint.log.journal import Entry, Journal
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.elastic.runtime.restoring import logged_of
from diloco.errors import DilocoError
from diloco.launch.fleet import spread
from diloco.report.events import Round
from diloco.run.folder import OUTER, has_log
from diloco.run.invites import TICKET, keep_ticket
from diloco.simulate.real.topology import island_name

POLL_S = 0.1
SAMPLE_S = 5.0
ARCHIVE_S = 10.0  # logs are read before the islands prune them
AGAIN_S = 5.0  # until an island that ended unasked is started again
LEAVE_S = 60.0  # for an island that was asked to leave
BEGIN_S = 300.0  # for all islands to be in the run
RETURN_S = 90.0  # for all islands to train again after the last heal
LATE_S = 240.0  # for the work of rounds that were undone to be contained: an island brings two phases' a round
OWN = ("island.batch=4", "island.device=cpu", "log.every=50", "evaluate.every=0", "checkpoint.snapshot_every=20")


class Operator:
    """Run islands in a folder and over a network, and collect an observation."""

    def __init__(self, root: Path, config: Path, network: SoakNetwork, islands: int) -> None:
        self._root, self._config, self._network = root, config, network
        self._zero = time.monotonic()
        self.islands = {n: SoakIsland(n, island_name(n), root) for n in range(1, islands + 1)}
        self.seen = Observation(island_name(1), 0.0)
        self._cuts: list[Fault] = []
        self._names: dict[str, str] = {}  # of islands, by their peer ids
        self._sampled = self._archived = 0.0
        self._ending = False

    @property
    def _now(self) -> float:
        return time.monotonic() - self._zero

    @property
    def _present(self) -> list[SoakIsland]:
        return [island for island in self.islands.values() if not island.gone]

    def begin(self) -> None:
        """Found the run, let all islands join, and wait for a round of all of them: then time begins."""
        self._start(self.islands[1])
        self._wait_or_fail(lambda: (self.islands[1].folder / "ticket").exists())
        for island in list(self.islands.values())[1:]:
            self._start(island)
        self._wait_or_fail(lambda: bool(self.seen.told) and self._all_in_a_round(0))
        shift = self._now
        self._zero += shift
        self.seen.told = [replace(each, at_s=each.at_s - shift) for each in self.seen.told]
        self.seen.moments, self.seen.samples = [], []
        self._sampled = self._archived = -ARCHIVE_S  # by the new clock: at once
        self._note_moment()

    def inflict(self, faults: Sequence[Fault], seconds: float) -> None:
        """Carry out the faults at their times, and heal them at theirs; all are healed when this returns."""
        begins = sorted(faults, key=lambda fault: fault.at_s)
        heals = sorted(faults, key=lambda fault: fault.until_s)
        self.seen.seconds = seconds
        while self._now < seconds:
            while heals and heals[0].until_s <= self._now and heals[0] not in begins:
                self._heal(heals.pop(0))
            while begins and begins[0].at_s <= self._now:
                self._carry_out(begins.pop(0))
            self._turn()
        for fault in heals:
            self._heal(fault)
        for island in self._present:
            if island.start_at is not None:
                island.start_at = min(island.start_at, self._now)
        self._note_moment()

    def come_together(self) -> None:
        """Wait until all islands train, and then for a round of all of them; give up after a time."""
        since = self._now
        self._wait(lambda: all(island.able for island in self._present), RETURN_S)
        back, told = self._now, len(self.seen.told)
        if self._wait(lambda: self._all_in_a_round(told), TOGETHER_S):
            self.seen.together_s = self._now - back
        self._say(f"all islands trained {back - since:.0f} s after the last heal; together: {self.seen.together_s}")
        self.seen.end_s = self._now
        self._archive()
        self._wait(self._nothing_owed, LATE_S)
        lost = work_lost(self.seen.records, self._chain, self.seen.lives)
        self._say(f"{lost} samples of undone rounds are not contained")

    def _nothing_owed(self) -> bool:
        """Return whether all that those who are there have contributed to any round is in the chain."""
        if self._now - self._archived > ARCHIVE_S / 4:
            self._archive()
        self.seen.lives |= lives_in(self._chain)
        return work_lost(self.seen.records, self._chain, self.seen.lives) == 0

    @property
    def _chain(self) -> list[SeenRecord]:
        """List the records up to the one that was reported last, of those that were read."""
        last = next((told.digest for told in reversed(self.seen.told) if told.digest in self.seen.records), None)
        return [] if last is None else chain_to(self.seen.records, last)

    def end(self) -> None:
        """Ask all islands to leave at once, wait for them, and read all logs a last time."""
        self._ending = True
        for island in self._present:
            island.start_at = None
            island.ask_to_leave(self._now)
        self._wait(lambda: not any(island.running for island in self._present), LEAVE_S + AGAIN_S)
        self._archive()
        time.sleep(1.0)  # for p2pd's guard
        sockets = {path for island in self.islands.values() for path in island.sockets}
        self.seen.sockets_left = sum(Path(path).exists() for path in sockets)

    def close(self) -> None:
        """Kill whatever still runs."""
        for island in self.islands.values():
            island.close()

    @property
    def survivors(self) -> list[Path]:
        """List the folders of the logs of all islands that have not left for good."""
        return [island.folder / OUTER for island in self._present if has_log(island.folder)]

    def _all_in_a_round(self, first: int) -> bool:
        """Return whether a round that was reported after the first so many reports has all islands in it."""
        names = {island.name for island in self._present}
        return any(names <= set(each.contributors) for each in self.seen.told[first:])

    # faults

    def _carry_out(self, fault: Fault) -> None:
        number = fault.islands[0]
        island = self.islands.get(number)
        if fault.kind in CUTS:
            self._cuts.append(fault)
            self._set_cut()
        elif fault.kind == "join":
            self.islands[number] = SoakIsland(number, island_name(number), self._root)
            self._start(self.islands[number])
        elif fault.kind == "slow":
            self._network.set_slow(number, fault.amount)
        elif island is None or not island.running or island.leaving_since is not None:
            self._say(f"{fault.describe()}: skipped, it does not run")
            return
        else:
            self._strike(fault, island)
        self._say(fault.describe())
        self._note_moment()

    def _strike(self, fault: Fault, island: SoakIsland) -> None:
        back_at = self._now + fault.until_s - fault.at_s
        match fault.kind:
            case "kill" | "skew":
                island.kill()
                island.start_at, island.clock_s = back_at, fault.amount
            case "leave":
                island.ask_to_leave(self._now)
                island.start_at, island.clock_s = back_at, 0.0
            case "depart":
                island.ask_to_leave(self._now)
                island.gone = True
            case "stop" | "freeze":
                island.stop(daemon_too=fault.kind == "freeze")
            case "daemon":
                island.kill_daemon()

    def _heal(self, fault: Fault) -> None:
        if fault in self._cuts:
            self._cuts.remove(fault)
            self._set_cut()
            self._say(f"healed: {fault.describe()}")
        elif fault.kind == "slow":
            self._network.set_slow(fault.islands[0], None)
        elif fault.kind in ("stop", "freeze"):
            self.islands[fault.islands[0]].proceed()
        self._note_moment()

    def _set_cut(self) -> None:
        self._network.set_cut(frozenset().union(*(fault.links for fault in self._cuts)))

    # what an operator does all the time

    def _turn(self) -> None:
        """Read what the islands report, notice who ended, start who is to come back, and take samples."""
        time.sleep(POLL_S)
        for island in self.islands.values():
            self._listen(island)
            if (ended := island.ended()) is not None:
                (self.seen.refusals if ended.refused else self.seen.crashes).append((self._now, ended.text))
                self._say(ended.text)
                if not (island.gone or self._ending) and island.start_at is None:
                    island.start_at = self._now + AGAIN_S
            if island.leaving_since is not None and self._now - island.leaving_since > LEAVE_S:
                self.seen.crashes.append((self._now, f"{island.name}: had not left {LEAVE_S:.0f} s after SIGTERM"))
                island.kill()
            if not island.running and island.start_at is not None and island.start_at <= self._now:
                self._start(island)
        self._note_moment()
        if self._now - self._sampled > SAMPLE_S:
            self._sample()
        if self._now - self._archived > ARCHIVE_S:
            self._archive()

    def _listen(self, island: SoakIsland) -> None:
        for event in island.events():
            if isinstance(event, Round):
                contributors = tuple(map(self._name_of, event.contributors))
                self.seen.told.append(Told(self._now, island.name, event.round, event.digest, contributors))

    def _start(self, island: SoakIsland) -> None:
        """Start an island as its owner would: the founder resumes its run, others join by the newest ticket."""
        where = ["--host", self._network.host(island.number)]
        if island.number == 1:
            resume = ["--resume"] if has_log(island.folder) else []
            words = ["run", str(self._config), "--islands", "1", *resume, *where]
        else:
            sets = [word for own in OWN for word in ("--set", own)]
            words = ["join", self._ticket(), "--name", island.name, "--dir", str(island.folder), *sets, *where]
        island.start(diloco_command(self._network.prefix(island.number), *words), self._network.environment())

    def _ticket(self) -> str:
        """Write a ticket with the addresses of all islands that run: any of them lets others in."""
        order = sorted(self._present, key=lambda island: not island.running)
        files = [island.folder / "addresses" for island in order]
        addresses = spread([file.read_text().split() for file in files if file.exists()])
        founded = Ticket.parse((self.islands[1].folder / TICKET).read_text(), 0.0)
        keep_ticket(self._root, founded.at(addresses))
        return str(self._root / TICKET)

    def _note_moment(self) -> None:
        able = frozenset(island.name for island in self._present if island.able)
        links = {link for fault in self._cuts for link in fault.links}
        cut = frozenset((island_name(sender), island_name(receiver)) for sender, receiver in links)
        last = self.seen.moments[-1] if self.seen.moments else None
        if last is None or (last.able, last.cut) != (able, cut):
            self.seen.moments.append(Moment(self._now, able, cut))

    def _sample(self) -> None:
        self._sampled = self._now
        for island in self.islands.values():
            if (usage := island.usage()) is not None:
                self.seen.samples.append(Sample(self._now, island.name, island.life, usage))

    def _archive(self) -> None:
        """Read the records of all logs that were not read before."""
        self._archived = self._now
        for island in self.islands.values():
            with suppress(OSError, DilocoError):  # a segment was pruned meanwhile: next time
                for digest, entry in Journal.read(island.folder / OUTER).entries.items():
                    if digest not in self.seen.records:
                        self.seen.records[digest] = self._seen(entry)

    def _seen(self, entry: Entry) -> SeenRecord:
        proposal = logged_of(entry).record.proposal
        work = tuple(
            SeenWork(self._name_of(each.island), each.offer.incarnation, each.offer.samples)
            for each in proposal.contributions
        )
        roster = tuple(map(self._name_of, proposal.roster))
        return SeenRecord(entry.round, entry.digest, entry.parent, roster, work)

    def _name_of(self, peer: str) -> str:
        """Return an island's name by its peer id, or by the end of it, which islands report before they know the name.

        A name stays what it is.
        """
        names = {island.name for island in self.islands.values()}
        if peer in names:
            return peer
        if not any(known.endswith(peer) for known in self._names):
            keys = {island.folder / "identity.key": island.name for island in self.islands.values()}
            self._names |= {Identity.load(key).peer_id: name for key, name in keys.items() if key.exists()}
        return next((name for known, name in self._names.items() if known.endswith(peer)), peer)

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        deadline = self._now + limit_s
        while not (done := condition()) and self._now < deadline:
            self._turn()
        return done

    def _wait_or_fail(self, condition: Callable[[], bool]) -> None:
        if not self._wait(condition, BEGIN_S):
            ends = [text for _, text in (*self.seen.refusals, *self.seen.crashes)]
            up = [island.name for island in self.islands.values() if island.up]
            raise WorkerFailed(f"the soak did not begin within {BEGIN_S:.0f} s: {', '.join(up)} train; {ends}")

    def _say(self, text: str) -> None:
        self.seen.faults.append((self._now, text))
        print(f"{self._now:6.1f} s  {text}", file=sys.stderr, flush=True)
