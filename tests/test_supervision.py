"""An island of several processes of which one dies or hangs: real processes, real signals, started as people do it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from conftest import SMALL, read_events
from launched import wait_until

from diloco.launch import devices
from diloco.launch.mesh_processes import BEGAN, LIVES, SUPERVISED, run_processes
from diloco.launch.restarts import continues
from diloco.run.folder import OWNER_KEY

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
LONG_RUN = {
    **SMALL,
    "model": {"preset": "tiny", "blocks": 1, "width": 32, "heads": 2, "feed_forward": 64},
    "island": {**SMALL["island"], "fsdp": 2},
    "inner": {"lr": 1e-3, "warmup": 2, "steps": 1_000_000},
    "sync": {"every": 20},
    "evaluate": {"every": 0},
}


class MeshIsland:
    """An island alone, of two processes; whoever has started them is `process`."""

    def __init__(self, folder: Path, launcher: tuple[str, ...], supervised: bool, **changes: object) -> None:
        self.folder, self.output = folder / "run", folder / "output.log"
        (folder / "run.yaml").write_text(
            yaml.safe_dump({**LONG_RUN, "checkpoint": {"dir": str(self.folder)}, **changes})
        )
        command = [sys.executable, *launcher, "-m", "diloco", "run", str(folder / "run.yaml")]
        environment = {**os.environ, **({SUPERVISED: "1"} if supervised else {})}
        with self.output.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def starts(self) -> int:
        path = self.folder / "events.jsonl"
        events = read_events(path) if path.exists() else []
        places = [at for at, event in enumerate(events) if event["event"] == "start"]
        return sum(any(event["event"] == "step" for event in events[at:]) for at in places)

    def trains(self, life: int) -> None:
        assert wait_until(lambda: self.starts() >= life or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()

    def pid(self, rank: int) -> int:
        """Return the number of a rank's process: they are the last children, in the order of ranks."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[rank - 2])

    def text(self) -> str:
        return self.output.read_text()

    def named(self) -> list[str]:
        return [line for line in self.text().splitlines() if line.startswith("error[process]")]


@contextmanager
def island(folder: Path, *launcher: str, supervised: bool = False, **changes: object) -> Iterator[MeshIsland]:
    """Whatever happens, no process of it stays."""
    started = MeshIsland(folder, launcher, supervised, **changes)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()


SHORT = [pytest.param((1, signal.SIGKILL), (0, signal.SIGSTOP), id="kill a process, stop the leader")]
REST = [
    pytest.param((0, signal.SIGKILL), (1, signal.SIGSTOP), id="kill the leader, stop a process", marks=pytest.mark.soak)
]


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "stopped"), [*SHORT, *REST])
def test_an_island_names_the_process_that_dies_or_stops_and_restarts_by_itself(tmp_path, killed, stopped):
    with island(tmp_path) as mesh:
        mesh.trains(life=1)
        first = mesh.pid(killed[0])
        os.kill(first, killed[1])
        mesh.trains(life=2)
        second = mesh.pid(stopped[0])
        os.kill(second, stopped[1])
        mesh.trains(life=3)
        died, hung = mesh.named()
        assert f"process {killed[0]} of 2 (host " in died and f"pid {first}) was killed by SIGKILL at " in died
        assert f"process {stopped[0]} of 2 (host " in hung and f"pid {second}) is stopped (SIGSTOP) since " in hung
        assert "the island restarts in 1 s" in died and "the island restarts in 2 s" in hung
        notes = [event["text"] for event in read_events(mesh.folder / "events.jsonl") if event["event"] == "note"]
        assert [text.removeprefix("restarted: ") for text in notes] == [
            line.removeprefix("error[process]: ").rpartition("; ")[0] for line in (died, hung)
        ]
        assert not Path(f"/proc/{second}").exists()
        mesh.process.send_signal(signal.SIGTERM)
        assert mesh.process.wait(120) == 0, mesh.text()
        assert list(mesh.folder.glob("save-*/facts.json"))


@pytest.mark.soak
@pytest.mark.parametrize("rank", [1, 0])
def test_under_torchrun_the_processes_name_a_stopped_one_themselves_and_go_on_after_its_restart(tmp_path, rank):
    with island(tmp_path, *TORCHRUN) as mesh:
        mesh.trains(life=1)
        pid = mesh.pid(rank)
        os.kill(pid, signal.SIGSTOP)
        mesh.trains(life=2)
        (line,) = mesh.named()
        assert f"process {rank} of 2 (host " in line and f"pid {pid}) is stopped (SIGSTOP) since " in line
        events = read_events(mesh.folder / "events.jsonl")
        assert [event["what"] for event in events if event["event"] == "elastic"] == ["joined"]  # by its own disk


