"""What keeps somebody from joining is told in one line, with what to do."""

import fcntl
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.errors import JoinRefused
from diloco.run.folder import OUTER, remove_if_refused
from diloco.run.genesis import FILE, Genesis
from diloco.version import PROTOCOL

FOUR = Path(__file__).parent / "data" / "0.1.0" / "pair" / "island-1" / "outer" / "genesis.json"


@pytest.mark.parametrize("given", ["runs/islands/tickt", "diloco3-" + "x" * 300])
def test_what_is_no_ticket(command, given):
    told = command.refused("join", given)
    assert "a ticket begins with diloco2-" in told and len(told) < 250


def test_a_folder_that_cannot_be_made(command, tmp_path: Path):
    owner, peer = (Identity.load(tmp_path / name) for name in ("owner", "peer"))
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{peer.peer_id}"
    ticket = Ticket.issue(owner, [address], now=time.time(), lifetime_s=60.0).render()
    (tmp_path / "file").touch()
    assert "name another one with --dir" in command.refused("join", ticket, "--dir", tmp_path / "file" / "run")


def refused_after(folder: Path, *made: str) -> None:
    """As an island that makes these files and is then refused."""
    with pytest.raises(JoinRefused), ExitStack() as stack:
        stack.push(remove_if_refused(folder))
        for name in made:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        raise JoinRefused("no")


def test_who_is_refused_leaves_nothing_behind(tmp_path: Path):
    refused_after(tmp_path / "runs" / "new", "identity.key", "names", ".lock", f"{OUTER}/{FILE}")
    assert list(tmp_path.iterdir()) == []


def test_who_is_refused_leaves_what_was_there_before(tmp_path: Path):
    (tmp_path / "notes").touch()
    (tmp_path / "empty").mkdir()
    refused_after(tmp_path, "identity.key", "addresses")
    refused_after(tmp_path / "empty", "identity.key")
    assert {path.name for path in tmp_path.rglob("*")} == {"notes", "empty"}


def test_what_was_fetched_of_a_state_is_not_fetched_again(tmp_path: Path):
    refused_after(tmp_path / "new", "identity.key", f"{OUTER}/download/about")
    assert (tmp_path / "new" / "identity.key").exists()


def test_a_run_that_nobody_is_in(command, tmp_path: Path):
    owner, peer = (Identity.load(tmp_path / name) for name in ("owner", "peer"))
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{peer.peer_id}"
    ticket = Ticket.issue(owner, [address], now=time.time(), lifetime_s=60.0).render()
    assert "nobody answers at" in command.refused("join", ticket)
    assert not (tmp_path / "runs").exists()
    several = [sys.executable, "-m", "diloco", "join", "-", "--fsdp", "2", "--dir", "runs/mesh"]
    found = subprocess.run(several, cwd=tmp_path, input=ticket, capture_output=True, text=True)
    assert "nobody answers at" in found.stderr  # each process has the ticket, which only the first has read


def test_a_folder_that_another_process_trains_in(command, run: Path):
    key = Identity.load(run / "identity.key")
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{key.peer_id}"
    ticket = Ticket.issue(Identity.load(run / "owner.key"), [address], now=time.time(), lifetime_s=60.0).render()
    resume = "run", run / "config.yaml", "--resume", "--islands", 1
    with (run / ".lock").open("w") as lock, open(key.path, "rb") as other:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)
        for words in (("join", ticket, "--dir", run), (*resume, "--set", f"checkpoint.dir={run}")):
            assert "error[save]: another process is training in" in command.refused(*words)


def test_a_run_that_speaks_another_protocol():
    """As a member of a run of 0.1.0 gives it to whoever joins."""
    raw, run, *_ = FOUR.read_bytes().split(b"\n")
    genesis = Genesis.given(raw, bytes.fromhex(run.decode()))
    with pytest.raises(
        JoinRefused, match=rf"^the run speaks protocol 4, this diloco {PROTOCOL}: diloco 0\.1\.0 reads it$"
    ):
        genesis.configure({})
