"""Streams by the hundred, to real islands: of one that is let in, and of a stranger. Rounds go on, nothing piles up."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from launched import wait_until
from real_islands import Island, addresses_of, end, open_islands, together
from strangers import Outsider

from diloco.comm.peers.identity import Identity
from diloco.comm.peers.ticket import Ticket
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.transport import PeerAddress, Stream
from diloco.elastic.runtime.mailbox import CHANNEL, MAX_STREAMS_OF_ONE
from diloco.errors import TransportError
from diloco.history.log import newest_state
from diloco.run.folder import IDENTITY_KEY, OUTER
from diloco.run.local import Connection
from diloco.run.peer import Peer

AT_ONCE = 8
MORE_THREADS = 3 * 64 + 50  # handshakes of both transports that come and go, and the few that are listened to
MORE_BYTES = 200 << 20

Open = Callable[[int], object]


@pytest.fixture(scope="module")
def islands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Island]]:
    with open_islands(tmp_path_factory.mktemp("run"), founders=3) as start:
        three = [start(1), start(2), start(3)]
        assert wait_until(lambda: together(three))
        end(three[2].process)
        since = time.time()
        assert wait_until(lambda: len(three[0].rounds_of(2, since)) > 2)
        yield three


@pytest.fixture(scope="module")
def member(islands: list[Island]) -> Iterator[Peer]:
    """The third island with its key, its record and its streams, which says nothing of what islands say."""
    ticket = Ticket.parse((islands[0].folder / "ticket").read_text(), 0.0)
    peer = Peer(islands[2].folder, ticket, Connection(name="island-3"))
    assert peer.id in newest_state(islands[0].folder / OUTER).invites, "it was a member"
    peer.publish()
    yield peer
    peer.close()


def memory_of(pid: int) -> tuple[int, int]:
    """How many threads a process has, and bytes in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    threads, kilobytes = (int(re.findall(rf"{key}:\s+(\d+)", status)[0]) for key in ("Threads", "VmRSS"))
    return threads, 1024 * kilobytes


def streams_cost_no_round(island: Island, count: int, open_one: Open) -> None:
    """Open so many, a few at once, and compare rounds and memory with what they were before."""
    since, before = time.time(), memory_of(island.process.pid)
    assert wait_until(lambda: len(island.rounds_of(2, since)) >= 3), "there are rounds before"
    began = time.time()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        opening = [pool.submit(open_one, number) for number in range(count)]
        threads = size = 0
        while not all(one.done() for one in opening):
            now = memory_of(island.process.pid)
            threads, size = max(threads, now[0]), max(size, now[1])
            time.sleep(0.1)
        for one in opening:
            one.result()
    since = time.time()
    assert wait_until(lambda: len(island.rounds_of(2, since)) >= 3), "rounds go on with all of them open"
    assert island.rounds_of(2, began), island.events("elastic")[-3:]
    assert threads < before[0] + MORE_THREADS and size < before[1] + MORE_BYTES, (before, threads, size)
    assert memory_of(island.process.pid)[0] < before[0] + 3 * MAX_STREAMS_OF_ONE


FEW_OR_ALL = pytest.mark.parametrize("count", [150, pytest.param(1500, marks=pytest.mark.soak)])


@FEW_OR_ALL
@pytest.mark.parametrize("way", ["direct", "libp2p"])
def test_control_streams_of_a_member_cost_no_round(islands, member: Peer, way: str, count: int) -> None:
    target = address_of(islands[0], member)
    transport = member._auto.direct if way == "direct" else member._auto.libp2p
    kept: list[Stream] = []

    def open_one(number: int) -> None:
        """Leave it silent, or within a message."""
        with suppress(TransportError):  # it has to make way for the next ones
            stream = transport.connect(target, CHANNEL, timeout_s=60)
            kept.append(stream)
            if number % 2:
                stream.carrier.wire.write(memoryview(b"\2\0\0"), None)  # type: ignore[attr-defined]

    with ExitStack() as stack:
        stack.callback(lambda: [stream.close() for stream in kept])
        streams_cost_no_round(islands[0], count, open_one)
        assert len(kept) > count // 2, "they were let in, and then hung up on"


@FEW_OR_ALL
@pytest.mark.parametrize("way", ["direct", "libp2p"])
def test_control_streams_of_a_stranger_cost_no_round(islands, member: Peer, tmp_path, way: str, count: int) -> None:
    target, refusals = address_of(islands[0], member), []
    with ExitStack() as stack:
        outsider = Outsider(tmp_path / "outsider.key", addresses_of(islands[0]))
        stack.callback(outsider.close)
        stranger = DirectTransport(outsider.identity.peer_id, "127.0.0.1")
        stack.callback(stranger.close)

        def open_one(_: int) -> None:
            if way == "libp2p":
                refusals.append(b"not among the peers" in outsider.stream(closes=False))
                return
            try:
                stranger.connect(target, CHANNEL, timeout_s=60)
            except TransportError:
                refusals.append(True)

        streams_cost_no_round(islands[0], count, open_one)
    assert refusals == [True] * count


def address_of(island: Island, member: Peer) -> PeerAddress:
    """Where a member finds an island, by the directory; the island knows the member by then."""
    name = Identity.load(island.folder / IDENTITY_KEY).peer_id
    assert wait_until(lambda: name in member.find_peers())
    address = member.find_peers()[name]

    def is_let_in() -> bool:
        with suppress(TransportError):
            member._auto.direct.connect(address, CHANNEL, timeout_s=5).close()
            return True
        return False

    assert wait_until(is_let_in)
    return address
