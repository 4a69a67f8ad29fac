"""What does not train does not import torch: an error is told at once, and who only watches processes stays small."""

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.cli.shared import loading

CONFIG = "run: light\nmodel: {preset: tiny}\ndata: {source: stdlib, sequence: 64}\nisland: {device: cpu}\n"
HEAVY = "torch", "hivemind", "numba"

PROGRAM = f"""
import sys
from diloco.cli import main
sys.argv = ["diloco", *sys.argv[1:]]
try:
    main()
finally:
    print("imported:", *[name for name in {HEAVY!r} if name in sys.modules])
"""


@pytest.mark.parametrize(
    "words",
    [
        ["run", "no-such.yaml"],
        ["run", "run.yaml", "--set", "inner.lr=none"],
        ["run", "run.yaml", "--islands", "2", "--resume"],
        ["join", "no-ticket"],
        ["launch", "run.yaml", "--islands", "2", "--dry-run"],
        ["launch", "--list", "no-run"],
        ["log", "no-run"],
        ["status", "no-run"],
        ["why", "no-run", "island-1"],
        ["ls"],
        ["stop", "no-run"],
        ["bundle", "no-run"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1].split() == ["imported:"], done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_an_island_of_one_process_trains_and_saves_without_what_meshes_and_compilers_need(tmp_path: Path) -> None:
    """They take a second and a half of each start."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    spared = ("torch._dynamo", "sympy", "torch.distributed.tensor", "torch.distributed.fsdp")
    sets = [word for each in ("inner.steps=2", "inner.warmup=1", "sync.every=1") for word in ("--set", each)]
    program = PROGRAM.replace(repr(HEAVY), repr(spared))
    words = [sys.executable, "-c", program, "run", "run.yaml", *sets]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1].split() == ["imported:"], done.stdout + done.stderr
    assert list(tmp_path.glob("runs/light/**/save-*")), (done.stdout, [*tmp_path.rglob("*")])


def test_who_starts_the_processes_of_a_mesh_imports_nothing_heavy() -> None:
    program = f"import sys, diloco.launch.mesh_processes; print([n for n in {HEAVY!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_garbage_collector_pauses_for_imports_only_and_leaves_them_out_from_then_on() -> None:
    gc.unfreeze()
    try:
        with pytest.raises(ImportError), loading():
            assert not gc.isenabled()
            raise ImportError("no such module")
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


POOLS = """
import sys, threading
from diloco.cli import main
sys.argv = ["diloco", "--version"]
try:
    main()
except SystemExit:
    pass
meeting = threading.Barrier(17)
def work():
    kept = bytes(100_000)
    meeting.wait(), meeting.wait()
for _ in range(16):
    threading.Thread(target=work).start()
meeting.wait()
words = [line.split() for line in open("/proc/self/maps")]
print(sum(len(each) == 5 and each[1] == "rw-p" and int(each[0].split("-")[0], 16) % 2**26 == 0 for each in words))
meeting.wait()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such pools")
def test_threads_share_a_few_pools_of_freed_memory() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    done = subprocess.run([sys.executable, "-c", POOLS], capture_output=True, text=True, env=environment, check=True)
    assert int(done.stdout.splitlines()[-1]) <= 4
