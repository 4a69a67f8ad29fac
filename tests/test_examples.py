"""The examples of every --help: each can be typed as it stands after the quickstart, or after what it says itself."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from diloco.cli.app import app

ROOT = Path(__file__).parent.parent
ROOT_COMMAND = typer.main.get_command(app)
# the same rounds in a second, as small as a model can be
SMALLER = [
    "model.width=16",
    "model.blocks=1",
    "data.sequence=16",
    "island.batch=1",
    "evaluate.samples=2",
    "log.every=100",
]


def examples(command: Any = ROOT_COMMAND) -> Iterator[str]:
    for below in getattr(command, "commands", {}).values():
        yield from examples(below)
    if command.epilog:
        yield command.epilog.removeprefix("Example: ")


ALL = list(examples())
# in this order, in one folder, after the quickstart and a run that others can join
TYPED = [
    "diloco init run.yaml --model tiny --data stdlib --islands 2",
    "diloco config examples/quickstart.yaml --set inner.lr=1e-3",
    "diloco tokenize docs/ README.md --out data.tokens",
    "diloco export quickstart exported/quickstart",
    "diloco status quickstart",
    "diloco why quickstart",
    "diloco ls",
    "diloco stop islands",
    "diloco bundle quickstart",
    "diloco log quickstart --checkout 12 out/round-12",
    "diloco rewind quickstart 12 --set inner.lr=1e-4",
    "diloco set islands inner.lr=1e-4 inner.steps=4000",
    'diloco sample quickstart "def main(" --tokens 100',
    "diloco plan examples/islands.yaml --islands 4 --link 1gbit,40ms --accelerator h100",
    "diloco completion bash",
    "diloco ticket create islands --islands 2 --days 7",
    "diloco ticket list islands",
    "diloco ticket show islands",
    "diloco ticket key runs/second",
    "diloco key export runs/second second.key",
    "diloco key import second.key runs/second",
]
SOAKED = [
    "diloco simulate virtual --islands 100 --link 100mbit,40ms --mtbf 1min",
    "diloco bench codec --json",
    "diloco bench plan --json",
    "diloco bench checkpoint --json",
    "diloco bench overhead --json",
]
ELSEWHERE = {  # what runs them, in place of this file
    "diloco demo": "make record, and its parts in test_habits.py",
    "diloco run examples/quickstart.yaml": "the run that all others need",
    "diloco join diloco2-": "test_docs_run.py", "diloco doctor runs/islands/ticket": "test_doctor.py",
    "diloco launch run.yaml --on slurm": "test_slurm.py", "diloco restore s3://": "test_checkpoint_remote.py",
    "diloco evict": "test_evict.py", "diloco force-roster": "test_force.py", "diloco ticket revoke": "test_tickets.py",
    "diloco simulate examples/islands.yaml": "test_docs_run.py", "diloco simulate protocol": "make soak",
    "diloco bench": "tests/prove.py", "diloco dashboard": "test_dashboard.py", "diloco report": "test_dashboard.py",
}  # fmt: skip


def type_in(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "diloco", *shlex.split(line)[1:]]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("line", ALL)
def test_every_example_has_options_that_exist_and_is_run_somewhere(line):
    words = [word.rstrip("…") or word for word in shlex.split(line)[1:]]
    command = ROOT_COMMAND
    while getattr(command, "commands", None):
        name = words[0] if words[0] in command.commands else "islands"  # simulate's first
        words = words[1:] if words[0] in command.commands else words
        command = command.commands[name]
    command.make_context(command.name, words)  # raises for what it does not know
    assert line in TYPED or line in SOAKED or any(line.startswith(known) for known in ELSEWHERE)


@pytest.mark.soak
def test_the_examples_work_on_the_quickstart_run(tmp_path):
    for name in ("examples", "docs", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    sets = "".join(f" --set {change}" for change in SMALLER)
    done = type_in(tmp_path, f"diloco run examples/quickstart.yaml{sets}")
    assert done.returncode == 0, done.stderr
    few = " --set inner.steps=24 --islands 1"
    assert type_in(tmp_path, f"diloco run examples/islands.yaml{sets}{few}").returncode == 0
    failed = {}
    for line in TYPED:
        done = type_in(tmp_path, line)
        if done.returncode or done.stderr.startswith(("error", "Traceback")):
            failed[line] = done.stdout[-300:] + done.stderr
    assert failed == {}
    assert set(TYPED) <= set(ALL) and set(SOAKED) <= set(ALL)


@pytest.mark.soak
@pytest.mark.parametrize("line", SOAKED)
def test_the_longer_examples_work(tmp_path, line):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    done = type_in(tmp_path, line)
    assert done.returncode in (0, 1), done.stderr  # 1: a limit did not hold on a machine that is busy
    assert "Traceback" not in done.stderr
