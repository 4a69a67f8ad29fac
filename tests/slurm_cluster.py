"""A real Slurm on this machine for tests: virtual nodes with fake GPUs (`cluster/slurm.sh`), and a run on it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from attached import free_ports
from launched import wait_until

from diloco.checkpoint.log.replica import vectors_digest
from diloco.elastic.protocol.ranges import size
from diloco.history.log import furthest, newest_state, state_of
from diloco.report.events import Round, of_kind
from diloco.report.watching import Tail

SCRIPT = Path(__file__).parent / "cluster" / "slurm.sh"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")
SETTINGS = """\
model: {preset: tiny, blocks: 1, width: 32, heads: 2, feed_forward: 64}
data: {sequence: 32}
island: {batch: 8, device: cpu}
inner: {lr: 1e-3, warmup: 2, schedule: constant, steps: 10000000}
sync: {every: 20}
elastic: {silence_s: 5}
evaluate: {every: 0}
"""
LAUNCH = """\
launch:
  partition: all
  time: 1:00:00
  grace_s: 40
"""


@contextmanager
def slurm(folder: Path, nodes: int, gpus: int) -> Iterator[dict[str, str]]:
    """Start a cluster, and give the variables by which its commands find it; nothing of it stays."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    if any(shutil.which(name) is None for name in NEEDED):
        installed = subprocess.run([SCRIPT, "install"], capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"Slurm cannot be installed here: {installed.stderr.strip()[-200:]}")
    conf, port = f"{folder}/slurm.conf", str(20000 + os.getpid() % 5000)
    environment = {**os.environ, "SLURM_TEST_DIR": str(folder), "SLURM_TEST_PORT": port, "SLURM_CONF": conf}
    try:
        up = subprocess.run([SCRIPT, "up", str(nodes), str(gpus)], env=environment, capture_output=True, text=True)
        assert up.returncode == 0, up.stdout + up.stderr
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True)
        wait_until(lambda: not subprocess.run(["squeue", "-h"], env=environment, capture_output=True).stdout, 60)
        subprocess.run([SCRIPT, "down"], env=environment, check=True)


class SlurmRun:
    """One run on a test cluster, as a person starts it: a configuration and commands."""

    def __init__(self, environment: dict[str, str], folder: Path, name: str) -> None:
        self.environment, self.folder, self.name, self.dir = environment, folder, name, folder / "runs" / name
        self.launch = f"{LAUNCH}  port: {free_ports(20) + 10}\n"  # the machines of an island meet below it
        (folder / "run.yaml").write_text(f"run: {name}\n{SETTINGS}{self.launch}")
        self.commands: list[str] = []

    def diloco(self, *words: str) -> str:
        """What a command prints; one that fails fails the test."""
        self.commands.append(" ".join(("diloco", *words)))
        return self.call(sys.executable, "-m", "diloco", *words)

    def call(self, *words: str) -> str:
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    @property
    def jobs(self) -> dict[str, str]:
        """State by task, as in 7_2, of all that Slurm has not forgotten."""
        listed = self.call(
            "squeue", "-h", "-r", "-t", "all", "-n", f"diloco-{self.name}", "-o", "%F_%K %T"
        ).splitlines()
        return dict(line.split() for line in listed)

    def task(self, number: int) -> str:
        """The task that is this island."""
        return next(job for job in self.jobs if job.endswith(f"_{number}"))

    def rounds(self, number: int) -> list[int]:
        """The rounds to which an island has contributed, as it says itself."""
        name = f"island-{number}"
        events = Tail(self.dir / name / "events.jsonl").read()
        return [event.round for event in of_kind(events, Round) if name in event.contributors]

    @property
    def last_round(self) -> int:
        return max((number for k in range(16) for number in self.rounds(k)), default=0)

    def finish(self) -> None:
        """Let the run end soon: islands go on while the command is on its way, so it may have to be said again."""
        for more in (2000, 8000, 32000):
            events = Tail(self.dir / "island-0" / "events.jsonl").read()
            steps = max(event.step for event in of_kind(events, Round)) + more
            words = (sys.executable, "-m", "diloco", "set", f"runs/{self.name}/island-0", f"inner.steps={steps}")
            if subprocess.run(words, cwd=self.folder, env=self.environment).returncode == 0:
                return
        raise AssertionError(self.logs())

    def starts(self, number: int) -> int:
        """How often Slurm has started an island's job."""
        log = self.dir / "launch" / "logs" / f"island-{number}.log"
        return log.read_text().count(f"island-{number} starts on") if log.exists() else 0

    def comes_back(self, number: int, *command: str) -> None:
        """Do something to an island, and wait until it was started again and contributes."""
        before = self.starts(number)
        self.call(*command)
        assert wait_until(lambda: self.starts(number) > before, 900), self.logs()
        assert self.contributes(number, after=self.last_round), self.logs()

    def contributes(self, number: int, after: int) -> bool:
        """Wait until an island has contributed to a round after this one."""
        return wait_until(lambda: max(self.rounds(number), default=0) > after, 900)

    def ends(self) -> bool:
        """Wait until no job of the run is left."""
        over = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT")
        return wait_until(lambda: all(state in over for state in self.jobs.values()), 1800)

    def logs(self) -> str:
        """What the jobs have printed, for a test that fails."""
        files = sorted((self.dir / "launch" / "logs").glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in files)

    def outcome(self, islands: int) -> tuple[int, int]:
        """Digests of the last states of all islands, counted, and samples that were taken twice."""
        logs = [self.dir / f"island-{number}" / "outer" for number in range(islands)]
        last = newest_state(furthest(logs))
        digests = {vectors_digest(state_of(log, newest_state(log).head.round)[1]) for log in logs}
        return len(digests), size(last.ledger.overlaps)


def variables_of(process: Path) -> dict[str, str]:
    """The variables of a process in /proc; none where it has just ended."""
    try:
        words = (process / "environ").read_bytes().decode().split("\0")
    except (OSError, UnicodeDecodeError):
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def devices(run: SlurmRun) -> set[tuple[str, str, str]]:
    """Node, island and GPUs of every process that trains in this run."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        own = variables_of(process)
        if own.get("DILOCO_FINISHED") == str(run.dir / "launch" / "finished") and "SLURM_STEP_ID" in own:
            found.add((own["SLURMD_NODENAME"], f"island-{own['SLURM_ARRAY_TASK_ID']}", own["CUDA_VISIBLE_DEVICES"]))
    return found
