"""Tickets as people use them: shown on any island, kept off the command line, and good when the founder is gone."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import wait_until
from real_islands import open_islands, together

from diloco.comm.peers.ticket import Ticket
from diloco.history.log import newest_state
from diloco.run.folder import OUTER


def diloco(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "diloco", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.soak
def test_without_its_founder_a_run_still_lets_others_in(tmp_path: Path) -> None:
    """By the ticket that another island shows, given as a string, which nobody on the machine can read."""
    with open_islands(tmp_path) as start:
        founder, second = start(1), start(2)
        assert wait_until(lambda: together([founder, second]), 90)
        assert diloco("ticket", "list", str(founder.folder)).endswith("1 of 100 used: island-2")
        founder.process.kill()
        founder.process.wait()
        shown = diloco("ticket", "show", str(second.folder))
        ticket = Ticket.parse(shown, time.time())
        assert ticket.addresses == tuple((second.folder / "addresses").read_text().split()), "of those who answer"
        assert 0 < ticket.head[0] <= newest_state(second.folder / OUTER).head.round
        command = [sys.executable, "-m", "diloco", "join", shown, "--name", "third", "--dir", str(tmp_path / "third")]
        third = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            since = time.time()
            assert wait_until(lambda: third.poll() is not None or second.rounds_of(2, since), 120)
            line = Path(f"/proc/{third.pid}/cmdline").read_bytes()
            assert shown.encode() not in line and b"*" * len(shown) in line
        finally:
            third.kill()
            assert "error" not in third.communicate()[1]


@pytest.mark.slow
def test_a_ticket_is_in_no_file_but_its_own(tmp_path: Path) -> None:
    with open_islands(tmp_path, founders=2) as start:
        islands = [start(1), start(2)]
        assert wait_until(lambda: together(islands), 90)
    secret = Ticket.parse((islands[0].folder / "ticket").read_text(), 0.0).render()[:100].encode()  # invite and key
    holding = {path.name for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_bytes()}
    assert holding == {"ticket", "invites"}
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.name in {*holding, "owner.key"}}
    assert modes == {0o600}
