"""Islands on hosts, as detached processes: on this machine, and on others by ssh.

Both do the same by shell scripts, which go to `sh` on its standard input: secrets are on no command line. On a host an
island has its own folder, which stays, and a job folder beside it for as long as it is launched.
"""

import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from ipaddress import IPv6Address
from pathlib import Path
from shlex import quote
from urllib.parse import urlsplit

from diloco.comm.peers.addressbook import free_port
from diloco.errors import ConfigError, LaunchError
from diloco.launch.backend import CONFIG, LOGS, Island, JobState, Launch, attach_words, call, fill, program_of
from diloco.launch.devices import own_devices, usable_cores
from diloco.launch.scripts import ALIVE, BEGINS, CANCEL, END, GPUS, PORTS, PRINTED, START, STATE
from diloco.run.secret import host_port

SSH_FAILED = 255
KEYS = ("address", "dir", "program")


@dataclass(frozen=True)
class Host:
    """Specify a machine, and where islands lie on it."""

    destination: str  # as ssh takes it; "" stands for this machine
    address: str  # at which other islands reach it
    dir: str
    program: str


class Hosts(ABC):
    """Start islands on hosts, in turn; subclasses say which hosts, and how a script gets there."""

    copies_secrets: bool  # to the job folder, for as long as the job lasts

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    @property
    @abstractmethod
    def hosts(self) -> list[Host]:
        """Return the hosts on which islands are put, in this order."""

    @abstractmethod
    def shell(self, host: Host) -> list[str]:
        """Return the command of a shell on a host that reads a script."""

    @abstractmethod
    def job(self, island: Island) -> str:
        """Return the island's job folder on its host."""

    @abstractmethod
    def secret(self, island: Island) -> str:
        """Return where the island's secret lies on its host."""

    def log(self, island: Island) -> str:
        """Return where what the island prints lies on its host."""
        return f"{self.job(island)}/output.log"

    @property
    @abstractmethod
    def directory(self) -> str:
        """Return the working folder of islands, for a shell."""

    @property
    def places(self) -> list[str]:
        """Return options of `diloco run` that say where islands are now, where that may have changed."""
        return []

    def environment(self, island: Island) -> dict[str, str]:
        """Return the variables of an island."""
        return dict(self.launch.config.launch.environment)

    def check(self, islands: Sequence[Island]) -> None:
        """Refuse ports that somebody else has."""
        self._on_hosts(islands, lambda island: PORTS.replace("PORTS", f"{island.port} {island.port + 1}"))

    def host(self, island: Island) -> Host:
        """Return the host that an island was put on, wherever it stands in the list by now; its folder stays there."""
        hosts = self.hosts
        listed = [host for host in hosts if host.destination == island.host]
        if not listed:  # an island that is still at work there is to be found
            return Host(island.host, host_port(island.address)[0], island.dir, hosts[0].program)
        same = [host for host in listed if host.dir == island.dir] or listed
        return replace(same[0], dir=island.dir or same[0].dir)

    def place(self, islands: Sequence[Island]) -> list[Island]:
        """Put islands on hosts: each stays where it is while that host is listed, else it gets the emptiest one; refuse
        islands over several machines, which nothing here starts."""
        if several := [island for island in islands if island.nodes > 1]:
            raise ConfigError(f"--nodes-per-island {several[0].nodes}: --on {self.launch.backend} has one machine each")
        hosts, placed = self.hosts, list[Island]()
        listed = {host.destination for host in hosts}
        load = Counter((each.host, each.dir) for each in self.launch.islands if not each.cancelled)
        for island in islands:
            if island.host not in listed:
                host = min(hosts, key=lambda host: load[host.destination, host.dir])
                load[host.destination, host.dir] += 1
                island = replace(island, host=host.destination, dir=host.dir)
            placed.append(replace(island, address=self.addresses([island])[island.name]))
        return placed

    def addresses(self, islands: Sequence[Island]) -> dict[str, str]:
        """Return where islands listen: their hosts and ports are known."""
        return {island.name: f"{_bracketed(self.host(island).address)}:{island.port}" for island in islands}

    def render(self, islands: Sequence[Island]) -> dict[str, str]:
        """Return the script of each island's job."""
        return {f"{island.name}.sh": self._script(island) for island in islands}

    def _script(self, island: Island) -> str:
        options, host, job = self.launch.config.launch, self.host(island), self.job(island)
        folder = f"{host.dir}/{island.name}"
        words = attach_words(self.launch, island, config=f"{job}/{CONFIG}", secret=self.secret(island), folder=folder)
        words += self.places
        values = {
            "place": f"{island.name} on {host.destination or 'this machine'}",
            "directory": self.directory, "setup": self._setup(island), "job": quote(job),
            "command": f"{host.program} {shlex.join(words)}", "restarts": str(options.restarts),
            "finished": quote(self._finished(host)), "grace_s": str(max(1, int(options.grace_s))),
            "passing": " ".join(map(quote, [f"{job}/pid", *[self.secret(island)] * self.copies_secrets])),
        }  # fmt: skip
        return fill("island.sh", values, options.templates)

    def _finished(self, host: Host) -> str:
        """Return the file that says, on each host, that one of its islands has seen the end of the run."""
        return f"{host.dir}/finished"

    def _setup(self, island: Island) -> str:
        exports = [f"export {name}={quote(value)}" for name, value in self.environment(island).items()]
        return "\n".join([*exports, *self.launch.config.launch.setup]) or ":"

    def submit(self, islands: Sequence[Island]) -> dict[str, str]:
        """Bring files to the hosts, and start the islands detached."""
        self._on_hosts(islands, self._start)
        return {island.name: f"{self.host(island).destination or 'here'}:{self.job(island)}" for island in islands}

    def _start(self, island: Island) -> str:
        files = {
            f"{self.job(island)}/run.sh": self._script(island),
            f"{self.job(island)}/{CONFIG}": self.launch.island_config_text,
        }
        if self.copies_secrets:
            files[self.secret(island)] = self.launch.secret_file(island.name).read_text(encoding="utf-8")
        writes = [f"cat >{quote(path)} <<'{END}'\n{text.rstrip()}\n{END}" for path, text in files.items()]
        return START.replace("WRITES", "\n".join([f"mkdir -p {quote(self.host(island).dir)}", *writes]))

    def states(self) -> dict[str, JobState]:
        """Ask all hosts how the islands' processes are. A host that does not answer says nothing about the others.

        When an island has seen the end of the run, hosts that have not heard of it are told: an island that was away
        would wait for the others for ever.
        """
        told, failed = self._ask_hosts(self.launch.islands, lambda _: STATE)
        found = {name: _state(words.split()) for name, words in told.items()}
        if JobState("finished") in found.values():
            late = [island for island in self.launch.islands if found.get(island.name) == JobState("running")]
            self._ask_hosts(late, lambda island: f"touch {quote(self._finished(self.host(island)))}")
        found |= {name: JobState("gone", detail=f"unknown: {error}") for name, error in failed.items()}
        places = {island.name: self.host(island).destination or "here" for island in self.launch.islands}
        addresses = self.addresses(self.launch.islands)
        return {
            name: replace(state, where=places[name], address=addresses[name])
            for name, state in found.items()
            if state is not None
        }

    def cancel(self, islands: Sequence[Island]) -> None:
        """Ask islands to leave, wait until they have, kill what does not, and remove their job folders.

        What they have printed to their end is brought here first. Hosts that do not answer are named at the end.
        """
        grace_s = int(self.launch.config.launch.grace_s)
        everything = {island.name for island in islands} == {island.name for island in self.launch.islands}

        def script(island: Island) -> str:
            rest = f"rm -f {quote(self._finished(self.host(island)))}" if everything else ""
            return f"grace_s={grace_s}\n{CANCEL}{rest}"

        told, failed = self._ask_hosts(islands, script, timeout_s=grace_s + 60)
        self._keep_logs(told)
        for error in failed.values():
            raise error

    def collect(self, islands: Sequence[Island]) -> dict[str, Path]:
        """Bring what the islands have printed here, from all hosts that answer."""
        return self._keep_logs(self._ask_hosts(islands, lambda _: PRINTED)[0])

    def _keep_logs(self, told: Mapping[str, str]) -> dict[str, Path]:
        folder, files = self.launch.here / LOGS, {}
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in told.items():
            if text:
                files[name] = folder / f"{name}.log"
                files[name].write_text(text, encoding="utf-8")
        return files

    def _on_hosts(self, islands: Sequence[Island], script: Callable[[Island], str]) -> None:
        """Run a script for each island on its host, all at once; raise what failed first."""
        for error in self._ask_hosts(islands, script)[1].values():
            raise error

    def _ask_hosts(
        self, islands: Sequence[Island], script: Callable[[Island], str], timeout_s: float = 120
    ) -> tuple[dict[str, str], dict[str, LaunchError]]:
        """Run a script for each island on its host, all at once; return what they print, and which have failed."""

        def call(island: Island) -> str:
            prelude = f"job={quote(self.job(island))} log={quote(self.log(island))}\n{ALIVE}\necho {BEGINS}"
            printed = self._run(self.host(island), f"{prelude}\n{script(island)}\n", timeout_s)
            return printed.partition(f"{BEGINS}\n")[2]

        with ThreadPoolExecutor(16) as pool:
            calls = {island.name: pool.submit(call, island) for island in islands}
        told, failed = dict[str, str](), dict[str, LaunchError]()
        for name, called in calls.items():
            try:
                told[name] = called.result()
            except LaunchError as error:
                failed[name] = error
        return told, failed

    def _run(self, host: Host, script: str, timeout_s: float) -> str:
        shell, where = self.shell(host), host.destination or "this machine"
        hints = {SSH_FAILED: f"; try: {shlex.join(shell)}"}
        return call(shell, where, "install it", text=script, timeout_s=timeout_s, hints=hints)


