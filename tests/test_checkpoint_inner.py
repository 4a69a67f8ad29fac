"""An island's inner state on disk: every value comes back as it was, whatever mesh wrote it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.checkpoint.save.inner import StagedInner, write_rank
from diloco.checkpoint.save.saver import read_inner, read_inner_tree
from diloco.errors import SaveError


def put(folder: Path, state: dict[str, Any]) -> Path:
    (folder / "inner").mkdir()
    write_rank(folder / "inner", 0, 1, StagedInner.of(state))
    return folder


def test_whatever_an_optimizer_keeps_comes_back(tmp_path: Path):
    kinds = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16
    state = {
        "kinds": [torch.arange(12).view(3, 4).to(kind) for kind in kinds],
        "numbers": {0: 7, 1: float("inf"), "of": (None, True, "text", -1.5e-300)},
        "odd": {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "turned": torch.arange(6.0).view(2, 3).T},
        "same/name": torch.ones(1),
        "same": {"name": torch.zeros(1)},
    }
    found = read_inner_tree(put(tmp_path, state))
    assert found.keys() == state.keys() and found["numbers"] == state["numbers"]
    assert [part.dtype for part in found["kinds"]] == [*kinds]
    for here, there in zip(found["kinds"], state["kinds"], strict=True):
        assert here.view(torch.uint8).equal(there.view(torch.uint8))
    assert all(torch.equal(found["odd"][name], value) for name, value in state["odd"].items())
    assert (found["same/name"].item(), found["same"]["name"].item()) == (1, 0)


def test_the_state_of_an_optimizer_with_lists_comes_back(tmp_path: Path):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([weight])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    before = optimizer.state_dict()
    found = read_inner_tree(put(tmp_path, {"moments": before["state"]}))["moments"]
    assert found[0].keys() == before["state"][0].keys() and len(found[0]["old_dirs"]) > 0
    for here, there in zip(found[0]["old_dirs"], before["state"][0]["old_dirs"], strict=True):
        assert torch.equal(here, there)
    torch.optim.LBFGS([weight]).load_state_dict({**before, "state": found})


def cut(folder: Path, whole: torch.Tensor, boxes: list[tuple[slice, slice]]) -> None:
    """As processes that hold these parts of one matrix would write it."""
    (folder / "inner").mkdir()
    for rank, box in enumerate(boxes):
        part = whole[box].contiguous()
        node = {
            "tensor": "w", "shape": list(whole.shape), "dtype": "float32", "offset": [side.start for side in box],
            "part": list(part.shape),
        }  # fmt: skip
        write_rank(folder / "inner", rank, len(boxes), StagedInner({"dict": [["w", node]]}, {"w": part}))


def test_parts_of_any_cut_make_up_the_whole(tmp_path: Path):
    whole = torch.rand(5, 6)
    rows, columns = (slice(0, 3), slice(3, 5)), (slice(0, 4), slice(4, 6))
    cut(tmp_path, whole, [(row, column) for row in rows for column in columns] + [(rows[0], columns[0])])  # one twice
    into = {"w": torch.zeros(5, 6)}
    read_inner(tmp_path, into)
    assert torch.equal(into["w"], whole)


def test_a_part_that_is_missing_is_named(tmp_path: Path):
    cut(tmp_path, torch.rand(5, 6), [(slice(0, 3), slice(0, 6)), (slice(3, 4), slice(0, 6))])
    with pytest.raises(SaveError, match=r"it lacks a part of the inner state's w\): delete"):
        read_inner(tmp_path, {"w": torch.zeros(5, 6)})
    with pytest.raises(SaveError, match=r"w is \[5, 6\] there and \[6, 5\] here"):
        read_inner(tmp_path, {"w": torch.zeros(6, 5)})
    (tmp_path / "inner" / "rank-00001.json").unlink()
    with pytest.raises(SaveError, match="rank-00001"):
        read_inner(tmp_path, {"w": torch.zeros(5, 6)})


def test_what_no_save_can_hold_is_refused_by_name():
    with pytest.raises(SaveError, match="optimizer/0/history is a set, and saves hold tensors, numbers and text only"):
        StagedInner.of({"optimizer": {0: {"history": {1, 2}}}})


@pytest.mark.parametrize(
    "index",
    [
        "", "[]", "7", "{}", '{"format": 9, "ranks": 1, "tree": {"dict": []}}',
        '{"format": 1, "ranks": 1e999, "tree": {}}', '{"format": 1, "ranks": 1, "tree": "list"}',
        '{"format": 1, "ranks": 1, "tree": {"dict": [["w", {"tensor": "w", "shape": [2], "dtype": "load"}]]}}',
        '{"format": 1, "ranks": 1, "tree": {"dict": [["w", {"tensor": "x", "shape": [2], "dtype": "float32", '
        '"offset": [-9], "part": [99]}]]}}',
        json.dumps({"format": 1, "ranks": 1, "tree": 0}).replace("0", "[" * 9000 + "]" * 9000),
    ],
)  # fmt: skip
def test_an_index_that_is_not_ours_is_refused_in_one_line(tmp_path: Path, index: str):
    put(tmp_path, {"w": torch.ones(2)})
    (tmp_path / "inner" / "rank-00000.json").write_text(index)
    with pytest.raises(SaveError, match="inner cannot be loaded") as refused:
        read_inner(tmp_path, {"w": torch.ones(2)})
    assert "\n" not in str(refused.value)
