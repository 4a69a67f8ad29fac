"""`diloco status`: what islands say of themselves and see of others, from this machine and from another one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from disks import fill, small_disk
from launched import wait_until
from own_loops import made, run_of, train_all
from situations import Situation

from diloco import connect
from diloco.checkpoint.log.history import read_headers
from diloco.comm.peers.admission import Admission, Right
from diloco.comm.peers.clock import RunClock
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress
from diloco.errors import PeerLost, SaveError
from diloco.history.present import ask_remote, find_islands, only_run, status_of, top_process
from diloco.report.shown import status_lines
from diloco.report.status import STATUS, IslandStatus, RunStatus, decode_status, merged, read_status
from diloco.report.why import Facts, why_island, why_now
from diloco.run import status as kept_status
from diloco.run.gate import Gate
from diloco.run.status import is_running, say_starting, started_at
from diloco.run.status_streams import CHANNEL, StatusAsker, StatusServer

ME = IslandStatus("id-1", "one", "training", told_by="one", member=True, share=0.5)
STATUS_OF_ONE = RunStatus("r", "id-1", 1000.0, 7, 70, 100, islands=(ME, replace(ME, island="id-2", name="two")))


def test_a_status_survives_its_way_through_json():
    assert decode_status(STATUS_OF_ONE.encode()) == STATUS_OF_ONE
    grown = {**asdict(STATUS_OF_ONE), "mood": "good"}
    assert decode_status(json.dumps(grown).encode()) == STATUS_OF_ONE


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"[]", b"{}", b"[" * 100_000, b'{"islands": 3}', b'{"run": "r", "me": "x", "at": "noon", "islands": []}',
        json.dumps({**asdict(STATUS_OF_ONE), "round": True}).encode(),
        json.dumps({**asdict(STATUS_OF_ONE), "round": 10**400}).encode(),
        json.dumps({**asdict(STATUS_OF_ONE), "round": -1}).encode(),
        json.dumps({**asdict(STATUS_OF_ONE), "islands": [{"island": "x", "bytes_sent": 2**63}]}).encode(),
        json.dumps({**asdict(STATUS_OF_ONE), "islands": [{"island": 7}]}).encode(),
        json.dumps({**asdict(STATUS_OF_ONE), "islands": [{"island": "x", "waiting_for": "all"}]}).encode(),
    ],
)  # fmt: skip
def test_what_a_peer_of_ill_will_sends_is_no_status(raw):
    assert decode_status(raw) is None


def test_what_is_long_or_infinite_is_cut():
    diverged = replace(STATUS_OF_ONE, loss=float("nan"), islands=(replace(ME, loss=float("inf")),))
    assert (found := decode_status(diverged.encode())) is not None and found.loss is None is found.islands[0].loss
    long = replace(ME, name="x" * 10_000)
    found = decode_status(replace(STATUS_OF_ONE, islands=(long,)).encode())
    assert found is not None and len(found.islands[0].name) == 1000
    for at in (float("inf"), float("nan"), 10**400, -(10**400), 1e300):
        hostile = json.dumps({**asdict(STATUS_OF_ONE), "at": at, "phase_since": at, "eta_s": at}).encode()
        assert (found := decode_status(hostile)) is not None and found.at == 0.0
        assert status_lines(found) and why_now(Facts(found))


def test_what_a_peer_calls_itself_gives_a_terminal_no_orders():
    evil = "\x1b[2J\r\n\x9b\ud800"
    island = replace(ME, name=f"two{evil}", disk=evil, state="waiting", waiting_for=(evil,), told_by=evil)
    found = decode_status(replace(STATUS_OF_ONE, run=f"r{evil}", islands=(ME, island)).encode())
    assert found is not None and found.run == "r\ufffd[2J\ufffd\ufffd\ufffd\ufffd"
    for line in (*status_lines(found), *why_now(Facts(found)), *why_island(Facts(found), found.islands[1].name)):
        assert not any(each < " " or "\x7f" <= each < "\xa0" for each in line)
        line.encode()


def test_each_island_is_believed_about_itself_and_nobody_else():
    two = replace(ME, island="id-2", name="liar", state="sending", told_by="two", share=0.99, loss=2.5)
    lie = replace(ME, state="lost")
    report = RunStatus("r", "id-2", 1000.0, islands=(two, lie))
    one, other = merged(STATUS_OF_ONE, [report]).islands
    assert one == ME
    assert (other.name, other.state, other.loss, other.share) == ("two", "sending", 2.5, 0.5)
    stale = replace(report, at=900.0)
    assert merged(STATUS_OF_ONE, [stale]) == STATUS_OF_ONE


def test_who_waits_learns_from_the_coordinator_for_whom():
    facts = Situation("islands A B C\nuntil A commits round 4\nslow C 8\nrun 7.5").facts("B")
    assert facts.status is not None
    states = {each.name: (each.state, each.waiting_for) for each in facts.status.islands}
    assert states["A"][1] == ("C",) and facts.status.island("A").leads


def test_the_lines_name_everybody_and_no_pipe_wraps_them():
    waiting = replace(ME, island="id-2", name="two\x1b[2J", state="waiting", waiting_for=("three",), since=940.0)
    lines = status_lines(replace(STATUS_OF_ONE, islands=(waiting, ME)), 1000.0)
    assert lines[0].startswith("r: round 7, step 70/100, collecting for")
    assert re.search(r"two.\[2J +waiting for three +1:00 min", lines[3]) and "\x1b" not in lines[3]
    assert lines[2].startswith("one ")


def test_a_process_that_is_gone_is_told_from_one_of_the_same_number(tmp_path):
    mine = replace(STATUS_OF_ONE, pid=os.getpid(), pid_started=started_at(os.getpid()), host=os.uname().nodename)
    assert is_running(mine)
    assert not is_running(replace(mine, pid_started=mine.pid_started + 1))
    assert not is_running(replace(mine, ended=True)) and not is_running(replace(mine, pid=2**22 - 1))
    (tmp_path / STATUS).write_bytes(replace(mine, pid=2**22 - 1, folder=str(tmp_path)).encode())
    found = status_of(find_islands(str(tmp_path)))
    assert found is not None and found.own.state == "ended" and found.islands[1].state == "lost"


def test_one_that_starts_says_so_whatever_its_last_life_has_left(tmp_path):
    (tmp_path / STATUS).write_bytes(replace(STATUS_OF_ONE, ended=True).encode())
    say_starting(tmp_path, "r", "id-1", "one")
    (island,) = find_islands(str(tmp_path))
    assert island.running and not island.is_silent
    found = status_of([island])
    assert found is not None and found.own.state == "starting"
    assert "has not got the run's state yet" in why_island(Facts(found), "one")[0]


def test_a_finished_run_is_told_from_one_that_stopped(tmp_path):
    ended = replace(STATUS_OF_ONE, ended=True, islands=(replace(ME, state="ended"),))
    assert "continues it" in why_now(Facts(ended))[0]
    assert why_now(Facts(replace(ended, finished=True))) == ["the run is finished: step 70, round 7"]
    assert "finished; last heard" in status_lines(replace(ended, finished=True), 1001.0)[0]


def test_who_stopped_knows_nothing_of_those_who_train_on_elsewhere(tmp_path, command):
    """As in the folder of a joiner that was ended while the others went on without waiting for it."""
    slow = replace(ME, island="id-2", name="two", share=0.0, contributed=3, leads=True)
    left = replace(STATUS_OF_ONE, at=time.time() - 24, ended=True, eta_s=564.0, islands=(ME, slow), command="go on")
    (tmp_path / STATUS).write_bytes(left.encode())
    first, *_, last = command("status", tmp_path).out.splitlines()
    assert re.fullmatch(r"r: round 7, step 70/100, not running here; last heard \d\d s ago", first)
    assert re.match(r"two +lost +\d\d s .*no island of this folder runs", last)
    assert command("why", tmp_path).out == (
        "nothing of the run is at work here: one: its islands have left in good order at round 7; whether two trains "
        "on elsewhere cannot be seen from here. go on continues it\n"
    )
    said = command("why", tmp_path, "two").out
    assert re.fullmatch(
        r"two is lost, last heard \d\d s ago: no island of this folder runs, which would hear it\n", said
    )


def test_stop_waits_for_the_end_of_the_process_and_not_only_for_its_goodbye(tmp_path, command):
    island = (
        "import signal, sys, time\nfrom pathlib import Path\nstatus, ready = map(Path, sys.argv[1:])\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\nready.touch()\nsignal.pause()\n"
        "status.write_text(status.read_text().replace('\"ended\": false', '\"ended\": true'))\ntime.sleep(1.5)\n"
    )
    (tmp_path / "diloco").write_text(island)
    folder = tmp_path / "run"
    folder.mkdir()
    child = subprocess.Popen([sys.executable, tmp_path / "diloco", folder / STATUS, tmp_path / "ready"])
    try:
        mine = replace(STATUS_OF_ONE, pid=child.pid, pid_started=started_at(child.pid), host=os.uname().nodename)
        (folder / STATUS).write_bytes(mine.encode())
        assert wait_until((tmp_path / "ready").exists, 20)
        assert command("stop", folder).out.endswith("run has stopped\n") and child.poll() is not None
        assert '"ended": true' in (folder / STATUS).read_text()
    finally:
        child.kill()
        child.wait()


def test_folders_of_one_run_are_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = replace(STATUS_OF_ONE, pid=os.getpid(), pid_started=started_at(os.getpid()), host=os.uname().nodename)
    for name in ("joined", "mine", "other"):
        (folder := Path("runs", name) / "outer").mkdir(parents=True)
        (folder / "genesis.json").write_text("of another run" if name == "other" else "of one run")
        (folder.parent / STATUS).write_bytes(replace(mine, ended=name == "other").encode())
    assert only_run() == "runs/joined"
    Path("runs/mine/owner.key").touch()
    assert only_run() == "runs/mine"
    Path("runs/other", STATUS).write_bytes(mine.encode())
    with pytest.raises(SaveError, match="several runs are going on, name one: joined, mine, other"):
        only_run()


def test_only_processes_of_diloco_are_taken_for_launchers():
    program = "import time; time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", program, "diloco"])
    try:
        assert top_process(child.pid) == child.pid
    finally:
        child.kill()
        child.wait()


def test_without_a_run_one_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SaveError, match="there is no run under runs/"):
        only_run()
    with pytest.raises(SaveError, match="no such run"):
        find_islands("nowhere")


def test_a_ticket_to_watch_takes_no_place_and_lets_nobody_speak(tmp_path):
    owner, gate = Identity.load(tmp_path / "owner.key"), Gate(lambda: None)
    ticket = Ticket.issue(owner, [], now=time.time(), lifetime_s=60, right=Right.WATCH, islands=1)
    for number in range(3):
        admission = ticket.admission(Identity.load(tmp_path / str(number)).public_key)
        assert isinstance(admission, Admission) and gate.objection(f"watcher {number}", admission) == ""


def test_who_only_watches_is_answered_on_one_channel_and_refused_on_all_others():
    network = MemoryNetwork()
    member, watcher, liar = (network.transport(name) for name in ("id-1", "watcher", "id-9"))
    member.inbox.may_open = lambda peer, channel: channel == CHANNEL or peer != "watcher"
    with closing(member), closing(watcher), closing(liar):
        server = StatusServer(member, lambda: (STATUS_OF_ONE.encode(), 2.0))
        before = time.time()
        asker, one = StatusAsker(watcher), {"a": PeerAddress("id-1")}
        (found,) = asker.ask(one)
        assert before - 2 <= found.at <= time.time() - 2  # by the watcher's clock
        assert replace(found, at=1000.0, phase_since=0.0) == STATUS_OF_ONE
        assert found.at - found.phase_since == pytest.approx(1000.0)
        for channel in ("control", "fetch", "pool"):
            with pytest.raises(PeerLost, match="may not open"):
                watcher.connect(PeerAddress("id-1"), channel, timeout_s=1)
        false = StatusServer(liar, lambda: (STATUS_OF_ONE.encode(), 0.0))  # it passes for somebody else
        (found,) = asker.ask({**one, "b": PeerAddress("id-9")})
        assert found.me == "id-1"
        server.close()
        assert asker.ask(one) == []
        false.close()


def test_who_asks_again_needs_no_new_stream_unless_the_old_one_was_closed():
    network, opened = MemoryNetwork(), []
    member, watcher = network.transport("id-1"), network.transport("watcher")
    counted = SimpleNamespace(connect=lambda *way, **more: opened.append(way) or watcher.connect(*way, **more))
    with closing(member), closing(watcher):
        server, asker = StatusServer(member, lambda: (STATUS_OF_ONE.encode(), 0.0)), StatusAsker(counted)
        for _ in range(3):
            assert len(asker.ask({"a": PeerAddress("id-1")})) == 1
        assert len(opened) == 1
        member.inbox.drop("watcher")
        assert len(asker.ask({"a": PeerAddress("id-1")})) == 1 and len(opened) == 2
        assert asker.ask({}) == [] and len(asker.ask({"a": PeerAddress("id-1")})) == 1 and len(opened) == 3
        server.close()


# real islands

SLOW = ("--link", "1mbit,50ms")  # islands that mostly wait for bytes leave the processor to other tests


def config_of(folder: Path) -> dict:
    return {
        "run": "seen", "model": {"preset": "tiny", "blocks": 1, "width": 32, "heads": 2, "feed_forward": 64},
        "data": {"sequence": 32}, "island": {"batch": 4, "device": "cpu"},
        "inner": {"steps": 1_000_000, "warmup": 2, "schedule": "constant"}, "sync": {"every": 10},
        "elastic": {"silence_s": 2, "min_islands": 2}, "evaluate": {"every": 0}, "log": {"every": 5},
        "checkpoint": {"dir": str(folder / "run")},
    }  # fmt: skip


def diloco(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "diloco", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


@pytest.mark.slow
def test_real_islands_are_seen_stopped_killed_watched_and_asked_to_stop(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_of(tmp_path)))
    run, words = tmp_path / "run", ("run", "config.yaml", "--islands", "2", "--no-restart", *SLOW)
    with (tmp_path / "said").open("w") as said:
        launcher = subprocess.Popen([sys.executable, "-m", "diloco", *words], cwd=tmp_path, stdout=said, stderr=said)
    try:
        one, two = run / "island-1", run / "island-2"

        def status() -> RunStatus:
            done = diloco("status", "run", "--json", cwd=tmp_path)
            found = decode_status(done.stdout.encode())
            assert found is not None, done.stderr
            return found

        def state_of(name: str) -> str:
            """What the command says of an island, without a process of its own each time it is asked."""
            islands = find_islands(str(run))
            ask_remote(islands)
            return status_of(find_islands(str(run))).island(name).state

        both = lambda: (found := read_status(two)) is not None and found.own.contributed > 2  # noqa: E731
        assert wait_until(both, 120), (tmp_path / "said").read_text()
        found = status()
        assert {each.name for each in found.islands} == {"island-1", "island-2"}
        assert all(each.told_by == each.name and each.bytes_sent and each.loss for each in found.islands)
        said_why = diloco("why", "run", cwd=tmp_path)
        assert said_why.returncode == 0 and said_why.stdout and "lost" not in said_why.stdout
        assert "1 of 1 running" in diloco("ls", run, cwd=tmp_path).stdout.splitlines()[1]

        made = diloco("ticket", "create", "run", "--right", "watch", cwd=tmp_path)
        (tmp_path / "watch").write_text(made.stdout)
        afar = diloco("status", tmp_path / "watch", "--json", cwd=tmp_path)
        seen = decode_status(afar.stdout.encode())
        assert seen is not None, afar.stderr
        assert {each.name for each in seen.islands} == {"island-1", "island-2"}
        assert (seen.pid, seen.host, seen.folder) == (0, "", "") and str(tmp_path) not in afar.stdout
        refused = diloco("join", tmp_path / "watch", cwd=tmp_path)
        assert refused.returncode == 2 and "this ticket only allows watching" in refused.stderr

        pid = read_status(two).pid
        os.kill(pid, signal.SIGSTOP)
        assert wait_until(lambda: state_of("island-2") == "silent", 60)
        said = diloco("why", "run", "island-2", cwd=tmp_path).stdout
        assert f"ago: its process {pid} is stopped by a signal, kill -CONT {pid} lets it go on" in said
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: state_of("island-2") == "ended", 60)
        said = diloco("why", "run", "island-2", cwd=tmp_path).stdout
        assert "gone without a goodbye" in said and f"&& {sys.executable} -m diloco join " in said
        left = read_status(one)
        assert left is not None and left.own.state in ("training", "waiting", "sending")

        done = diloco("stop", "run", cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == "run has stopped"
        launcher.wait(60)
        assert "not running" in diloco("status", "run", cwd=tmp_path).stdout
        assert diloco("stop", "run", cwd=tmp_path).stdout == "run is not running\n"
        assert read_headers(two / "outer")[0].round == 1  # before it came: from whom it joined
        listed = json.loads(diloco("log", "run", "--json", cwd=tmp_path).stdout)
        assert {name for row in listed for name in row["contributors"]} == {"island-1", "island-2"}
        assert all(row["loss"] for row in listed if row["contributors"])
    finally:
        launcher.terminate()
        launcher.wait(60)


def test_why_refuses_what_is_neither_a_run_nor_an_island(tmp_path, command):
    assert "nosuch: no such run" in command.refused("why", "nosuch")
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / STATUS).write_bytes(replace(STATUS_OF_ONE, at=time.time(), ended=True).encode())
    assert command("why", "two").code == 0  # an island's name alone
    for command_ in ("why", "status"):
        assert "nosuch: no such run, neither as a folder nor under runs/: there are mine" in command.refused(
            command_, "nosuch"
        )
    assert "nosuch: no such island; the run has one, two" in command.refused("why", "mine", "nosuch")


def test_why_answers_while_a_run_is_starting_and_has_no_log(tmp_path, command):
    say_starting(tmp_path, "r", "id-1", "one")
    assert command("why", tmp_path).out.startswith("one has not got the run's state yet")
    assert command("why", tmp_path, "--round", 1).out.startswith("round 1 is not known here")


def test_an_island_whose_disk_is_full_is_not_taken_for_a_stopped_one(tmp_path, command):
    """It cannot refresh its status there: the disk says why."""
    with small_disk(tmp_path / "disk") as folder:
        mine = replace(STATUS_OF_ONE, pid=os.getpid(), pid_started=started_at(os.getpid()), host=os.uname().nodename)
        fast, usual = replace(ME, tokens_per_s=9e3), replace(ME, island="id-2", name="two", told_by="two")
        then = (fast, replace(usual, tokens_per_s=1e3))
        (folder / STATUS).write_bytes(replace(mine, at=time.time() - 60, islands=then).encode())
        assert "is there, and starved or hangs" in command("why", folder).out
        fill(folder)
        said = command("why", folder).out
        assert said.startswith(f"one's disk takes nothing: {folder} has no space left")
        assert "stopped" not in said and "slow" not in said
        assert "disk: " in command("status", folder).out


def test_an_island_tells_that_its_machines_clock_is_wrong(tmp_path, monkeypatch):
    """As one does whose run has a later time than its machine."""
    ahead = RunClock()
    ahead.hear(time.time() + 3600)
    monkeypatch.setattr(kept_status, "RUN_CLOCK", ahead)
    model = made()
    with connect(run_of(tmp_path), model, "SGD", optimizer_options={"lr": 0.1}, alone=True) as run:
        train_all(run, model)
        assert wait_until(lambda: (found := read_status(tmp_path / "run")) is not None and found.own.clock_off_s > 0)
        status = read_status(tmp_path / "run")
    assert status is not None
    assert "the clock of quickstart's machine is 1:00 h behind the run's, which is used: set the clock" in why_now(
        Facts(status)
    )
