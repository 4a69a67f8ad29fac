import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
from forked import FORKED

from diloco.bench.baselines import FP16_ERROR_LIMIT, gloo_seconds, hivemind_seconds
from diloco.bench.processes import BenchPeer, WorkerFailed, run_peers

LONG_S = 1000.0
SOON_S = 60.0
COUNT = 20_000


def processes_with(mark: str) -> list[int]:
    """Every other process that inherited this from its environment, whoever its parent is now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # not ours, or gone meanwhile
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
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


@pytest.fixture(autouse=True)
def warm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes from a server that has their modules, but for those that a mark in the environment finds."""
    if "mark" not in request.fixturenames:
        monkeypatch.setattr("diloco.bench.processes.mp.get_context", lambda _: FORKED)


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
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # tests in the background do not
    code = f"{heeds}; import test_bench_peers as t; t.run_peers(2, t.wait_long_with_a_child, 'told')"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.send_signal(number)
    assert parent.wait(SOON_S) != 0
    assert eventually(lambda: processes_with(mark) == [])


def wait_for_one_that(peer: BenchPeer, sleeps_s: float) -> None:
    if peer.index == 0:
        time.sleep(sleeps_s)
    else:
        peer.barrier(timeout_s=0.1 if sleeps_s else SOON_S)


@pytest.mark.parametrize(
    ("sleeps_s", "complaint"),
    [(LONG_S, "peer 1 waited 0.1 s for the others"), (0.0, "peer 1 waits for peer 0, which has ended already")],
)
def test_nobody_waits_for_ever(sleeps_s: float, complaint: str) -> None:
    with pytest.raises(WorkerFailed, match=complaint):
        run_peers(2, wait_for_one_that, sleeps_s)


def test_gloo_averages_and_its_warm_up_does_not_count() -> None:
    figures = gloo_seconds(2, COUNT, repeats=3)
    assert len(figures["seconds_of_each"]) == 3
    assert figures["seconds"] == sorted(figures["seconds_of_each"])[1]
    assert figures["max_error"] < 1e-6


@pytest.mark.slow
def test_hivemind_averages_in_fp16_and_leaves_no_daemon(mark: str) -> None:
    try:
        figures = hivemind_seconds(2, COUNT, repeats=1)
    except WorkerFailed:  # on a busy machine its peers give each other up: said, as it must be, and tried once more
        figures = hivemind_seconds(2, COUNT, repeats=1)
    assert 0 < figures["allreduce_seconds"] < figures["seconds"]
    assert 1e-5 < figures["max_error"] < FP16_ERROR_LIMIT
    assert eventually(lambda: processes_with(mark) == [])
