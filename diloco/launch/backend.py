"""What starts islands somewhere: one small protocol for this machine, hosts by ssh, and schedulers.

A backend is told what to start and where its files lie (`Launch`), and never changes the run itself: islands are
started by `diloco run CONFIG --attach SECRET`, which may be done any number of times.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from textwrap import indent
from types import MappingProxyType
from typing import Literal, Protocol

import yaml

from diloco.atomic import write_file
from diloco.config.file import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError, LaunchError

# Where islands can be started, and by what: `module:Class`, loaded when somebody asks for it.
BACKENDS = {
    "local": "diloco.launch.hosts:Local",
    "ssh": "diloco.launch.hosts:Ssh",
    "slurm": "diloco.launch.slurm:Slurm",
    "kubernetes": "diloco.launch.kubernetes:Kubernetes",
}

LAUNCH, SECRETS, STATE, CONFIG, LOGS = "launch", "secrets", "launch.json", "config.yaml", "logs"  # in a run's folder
TEMPLATES = Path(__file__).parent / "templates"
VERSION = 2
CALL_S = 120.0  # for one command of ssh or of a scheduler, which may be busy


@dataclass(frozen=True)
class Island:
    """Specify one island that is launched: its place among the others, what it needs, and the job that runs it."""

    name: str
    port: int
    nodes: int = 1
    processes: int = 1  # of each node
    gpus: int = 0  # of each node; 0: none is asked for
    fsdp: int | None = None  # its own, where it differs from the configuration's
    job: str = ""  # what the backend calls it; empty before it is submitted
    address: str = ""  # HOST:PORT, where that is known beforehand
    host: str = ""  # that it was put on, as ssh takes it; empty where a scheduler chooses, and on this machine
    dir: str = ""  # where its folder lies on that host
    cancelled: bool = False  # it is not to be started again

    @property
    def number(self) -> int:
        """Return the K of island-K."""
        return int(self.name.rpartition("-")[2])

    @property
    def changes(self) -> tuple[str, ...]:
        """Return the options of `diloco run` that make this island's mesh its own."""
        return () if self.fsdp is None else ("--set", f"island.fsdp={self.fsdp}")


@dataclass(frozen=True)
class Launch:
    """Hold what is launched: the run's folder here, its configuration, and all islands so far."""

    folder: Path
    config: Config
    backend: str
    islands: tuple[Island, ...]

    @classmethod
    def read(cls, folder: Path) -> "Launch":
        """Read what was launched in a run's folder; raise LaunchError where nothing was."""
        here = folder / LAUNCH
        try:
            tree = json.loads((here / STATE).read_text())
            islands = tuple(Island(**island) for island in tree["islands"])
            if tree["version"] != VERSION:
                raise LaunchError(f"{here / STATE} is of another diloco: use that one")
            return cls(folder, load_config(here / CONFIG), str(tree["backend"]), islands)
        except FileNotFoundError:
            raise LaunchError(
                f"{folder} was not launched: there is no {here / STATE}; `diloco launch` makes it"
            ) from None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise LaunchError(f"{here / STATE} cannot be used ({error}): restore it from a copy") from None

    def write(self) -> None:
        """Write down what is launched, so that it can be listed, extended and ended later."""
        tree = {"version": VERSION, "backend": self.backend, "islands": [asdict(island) for island in self.islands]}
        write_file(self.here / STATE, json.dumps(tree, indent=1) + "\n", durable=True)

    @property
    def here(self) -> Path:
        """Return the folder for everything of the launch itself; job files and logs lie there, too."""
        return self.folder / LAUNCH

    @property
    def config_file(self) -> Path:
        """Return the configuration as it was launched, without defaults."""
        return self.here / CONFIG

    @property
    def config_text(self) -> str:
        """Return what is written to that file."""
        return _as_yaml(self.config)

    @property
    def island_config_text(self) -> str:
        """Return the same as islands get it: `launch.environment` may hold keys, and is no part of the run."""
        return _as_yaml(self.config.of_island())

    def secret_file(self, name: str) -> Path:
        """Return where the secret of an island lies on this machine."""
        return self.here / SECRETS / name

    def island(self, name: str) -> Island:
        """Return the island of this name; raise LaunchError where there is none."""
        for island in self.islands:
            if island.name == name:
                return island
        raise LaunchError(f"{self.folder} has no {name}: it has {', '.join(each.name for each in self.islands)}")

    def having(self, islands: Iterable[Island]) -> "Launch":
        """Return the same with these islands added, or in place of those of the same names."""
        merged = {island.name: island for island in (*self.islands, *islands)}
        return replace(self, islands=tuple(merged.values()))


def _as_yaml(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True), sort_keys=False)


@dataclass(frozen=True)
class JobState:
    """Describe how a job of an island is, as whoever runs it sees it."""

    state: Literal["waiting", "running", "finished", "left", "failed", "gone"]
    where: str = ""  # host, node or pod
    address: str = ""  # HOST:PORT at which the island is reached, where that is known
    detail: str = ""  # a reason, an exit code


