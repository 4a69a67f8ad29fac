"""Which process of an island hangs, from the signs of life of all: pure, on a made clock."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from launched import wait_until

from diloco.island.activity import Activity, Sign
from diloco.island.hangs import LONG, SILENT_S, STOPPED_S, HangDetector, ProcessState, process_state
from diloco.island.signs import FolderSigns

HANG_S = 100.0
STEP = Sign(1, "node-1", 42, calls=7, text="inner step 3", where="wait in x.py:1", in_collective=True, long=False)


class Watched:
    """Processes that give a sign every second, each in its own way."""

    def __init__(self, *signs: Sign) -> None:
        self.now, self.signs, self.silent = 1000.0, list(signs), set[int]()
        self.states: dict[int, ProcessState] = {}
        self.detector = HangDetector(len(signs), HANG_S, self.now)

    def run(self, seconds: float):
        """Return what is found within that time, and after how many seconds."""
        for passed in range(int(seconds)):
            self.now += 1.0
            self.detector.wake(self.now)
            for rank, sign in enumerate(self.signs):
                if rank not in self.silent:
                    self.signs[rank] = replace(sign, number=sign.number + 1)
                self.detector.observe(rank, self.signs[rank], self.states.get(rank), self.now)
            if (hang := self.detector.find(self.now)) is not None:
                return hang, passed + 1
        return None


def test_a_process_that_works_is_left_alone_however_slow():
    island = Watched(STEP, STEP)
    for _ in range(20):
        assert island.run(HANG_S - 1) is None  # a step takes nearly as long as it may
        island.signs = [replace(sign, calls=sign.calls + 1) for sign in island.signs]


def test_a_stopped_process_is_named_with_what_it_was_doing():
    island = Watched(STEP, STEP)
    island.run(5)
    island.silent, island.states = {1}, {0: ProcessState(False, 1.0), 1: ProcessState(True, 1.0)}
    hang, after_s = island.run(60)
    assert hang.rank == 1 and after_s == STOPPED_S
    assert "process 1 of 2 (host node-1, pid 42) is stopped (SIGSTOP) since " in hang.text
    assert hang.text.endswith("in inner step 3 (wait in x.py:1)")


def test_a_silent_process_of_another_machine_is_named_later():
    island = Watched(STEP, STEP, STEP)
    island.run(5)
    island.silent = {0}  # the leader
    hang, after_s = island.run(60)
    assert (hang.rank, after_s) == (0, SILENT_S) and "gives no sign of life" in hang.text


def test_silence_of_a_process_that_computes_is_no_hang_until_hang_s():
    """One call into C that keeps all other threads waiting: it uses the processor, so it lives."""
    island = Watched(STEP, STEP)
    island.silent = {1}
    for second in range(int(HANG_S) - 1):
        island.states = {1: ProcessState(False, float(second))}
        assert island.run(1) is None
    island.states = {1: ProcessState(False, HANG_S)}
    hang, _ = island.run(3)
    assert hang.rank == 1


def test_in_a_stuck_collective_the_one_is_named_that_did_not_enter_it():
    late = replace(STEP, calls=6, text="inner step 3", where="read in batches.py:9", in_collective=False)
    hang, after_s = Watched(STEP, STEP, late, STEP).run(2 * HANG_S)
    assert (hang.rank, after_s) == (2, HANG_S + 1)  # the first second saw it move
    assert "process 2 of 4" in hang.text and "has not moved on" in hang.text
    assert "read in batches.py:9" in hang.text and "process 3, in inner step 3 (wait in x.py:1)" in hang.text


def test_of_equal_counts_the_one_outside_of_a_collective_is_named():
    hang, _ = Watched(STEP, replace(STEP, in_collective=False), STEP).run(2 * HANG_S)
    assert hang.rank == 1


@pytest.mark.parametrize("waiting", [{"waits": True}, {"done": True}])
def test_a_leader_that_waits_for_other_islands_and_one_that_leaves_may_take_hours(waiting):
    island = Watched(replace(STEP, **waiting), replace(STEP, **waiting))
    assert island.run(100 * HANG_S) is None


def test_a_first_step_or_a_save_gets_longer():
    island = Watched(replace(STEP, long=True), STEP)
    assert island.run(LONG * HANG_S) is None
    assert island.run(2) is not None


def test_what_was_not_seen_while_the_watcher_itself_slept_does_not_count():
    island = Watched(STEP, STEP)
    island.run(10)
    island.silent = {0, 1}
    island.now += 10_000  # a closed laptop
    assert island.run(SILENT_S - 1) is None
    assert island.run(2) is not None


def test_a_process_that_never_gave_a_sign_has_the_time_of_a_start():
    detector = HangDetector(2, HANG_S, 0.0, {0: 17, 1: 18})
    for now in range(int(LONG * HANG_S)):
        detector.wake(now)
        detector.observe(0, replace(STEP, number=now, calls=now), None, now)
        assert detector.find(now) is None
    hang = detector.find(LONG * HANG_S)
    assert hang is not None and "process 1 of 2 (host " in hang.text and "pid 18) gives no sign" in hang.text
    assert hang.text.endswith("before its first sign")


def test_signs_say_what_the_main_thread_does(tmp_path):
    activity, signs = Activity(), FolderSigns(tmp_path)
    activity.begin("inner step 5")
    found = []

    def give() -> None:
        with activity.during("the wait for other islands", waits=True):
            activity.count()
            signs.put(3, activity.sign())
        signs.put(3, activity.sign())

    thread = threading.Thread(target=give)
    thread.start()
    thread.join()
    found = signs.get(3)
    assert found is not None and (found.number, found.calls, found.text, found.waits) == (2, 1, "inner step 5", False)
    assert "threading.py" in found.where and found.pid == os.getpid()  # join, in the main thread
    assert signs.get(2) is None
    (tmp_path / "sign-2").write_bytes(b'{"number": 1, "ho')  # half written
    assert signs.get(2) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_the_system_says_which_process_is_stopped():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert process_state(process.pid) == ProcessState(False, 0.0)
        process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: process_state(process.pid) == ProcessState(True, 0.0))
        process.kill()
    assert process_state(process.pid) is None
