"""Plain saves: replaced where their step was saved before, pruned by age, never fewer than there were; written while
training goes on."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from alone import train
from conftest import SMALL

from diloco.atomic import ASIDE
from diloco.checkpoint.save.facts import FACTS, read_facts, saves
from diloco.checkpoint.save.saver import KEEP, Saver, finish_save, read_inner, read_outer, write_save
from diloco.errors import SaveError
from diloco.history.load import load_trained

WORKER = Path(__file__).with_name("save_worker.py")


def put(folder: Path, step: int, round: int, clock: int | None = None) -> Path:
    """Its round is its value."""
    value = torch.tensor([float(round)])
    facts = {**dict.fromkeys(FACTS), "round": round, "step": step, "outer_step": clock}
    return write_save(folder, step, inner={"model": value}, outer={"parameters": value}, facts=facts)


def rounds(folder: Path) -> dict[int, int]:
    found = {read_facts(save)["step"]: read_facts(save)["round"] for save in saves(folder)}
    assert [float(read_outer(save)["parameters"]) for save in saves(folder)] == [*found.values()]
    return found


def test_a_save_of_a_step_that_was_saved_before_takes_its_place(tmp_path):
    put(tmp_path, 400, 7)
    put(tmp_path, 400, 8)
    assert rounds(tmp_path) == {400: 8}
    assert [path.name for path in tmp_path.iterdir()] == ["save-00000400"]


def test_the_oldest_by_round_goes_and_never_the_one_just_written(tmp_path):
    put(tmp_path, 400, 7)
    put(tmp_path, 300, 8)
    put(tmp_path, 350, 9)
    assert rounds(tmp_path) == {300: 8, 350: 9}
    put(tmp_path, 100, 6)  # of a heavier branch with fewer rounds
    assert rounds(tmp_path) == {100: 6, 350: 9} and KEEP == 2


def test_rounds_that_begin_again_are_later_by_the_clock_of_their_state(tmp_path):
    for step, round in ((50, 11), (60, 13), (65, 1), (70, 2)):
        put(tmp_path, step, round, clock=step)
    assert rounds(tmp_path) == {65: 1, 70: 2}


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_whoever_dies_while_replacing_leaves_one_of_both(tmp_path, monkeypatch, dies):
    put(tmp_path, 400, 7)
    renames, real = [], Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name.startswith("save-"):
            if len(renames) == dies:
                raise KeyboardInterrupt
            renames.append(path)
        return real(path, target)

    def keep(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", rename)
    if dies == 2:
        monkeypatch.setattr(shutil, "rmtree", keep)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path, 400, 8)
    monkeypatch.undo()
    assert rounds(tmp_path) == {400: 8 if dies == 2 else 7}
    put(tmp_path, 500, 9)
    assert rounds(tmp_path) == {400: 8 if dies == 2 else 7, 500: 9}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["save-00000400", "save-00000500"]


def test_a_disk_that_refuses_the_new_one_gives_the_old_one_back(tmp_path, monkeypatch):
    put(tmp_path, 400, 7)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.suffix == ".part":
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(SaveError, match="No space left"):
        put(tmp_path, 400, 8)
    monkeypatch.undo()
    assert rounds(tmp_path) == {400: 7}


def test_a_model_is_found_while_its_only_save_is_being_replaced(run, monkeypatch):
    for save in saves(run)[:-1]:
        shutil.rmtree(save)
    (only,) = saves(run)

    def read(save: Path) -> dict[str, object]:
        if only.exists():
            only.rename(only.with_name(only.name + ASIDE))
        return read_facts(save)

    monkeypatch.setattr("diloco.history.load.read_facts", read)
    assert load_trained(run).step > 0


class Gate:
    """Writing in the background waits until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        monkeypatch.setattr("diloco.checkpoint.save.saver.finish_save", self._write)

    def _write(self, *arguments: object, **named: object) -> Path:
        assert threading.current_thread().name != "save" or self.open.wait(20)
        return finish_save(*arguments, **named)  # type: ignore[arg-type]


