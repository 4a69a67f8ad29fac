"""What keeps somebody from joining is told in one line, with what to do."""

import time
from pathlib import Path

import pytest

from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.errors import JoinRefused
from diloco.run.genesis import Genesis

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


def test_a_run_that_speaks_another_protocol():
    """As a member of a run of 0.1.0 gives it to whoever joins."""
    raw, run, *_ = FOUR.read_bytes().split(b"\n")
    genesis = Genesis.given(raw, bytes.fromhex(run.decode()))
    with pytest.raises(JoinRefused, match=r"^the run speaks protocol 4, this diloco 7: diloco 0\.1\.0 reads it$"):
        genesis.configure({})