class Backend(Protocol):
    """Start islands somewhere, say how they are, and end them. Made from a `Launch`, by the name of its class."""

    def __init__(self, launch: Launch) -> None: ...

    def check(self, islands: Sequence[Island]) -> None:
        """Raise ConfigError or LaunchError, with what to do, if these islands cannot be started this way from here."""

    def place(self, islands: Sequence[Island]) -> list[Island]:
        """Return these islands with what is known of their places before they are submitted; nothing is started."""
        ...

    def render(self, islands: Sequence[Island]) -> dict[str, str]:
        """Return the files by which these islands are submitted, by their names below RUN/launch; none is secret."""
        ...

    def submit(self, islands: Sequence[Island]) -> dict[str, str]:
        """Start these islands, whose files and secrets are written; return the name of each one's job."""
        ...

    def states(self) -> dict[str, JobState]:
        """Return how each island's job is."""
        ...

    def cancel(self, islands: Sequence[Island]) -> None:
        """Ask these islands to contribute, save and leave, and not to come back; leave nothing of their jobs behind."""

    def collect(self, islands: Sequence[Island]) -> dict[str, Path]:
        """Bring what these islands have printed to RUN/launch/logs; return each one's file."""
        ...


def backend_of(launch: Launch) -> Backend:
    """Return the backend of a launch."""
    if launch.backend not in BACKENDS:
        raise ConfigError(f"--on {launch.backend}: write one of {', '.join(BACKENDS)}")
    made: Backend = resolve_name(BACKENDS[launch.backend])(launch)
    return made


def program_of(launch: Launch, *, same_machine: bool) -> str:
    """Return how diloco is called where islands run: as configured; as here, where that is the same installation."""
    here = f"{shlex.quote(sys.executable)} -m diloco" if same_machine else "diloco"
    return launch.config.launch.program or here


def call(
    words: Sequence[str], who: str, missing: str, *,
    text: str | None = None, timeout_s: float = CALL_S, hints: Mapping[int, str] = MappingProxyType({}),
) -> str:  # fmt: skip
    """Run a command and return what it prints; raise LaunchError with its own last words where it fails.

    `who` is what it stands for in messages, `missing` what to do where there is no such command here, `hints` what to
    do by exit codes.
    """
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{who} does not answer within {timeout_s:.0f} s: try again") from None
    except OSError as error:
        raise LaunchError(f"{words[0]} cannot be started ({error.strerror}): {missing}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise LaunchError(f"{who}: {last}{hints.get(done.returncode, '')}")
    return done.stdout


def attach_words(launch: Launch, island: Island, *, config: str, secret: str, folder: str) -> list[str]:
    """Return the arguments of `diloco` that let an island take part, however often it was started before."""
    words = ["run", config, "--attach", secret, "--dir", folder, "--port", str(island.port)]
    return [*words, *own_words(launch, island)]


def own_words(launch: Launch, island: Island) -> list[str]:
    """Return the options of `diloco run` by which this island trains: its own mesh, and a program of somebody's own."""
    script = launch.config.launch.script
    return [*island.changes, *([] if script is None else ["--script", script])]


def fill(name: str, values: Mapping[str, object], own: str | None = None) -> str:
    """Fill in a template: a plain file in which {{name}} stands for a value; one in the folder `own` replaces ours.

    A line that holds nothing else gets all lines of the value, indented as it is; none where the value is empty.
    """
    path = TEMPLATES / name if own is None or not (Path(own) / name).exists() else Path(own) / name
    text = path.read_text(encoding="utf-8")
    if unknown := set(re.findall(r"\{\{(\w+)\}\}", text)) - set(values):
        raise ConfigError(f"{path}: {{{{{min(unknown)}}}}} stands for nothing: use {', '.join(sorted(values))}")

    def value(found: re.Match[str]) -> str:
        if found["word"]:
            return str(values[found["word"]])
        whole = str(values[found["line"]]) if values[found["line"]] else ""
        return indent(whole.rstrip(), found["margin"]) + "\n" if whole else ""

    # in one pass: what a value holds in double braces is its own
    return re.sub(r"^(?P<margin>[ ]*)\{\{(?P<line>\w+)\}\}\n|\{\{(?P<word>\w+)\}\}", value, text, flags=re.MULTILINE)


def torchrun_of(program: str) -> str:
    """Return how torchrun is called, where diloco is called like this."""
    words = program.removesuffix(" -m diloco")
    if words != program:
        return f"{words} -m torch.distributed.run"
    return f"{program.removesuffix('diloco')}torchrun" if program.endswith("diloco") else "torchrun"


def new_islands(config: Config, first: int, count: int, *, nodes: int, gpus: int) -> tuple[Island, ...]:
    """Return islands that are to be launched, from island-`first` on; raise ConfigError if they cannot be like that.

    The mesh follows what is asked for: `island.fsdp` grows with nodes and GPUs, unless it is configured. Islands that
    are added later have a mesh of their own.
    """
    island = config.island
    asked, configured = nodes * max(1, gpus), island.fsdp * island.tp
    if asked == configured or (not gpus and configured % nodes == 0):
        fsdp, processes = None, configured
    elif asked % island.tp or (first == 0 and "fsdp" in island.model_fields_set):
        raise ConfigError(
            f"--nodes-per-island {nodes} with --gpus-per-node {gpus} asks for {asked} processes, and island.fsdp="
            f"{island.fsdp} x island.tp={island.tp} is {configured}: set them so that their product is {asked}"
        )
    else:
        fsdp, processes = asked // island.tp, asked
        if config.launch.script is None and island.batch % (fsdp * island.least_accumulate):
            raise ConfigError(
                f"island.batch={island.batch}: {asked} processes of an island make island.fsdp={fsdp}, so it must be a "
                f"multiple of {fsdp * island.least_accumulate} (island.fsdp times island.accumulate)"
            )
    base = config.launch.port
    numbers = range(first, first + count)
    if base + 2 * (first + count) > 65535:
        raise ConfigError(f"launch.port={base}: {first + count} islands take two ports each: use a lower one")
    return tuple(Island(f"island-{k}", base + 2 * k, nodes, processes // nodes, gpus, fsdp) for k in numbers)
