"""Plain saves: replaced where their step was saved before, pruned by age, never fewer than there were."""

import shutil
from pathlib import Path

import pytest
import torch

from diloco.checkpoint.save import ASIDE, FACTS, KEEP, read_facts, read_outer, saves, write_save
from diloco.errors import SaveError
from diloco.trained import load_trained


def put(folder: Path, step: int, round: int) -> Path:
    """Its round is its value."""
    value = torch.tensor([float(round)])
    facts = {**dict.fromkeys(FACTS), "round": round, "step": step}
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

    monkeypatch.setattr("diloco.trained.read_facts", read)
    assert load_trained(run).step > 0
