"""The command that starts an island again, as it can be read in its status."""

import os
import shlex
import sys

import pytest

from diloco.comm.peers.ticket import PREFIX
from diloco.run.typed import LIMIT, MAIN, TICKET_WORD, again

HERE = f"cd {shlex.quote(os.getcwd())} && "


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("/b/diloco run c.yaml --fresh --set log.every=2", "/b/diloco run c.yaml --set log.every=2 --resume"),
        ("/b/diloco run c.yaml --resume", "/b/diloco run c.yaml --resume"),
        ("/b/diloco run c.yaml --attach=s.json", "/b/diloco run c.yaml --attach=s.json"),
        (f"/b/diloco join {TICKET_WORD} --dir d", "/b/diloco join TICKET --dir d"),
        (f"/b/diloco join {PREFIX}abc", "/b/diloco join TICKET"),
        (f"{MAIN} join t.txt", f"{sys.executable} -m diloco join t.txt"),
        ("train.py", f"{sys.executable} train.py"),
        (f"train.py {PREFIX}abc --token secret", f"{sys.executable} train.py …"),
        ("/p/mine/__main__.py", f"{sys.executable} /p/mine/__main__.py"),
    ],
)
def test_what_was_typed_is_changed_as_far_as_it_has_to_be(monkeypatch, typed, expected):
    monkeypatch.setattr(sys, "argv", typed.split())
    assert again() == HERE + expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (f"{MAIN} run c.yaml", "torchrun --nproc-per-node 4 -m diloco run c.yaml --resume"),
        ("train.py", "torchrun --nproc-per-node 4 train.py"),
    ],
)
def test_processes_of_torchrun_are_started_by_it(monkeypatch, typed, expected):
    monkeypatch.setattr(sys, "argv", typed.split())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("DILOCO_MEETING", raising=False)
    assert again() == HERE + expected


def test_a_command_that_would_be_cut_off_is_not_told(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["diloco", "run", "x" * LIMIT])
    assert again() == ""
