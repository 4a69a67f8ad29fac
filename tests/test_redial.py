"""What an island keeps to find the others again: turns to dial, addresses on disk, the run's time."""

import json
import time
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from diloco.comm.peers.addressbook import MAX_PEERS, OTHERS, AddressBook, by_peer
from diloco.comm.peers.clock import MAX_OFF_S, RunClock
from diloco.comm.peers.redial import MOST_S, Redial, pause_s


def turns(redial: Redial, until: float) -> list[float]:
    """When a peer that never answers is tried, if somebody looks every tenth of a second."""
    tried = []
    for tenth in range(int(until * 10)):
        if redial.due(["B"], tenth / 10):
            redial.tried(["B"], tenth / 10)
            tried.append(tenth / 10)
    return tried


def test_a_lost_peer_is_tried_soon_then_less_often_and_for_ever() -> None:
    tried = turns(Redial(Random(1)), until=3600.0)
    pauses = [later - earlier for earlier, later in pairwise(tried)]
    assert tried[0] == 0.0 and pauses[0] <= 1.2 and max(pauses) <= MOST_S + 0.2
    assert min(pauses[6:]) > 9.0 and tried[-1] > 3600.0 - MOST_S - 1


def test_a_peer_that_was_found_is_tried_at_once_when_it_is_lost_again() -> None:
    redial = Redial(Random(1))
    turns(redial, until=60.0)
    assert redial.due([], 60.0) == [] and redial.due(["B"], 60.1) == ["B"]


def test_pauses_differ_by_chance() -> None:
    random = Random(1)
    assert len({pause_s(9, random) for _ in range(10)}) == 10


def book_of(folder: Path, **places: list[str]) -> AddressBook:
    book = AddressBook(folder)
    book.remember(places, lambda peer: False)
    return book


def test_addresses_outlive_the_process_and_who_is_absent_stays(tmp_path: Path) -> None:
    book_of(tmp_path, B=["/ip4/10.0.0.2/tcp/1/p2p/B"])
    book_of(tmp_path, C=["/ip4/10.0.0.3/tcp/1/p2p/C"])
    assert list(AddressBook(tmp_path).others) == ["B", "C"]
    assert json.loads((tmp_path / OTHERS).read_text())["version"] == 2


def test_members_stay_longest(tmp_path: Path) -> None:
    book = AddressBook(tmp_path)
    book.remember({"member": ["/ip4/10.0.0.1/tcp/1"]}, lambda peer: True)
    for number in range(2 * MAX_PEERS):
        book.remember({f"guest-{number}": ["/ip4/10.0.0.2/tcp/1"]}, lambda peer: peer == "member")
    others = AddressBook(tmp_path).others
    assert len(others) == MAX_PEERS and "member" in others and f"guest-{2 * MAX_PEERS - 1}" in others


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / OTHERS).write_text("/ip4/10.0.0.2/tcp/1/p2p/B\n/ip4/10.0.0.3/tcp/1/p2p/C\n")
    assert AddressBook(tmp_path).others == {"B": ("/ip4/10.0.0.2/tcp/1/p2p/B",), "C": ("/ip4/10.0.0.3/tcp/1/p2p/C",)}


@pytest.mark.parametrize("content", [b'{\n "version": 3, "peers": {"B": []}}', b'{\n "vers', b"\xff\xfe", b"{\n[]}"])
def test_a_file_that_cannot_be_read_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / OTHERS).write_bytes(content)
    assert AddressBook(tmp_path).others == {}


def test_addresses_without_a_peer_are_left_out() -> None:
    relayed = "/ip4/10.0.0.1/tcp/1/p2p/R/p2p-circuit/p2p/B"
    assert by_peer(["/ip4/10.0.0.1/tcp/1", relayed]) == {"B": (relayed,)}


HOUR_S = 3600.0


def off_s(clock: RunClock) -> float:
    """The run's time less this machine's, without what has passed meanwhile."""
    return round(clock.now() - time.time(), 1)


@pytest.mark.parametrize("theirs", [-HOUR_S, HOUR_S])
def test_a_newcomer_takes_the_time_of_the_run(theirs: float) -> None:
    clock = RunClock()
    assert clock.hear(time.time() + theirs) and off_s(clock) == theirs


def test_a_settled_clock_is_only_put_forward() -> None:
    clock = RunClock()
    clock.settle()
    clock.hear(time.time() - HOUR_S)
    assert off_s(clock) == 0.0
    clock.hear(time.time() + HOUR_S)
    clock.advance_to(time.time() + 2 * HOUR_S)
    clock.advance_to(time.time())
    assert off_s(clock) == 2 * HOUR_S


def test_a_clock_more_than_a_day_off_is_not_followed() -> None:
    clock = RunClock()
    assert not clock.hear(time.time() + MAX_OFF_S + 60)
    clock.advance_to(time.time() + MAX_OFF_S + 60)
    assert off_s(clock) == 0.0


def test_setting_the_machines_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, real = RunClock(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + HOUR_S)
    assert abs(clock.now() - real()) < 60
