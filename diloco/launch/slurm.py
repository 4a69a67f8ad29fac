"""Islands as tasks of Slurm arrays: task K of an array is island-K; islands that are added later are another array.

The run's folder is on a file system that the nodes share. The templates `slurm.sh` and `machine.sh` are the jobs: they
restart an island that fails, queue one again that has left, and pass on requests to stop.
"""

import re
import shlex
import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from diloco.errors import ConfigError, LaunchError
from diloco.launch.backend import LOGS, Island, JobState, Launch, call, fill, own_words, program_of, torchrun_of

AT = "at"  # in RUN/launch: a file for each island with HOST:PORT, where it was started last
MACHINE = "machine.sh"
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SUSPENDED", "SPECIAL_EXIT", "RESIZING")
RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED")


class Slurm:
    """Submit islands to Slurm by sbatch, and follow them by squeue."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.options = launch, launch.config.launch

    def check(self, islands: Sequence[Island]) -> None:
        """Refuse a machine without Slurm's commands, and a configuration that Slurm would misread."""
        if shutil.which("sbatch") is None:
            raise LaunchError(
                "there is no sbatch here: launch from a machine of the cluster, or with --on ssh or local"
            )
        if set('"\\\n') & set(str(here := self.launch.here.absolute())):
            raise ConfigError(
                f"checkpoint.dir={here.parent}: sbatch misreads quotation marks and backslashes: rename it"
            )
        for option in self.options.extra:
            if not option.startswith("-") or "\n" in option:
                raise ConfigError(f"launch.extra={option!r}: write options of sbatch, as in --mem=64G")

    def place(self, islands: Sequence[Island]) -> list[Island]:
        """Return the islands as they are: Slurm chooses the nodes."""
        return list(islands)

    def render(self, islands: Sequence[Island]) -> dict[str, str]:
        """Return a job file for all islands that are alike, and the script that runs on each of their nodes."""
        jobs = {_file(alike): self._job(alike) for alike in _alike(islands)}
        return {**jobs, MACHINE: fill(MACHINE, {}, self.options.templates)}

    def _job(self, islands: Sequence[Island]) -> str:
        options, here, first = self.options, self.launch.here.absolute(), islands[0]
        base = Path(options.dir or self.launch.folder).expanduser().absolute()
        program = program_of(self.launch, same_machine=options.container is None)
        values = {
            "job": self.job_name, "array": ",".join(str(island.number) for island in islands),
            "logs": str(here / LOGS).replace("%", "%%"),  # of which sbatch makes one
            "nodes": first.nodes, "processes": first.processes, "port": options.port, "restarts": options.restarts,
            "grace_s": max(1, int(options.grace_s)), "interface": shlex.quote(options.interface or ""),
            "options": "\n".join(f"#SBATCH {option}" for option in self._options(first)),
            "setup": "\n".join(self._setup()), "srun": " ".join(self._srun(base)), "program": program,
            "torchrun": torchrun_of(program), "changes": shlex.join(own_words(self.launch, first)),
            "here": shlex.quote(str(here)), "folder": shlex.quote(str(base)), "directory": shlex.quote(str(Path.cwd())),
        }  # fmt: skip
        return fill("slurm.sh", values, options.templates)

    @property
    def job_name(self) -> str:
        """Return what all jobs of this run are called."""
        return f"diloco-{self.launch.config.run}"

    def _options(self, island: Island) -> list[str]:
        given = {
            "--partition": self.options.partition, "--account": self.options.account, "--time": self.options.time,
            "--gpus-per-node": island.gpus or None,
        }  # fmt: skip
        return [*(f"{name}={value}" for name, value in given.items() if value is not None), *self.options.extra]

    def _setup(self) -> list[str]:
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.options.environment.items()]
        return [*(f"module load {shlex.quote(name)}" for name in self.options.modules), *exports, *self.options.setup]

    def _srun(self, base: Path) -> list[str]:
        if self.options.container is None:
            return []
        own = sorted({str(base), str(self.launch.folder.absolute())})
        mounts = ",".join(path if ":" in path else f"{path}:{path}" for path in (*own, *self.options.mounts))
        return [shlex.quote(f"--container-image={self.options.container}"), shlex.quote(f"--container-mounts={mounts}")]

    def submit(self, islands: Sequence[Island]) -> dict[str, str]:
        """Submit the job files; each island is a task of an array."""
        (self.launch.here / LOGS).mkdir(exist_ok=True)
        jobs: dict[str, str] = {}
        try:
            for alike in _alike(islands):
                array = _array_of(_call("sbatch", "--parsable", str(self.launch.here / _file(alike))))
                jobs |= {island.name: f"{array}_{island.number}" for island in alike}
        except LaunchError:
            if jobs:  # nobody would know of these: all are submitted, or none
                _call("scancel", *jobs.values())
            raise
        return jobs

    def states(self) -> dict[str, JobState]:
        """Ask Slurm how the islands' tasks are. It forgets those that have ended after a while."""
        islands = [island for island in self.launch.islands if island.job]
        if not islands:
            return {}
        wanted = f"--name={self.job_name}"
        listed = _call("squeue", "--noheader", "--array", "--states=all", wanted, "--format=%F_%K|%T|%N|%r")
        found = dict(line.strip().split("|", 1) for line in listed.splitlines() if "|" in line)
        return {island.name: self._state(island, found.get(island.job)) for island in islands}

    def _state(self, island: Island, line: str | None) -> JobState:
        place = self.launch.here / AT / island.name
        address = place.read_text().strip() if place.exists() else ""
        if line is None:
            return JobState("gone", detail="Slurm has forgotten it")
        state, nodes, reason = line.split("|", 2)
        if state in RUNNING:
            return JobState("running", nodes, address, "" if state == "RUNNING" else state.lower())
        if state in WAITING:
            return JobState("waiting", detail=reason)
        if state == "COMPLETED":
            return JobState("finished")
        return JobState("left" if state in ("CANCELLED", "PREEMPTED") else "failed", nodes, detail=state.lower())

    def cancel(self, islands: Sequence[Island]) -> None:
        """Cancel tasks: Slurm asks them to stop, and kills what is left after its KillWait. Their logs stay."""
        if jobs := [island.job for island in islands if island.job]:
            _call("scancel", *jobs)
        for island in islands:
            (self.launch.here / AT / island.name).unlink(missing_ok=True)

    def collect(self, islands: Sequence[Island]) -> dict[str, Path]:
        """Return the logs, which Slurm writes where they belong."""
        files = {island.name: self.launch.here / LOGS / f"{island.name}.log" for island in islands}
        return {name: path for name, path in files.items() if path.exists()}


def _alike(islands: Sequence[Island]) -> list[list[Island]]:
    """Group islands that ask for the same nodes: an array's tasks do."""

    def asked(island: Island) -> tuple[object, ...]:
        return island.nodes, island.processes, island.gpus, island.changes

    return [list(group) for _, group in groupby(sorted(islands, key=asked), key=asked)]


def _file(islands: Sequence[Island]) -> str:
    return f"slurm-{min(island.number for island in islands)}.sh"


def _array_of(printed: str) -> str:
    """Return the job's number from what `sbatch --parsable` prints, among lines that a site's wrapper adds."""
    found = re.findall(r"^(\d+)(?:;\S*)?\s*$", printed, flags=re.MULTILINE)
    if not found:
        raise LaunchError(
            f"sbatch has printed no job's number but {printed.strip()[:200]!r}: look with squeue, cancel what was "
            "submitted, and have sbatch --parsable print the number on a line of its own"
        )
    return str(found[-1])


def _call(*words: str) -> str:
    return call(words, words[0], "launch where Slurm is")
