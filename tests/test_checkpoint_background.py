"""Files that are written while training goes on: any reader of safetensors reads them, and their writer rests."""

import hashlib
import math
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco.checkpoint.log.writing import DTYPES, PIECE, REST, WritePace, write_tensors
from diloco.checkpoint.save.saver import Saver, read_inner, read_outer, write_save

FACTS = {"round": 1}


@pytest.mark.parametrize("count", [0, 1, 1001])
def test_every_type_comes_back_from_the_file(tmp_path: Path, count: int) -> None:
    tensors = {str(dtype): torch.arange(count).to(dtype) for dtype in DTYPES}
    tensors["a matrix, turned"] = torch.arange(12.0).view(3, 4).T
    digest = hashlib.sha256()
    write_tensors(tmp_path / "x.safetensors", tensors, seen=digest.update)
    assert digest.digest() == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).digest()
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_rests_many_times_as_long_as_it_worked_unless_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = WritePace()
    pace.begin()
    started = time.monotonic()
    work(0.02)
    pace.rest()
    assert time.monotonic() - started >= 0.02 * REST
    pace.begin()
    work(0.02)
    pace.hurry()
    monkeypatch.setattr("diloco.checkpoint.log.writing.REST", 1e9)
    pace.rest()  # at once, or it would never come back


def test_rests_no_more_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.checkpoint.log.writing.REST", 1e9)
    pace = WritePace(seconds=0.0)
    pace.begin()
    work(0.02)
    pace.rest()  # at once, or it would never come back


def test_a_save_has_half_the_time_since_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([10.0, 50.0, 56.0])
    saver = Saver(tmp_path, lambda step, path, seconds: None, pytest.fail)  # type: ignore[arg-type]
    monkeypatch.setattr("diloco.checkpoint.save.saver.time.monotonic", lambda: next(moments))
    assert [saver._time_to_spare() for _ in range(3)] == [math.inf, 20.0, 3.0]


def test_a_save_rests_after_every_few_megabytes_of_either_file(tmp_path: Path) -> None:
    rests: list[float] = []
    inner = {f"w{i}": torch.rand(PIECE // 4) for i in range(3)}
    outer = {"parameters": torch.rand(2 * PIECE // 4)}
    path = write_save(tmp_path, 1, inner=inner, outer=outer, facts=FACTS, rest=lambda: rests.append(0))
    assert len(rests) >= 3 + 2
    back = {name: torch.empty_like(value) for name, value in inner.items()}
    read_inner(path, into=back)
    assert all(torch.equal(back[name], inner[name]) for name in inner)
    assert torch.equal(read_outer(path)["parameters"], outer["parameters"])


def test_who_waits_for_a_save_does_not_wait_for_its_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.checkpoint.log.writing.REST", 1e9)  # without hurry it would rest for ever
    written: list[Path] = []
    saver = Saver(tmp_path, lambda step, path, seconds: written.append(path), pytest.fail)  # type: ignore[arg-type]
    saver.begin(1, inner={"w": torch.rand(PIECE)}, outer={"parameters": torch.rand(PIECE)}, facts=FACTS)
    saver.wait()
    assert [path.name for path in written] == ["save-00000001"] and not saver.writing
