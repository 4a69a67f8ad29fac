"""Start, kill, stop, cut off and slow down islands by a script, over links that a file describes."""

import json
import os
import signal
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

from diloco.atomic import write_file
from diloco.comm.peers.identity import Identity
from diloco.launch.fleet import Fleet, Plan, open_run
from diloco.report.watching import IslandsView
from diloco.simulate.real.faults import Fault
from diloco.simulate.real.netns import Namespaces
from diloco.simulate.real.network import VARIABLE, cut_pairs, network_at
from diloco.simulate.real.topology import Topology, island_name

NETWORK = "network.json"


@dataclass(frozen=True)
class World:
    """Hold what a simulation is given besides a configuration."""

    topology: Topology
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class SimulatedPlan(Plan):
    """Plan islands that find the simulated network by an environment variable."""

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of an island's process, with the path of the network's file."""
        return {**super().environment, VARIABLE: str((self.folder / NETWORK).resolve())}


@dataclass
class FleetHistory:
    """Record what the fleet saw and did, in Unix time, which is the same on all machines."""

    zero: float | None = None  # when all first islands that had not gone for good trained; faults count from there
    ended: float = 0.0
    lives: dict[str, list[list[float]]] = field(default_factory=dict)  # of each island's processes: begin and end
    stops: dict[str, list[list[float]]] = field(default_factory=dict)
    faults: dict[Fault, float] = field(default_factory=dict)  # those that took effect, and when


class SimulatedFleet(Fleet):
    """Run islands, and inflict the world's faults on them at their times."""

    def __init__(self, plan: Plan, view: IslandsView, world: World, namespaces: Namespaces | None = None) -> None:
        super().__init__(plan, view)
        self.world, self.happened, self._namespaces = world, FleetHistory(), namespaces
        self._waiting = {island_name(i) for fault in world.faults if fault.kind == "join" for i in fault.islands}
        self._ids = {name: Identity.load(plan.folder / name / "identity.key").peer_id for name in plan.names}
        self._written = ""
        self._stopped: dict[str, float] = {}  # until when
        self._ahead = [fault for fault in world.faults if fault.kind != "slow"]
        self._write_network(0.0)

    def poll(self, asked: int) -> None:
        """Run one turn of the fleet, and carry out the faults that are due; none any more once the run ends."""
        super().poll(asked)
        if self._ending:
            self._ahead.clear()
        elif self.happened.zero is None:
            self._begin_if_all_train()
        if self.happened.zero is not None:
            self._play(time.time() - self.happened.zero)

    @property
    def asked(self) -> bool:
        """Return whether a signal has asked the fleet to stop."""
        return self._asked_at is not None

    @property
    def _ending(self) -> bool:
        """Return whether the run is over or asked to stop: then no more faults come."""
        return self.asked or self._over_at is not None

    def _begin_if_all_train(self) -> None:
        """Start the clock of faults once all first islands train, but for those gone for good."""
        rows = [row for row in self.board.rows.values() if row.name not in self._waiting]
        away = [row.name for row in rows if row.state in ("gone", "left") and row.name not in self._again_at]
        if len(away) < len(rows) and all(row.state == "training" or row.name in away for row in rows):
            self.happened.zero = time.time()
            without = f" but {', '.join(away)} (gone for good)" if away else ""
            self.view.say(f"all islands train{without}: from here on time counts")
            for fault in self.world.faults:
                if fault.kind == "slow":
                    self.happened.faults[fault] = self.happened.zero

    def _play(self, seconds: float) -> None:
        """Resume stopped islands, carry out faults and change the network, as is due at that time."""
        for name, until_s in list(self._stopped.items()):
            if seconds >= until_s or self._ending:
                del self._stopped[name]
                self._signal(name, signal.SIGCONT)
                self.happened.stops[name][-1].append(time.time())
                self.view.say(f"{seconds:.0f} s: {name} goes on")
        while self._ahead and self._ahead[0].at_s <= seconds:
            self._carry_out(self._ahead.pop(0), seconds)
        self._write_network(seconds)

    def _carry_out(self, fault: Fault, seconds: float) -> None:
        """Carry out one fault; a kill or a stop of an island that is not running does nothing."""
        names = [island_name(island) for island in fault.islands]
        if fault.kind in ("kill", "stop") and names[0] not in self._running:
            self.view.say(f"{seconds:.0f} s: {fault.said}: it is not running, so nothing happens")
            return
        now = self.happened.faults[fault] = time.time()
        self.view.say(f"{seconds:.0f} s: {fault.describe()}")
        match fault.kind:
            case "kill":
                self.children[names[0]].kill()
            case "stop":
                self._signal(names[0], signal.SIGSTOP)
                self._stopped[names[0]] = fault.until_s
                self.happened.stops.setdefault(names[0], []).append([now])
            case "join":
                self._waiting -= set(names)
                for name in names:
                    self._start(name, self.plan.joiner(name))

    def _signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to an island's whole process group."""
        pid = self.children[name].pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(pid, number)

    def _write_network(self, seconds: float) -> None:
        """Write the network's file if it has changed, and shape the namespaces."""
        topology = self.world.topology
        faults = tuple(fault for fault in self.world.faults if fault.kind == "slow" or fault in self.happened.faults)
        if self._namespaces is not None:
            for island, site in enumerate(topology.sites, start=1):
                self._namespaces.shape(island, site.rates_at(seconds))
            self._namespaces.cut_exactly(cut_pairs(faults, seconds))
        text = json.dumps(network_at(topology, faults, self._ids, seconds, self._namespaces))
        if text != self._written:
            write_file(self.plan.folder / NETWORK, text)
            self._written = text

    def _start(self, name: str, arguments: list[str]) -> None:
        """Start an island, unless it waits for its time to join."""
        if name in self._waiting:  # its time will come
            return
        self.happened.lives.setdefault(name, []).append([time.time()])
        super()._start(name, arguments)

    def _ended(self, name: str, now: float) -> None:
        self._close_life(name)
        super()._ended(name, now)

    def _close_life(self, name: str) -> None:
        """Record the end of an island's process, and of its stop if it was stopped."""
        self._stopped.pop(name, None)
        for spans in (self.happened.lives, self.happened.stops):
            if (mine := spans.get(name)) and len(mine[-1]) == 1:
                mine[-1].append(time.time())

    def end(self) -> None:
        """End all islands, and record when that was."""
        super().end()
        for name in self.plan.names:
            self._close_life(name)
        self.happened.ended = time.time()


def simulate(plan: SimulatedPlan, view: IslandsView, world: World, *, netns: bool = False) -> SimulatedFleet:
    """Run until the run is finished, or all islands have left.

    An earlier run in that folder is kept under another name.
    """
    later = sum(len(fault.islands) for fault in world.faults if fault.kind == "join")
    plan = replace(plan, islands=world.topology.islands, later=later)
    open_run(plan, view, fresh=True)
    with Namespaces(plan.islands).opened() if netns else nullcontext() as namespaces:
        fleet = SimulatedFleet(plan, view, world, namespaces)
        fleet.run()
    return fleet