@pytest.fixture
def gate(monkeypatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def begin(saver: Saver, step: int) -> torch.Tensor:
    """The inner state that it saves; all of it is the step."""
    inner, outer = torch.tensor([float(step)] * 3), torch.tensor([float(step)])
    facts = {**dict.fromkeys(FACTS), "round": step, "step": step}
    saver.begin(step, inner={"model": {"weights": inner}}, outer={"parameters": outer}, facts=facts)
    return inner


def test_what_is_written_is_what_was_there_when_it_began(tmp_path, gate):
    told: list[int] = []
    saver = Saver(tmp_path, lambda step, path, seconds: told.append(step), pytest.fail)
    put(tmp_path, 1, 1)
    inner = begin(saver, 2)
    inner.zero_()
    assert saver.writing and list(rounds(tmp_path)) == [1] and told == []
    gate.open.set()
    saver.wait()
    assert rounds(tmp_path) == {1: 1, 2: 2} and told == [2] and not saver.writing
    found = {"model": {"weights": torch.zeros(3)}}
    read_inner(saves(tmp_path)[-1], into=found)
    assert found["model"]["weights"].tolist() == [2.0] * 3


def test_one_save_waits_for_the_one_before(tmp_path, gate):
    told: list[int] = []
    saver = Saver(tmp_path, lambda step, path, seconds: told.append(step), pytest.fail)
    begin(saver, 1)
    second = threading.Thread(target=begin, args=(saver, 2))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    gate.open.set()
    second.join(20)
    saver.wait()
    assert told == [1, 2]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a bug")])
def test_a_save_that_fails_is_told_of_and_the_next_one_is_written(tmp_path, monkeypatch, error):
    told: list[object] = []
    saver = Saver(tmp_path, lambda step, path, seconds: told.append(step), told.append)

    def refuse(*_: object) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr("diloco.checkpoint.save.saver.write_tensors", refuse)
        begin(saver, 1)
        saver.wait()
    assert isinstance(error, RuntimeError) or list(tmp_path.iterdir()) == []  # the log needs the space
    begin(saver, 2)
    saver.wait()
    assert isinstance(told[0], SaveError) and str(error.args[-1]) in str(told[0]) and told[1:] == [2]
    assert rounds(tmp_path) == {2: 2}


def test_the_end_of_a_run_waits_for_what_is_being_written(small, gate):
    threading.Timer(1.0, gate.open.set).start()
    life = train(small(checkpoint={"snapshot_every": 2}))
    assert [event.kind for event in life.heard.events][-2:] == ["end", "agreed"]
    assert [event["step"] for event in life.events("save")] == [10, 12]


@pytest.mark.soak
def test_whoever_is_killed_while_writing_leaves_whole_saves(tmp_path):
    random, newest = Random(5), 0
    for _ in range(3):
        worker = subprocess.Popen([sys.executable, WORKER, "endless", tmp_path], stdout=subprocess.PIPE, text=True)
        try:
            for _ in range(random.randrange(2, 6)):
                newest = int(worker.stdout.readline())
            threading.Event().wait(random.random() / 20)
        finally:
            worker.kill()
            worker.communicate()
        assert max(rounds_of_whole(tmp_path)) >= newest


def rounds_of_whole(folder: Path) -> list[int]:
    found = []
    for save in saves(folder):
        number, model = read_facts(save)["round"], {"model": torch.zeros(300_000)}
        read_inner(save, into=model)
        assert set(model["model"].tolist()) == set(read_outer(save)["parameters"].tolist()) == {float(number)}
        found.append(number)
    return found


@pytest.mark.slow
def test_processes_of_a_mesh_save_what_was_there_when_it_began(tmp_path):
    tree = {**SMALL, "island": {"batch": 8, "device": "cpu", "fsdp": 2}, "checkpoint": {"dir": str(tmp_path / "run")}}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, str(WORKER), "mesh", str(tmp_path / "config.json")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
