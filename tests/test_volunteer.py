"""Islands of volunteers: hours of the day, bytes a month, a GPU that others use; and identities that move."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import pytest
from conftest import SMALL, read_events
from forked import ForkedCommand
from invited import ticket_in
from launched import TOGETHER, started, wait_until
from real_islands import LINK

from diloco.comm.peers.identity import Identity
from diloco.comm.peers.record import PeerRecord
from diloco.comm.transport.link import Link
from diloco.config.file import load_config
from diloco.errors import DeviceError
from diloco.launch import volunteer
from diloco.launch.volunteer import Volunteer
from diloco.run.allowance import Hours, IdleGpu, MonthlyBytes, TrafficMeter, gpu_processes, read_traffic
from diloco.run.signals import signals
from diloco.run.twins import Twins

NOON, NIGHT = datetime(2026, 11, 18, 12, 0), datetime(2026, 11, 18, 23, 30)


# hours of the day


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("22-7", [(22, 0), (23, 59), (0, 0), (6, 59)], [(7, 0), (12, 0), (21, 59)]),
        ("8:30-17", [(8, 30), (16, 59)], [(8, 29), (17, 0)]),
        ("0-6,20-24", [(0, 0), (20, 0), (23, 59)], [(6, 0), (19, 59)]),
    ],
)
def test_hours_may_pass_midnight_and_be_several(hours, inside, outside):
    parsed = Hours.parse(hours)
    assert [parsed.reason(NOON.replace(hour=hour, minute=minute)) for hour, minute in inside] == [""] * len(inside)
    assert all(parsed.reason(NOON.replace(hour=hour, minute=minute)) for hour, minute in outside)


def test_who_is_outside_hears_when_it_is_back():
    assert Hours.parse("22-7").reason(NOON) == "it is outside of --hours 22-7, back at 22:00"
    assert Hours.parse("0:15-6").reason(NIGHT).endswith("back at 00:15")


@pytest.mark.parametrize("text", ["", "22", "7-7", "25-3", "24-3", "1-2-3", "8:60-9", "a-b", "-3-4", "0-24:01"])
def test_hours_that_are_none_are_refused_with_an_example(command, text, tmp_path):
    with pytest.raises(ValueError, match="such as 22-7"):
        Hours.parse(text)


# bytes a month


def test_bytes_of_a_month_are_kept_on_disk_over_restarts_and_begin_anew_with_the_next(tmp_path):
    now, link = NOON, Link()
    for _ in range(2):  # two lives of an island
        link = Link()
        meter = TrafficMeter(tmp_path, link, lambda: now)
        link.up.reserve(300, 0.0)
        link.down.reserve(200, 0.0)
        meter.close()
    assert read_traffic(tmp_path, NOON) == 1000
    limit = MonthlyBytes(tmp_path, 1020)
    assert limit.reason(NOON) == "1 kB of --max-month 1.02 kB are used, back on 2026-12-01"
    assert MonthlyBytes(tmp_path, 1021).reason(NOON) == "", "98 % are enough"
    december = NOON.replace(month=12)
    assert limit.reason(december) == "" and read_traffic(tmp_path, december) == 0
    assert MonthlyBytes(tmp_path, 0).reason(december).endswith("back on 2027-01-01")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"month": "2026-11", "bytes": "x"}', b"\xff"])
def test_a_damaged_count_begins_anew_and_ends_nothing(tmp_path, damage):
    (tmp_path / "traffic.json").write_bytes(damage)
    assert MonthlyBytes(tmp_path, 10).reason(NOON) == ""


# a GPU that others use: `nvidia-smi` is a program on PATH

PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0          -     -      -      -      -      -      -      -    -
{lines}
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Writes what nvidia-smi says from now on."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/pmon\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    def says(*lines: str) -> None:
        (tmp_path / "pmon.new").write_text(PMON.format(lines="\n".join(lines)))
        (tmp_path / "pmon.new").rename(tmp_path / "pmon")

    says()
    return says


def test_a_process_that_computes_or_draws_a_lot_is_named_and_ones_own_are_not(smi):
    me, idle = os.getpid(), IdleGpu(lambda pid: False)
    assert list(gpu_processes()) == [] and idle.reason(NOON) == ""
    smi(
        f"    0       {me}     C     45     12      -      -      -      -    python3",
        "    1  1  G  3  0  -  -  -  -  Xorg",
    )
    assert idle.reason(NOON) == f"python3 (process {me}) uses GPU 0"
    assert IdleGpu(lambda pid: pid == me).reason(NOON) == ""
    assert IdleGpu(lambda pid: False, frozenset({1})).reason(NOON) == "", "a desktop draws a little"
    smi("    1  1  G  80  0  -  -  -  -  game")
    assert idle.reason(NOON) == "game (process 1) uses GPU 1"
    smi("    0  999999999  C  80  0  -  -  -  -  python3")
    assert idle.reason(NOON) == "", "it is in another container, as ours may be"


def test_without_nvidia_smi_or_with_one_that_fails_it_is_said(smi, monkeypatch, tmp_path):
    (tmp_path / "pmon").unlink()
    with pytest.raises(DeviceError, match="does not say who uses the GPU"):
        list(gpu_processes())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeviceError, match="not installed here: leave that out"):
        list(gpu_processes())


def test_an_island_s_own_processes_are_known_by_their_parents(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        island = Volunteer([], tmp_path, print)
        assert island.owns(os.getpid()) and island.owns(child.pid)
        assert not island.owns(1) and not island.owns(999999999)
    finally:
        child.kill()
        child.wait()


# coming and going


@pytest.fixture
def program(monkeypatch, tmp_path) -> Path:
    """Put a program in place of the island; it notes in the file that is returned that it came, and how it left."""
    code = (
        "import signal, sys, time, pathlib; f = pathlib.Path(sys.argv[1]).open('a', buffering=1)\n"
        "def leave(*_): time.sleep(float(sys.argv[2])); f.write('left\\n'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, leave); f.write('come\\n')\n"
        "time.sleep(600)"
    )
    monkeypatch.setattr(volunteer, "LOOK_S", 0.05)
    monkeypatch.setattr(volunteer, "QUIET_S", 0.0)
    log, takes_s = tmp_path / "log", tmp_path / "takes_s"
    log.touch()

    def start(*_: object, **__: object) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", code, str(log), takes_s.read_text() if takes_s.exists() else "0"]
        return subprocess.Popen(words, start_new_session=True)

    monkeypatch.setattr(volunteer, "start_process", start)
    return log


def run_while(island: Volunteer, limit: volunteer.Limit, operate: Callable[[], object]) -> int:
    """Run an island while somebody operates, then ask it to end; return its exit code."""

    def work() -> None:
        try:
            operate()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=work)
    with signals():  # whatever comes too late ends no test
        thread.start()
        try:
            return island.run([limit])
        finally:
            thread.join()


def test_a_volunteer_s_island_waits_comes_leaves_in_good_order_and_comes_back(program, tmp_path):
    told: list[str] = []
    log, reason = program, ["it is day"]

    def operate() -> None:
        wait_until(lambda: told)
        reason[0] = ""
        wait_until(lambda: log.read_text() == "come\n")
        reason[0] = "it is day again, back at 22:00"
        wait_until(lambda: log.read_text() == "come\nleft\n")
        reason[0] = ""
        wait_until(lambda: log.read_text().endswith("left\ncome\n"))

    code = run_while(Volunteer([], tmp_path, told.append), lambda now: reason[0], operate)
    assert code == 0 and log.read_text() == "come\nleft\ncome\nleft\n"
    assert told == [
        "the island waits: it is day (Ctrl-C ends it)",
        "the island comes back",
        "the island leaves: it is day again, back at 22:00 (Ctrl-C ends it)",
        "the island comes back",
    ]


def test_an_nvidia_smi_that_fails_once_costs_nothing_and_is_said_once(program, tmp_path):
    told, asked = list[str](), [0]

    def limit(now: datetime) -> str:
        asked[0] += bool(program.read_text())
        if asked[0] % volunteer.FAILURES:
            raise DeviceError("nvidia-smi does not answer: mend that")
        return ""

    island = Volunteer([], tmp_path, told.append)
    code = run_while(island, limit, lambda: wait_until(lambda: asked[0] > 3 * volunteer.FAILURES, 30))
    assert code == 0 and program.read_text() == "come\nleft\n"
    assert len(told) == 1 and "nvidia-smi does not answer" in told[0]


def test_while_nvidia_smi_keeps_failing_an_island_is_away_in_good_order(program, smi, tmp_path):
    told: list[str] = []

    def operate() -> None:
        wait_until(lambda: program.read_text() == "come\n", 30)
        (tmp_path / "pmon").unlink()
        wait_until(lambda: program.read_text() == "come\nleft\n", 30)
        smi()
        wait_until(lambda: program.read_text() == "come\nleft\ncome\n", 30)

    island = Volunteer([], tmp_path, told.append)
    code = run_while(island, IdleGpu(island.owns).reason, operate)
    assert code == 0 and program.read_text() == "come\nleft\ncome\nleft\n"
    assert [line.partition(":")[0] for line in told[1:]] == ["the island leaves", "the island comes back"]


def test_a_program_s_name_in_no_encoding_is_no_error(smi, tmp_path):
    with (tmp_path / "pmon").open("ab") as file:
        file.write(b"    0  1  C  80  0  -  -  -  -  caf\xc3\n")
    assert [each.command for each in gpu_processes()] == ["caf\ufffd"]


@pytest.mark.parametrize("why", ["it saves", "elastic.grace_s is long"])
def test_an_island_that_needs_its_time_to_leave_is_not_killed(program, monkeypatch, tmp_path, why):
    monkeypatch.setattr(volunteer, "ASK_S", 0.0)
    (tmp_path / "takes_s").write_text("1")
    if why == "it saves":
        part = tmp_path / "save-00000003.part" / "inner"
        part.mkdir(parents=True)
        (part / "rank-00000.safetensors").write_bytes(b"half")
    else:
        (tmp_path / "config.yaml").write_text("elastic: {grace_s: 60}\n")
    island = Volunteer([], tmp_path, print)
    assert run_while(island, lambda now: "", lambda: wait_until(lambda: bool(program.read_text()), 30)) == 0
    assert program.read_text() == "come\nleft\n"


def test_with_json_a_volunteer_s_island_that_waits_says_so_to_standard_error(tmp_path):
    hour = datetime.now().hour
    later = f"{(hour + 2) % 24}-{(hour + 3) % 24}"
    words = ["join", ticket_in(tmp_path).render(), "--dir", str(tmp_path / "island"), "--hours", later, "--json"]
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "-m", "diloco", *words], stdout=stdout, stderr=stderr)
    assert wait_until(lambda: out.read_text() + err.read_text() or process.poll() is not None, 60)
    process.terminate()
    process.wait(60)
    assert err.read_text().startswith("the island waits: it is outside of --hours") and not out.read_text()


@pytest.mark.slow
def test_a_joined_island_leaves_while_another_process_uses_the_gpu_and_comes_back(smi, tmp_path):
    """A real run, a real island and its bytes of the month; the other process on the GPU is this test."""
    path, folder = tmp_path / "run.yaml", tmp_path / "second"
    path.write_text(json.dumps({**SMALL, **TOGETHER, "checkpoint": {"dir": str(tmp_path / "run")}}))
    sets = ("--set", "inner.steps=100000", "--set", "elastic.grace_s=21")
    founder = ("run", str(path), "--islands", "1", *sets, "--link", LINK)
    joiner = ("join", str(tmp_path / "run" / "ticket"), "--name", "second", "--dir", str(folder), "--link", LINK)
    limits = ("--yield-gpu", "--max-month", "1TB", "--hours", "0-24")

    def rounds() -> int:
        events = folder / "events.jsonl"
        told = read_events(events) if events.exists() else []
        return sum(each["event"] == "round" and "second" in each["contributors"] for each in told)

    def left() -> bool:
        return any(each["event"] == "end" for each in read_events(folder / "events.jsonl"))

    with ExitStack() as stack:
        stack.callback(ForkedCommand(*founder, log=tmp_path / "founder.log").kill)
        assert wait_until((tmp_path / "run" / "ticket").exists)
        second = stack.enter_context(started(*joiner, *limits))
        assert wait_until(lambda: rounds() > 0)
        smi(f"    0       {os.getpid()}     C     45     12      -      -      -      -    python3")
        assert wait_until(left)
        before, used = rounds(), read_traffic(folder, datetime.now())
        assert used > 1000
        assert load_config(folder / "config.yaml").elastic.grace_s == 21, "the run's: so long it may take to leave"
        smi()
        assert wait_until(lambda: rounds() > before)
        assert wait_until(lambda: read_traffic(folder, datetime.now()) > used)
        second.send_signal(signal.SIGINT)
        out, err = second.communicate(timeout=300)
    assert second.returncode == 0, out + err
    assert f"the island leaves: python3 (process {os.getpid()}) uses GPU 0" in out and "the island comes back" in out


# identities


def test_a_key_moves_to_another_folder_readable_by_its_owner_alone(command, tmp_path):
    first = Identity.load(tmp_path / "first" / "identity.key")
    said = command("key", "export", "first", "moved.key")
    assert said.code == 0 and first.peer_id in said.out and "do not start the one in first again" in said.out
    assert stat.S_IMODE(Path("moved.key").stat().st_mode) == 0o600
    assert first._key.private_bytes_raw().hex() not in said.out
    assert command("key", "import", "moved.key", "new/home").code == 0
    assert Identity.load(Path("new/home/identity.key")).peer_id == first.peer_id
    assert stat.S_IMODE(Path("new/home/identity.key").stat().st_mode) == 0o600
    assert command("key", "import", "moved.key", "new/home").code == 0, "the same once more"


def test_a_key_is_never_written_over_nor_taken_from_where_others_can_read_it(command, tmp_path):
    for name in ("first", "second"):
        Identity.load(tmp_path / name / "identity.key")
    assert command("key", "export", "first", "moved.key").code == 0
    assert "exists already" in command.refused("key", "export", "second", "moved.key")
    assert "holds another key" in command.refused("key", "import", "moved.key", "second")
    assert "no island's folder" in command.refused("key", "export", "nowhere", "a.key")
    assert "does not exist" in command.refused("key", "import", "no.key", "third")
    Path("moved.key").chmod(0o644)
    assert "chmod 600" in command.refused("key", "import", "moved.key", "third")
    (tmp_path / "bad.key").write_bytes(b"no key")
    (tmp_path / "bad.key").chmod(0o600)
    assert "damaged or of another kind" in command.refused("key", "import", "bad.key", "third")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    Path("moved.key").chmod(0o600)
    assert "is not a diloco run" in command.refused("key", "import", "moved.key", "mine")
    assert not (tmp_path / "third").exists()


def record(certificate: bytes, sequence: int) -> PeerRecord:
    return PeerRecord(
        bytes(32), bytes(32), (), (("10.0.0.7", 4000),), certificate, "gpu-box", "cpu", "", 0, 0, 1, bytes(32),
        sequence=sequence,
    )  # fmt: skip


def test_of_two_islands_with_one_key_the_later_one_ends_and_the_first_is_told():
    came_later, was_first = Twins(b"later", 1000), Twins(b"first", 500)
    assert came_later.look(None) == was_first.look(record(b"first", 700)) == ("", False)
    assert came_later.look(record(b"first", 990)) == ("", False), "it may be its own last life"
    told = "another island has this one's key, and takes part as gpu-box from 10.0.0.7:4000"
    assert came_later.look(record(b"first", 1010)) == (told, True)
    assert was_first.look(record(b"later", 1005)) == (told, False)
