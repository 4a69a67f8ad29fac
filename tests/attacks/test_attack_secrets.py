"""Secrets lie in files that their owner alone can read, and in no others."""

import base64
from pathlib import Path

import pytest
from launched import islands

from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket

SECRET_FILES = {"ticket", "invites", "identity.key", "owner.key"}
TICKETS = {"ticket", "invites"}


@pytest.mark.slow
def test_secrets_are_in_their_own_files_only_and_these_are_private(tmp_path: Path):
    """Two islands, from founding to the end, with all that they and their launcher write. The launcher shows the ticket
    on its terminal, to whoever has founded the run."""
    with islands(tmp_path, "inner.steps=20") as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    private = [path for path in files if path.name in SECRET_FILES]
    assert {path.name for path in private} == SECRET_FILES
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in private} == dict.fromkeys(SECRET_FILES, "0o600")
    tickets = [Ticket.parse(line, 0.0) for path in files if path.name in TICKETS for line in path.read_text().split()]
    assert any(ticket.secret for ticket in tickets)
    secrets = {ticket.render().encode() for ticket in tickets}
    for secret in {ticket.secret for ticket in tickets if ticket.secret}:
        secrets |= {secret, secret.hex().encode(), base64.urlsafe_b64encode(secret).rstrip(b"=")}
    secrets |= {path.read_bytes() for path in private if path.suffix == ".key"}
    told = {path: path.read_bytes() for path in files if path not in private}
    assert len(told) > 20
    assert [path for path, data in told.items() if any(secret in data for secret in secrets)] == []
    for island in ("island-1", "island-2"):  # each has a key of its own
        assert Identity.load(tmp_path / "run" / island / "identity.key").peer_id
