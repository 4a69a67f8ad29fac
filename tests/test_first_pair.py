"""Rounds go on where the roster's first two islands cannot reach each other, as they do where its last two cannot."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sorted_islands
import yaml
from conftest import read_events
from launched import wait_until

CUT_S = 240  # from the start: by then all islands have joined over the slow link
CONFIG = {
    "model": {"preset": "tiny"}, "data": {"source": "stdlib", "sequence": 128}, "island": {"batch": 8, "device": "cpu"},
    "inner": {"lr": 3e-3, "warmup": 5, "schedule": "constant", "steps": 100_000},
    "sync": {"every": 5, "codec": "fp32"}, "evaluate": {"samples": 4},
    "elastic": {"start_islands": 4, "start_s": 400, "partition": "quorum"},
}  # fmt: skip


def contributors(island: Path, since_s: float) -> list[list[str]]:
    """Who contributed to each round after so many seconds of the run, as an island has it."""
    events, first = (read_events(each / "events.jsonl") for each in (island, island.parent / "island-1"))
    if not first:  # its file is there before its first event is
        return []
    began = first[0]["time"]
    rounds = [event for event in events if event["event"] == "round" and event["time"] - began > since_s]
    return [event["contributors"] for event in rounds if event["contributors"]]  # others only lease samples


@pytest.mark.soak
@pytest.mark.timeout(2700)
def test_a_cut_between_the_first_two_costs_no_more_than_one_between_the_last_two(tmp_path):
    """Exchanges of 20 s over 2.4 Mbit/s, eight islands for a quarter of an hour, which mostly wait for bytes."""
    runs, environment = [], {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    for name, cut in (("first", "1|2"), ("last", "3|4")):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**CONFIG, "run": name, "checkpoint": {"dir": str(tmp_path / name)}}))
        words = ["simulate", str(path), "--islands", "4", "--link", "2400kbit,40ms", "--cut", f"{cut}@{CUT_S}s..1h"]
        with (tmp_path / f"{name}.log").open("w") as log:
            command = [sys.executable, sorted_islands.__file__, *words]
            runs.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path))
    try:
        last = tmp_path / "last" / "island-1"
        assert wait_until(lambda: (last / "events.jsonl").exists() and len(contributors(last, CUT_S)) >= 20, 1800)
        first = contributors(tmp_path / "first" / "island-3", CUT_S)
        assert len(first) >= 0.7 * len(contributors(last, CUT_S))
        assert all(len(names) >= 3 for names in first)  # nobody alone
    finally:
        for process in runs:
            process.send_signal(signal.SIGINT)
        for process in runs:
            process.wait(240)
