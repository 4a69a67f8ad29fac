"""`diloco run --attach`: one start for every island, any number of times, in any order. Real processes and kills."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from attached import Attached, kill, wait_for_end
from launched import wait_until

from diloco.comm.peers.identity import Identity
from diloco.errors import ConfigError, IdentityError, TicketError
from diloco.run.attach import Attachment
from diloco.run.secret import IslandSecret, make_secrets, parse_places
from diloco.run.signals import LEFT

START_S = 12.0  # within which islands are started, doubled and killed
SLOW = ("--link", "100mbit,150ms")  # rounds take long enough to do something between two of them
FEW, MANY = range(1), range(1, 20)


def secrets(folder: Path, *names: str) -> list[Path]:
    made = make_secrets(names, {names[0]: "10.0.0.1:31337"})
    for secret in made:
        secret.write(folder / secret.island)
    return [folder / secret.island for secret in made]


def test_secrets_are_of_one_run_and_only_the_first_one_founds_it(tmp_path: Path) -> None:
    first, second = (IslandSecret.read(path) for path in secrets(tmp_path, "island-0", "island-1"))
    assert first.ticket.run_id == second.ticket.run_id and first.islands == second.islands
    assert first.owner is not None and second.owner is None
    assert second.multiaddrs({}) == (f"/ip4/10.0.0.1/tcp/31337/p2p/{first.peer}",)
    assert second.multiaddrs({"island-0": "node-7:4000", "island-9": "node-8:4000"}) == (
        f"/dns4/node-7/tcp/4000/p2p/{first.peer}", f"/ip4/10.0.0.1/tcp/31337/p2p/{first.peer}"
    )  # fmt: skip
    assert first.identity.hex() not in repr(first) and first.owner.hex() not in repr(first)


def test_islands_that_are_added_later_are_of_the_same_run(tmp_path: Path) -> None:
    founder = IslandSecret.read(secrets(tmp_path, "island-0")[0])
    again, added = make_secrets(["island-1"], {}, [founder])
    assert again.islands == added.islands and again.owner == founder.owner
    assert added.ticket.run_id == founder.ticket.run_id and added.owner is None
    assert set(added.islands) == {"island-0", "island-1"}


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda path: path.chmod(0o640), "chmod 600"),
        (lambda path: path.write_text("diloco2-"), "not JSON"),
        (lambda path: path.write_text("{}"), "no whole island's secret"),
        (lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "owner": "00" * 32})), "owner's key"),
        (lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "identity": "11" * 32})), "its key"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_a_secret_that_is_none_or_that_others_can_read_is_refused(tmp_path: Path, spoil, told: str) -> None:
    path = secrets(tmp_path, "island-0")[0]
    spoil(path)
    with pytest.raises(TicketError, match=told):
        IslandSecret.read(path)


def test_addresses_are_refused_by_name() -> None:
    assert parse_places("") == {}
    assert parse_places("island-0=h:1, island-1=[::1]:2,") == {"island-0": "h:1", "island-1": "[::1]:2"}
    for text in ("island-0", "island-0=h", "=h:1", "island-0=h:0", "island-0=h:70000"):
        with pytest.raises(ConfigError, match="write NAME=HOST:PORT"):
            parse_places(text)


def test_a_folder_of_another_island_is_refused(tmp_path: Path) -> None:
    first, second = secrets(tmp_path, "island-0", "island-1")
    Identity.keep(tmp_path / "run" / "identity.key", IslandSecret.read(first).identity)
    with pytest.raises(IdentityError, match="belongs to another island"):
        Attachment(second, IslandSecret.read(second)).prepare(tmp_path / "run")


def start_all_at_once(folder: Path, seed: int) -> None:
    """Start four islands within moments, in random order, one of them twice; kill one of them at a random moment of the
    start, and start it again."""
    chance = random.Random(seed)
    with Attached(folder, 4, elastic={"min_islands": 4}) as run:
        order = chance.sample(run.names, 4)
        victim, twice = chance.choice(run.names), chance.choice(run.names)
        moments = sorted([(chance.uniform(0, 2), name) for name in order] + [(chance.uniform(0, START_S), twice)])
        dies_s, processes, doubles = chance.uniform(0, START_S), {}, []
        began = time.monotonic()
        for at_s, name in sorted([*moments, (dies_s, "")]):
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            if not name and victim in processes:
                kill(processes[victim])
                processes[victim] = run.start(victim)
            elif name in processes:
                doubles.append(run.start(name))
            elif name:
                processes[name] = run.start(name)
        # of the two of one island, the one that has waited for a minute is refused; the victim may have been the other
        codes = dict(zip(processes, wait_for_end(*processes.values(), timeout_s=800), strict=True))
        wait_for_end(*doubles)
        assert all(process.returncode in (0, 2) for process in doubles)
        refused = [name for name, code in codes.items() if code != 0]
        assert refused in ([], [twice]) and all("another process is training" in run.output(name) for name in refused)
        assert not refused or doubles[0].returncode == 0
        run.check_one_run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", FEW)
def test_islands_that_all_start_at_once_are_one_run(tmp_path: Path, seed: int) -> None:
    start_all_at_once(tmp_path, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", MANY)
def test_islands_that_all_start_at_once_are_one_run_every_time(tmp_path: Path, seed: int) -> None:
    start_all_at_once(tmp_path, seed)


@pytest.mark.cluster
@pytest.mark.parametrize("with_mark", [True, False])
def test_a_founder_whose_folder_is_lost_joins_its_run(tmp_path: Path, with_mark: bool) -> None:
    with Attached(tmp_path, 3, inner={"steps": 60}, elastic={"min_islands": 3}) as run:
        processes = {name: run.start(name, *SLOW) for name in run.names}
        assert wait_until(lambda: run.is_training("island-0", 2))
        kill(processes["island-0"])
        shutil.rmtree(run.island("island-0"))
        if not with_mark:  # the secret's folder was lost, too, and given again
            (tmp_path / "secrets" / "island-0.founded").unlink()
        processes["island-0"] = run.start("island-0", *SLOW)
        assert wait_for_end(*processes.values()) == [0, 0, 0]
        (joined,) = [event["text"] for event in run.events("island-0", "elastic") if event["what"] == "joined"]
        assert "peer" in joined and "state of round 0 " not in joined
        run.check_one_run()


@pytest.mark.soak
def test_a_founder_that_lost_everything_does_not_begin_again_while_another_is_too_busy_to_answer(
    tmp_path: Path,
) -> None:
    """As a pod without a volume that is made anew: neither its folder nor the mark beside its secret are left."""
    with Attached(tmp_path, 2, inner={"steps": 60}, elastic={"min_islands": 2}) as run:
        founder, other = run.start("island-0", *SLOW), run.start("island-1", *SLOW)
        assert wait_until(lambda: run.is_training("island-0", 2))
        kill(founder)
        os.killpg(other.pid, signal.SIGSTOP)
        shutil.rmtree(run.island("island-0"))
        (tmp_path / "secrets" / "island-0.founded").unlink()
        founder = run.start("island-0", *SLOW)
        assert wait_until(lambda: (run.island("island-0") / "addresses").exists())  # from here on it asks
        assert not wait_until(lambda: (run.island("island-0") / "outer").exists(), 20)
        os.killpg(other.pid, signal.SIGCONT)
        assert wait_for_end(founder, other) == [0, 0]
        run.check_one_run()


@pytest.mark.cluster
def test_an_island_that_is_asked_to_stop_exits_with_75_and_comes_back(tmp_path: Path) -> None:
    key = {"environment": {"WANDB_API_KEY": "s3cr3t"}}
    with Attached(tmp_path, 2, inner={"steps": 250}, elastic={"min_islands": 2}, launch=key) as run:
        founder, other = run.start("island-0", *SLOW), run.start("island-1", *SLOW)
        assert wait_until(lambda: run.is_training("island-1"))
        again = run.start("island-1", *SLOW)  # while the first one is still there
        assert wait_until(lambda: "another process is training" in run.output("island-1"))
        other.send_signal(signal.SIGTERM)
        assert wait_for_end(other) == [LEFT]
        assert wait_for_end(again, founder) == [0, 0]
        run.check_one_run()
        files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
        assert [file for file in files if b"s3cr3t" in file.read_bytes()] == []


@pytest.mark.slow
def test_waiting_islands_say_for_whom_and_leave_when_asked(tmp_path: Path) -> None:
    with Attached(tmp_path, 2) as run:
        (tmp_path / "secrets" / "island-0.founded").touch()  # and its folder is lost
        founder = run.start("island-0", "--wait", "20")
        other = run.start("island-1")
        for name, whom in (("island-0", "island-1"), ("island-1", "island-0")):
            assert wait_until(lambda name=name: "waits since" in run.output(name))
            assert f"for {whom} at {run.addresses[whom]}" in run.output(name)
        assert wait_for_end(founder) == [2] and "no member of the run answered" in run.output("island-0")
        assert "lost its disk" in run.output("island-0") and not (run.island("island-0") / "outer").exists()
        other.send_signal(signal.SIGTERM)
        assert wait_for_end(other) == [LEFT]
