"""Headers of rounds before an island came: it takes them from a member, which may be slow, damaged or hostile."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from checkpoint_writer import following
from logs import opened, settle

from diloco.bench.bare import BareConfig
from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.history import RoundHeader, chain_of, headers_in, read_headers, read_history
from diloco.checkpoint.log.library import Library
from diloco.checkpoint.log.room import bytes_of, check_of
from diloco.checkpoint.log.store import Store
from diloco.checkpoint.transfer.donor import Donor
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.transport import PeerAddress
from diloco.elastic.protocol.record import Head, LoggedRecord, Phases
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.applier import Applier
from diloco.elastic.runtime.fetching import FetchedState
from diloco.elastic.runtime.headers import header_of, take_history
from diloco.history.rounds import history_of


def digest(number: int) -> str:
    return f"{number:064x}"


def header(number: int) -> RoundHeader:
    return RoundHeader(digest(number), digest(number - 1), number, 1000, number, 0, 10, 10 * number, 100, (), 1)


def lines(*numbers: int) -> bytes:
    return b"".join(header(number).line() for number in numbers)


class Members:
    """Members of a run that give these histories when they are asked."""

    def __init__(self, folder: Path) -> None:
        self.network, self.stack = MemoryNetwork(), ExitStack()
        self.me = self.network.transport("me")
        self.store: DiskStore = opened(folder)[0]
        self.names: list[str] = []

    def add(self, history: bytes | None) -> None:
        name, library = f"member-{len(self.names)}", Library(lambda asked: history if asked == "history" else None)
        transport = self.network.transport(name)
        self.stack.callback(transport.close)
        self.stack.callback(Donor(transport, library).close)
        self.names.append(name)

    def take(self, head: int, limit_s: float = 10.0) -> list[RoundHeader]:
        addresses = {name: PeerAddress(name) for name in self.names}
        take_history(self.me, addresses, digest(head), self.store, limit_s)
        settle(self.store)
        return read_headers(self.store.folder)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    found = Members(tmp_path)
    yield found
    found.stack.close()
    found.me.close()
    found.store.close()


def test_the_rounds_that_led_to_the_state_are_taken_and_no_others(members):
    members.add(lines(1, 2, 3, 4, 5, 9))
    assert members.take(4) == [replace(header(number), added=True) for number in (1, 2, 3, 4)]


def test_headers_that_come_after_rounds_of_its_own_do_not_end_the_chain(members):
    members.store.keep_headers([header(5), header(6)])
    members.add(lines(1, 2, 3, 4))
    members.take(4)
    assert [each.round for each in chain_of(read_history(members.store.folder))] == [1, 2, 3, 4, 5, 6]


HOSTILE = {
    "nothing": None,
    "another run's": lines(7, 8),
    "nested without end": b"[" * 200_000,
    "a number of 400 digits": json.dumps({**asdict(header(2)), "size": 10**400}).encode() + b"\n",
    "a circle": replace(header(9), parent=digest(9)).line(),
    "bytes": bytes(range(256)) * 100,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_whatever_a_member_gives_the_next_one_is_asked(what, members):
    members.add(HOSTILE[what])
    members.add(lines(1, 2))
    assert [each.round for each in members.take(2)] == [1, 2]


def test_one_that_is_gone_and_no_time_left_cost_nothing_but_the_headers(members):
    members.names.append("nobody")
    members.add(lines(1, 2))
    assert members.take(2, limit_s=0.0) == []
    assert len(members.take(2)) == 2


class Broken(Store):
    def keep_headers(self, headers: Sequence[RoundHeader]) -> None:
        raise RuntimeError("out of memory")


def test_a_store_that_fails_does_not_end_the_run(members, caplog):
    members.add(lines(1))
    take_history(members.me, {"member-0": PeerAddress("member-0")}, digest(1), Broken())
    assert "could not be taken" in caplog.text and "out of memory" in caplog.text


def test_figures_that_a_peer_has_made_up_in_a_record_do_not_cost_its_header():
    """Times and losses of a record are what others say, and a model that diverges has any loss."""
    record, _ = following(BareConfig(100).beginning(("A",)).state, 100)
    (part,) = record.proposal.contributions
    for loss in (1e300, float("inf"), float("nan"), 2.5):
        said = replace(part, offer=replace(part.offer, loss=loss))
        made_up = replace(record, proposal=replace(record.proposal, contributions=(said,)))
        for time_ms in (2**62, -5, 1000):
            logged = LoggedRecord(made_up, ("A",), time_ms, Phases(time_ms, time_ms))
            (found,) = headers_in(header_of(logged, ("A",), 100, 400).line())
            assert found.time_ms == found.exchange_ms == (1000 if time_ms == 1000 else 0)
            assert found.loss == (2.5 if loss == 2.5 else None)


def test_after_a_move_to_another_branch_nothing_that_it_undid_is_told(tmp_path):
    """Neither to people, by the file, nor by the last rounds that a status is made of."""
    config = BareConfig(100)
    begun = config.beginning(("A",))
    store, state = opened(tmp_path, begun.state.head.digest)[0], begun.state
    applier = Applier(config.run, state, begun.vectors, store, lambda *_: None)

    def commit(state: RunState) -> RunState:
        record, payload = following(state, 100)
        applier.hold(record.payload, payload)
        return applier.append(LoggedRecord(record, ("A",)))

    for _ in range(3):
        state = commit(state)
    elsewhere = replace(state, head=Head(9000, 9, "ab" * 32))
    rooms = {name: bytes_of(vector) for name, vector in begun.vectors.items()}
    applier.switch(FetchedState(elsewhere, rooms, check_of(rooms), {}))
    assert list(applier.headers) == []
    settle(store)
    assert [each.round for each in read_headers(tmp_path)] == [1, 2, 3] and chain_of(read_history(tmp_path)) == []
    commit(elsewhere)
    settle(store)
    store.close()
    assert [each.round for each in applier.headers] == [10]
    assert [each.round for each in history_of([tmp_path]).rounds] == [10]
