"""Several islands on this machine, each a process of its own: starts them, watches them, restarts those that die.

No island is special once the run has begun. The first one founds it; if it dies, it comes back as a joiner like any
other, with a ticket that names the addresses of all.
"""

import json
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from diloco.atomic import write_file
from diloco.checkpoint.save.facts import among_others, read_facts, saves
from diloco.comm.peers.ticket import ADDRESSES_LIMIT, Ticket
from diloco.config.fields import parse_address
from diloco.config.file import render_config
from diloco.config.schema import Config
from diloco.errors import Evicted, SaveError
from diloco.launch.devices import devices_of, usable_cores
from diloco.launch.mesh_processes import SUPERVISED
from diloco.launch.processes import Child
from diloco.report.board import Board
from diloco.report.events import Event
from diloco.report.watching import IslandsView, Tail
from diloco.run.folder import islands_in, prepare_folder, refuse_other_protocols
from diloco.run.invites import TICKET, keep_ticket
from diloco.run.machine import TOGETHER
from diloco.run.signals import PAUSE, signals
from diloco.train.amend import amended, amendment_files, read_amendment
from diloco.units import counted

OWN = ("island", "log", "evaluate", "checkpoint")  # a joiner's own sections; all others come from the founder
LOOK_S = 0.2
RESTART_S = 3.0
RESTARTS = 5  # of one island
LEAVE_S = 40.0  # for an island to end by itself, beyond elastic.grace_s, unless it is still saving
SAVING_S = 30.0  # since it last wrote to a file


