"""`diloco bench memory`: what it counts of a process and of an island's events. Its runs take half an hour."""

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager

import pytest

from diloco.bench.memory import BUDGET, Curve, config_of, seen_in, watching
from diloco.report.events import Round, Start

BYTES = 200 << 20
HOLD = """
import os, sys
mine = bytearray(os.urandom(1)) * {size}
if {forks}:
    if os.fork() == 0:
        other = bytearray(os.urandom(1)) * {size}
        print("there", flush=True); sys.stdin.read()
        os._exit(0)
else:
    print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(*, forks: bool):
    code = HOLD.format(size=BYTES, forks=forks)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"there\n"
        yield process.pid
    finally:
        process.communicate()


@pytest.mark.parametrize("forks", [False, True])
def test_the_memory_of_a_process_and_of_its_children_is_counted_once(forks):
    with holding(forks=forks) as pid, watching(pid) as curve:
        while len(curve.moments) < 3:
            pass
    assert 1.0 <= curve.peak[1] / (BYTES * (2 if forks else 1)) < 1.2


def test_growth_counts_from_the_settled_rounds_on_and_a_peak_is_told_with_its_round():
    config = config_of("classic", 5_000_000, 12)
    rounds = [
        Round(time=10.0 * number, round=number, contributors=("a",), step=number, digest="") for number in range(1, 13)
    ]
    curve = Curve([(0.5 * tick, 10**9 + (tick // 20) * 3_000_000) for tick in range(240)])
    curve.moments[33] = (16.5, 2 * 10**9)  # while the second round goes on
    told = {
        "run": "",
        "dir": "",
        "model": "",
        "data": "",
        "device": "",
        "dtype": "",
        "mesh": "",
        "steps": 1,
        "every": 1,
    }
    sizes = {"parameters": 5_000_000, "trained_parameters": 5_000_000, "data_tokens": None, "tokens_per_step": None}
    start = Start(time=0.0, **told, **sizes)
    seen = seen_in(config, [start, *rounds], curve)
    assert (seen.peak, seen.peak_at) == (2 * 10**9, "round 2")
    assert seen.growth_a_round == pytest.approx(3_000_000)
    assert seen.planned > 8 * seen.parameters


def test_the_budget_is_that_of_the_table():
    assert pytest.approx({"classic": 12.1, "overlapped": 16.1, "streaming": 13.4}, abs=0.05) == BUDGET


MAPPED = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    pages = mmap.mmap(file.fileno(), 0)
sum(pages[::4096])
print("there", flush=True); sys.stdin.read()
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no folder in memory here")
def test_files_that_lie_in_memory_are_counted_apart():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = os.path.join(folder, "file")
        with open(path, "wb") as file:
            file.write(os.urandom(4096) * (BYTES // 4096))
        process = subprocess.Popen([sys.executable, "-c", MAPPED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert process.stdout.readline() == b"there\n"
            with watching(process.pid) as whole, watching(process.pid, folder) as rest:
                while not (whole.moments and rest.moments):
                    pass
        finally:
            process.communicate()
    assert whole.peak[1] > BYTES > 4 * rest.peak[1] > 0
