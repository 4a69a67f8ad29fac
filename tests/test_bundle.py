"""`diloco bundle`: what a bug report needs, and no secret; and output that somebody stops to read."""

import base64
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from alone import train

from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.errors import SaveError
from diloco.history.bundle import about, pack, without_secrets
from diloco.units import format_size


def contents(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as packed:
        return {each.name: packed.extractfile(each).read() for each in packed.getmembers()}


def test_no_key_and_no_ticket_is_in_the_archive(small, tmp_path, command):
    """A run that has trained, whose ticket somebody has pasted where it does not belong."""
    config = small(checkpoint={"remote": None})
    train(config)
    run = tmp_path / "run"
    owner = Identity.load(run / "owner.key")
    ticket = Ticket.issue(owner, ["/ip4/10.0.0.1/tcp/1"], now=0.0, lifetime_s=60)
    (run / "ticket").write_text(ticket.render())
    other = Ticket.issue(owner, [], now=0.0, lifetime_s=60)  # of somebody else: no file here has it
    key = (run / "identity.key").read_bytes()
    with (run / "diloco.log").open("ab") as log:
        log.write(f"joined with {ticket.render()} and {other.render()}\n".encode())
        log.write(key + b" " + key.hex().encode() + b" " + base64.b64encode(key) + b"\n")
        log.write(b"copied to s3://me:password@bucket/runs?X-Signature=abcdef&region=eu\n")
    made = command("bundle", run, "--out", tmp_path / "b.tar.gz")
    assert made.code == 0, made.err
    found = contents(tmp_path / "b.tar.gz")
    wanted = ("config.yaml", "events.jsonl", "outer/history.jsonl", "about.json", "status.txt", "why.txt")
    assert {f"run/{name}" for name in wanted} <= set(found)
    everything = b"\n".join(found.values())
    secrets = [ticket.render().encode(), other.render().encode(), ticket.secret, ticket.secret.hex().encode()]
    for file in ("identity.key", "owner.key"):
        raw = (run / file).read_bytes()
        secrets += [raw, raw.hex().encode(), base64.b64encode(raw), base64.urlsafe_b64encode(raw)]
    assert [secret for secret in secrets if secret in everything] == []
    assert b"diloco2-" not in everything and b"password" not in everything and b"abcdef" not in everything
    assert b"s3://(secret)@bucket/runs" in everything and b"region=eu" in everything
    assert not any(name.endswith((".key", "ticket", "invites")) for name in found)


def test_an_archive_is_never_written_over(tmp_path):
    (tmp_path / "there").write_text("mine")
    with pytest.raises(SaveError, match="already exists"):
        pack(tmp_path, tmp_path / "there", {})
    assert (tmp_path / "there").read_text() == "mine" and about()["diloco"]


def test_of_a_long_file_whole_lines_go_in_so_that_no_half_of_a_secret_does(tmp_path, monkeypatch):
    (tmp_path / "ticket").write_text("diloco2-" + "S" * 40)
    (tmp_path / "diloco.log").write_text(f"joined with {(tmp_path / 'ticket').read_text()} today\nround 7\n")
    monkeypatch.setattr("diloco.history.bundle.LAST_BYTES", 30)
    pack(tmp_path, tmp_path / "b.tar.gz", {})
    assert contents(tmp_path / "b.tar.gz")[f"{tmp_path.name}/diloco.log"] == b"round 7\n"


def test_an_archive_that_could_not_be_finished_is_not_left_behind(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(UnicodeEncodeError):
        pack(tmp_path / "run", tmp_path / "b.tar.gz", {"status.txt": "\ud800"})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_text_without_secrets_stays_as_it_is():
    text = b"round 7 of island-1 at http://example.com/a?page=3 in diloco-runs"
    assert without_secrets(text, []) == text


def test_sizes_just_below_the_next_unit_have_no_exponent():
    assert format_size(1000 * 1024) == "1000 KiB" and format_size(1023 * 2**20) == "1023 MiB"
    assert format_size(1024**2) == "1 MiB" and format_size(1536) == "1.5 KiB"


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_any_more_says_so_and_trains_on(small, tmp_path):
    from diloco.config.file import render_config

    (tmp_path / "config.yaml").write_text(render_config(small(log={"every": 1})))
    words = [sys.executable, "-m", "diloco", "run", "config.yaml"]
    run = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stderr is not None
    run.stdout.readline()
    run.stdout.close()
    said = run.stderr.read()
    assert run.wait(120) == 0, said
    assert said.count("nobody reads this output any more: training goes on") == 1 and "Traceback" not in said
    assert '"finished": true' in (tmp_path / "run" / "events.jsonl").read_text()
