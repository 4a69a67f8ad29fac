import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

from diloco.bench.peers import BenchPeer, run_peers
from diloco.bench.processes import WorkerFailed

LONG_S = 1000.0
SOON_S = 60.0


def processes_with(mark: str) -> list[int]:
    """Every other process that inherited this from its environment, whoever its parent is now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # not ours, or gone meanwhile
            continue
    return [pid for pid in found if pid != os.getpid()]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    if not Path("/proc/self/environ").exists():
        pytest.skip("needs /proc")
    resource_tracker.ensure_running()  # multiprocessing's own: it stays as long as we do
    mark = f"DILOCO_BENCH_MARK={uuid.uuid4()}"
    monkeypatch.setenv(*mark.split("="))
    return mark


def talk(peer: BenchPeer, factor: int) -> tuple[int, int, list[list[int]], int]:
    peer.barrier()
    heard = [peer.exchange(peer.index * factor + turn) for turn in range(3)]
    return peer.index, peer.count, heard, torch.get_num_threads()


def test_everybody_hears_everybody_in_order_and_uses_one_thread() -> None:
    heard = [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert run_peers(3, talk, 10) == [(index, 3, heard, 1) for index in range(3)]


def wait_long_with_a_child(peer: BenchPeer, how: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LONG_S})"])
    peer.exchange(child.pid)
    if peer.index == 1:
        fail(how)
    time.sleep(LONG_S)


def fail(how: str) -> None:
    match how:
        case "raise":
            raise ValueError("bad luck")
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "told":
            print("ready", flush=True)


FAILURES = {
    "raise": r"(?s)peer 1 of the bench failed:.*in fail.*ValueError: bad luck",
    "exit": "peer 1 of the bench died: exit code 7",
    "kill": "peer 1 of the bench died: exit code -9",
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_worker_that_fails_is_named_and_ends_the_bench_with_all_it_started(how: str, mark: str) -> None:
    with pytest.raises(WorkerFailed, match=FAILURES[how]):
        run_peers(2, wait_long_with_a_child, how)
    assert eventually(lambda: processes_with(mark) == [])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_parent_is_stopped(number: signal.Signals, mark: str) -> None:
    code = "import test_bench_peers as t; t.run_peers(2, t.wait_long_with_a_child, 'told')"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.send_signal(number)
    assert parent.wait(SOON_S) != 0
    assert eventually(lambda: processes_with(mark) == [])


def come_late(peer: BenchPeer) -> None:
    if peer.index == 0:
        time.sleep(LONG_S)
    peer.barrier(timeout_s=0.1)


def test_a_barrier_does_not_wait_for_ever() -> None:
    with pytest.raises(WorkerFailed, match=r"peer 1 waited 0.1 s for the others"):
        run_peers(2, come_late)


def leave_early(peer: BenchPeer) -> None:
    if peer.index == 1:
        peer.barrier()


def test_whoever_waits_for_one_that_has_ended_is_told() -> None:
    with pytest.raises(WorkerFailed, match="peer 1 waits for peer 0, which has ended already"):
        run_peers(2, leave_early)
