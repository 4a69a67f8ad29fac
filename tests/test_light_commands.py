"""What does not train does not import torch: an error is told at once, and who only watches processes stays small."""

import gc
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