def _state(words: list[str]) -> JobState | None:
    match words:
        case ["running"]:
            return JobState("running")
        case ["ended", "0"]:
            return JobState("finished")
        case ["ended", "75"]:
            return JobState("left")
        case ["ended", code]:
            return JobState("failed", detail=f"exit code {code}")
        case ["gone"]:
            return JobState("gone", detail="killed")
    return None


class Local(Hosts):
    """Start islands on this machine. Their folders are in the run's folder."""

    copies_secrets = False

    @property
    def hosts(self) -> list[Host]:
        base = Path(self.launch.config.launch.dir or self.launch.folder).expanduser().absolute()
        return [Host("", "127.0.0.1", str(base), program_of(self.launch, same_machine=True))]

    def place(self, islands: Sequence[Island]) -> list[Island]:
        """Put islands on this machine; unless their ports are configured, at the next ones that are free."""
        if "port" in self.launch.config.launch.model_fields_set:
            return super().place(islands)
        taken, ready = {island.port for island in self.launch.islands if island.address}, list[Island]()
        for island in islands:
            if not island.address:
                free = (port for port in range(island.port, 65535, 2) if port not in taken and _both_free(port))
                island = replace(island, port=next(free, island.port))
                taken.add(island.port)
            ready.append(island)
        return super().place(ready)

    def shell(self, host: Host) -> list[str]:
        return ["sh", "-s"]

    def job(self, island: Island) -> str:
        return str((self.launch.here / "jobs" / island.name).absolute())

    def secret(self, island: Island) -> str:
        return str(self.launch.secret_file(island.name).absolute())

    def log(self, island: Island) -> str:
        """Return where logs of islands elsewhere are brought to: here they are from the beginning."""
        return str((self.launch.here / LOGS / f"{island.name}.log").absolute())

    def submit(self, islands: Sequence[Island]) -> dict[str, str]:
        """Start the islands detached."""
        (self.launch.here / LOGS).mkdir(parents=True, exist_ok=True)
        return super().submit(islands)

    def _keep_logs(self, told: Mapping[str, str]) -> dict[str, Path]:
        return {name: self.launch.here / LOGS / f"{name}.log" for name, text in told.items() if text}

    def environment(self, island: Island) -> dict[str, str]:
        """Return the variables of an island, with its share of this machine's cores and GPUs."""
        sizes = [each.processes for each in self.launch.islands]  # which --gpus-per-node may have made their own
        share = {"OMP_NUM_THREADS": str(max(1, usable_cores() // len(sizes)))}
        return share | own_devices(island.number, sizes, self.launch.config.island) | super().environment(island)

    @property
    def directory(self) -> str:
        """Return where it was launched: paths in the configuration are relative to that."""
        return quote(str(Path.cwd()))


class Ssh(Hosts):
    """Start islands on other machines by ssh, without a shared file system."""

    copies_secrets = True

    @property
    def hosts(self) -> list[Host]:
        options = self.launch.config.launch
        if options.hosts is None:
            raise ConfigError("launch.hosts=null: --on ssh needs a file with a host on each line")
        run, program = self.launch.config.run, program_of(self.launch, same_machine=False)
        return read_hosts(Path(options.hosts), run=run, dir=options.dir or f"diloco/{run}", program=program)

    def check(self, islands: Sequence[Island]) -> None:
        """Refuse a host that cannot be reached, or has no diloco, before any island is started."""
        super().check(islands)

        def script(island: Island) -> str:
            program = self.host(island).program
            hint = quote(f"there is no diloco there: `{program} --version` fails; set launch.program")
            test = f"{program} --version </dev/null >/dev/null 2>&1"
            return f"{self._setup(island)}\n{test} || {{ echo {hint} >&2; exit 1; }}"

        self._on_hosts(list({self.host(island): island for island in islands}.values()), script)

    def _setup(self, island: Island) -> str:
        """Return the lines before an island, with its share of the GPUs where others are on the same host."""
        at = self.host(island).destination
        mates = [each for each in self.launch.islands if self.host(each).destination == at]
        if len(mates) == 1 or self.launch.config.island.device == "cpu":
            return super()._setup(island)
        first = sum(each.processes for each in mates if each.number < island.number)
        gpus = GPUS.replace("FIRST", str(first)).replace("EACH", str(island.processes)).replace("NAME", island.name)
        return f"{super()._setup(island)}\n{gpus}"

    def shell(self, host: Host) -> list[str]:
        return [*shlex.split(self.launch.config.launch.ssh), "-o", "BatchMode=yes", host.destination, "sh -s"]

    def job(self, island: Island) -> str:
        return f"{self.host(island).dir}/{island.name}.job"

    def secret(self, island: Island) -> str:
        return f"{self.job(island)}/secret"

    @property
    def places(self) -> list[str]:
        """Return the addresses of the hosts file: those in the secrets are of machines that may have been replaced."""
        known = self.addresses(self.launch.islands)
        return ["--at", ",".join(f"{name}={place}" for name, place in known.items())]

    @property
    def directory(self) -> str:
        """Return the home folder: paths in the configuration are relative to that, or absolute."""
        return '"$HOME"'


def read_hosts(path: Path, *, run: str, dir: str, program: str) -> list[Host]:
    """Read a hosts file: on each line a destination of ssh, then address=, dir= or program= where they differ.

    A host's own `dir` is for all runs: each has a folder of its name there.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"launch.hosts={path}: cannot be read: {error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        try:
            destination, *pairs = shlex.split(line, comments=True) or [""]
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}: close the quotes") from None
        given = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
        given |= {"dir": f"{given['dir']}/{run}"} if given.get("dir") else {}
        if wrong := [pair for pair in pairs if pair.partition("=")[0] not in KEYS or not pair.partition("=")[2]]:
            raise ConfigError(f"{path}, line {number}: {wrong[0]!r}: write {' or '.join(f'{key}=…' for key in KEYS)}")
        if destination:
            found = {"address": _host_of(destination), "dir": dir, "program": program} | given
            found["dir"] = found["dir"].removeprefix("~/")  # all is relative to the home folder there
            _refuse_unusable(destination, found["address"], f"{path}, line {number}")
            hosts.append(Host(destination, **found))
    if not hosts:
        raise ConfigError(f"launch.hosts={path}: there is no host in it: write one on each line")
    return hosts


def _host_of(destination: str) -> str:
    """Return the host in a destination of ssh: [USER@]HOST, or ssh://[USER@]HOST[:PORT]."""
    if destination.startswith("ssh://"):
        return urlsplit(destination).hostname or ""
    return destination.rpartition("@")[2]


def _refuse_unusable(destination: str, address: str, where: str) -> None:
    """Refuse what ssh would take for an option, and an address that no island can dial, before secrets have it."""
    if destination.startswith("-"):
        raise ConfigError(f"{where}: {destination!r} is no host: write options of ssh into launch.ssh")
    try:
        host_port(f"{_bracketed(address)}:1")
        if ":" in address:
            IPv6Address(address)
    except ValueError:
        raise ConfigError(f"{where}: address={address}: write a host's name or address, without a port") from None


def _both_free(port: int) -> bool:
    try:
        return bool(free_port("", port) and free_port("", port + 1))
    except OSError:
        return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
