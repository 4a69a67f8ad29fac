"""The command that starts an island again, as it can be read in its status."""

import sys

import pytest

from diloco.run.typed import TICKET_WORD, again


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("/b/diloco run c.yaml --fresh --set log.every=2", "/b/diloco run c.yaml --set log.every=2 --resume"),
        ("/b/diloco run c.yaml --resume", "/b/diloco run c.yaml --resume"),
        ("/b/diloco run c.yaml --attach=s.json", "/b/diloco run c.yaml --attach=s.json"),
        (f"/b/diloco join {TICKET_WORD} --dir d", "/b/diloco join TICKET --dir d"),
        ("/b/diloco/__main__.py join t.txt", f"{sys.executable} -m diloco join t.txt"),
        ("train.py --fresh 2", f"{sys.executable} train.py --fresh 2"),
    ],
)
def test_what_was_typed_is_changed_as_far_as_it_has_to_be(monkeypatch, typed, expected):
    monkeypatch.setattr(sys, "argv", typed.split())
    assert again() == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("/v/diloco/__main__.py run c.yaml", "torchrun --nproc-per-node 4 -m diloco run c.yaml --resume"),
        ("train.py", "torchrun --nproc-per-node 4 train.py"),
    ],
)
def test_processes_of_torchrun_are_started_by_it(monkeypatch, typed, expected):
    monkeypatch.setattr(sys, "argv", typed.split())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("DILOCO_MEETING", raising=False)
    assert again() == expected
