"""Write the run folders that later versions of diloco must be able to go on with: `python tests/write_fixtures.py`.

Trains with the diloco that is installed (or that PYTHONPATH names) and writes to `tests/data/VERSION/`:

    text.txt              what is trained on: the LICENSE
    alone.yaml, alone/    `diloco run alone.yaml`, stopped in the middle of a phase, after some rounds
    pair.yaml, pair/      `diloco run pair.yaml --islands 2`, paused after some rounds: logs, snapshots, saves
    digests.json          of each island of the pair, at its last round: digests of the chain and of all vectors

Folders of earlier versions stay as they are: write them once, when a version is released, and never again. All paths
are relative to that folder, and what only holds paths, process ids or warnings is left out. Git does not keep the modes
of key files: a copy has to be made private (chmod 600) before it is used.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from diloco.checkpoint.log.replica import vectors_digest
from diloco.history.log import newest_state, state_of
from diloco.version import __version__

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
TOO_LONG_S = 300.0
COMMON = {
    "model": {"preset": "tiny", "blocks": 1, "width": 16, "heads": 2, "feed_forward": 32, "tied": True},
    "data": {"source": "text", "path": "text.txt", "sequence": 32},
    "island": {"batch": 4, "device": "cpu"},
    "outer": {"lr": 0.7},
    "evaluate": {"samples": 4},
    "log": {"every": 1},
}
ALONE = {
    "run": "alone",
    **COMMON,
    "inner": {"lr": 3e-3, "warmup": 2, "steps": 2000},
    "sync": {"every": 5},
    "checkpoint": {"dir": "alone", "snapshot_every": 2},
}
PAIR = {
    "run": "pair",
    **COMMON,
    "inner": {"lr": 3e-3, "warmup": 2, "steps": 60},
    "sync": {"every": 5},
    "elastic": {"min_islands": 2, "silence_s": 2.0},
    "checkpoint": {"dir": "pair", "snapshot_every": 3, "keep": 0},
}
NOT_NEEDED = ("*.log", ".lock", "cache", "islands.json", "download")


def main() -> None:
    folder = DATA / __version__
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / "LICENSE", folder / "text.txt")
    write_run(folder, ALONE, (), lambda: reached(folder / "alone", "step", 12))
    write_run(
        folder, PAIR, ("--islands", "2"), lambda: reached(folder / "pair" / "island-2", "round", 6)
    )  # one past a snapshot
    found = {island.name: digests(island / "outer") for island in sorted((folder / "pair").glob("island-*"))}
    (folder / "digests.json").write_text(json.dumps({"pair": found}, indent=1) + "\n")
    print(f"{folder}: {json.dumps(found)}")


def write_run(folder: Path, config: dict[str, object], options: tuple[str, ...], ready: Callable[[], bool]) -> None:
    name = str(config["run"])
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    command = [sys.executable, "-m", "diloco", "run", f"{name}.yaml", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as run:
        stop_when(ready, run)
        said = run.communicate(timeout=TOO_LONG_S)[0].decode()
    if "--resume" not in said:
        raise SystemExit(f"the run {name} was not stopped in the middle:\n{said}")
    for pattern in NOT_NEEDED:
        for path in list((folder / name).rglob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def stop_when(ready: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    too_late = time.monotonic() + TOO_LONG_S
    while not ready() and run.poll() is None:
        if time.monotonic() > too_late:
            run.kill()
            raise SystemExit(f"{run.args} takes longer than {TOO_LONG_S:.0f} s")
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)


def reached(island: Path, event: str, number: int) -> bool:
    path = island / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    told = [found for found in map(json.loads, lines) if found["event"] == event]
    return bool(told) and told[-1][event] >= number


def digests(log: Path) -> dict[str, object]:
    """Where an island's log leads."""
    head = newest_state(log).head
    return {"round": head.round, "chain": head.digest, "vectors": vectors_digest(state_of(log, head.round)[1])}


if __name__ == "__main__":
    main()