@dataclass(frozen=True)
class Plan:
    """Specify which islands are started on this machine, where, and by which commands."""

    config: Config
    path: Path
    overrides: tuple[str, ...]
    islands: int
    link: str | None = None
    host: str | None = None
    restart: bool = True
    resume: bool = False
    port: int | None = None  # of the first island; the next one has the two after it, and so on
    relay: str | None = None
    later: int = 0  # so many of the islands are not there from the beginning

    @property
    def folder(self) -> Path:
        """Return the run's folder, in which each island has one of its own."""
        return Path(self.config.dir)

    @property
    def names(self) -> list[str]:
        """Return what the islands and their folders are called; the first is the founder."""
        return [f"island-{number}" for number in range(1, self.islands + 1)]

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that give each island its share of this machine's cores, and say who restarts it."""
        return {"OMP_NUM_THREADS": str(max(1, usable_cores() // self.islands)), SUPERVISED: "1"}

    def devices(self, name: str) -> dict[str, str]:
        """Return the variable that gives this island its share of this machine's GPUs."""
        return devices_of(self.names.index(name), self.islands, self.config.island)

    @property
    def together(self) -> str:
        """Return how many islands are here, and how many of them on the first one's GPU."""
        devices = [self.devices(name) for name in self.names]
        return f"{self.islands} {devices.count(devices[0])}"

    def founder(self) -> list[str]:
        """Return the arguments of `diloco` that found the run, or resume it, as the first island."""
        changes = [*self.overrides, *self.metrics(self.names[0]), f"checkpoint.dir={self.folder / self.names[0]}"]
        if "start_islands" not in self.config.elastic.model_fields_set:  # nobody trains ahead of the others
            changes.insert(0, f"elastic.start_islands={self.islands - self.later}")
        resume = ["--resume"] if self.resume else []
        return ["run", str(self.path), "--islands", "1", *resume, *_sets(changes), *self.network(self.names[0])]

    def joiner(self, name: str) -> list[str]:
        """Return the arguments of `diloco` that let this island join by the run's ticket."""
        where = ["--name", name, "--dir", str(self.folder / name)]
        return [
            "join",
            str(self.folder / TICKET),
            *where,
            *_sets([*self._own(), *self.metrics(name)]),
            *self.network(name),
        ]

    def _own(self) -> list[str]:
        sections = {name: getattr(self.config, name).model_dump(mode="json", exclude_unset=True) for name in OWN}
        leaves = [(f"{name}.{key}", value) for name, tree in sections.items() for key, value in tree.items()]
        return [f"{key}={json.dumps(value)}" for key, value in leaves if key not in ("checkpoint.dir", "log.metrics")]

    def metrics(self, name: str) -> list[str]:
        """Return the setting by which an island answers Prometheus, each at a port of its own; none if none does."""
        if self.config.log.metrics is None:
            return []
        host, port = parse_address(self.config.log.metrics)
        return [f"log.metrics={json.dumps(f'{host}:{port + self.names.index(name)}')}"]

    def network(self, name: str) -> list[str]:
        """Return an island's options for link, host, ports and relaying, as far as they were given."""
        port = None if self.port is None else str(self.port + 2 * self.names.index(name))
        given = {"--link": self.link, "--host": self.host, "--port": port, "--relay": self.relay}
        return [word for option, value in given.items() if value is not None for word in (option, value)]


def _sets(changes: list[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def run_islands(plan: Plan, view: IslandsView, *, fresh: bool) -> Board:
    """Train until the run is finished, or everybody has left; return what the islands reported."""
    open_run(plan, view, fresh=fresh)
    fleet = Fleet(plan, view)
    fleet.run()
    return fleet.board


def end_of(plan: Plan) -> str | None:
    """Return in words where a run has ended, if an island of this folder has seen it and it is not prolonged."""
    for save in [save for name in plan.names for save in saves(plan.folder / name)]:
        if (together := among_others(save)) is not None and together["finished"]:
            facts = read_facts(save)
            if facts["step"] >= steps_wanted(plan):
                return f"step {facts['step']}, round {facts['round']}"
    return None


def steps_wanted(plan: Plan) -> int:
    """Return how far this run is to go: by its configuration, or by a change that its owner has made."""
    made = map(read_amendment, amendment_files(plan.folder / plan.names[0]))
    return max(plan.config.inner.steps, amended(plan.config, made).inner.steps)


def open_run(plan: Plan, view: IslandsView, *, fresh: bool) -> None:
    """Make the folders of the run and of its islands, and lock the run's; `fresh` keeps an earlier run elsewhere."""
    folder = plan.folder
    plan.devices(plan.names[0])  # too few for all of them are refused before anything is written
    if plan.resume:
        refuse_other_protocols(folder)
    if plan.resume and not islands_in(folder) and not any(map(saves, (folder, *folder.glob("island-*/")))):
        raise SaveError(f"{folder} holds no run to resume: start without --resume")
    try:
        kept = prepare_folder(folder, resume=plan.resume, fresh=fresh)
        for place in (folder, *(folder / name for name in plan.names)):
            place.mkdir(exist_ok=True)
            (place / "config.yaml").write_text(
                render_config(plan.config.of_island()), encoding="utf-8"
            )  # by it a run is known
    except OSError as error:
        raise SaveError(f"{folder} cannot be written: {error}; set checkpoint.dir to another folder") from None
    if kept is not None:
        view.say(f"the earlier run is kept as {kept}")


class Fleet:
    """Run the islands of a plan as child processes, and show what they report."""

    def __init__(self, plan: Plan, view: IslandsView) -> None:
        self.plan, self.view, self.board = plan, view, Board.of(plan.names)
        self.children = {name: Child(name, plan.folder / name) for name in plan.names}
        self._tails = {name: Tail(plan.folder / name / "events.jsonl") for name in plan.names}
        self._again_at: dict[str, float] = {}  # islands that will be started once more
        self._running: set[str] = set()
        self._addresses: list[str] = []
        self._written_ns = 0  # when the ticket was, that they were added to
        self._asked_at: float | None = None
        self._over_at: float | None = None
        self._killing = False

    @property
    def at_work(self) -> bool:
        """Tell whether any island is running or will be started again."""
        return bool(self._running or self._again_at)

    def run(self) -> None:
        """Start the islands and watch them until all have ended; no process is left behind."""
        with signals() as heard:
            try:
                self.found()
                while self.at_work:
                    time.sleep(LOOK_S)
                    self.poll(len(heard))
            finally:
                self.end()

    def found(self) -> None:
        """Start the first island, which founds the run or resumes it; the others follow when its ticket is written."""
        self.view.say(f"starting {counted(self.plan.islands, 'island')} in {self.plan.folder}")
        if self.plan.resume:
            (self.plan.folder / self.plan.names[0] / TICKET).unlink(missing_ok=True)  # others wait for the new one
            for _, _, event in self._news():
                self.board.remember(event)
        self._start(self.plan.names[0], self.plan.founder())

    def poll(self, asked: int) -> None:
        """Take one turn: signals (`asked` so far), islands' events, the ticket, who has ended, who comes back."""
        now = time.monotonic()
        self._heed(asked, now)
        self._listen()
        self._invite()
        for name in [name for name in self.plan.names if name in self._running]:
            if self.children[name].exit_code is not None:
                self._ended(name, now)
        self._wrap_up(now)
        for name in [name for name, at in self._again_at.items() if now >= at]:
            del self._again_at[name]
            self.board.again(name)
            self._start(name, self.plan.joiner(name))
        self.view.show(self.board.rows.values())

    def end(self) -> None:
        """Kill every island that is left, whatever happened here, and show what was last reported."""
        for child in self.children.values():
            child.kill()
        self._listen()
        self._say(self.board.flush())
        self.board.paused = self._asked_at is not None and all(row.state == "left" for row in self.board.rows.values())

    def _start(self, name: str, arguments: list[str]) -> None:
        together = {TOGETHER: "0 0" if self._running else self.plan.together}
        self.children[name].start(arguments, self.plan.environment | self.plan.devices(name) | together)
        self._running.add(name)
        listed = [{"name": c.name, "pid": c.pid, "folder": str(c.folder)} for c in self.children.values() if c.pid]
        write_file(self.plan.folder / "islands.json", json.dumps(listed, indent=2) + "\n")

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            self.view.say(line)

    def _listen(self) -> None:
        for _, name, event in self._news():
            self.view.hear(name, event)
            self._say(self.board.hear(name, event))
        self._say(self.board.tick(time.time()))

    def _news(self) -> list[tuple[float, str, Event]]:
        """Return what the islands have reported since the last call, by time, with who has."""
        events = [(event.time, name, event) for name, tail in self._tails.items() for event in tail.read()]
        return sorted(events, key=lambda told: told[0])

    def _heed(self, asked: int, now: float) -> None:
        if asked and self._asked_at is None:
            self._asked_at = now
            self._again_at.clear()
            self.view.say("pausing: the islands finish their step and save (once more ends them at once)")
            for name in self._running:
                self.children[name].pause()
        late = self._asked_at is not None and now - self._asked_at > self.plan.config.elastic.grace_s + LEAVE_S
        if asked > 1 or late:
            self._kill(even_saving=asked > 1)

    def _invite(self) -> None:
        """Write a ticket with the addresses of all islands that are running: any of them can let others in. Once there
        is one, the other islands are started."""
        file = self.plan.folder / self.plan.names[0] / TICKET
        if not file.exists():
            return
        there = [self.children[name] for name in self.plan.names if name in self._running]
        files = [child.folder / "addresses" for child in there]
        addresses = spread([file.read_text().split() for file in files if file.exists()])
        written_ns = file.stat().st_mtime_ns  # another one, if its owner has revoked it
        if not addresses or (addresses, written_ns) == (self._addresses, self._written_ns):
            return
        first, self._addresses, self._written_ns = not self._addresses, addresses, written_ns
        founded = Ticket.parse(file.read_text(), 0.0)
        keep_ticket(self.plan.folder, founded.at(addresses))
        if first:
            self._say(invitation(self.plan, founded.at(addresses).render()))
            for name in self.plan.names[1:]:
                self._start(name, self.plan.joiner(name))

    def _ended(self, name: str, now: float) -> None:
        child, row = self.children[name], self.board.rows[name]
        asked = self._asked_at is not None or (self._over_at is not None and row.state == "starting")
        self._running.discard(name)
        row.state = "left" if child.exit_code == 0 else "gone"
        if child.exit_code == 0 or self._killing:
            return
        if asked and child.exit_code in (-PAUSE, -signal.SIGTERM):  # no handler of ours was there
            row.state = "left"
            self.view.say(f"{name} had not started yet")
            return
        self.view.say(f"{name} died ({child.reason()})")
        if asked:
            return
        if not self._addresses:
            self.view.say("the run was not founded")
        elif f"error[{Evicted.code}]" in child.reason():
            row.state = "left"  # by its owner's will
        elif self.plan.restart and not self.board.finished:
            if row.restarts < RESTARTS:
                self.view.say(f"{name} restarts in {RESTART_S:.0f} s")
                self._again_at[name] = now + RESTART_S
            else:
                log = child.folder / "output.log"
                self.view.say(f"{name} has died {RESTARTS + 1} times and is not restarted: see {log}")

    def _wrap_up(self, now: float) -> None:
        """Stop islands that are still starting once the run is over or nobody is left in it. Those that need longer
        than LEAVE_S seconds to end are killed."""
        if self._over_at is None and (self.board.finished or self._deserted):
            self._over_at = now
            self._again_at.clear()
            for name in self._running:
                if self.board.rows[name].state == "starting":
                    self.children[name].ask_to_stop()
            if not self.board.finished and self._asked_at is None:
                self.view.say("no island is left in the run: --resume continues it from their disks")
        if self._over_at is not None and now - self._over_at > LEAVE_S:
            self._kill(even_saving=False)

    def _kill(self, *, even_saving: bool) -> None:
        for child in [self.children[name] for name in self._running]:
            if even_saving or not is_saving(child.folder):
                self._killing = True
                child.kill()

    @property
    def _deserted(self) -> bool:
        """Tell whether nobody holds the run's state: neither an island that trains, nor the founder on its way."""
        rows = [self.board.rows[name] for name in self._running]
        founding = self.plan.names[0] in self._running and not self.board.rows[self.plan.names[0]].restarts
        return not founding and all(row.state != "training" for row in rows)


def is_saving(folder: Path) -> bool:
    """Tell whether a save or a snapshot of this island has grown lately: a large one takes its time."""
    files = [*folder.glob("save-*.part/**/*"), *folder.glob("outer/snapshot-*.part/*")]
    with suppress(FileNotFoundError):  # it has just been finished
        return any(time.time() - file.stat().st_mtime < SAVING_S for file in files)
    return True


def invitation(plan: Plan, ticket: str) -> list[str]:
    """Return the lines that show the ticket and how to join with it."""
    local = plan.host in (None, "127.0.0.1", "localhost")
    elsewhere = "to let other machines in, start with --host ADDRESS" if local else "elsewhere: diloco join TICKET"
    shown = [f"ticket: {ticket}"] if sys.stdout.isatty() else []  # it is a secret: no log is to have it
    return [*shown, f"join from another terminal: diloco join {plan.folder}/ticket; {elsewhere}"]


def spread(addresses: list[list[str]]) -> list[str]:
    """Choose as many addresses as a ticket holds: everybody's first, then everybody's second, …"""
    turns = zip_longest(*addresses)
    return [address for turn in turns for address in turn if address is not None][:ADDRESSES_LIMIT]