@pytest.mark.cluster
def test_in_a_stuck_collective_the_process_is_named_that_lives_and_does_not_enter_it():
    worker = str(Path(__file__).parent / "hang_worker.py")
    done = subprocess.run([sys.executable, *TORCHRUN[:-2], worker], capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error[process]")]
    assert done.returncode != 0 and lines
    assert "process 1 of 2 (host " in lines[0] and "has not moved on since " in lines[0]
    assert "in inner step 1 (read_for_ever in hang_worker.py:" in lines[0]
    assert "process 0, in inner step 1 (all_reduce in distributed_c10d.py:" in lines[0]


@pytest.mark.cluster
def test_an_island_that_somebody_else_restarts_ends_with_the_name_of_the_process(tmp_path):
    with island(tmp_path, supervised=True) as mesh:
        mesh.trains(life=1)
        os.kill(mesh.pid(1), signal.SIGKILL)
        assert mesh.process.wait(120) == 128 + signal.SIGKILL
        (line,) = mesh.named()
        assert line.endswith("; the island ends with it")


@pytest.mark.slow
def test_what_is_refused_is_not_started_again(tmp_path):
    missing = str(tmp_path / "no-such-file")
    with island(tmp_path, data={"source": "text", "path": missing, "sequence": 32}) as mesh:
        assert mesh.process.wait(300) == 2
        assert mesh.named() == [] and mesh.text().count(missing) == 1


UNSHARED = 'mkdir -p "$0/machine-$RANK" && cd "$0/machine-$RANK" && exec "$1" -m diloco run "$0/run.yaml"'


@pytest.mark.cluster
def test_an_island_of_several_machines_without_a_shared_folder_is_refused_before_its_first_step(tmp_path):
    """The two processes stand in different folders, as on two machines with disks of their own."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**LONG_RUN, "checkpoint": {"dir": "run"}}))
    words = [*TORCHRUN[:-2], "--no-python", "bash", "-c", UNSHARED, str(tmp_path), sys.executable]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error[save]")]
    assert f"{tmp_path}/machine-1/run (process 1): not the same folder as" in line
    assert "a file system that all machines share" in line
    assert not list(tmp_path.glob("machine-*/run/save-*")) and not list(tmp_path.glob("machine-*/run/outer/*"))
    assert not list(tmp_path.glob("machine-*/run/.shared-*"))


def test_a_restart_resumes_what_its_last_life_left_but_never_a_run_that_fresh_was_to_replace(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    (folder / "outer").mkdir(parents=True)
    (folder / OWNER_KEY).touch()
    monkeypatch.setenv(LIVES, "1")
    assert not continues(folder, fresh=False)  # killed before it had begun
    (folder / "outer" / "log-0.seg").touch()
    assert continues(folder, fresh=False)
    monkeypatch.setenv(BEGAN, str((folder / OWNER_KEY).stat().st_mtime - 1))
    assert continues(folder, fresh=True)
    monkeypatch.setenv(BEGAN, str((folder / OWNER_KEY).stat().st_mtime + 1))
    assert not continues(folder, fresh=True)  # the run is an earlier one: its successor had not got that far
    monkeypatch.setenv(LIVES, "0")
    assert not continues(folder, fresh=False)


TELL = "TELL_THE_TEST"


def tell() -> None:
    """Say who this process is, in place of the command that each process of a mesh runs; the second one fails once, and
    is refused once, as by a bucket that cannot be reached just then."""
    rank, life = os.environ["RANK"], os.environ[LIVES]
    words = [rank, "of", os.environ["WORLD_SIZE"], "life", life, "threads", os.environ["OMP_NUM_THREADS"]]
    with Path(os.environ[TELL], rank).open("a") as file:
        print(*words, "anew" if os.environ[TELL] not in COLLECTED else "forked", file=file)
    os.write(1, f"the words of {rank}\n".encode())
    if rank == "1" and life in ("0", "1"):
        sys.exit(1 + int(life))


COLLECTED: set[str] = set()  # by the process that starts the others


@pytest.mark.parametrize("how", ["forked", "anew"])
def test_processes_of_a_mesh_are_forked_but_not_where_there_may_be_gpus(tmp_path, monkeypatch, capfd, how):
    (tmp_path / "driver").touch()
    monkeypatch.setattr(devices, "DRIVERS", (str(tmp_path / "driver"),) if how == "anew" else ())
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv(TELL, str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules[__name__])  # what a new interpreter would run first
    COLLECTED.add(str(tmp_path))
    assert run_processes(2, tell, 30.0) == 0
    assert (tmp_path / "1").read_text() == "".join(f"1 of 2 life {life} threads 2 {how}\n" for life in (0, 1, 2))
    assert f"0 of 2 life 2 threads 2 {how}\n" in (tmp_path / "0").read_text()
    out, err = capfd.readouterr()
    assert set(out.splitlines()) == {"the words of 0"}
    assert "process 1 of 2 (host " in err and "ended, before its first sign: the words of 1; the island restarts" in err
