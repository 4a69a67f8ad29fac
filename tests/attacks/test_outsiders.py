"""Outsiders against real islands: who has an address gets nothing, and a ticket works for whom it says."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from invited import admitted, ticket_in
from launched import wait_until
from real_islands import Island, addresses_of, open_islands, ports_of, together
from strangers import Outsider

from diloco.comm.peers.dht import dht_key
from diloco.comm.peers.directory import Directory
from diloco.comm.peers.identity import Identity, run_id_of
from diloco.comm.peers.record import PeerRecord, encode
from diloco.comm.peers.ticket import Ticket
from diloco.comm.transport.libp2p import Libp2pTransport
from diloco.comm.transport.transport import PeerAddress
from diloco.errors import DirectoryError, TransportError
from diloco.history.log import newest_state
from diloco.run.folder import OUTER, OWNER_KEY
from diloco.run.invites import make_ticket

GHOSTS = 3000
HALF_OPEN = 2000
LOOK_S = 6.0


@pytest.fixture(scope="module")
def islands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Island]]:
    with open_islands(tmp_path_factory.mktemp("run"), founders=2) as start:
        two = [start(1), start(2)]
        assert wait_until(lambda: together(two), 60)
        yield two


def rounds_in(island: Island, seconds: float) -> int:
    since = time.time()
    time.sleep(seconds)
    return len(island.rounds_of(2, since))


def roster_of(island: Island) -> tuple[str, ...]:
    return newest_state(island.folder / OUTER).roster


@pytest.fixture
def outsider(islands: list[Island], tmp_path: Path) -> Iterator[Outsider]:
    outsider = Outsider(tmp_path / "outsider.key", addresses_of(islands[0]))
    yield outsider
    outsider.close()


def record_of(identity: Identity, run_id: bytes, **changes: object) -> PeerRecord:
    now_ms = int(time.time() * 1000)
    plain = PeerRecord(
        run_id, identity.public_key, ("/ip4/127.0.0.1/tcp/9",), (("127.0.0.1", 9),), b"certificate", "ghost", "cpu",
        "1", 10**9, 10**9, 1, b"c" * 32, sequence=now_ms, expires_ms=now_ms + 60_000,
    )  # fmt: skip
    return replace(plain, **changes)


def test_who_knows_an_address_reads_nothing_and_enters_no_roster(islands, outsider: Outsider, tmp_path: Path) -> None:
    owner = Identity.load(islands[0].folder / OWNER_KEY)
    run_id, me = run_id_of(owner.public_key), outsider.identity
    assert outsider.read(run_id) is None, "records are for those who were invited"
    assert not any(outsider.publish(run_id, record_of(me, run_id), me) or [])
    stolen = ticket_in(tmp_path).admission(me.public_key).pack()  # of another run
    assert not any(outsider.publish(run_id, record_of(me, run_id, admission=stolen), me) or [])
    assert b"not among the peers" in outsider.stream()
    assert not outsider.speaks("/ipfs/kad/1.0.0"), "libp2p's own DHT keeps what strangers say, and tells them addresses"
    with pytest.raises(DirectoryError, match="nobody lets this peer in"):
        Directory.start(Identity.load(tmp_path / "other"), admitted(me), bootstrap=outsider.bootstrap)
    assert rounds_in(islands[0], LOOK_S) and me.peer_id not in roster_of(islands[0])


def test_a_copied_admission_is_of_no_use(islands, tmp_path: Path) -> None:
    """Of a member, as any other member sees it: its record is read with a ticket, and published under another key."""
    ticket = Ticket.parse((islands[0].folder / "ticket").read_text(), 0.0)
    member, thief = Identity.load(tmp_path / "member"), Identity.load(tmp_path / "thief")
    with ExitStack() as stack:
        inside = Directory.start(member, ticket.admission(member.public_key), bootstrap=addresses_of(islands[0]))
        stack.callback(inside.close)
        assert wait_until(lambda: len(inside.peers()) >= 2, 20)
        copied = next(iter(inside.peers().values())).admission
        forged = encode(record_of(thief, inside.run_id, admission=copied), thief)
        storing = inside._node.store(dht_key(inside.run_id), forged, time.time() + 59, subkey=thief.public_key)
        with suppress(DirectoryError):
            inside.call(storing)
        assert thief.public_key not in inside.peers()
        knocking = Libp2pTransport(inside)
        stack.callback(knocking.close)
        host = PeerAddress(
            Identity.load(islands[0].folder / "identity.key").peer_id, control=tuple(addresses_of(islands[0]))
        )
        with suppress(TransportError):  # it has no record: nobody knows its key
            knocking.connect(host, "control", timeout_s=5).close()
    assert thief.peer_id not in roster_of(islands[0])


def test_ghosts_in_the_directory_cost_no_round(islands, outsider: Outsider) -> None:
    owner = Identity.load(islands[0].folder / OWNER_KEY)
    run_id = run_id_of(owner.public_key)
    before = rounds_in(islands[0], LOOK_S)
    since, ghost = time.time(), outsider.identity
    value = outsider.node.protocol.serializer.dumps(encode(record_of(ghost, run_id), ghost))
    chance, key = Random(1), outsider.node.protocol.node_id.generate(source=dht_key(run_id))

    async def haunt() -> None:
        for _ in range(GHOSTS // 100):
            subkeys = [chance.randbytes(32) for _ in range(100)]
            await outsider.node.protocol.call_store(
                outsider.peer, [key] * 100, [value] * 100, time.time() + 59, subkeys=subkeys
            )

    outsider.thread.call(haunt(), 60)
    time.sleep(max(0.0, LOOK_S - (time.time() - since)))
    during = len(islands[0].rounds_of(2, since)) * LOOK_S / (time.time() - since)
    assert during >= before / 2, (before, during)


def open_halves(port: int, stack: ExitStack) -> None:
    for _ in range(HALF_OPEN):
        half = stack.enter_context(socket.socket())
        half.setblocking(False)
        with suppress(BlockingIOError):
            half.connect(("127.0.0.1", port))


@pytest.mark.soak
def test_half_open_connections_keep_nobody_out(islands, tmp_path: Path, joining) -> None:
    ports = [int(addresses_of(islands[0])[0].split("/")[4]), *ports_of(islands[0].process.pid)]
    before = rounds_in(islands[0], LOOK_S)
    with ExitStack() as stack:
        for port in ports:
            open_halves(port, stack)
        during = rounds_in(islands[0], LOOK_S)
        assert len(ports) > 1 and during >= before / 2, (before, during)
        newcomer = joining(islands[0].folder / "ticket", "late")
        assert wait_until(lambda: newcomer.poll() is not None or len(roster_of(islands[0])) > 2, 120)
        assert newcomer.poll() is None


Joining = Callable[[Path | str, str], "subprocess.Popen[str]"]


@pytest.fixture
def joining(tmp_path: Path) -> Iterator[Joining]:
    """Start `diloco join`, as whoever holds a ticket does."""
    with ExitStack() as stack:

        def join(ticket: Path | str, name: str) -> "subprocess.Popen[str]":
            command = [
                sys.executable,
                "-m",
                "diloco",
                "join",
                str(ticket),
                "--name",
                name,
                "--dir",
                str(tmp_path / name),
            ]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            stack.callback(lambda: (process.kill(), process.communicate()))
            return process

        yield join


@pytest.mark.soak
def test_tickets_let_in_whom_they_name_and_nobody_else(islands, tmp_path: Path, joining: Joining) -> None:
    folder = islands[0].folder
    owner, somebody = Identity.load(folder / OWNER_KEY), Identity.load(tmp_path / "somebody")
    usual = {"lifetime_s": 3600.0, "peer": None, "right": 1, "islands": 1}
    stranger = Ticket.issue(Identity.load(tmp_path / "owner"), addresses_of(islands[0]), now=time.time(), lifetime_s=99)
    expired = Ticket.issue(owner, addresses_of(islands[0]), now=time.time() - 3600, lifetime_s=60)
    bound = make_ticket(folder, owner, addresses_of(islands[0]), **usual | {"peer": somebody.public_key})
    once = make_ticket(folder, owner, addresses_of(islands[0]), **usual)
    told = {
        "for another run": joining(stranger.render(), "stranger"),
        "expired": joining(expired.render(), "expired"),
        "for another peer": joining(bound.render(), "bound"),
    }
    first = joining(once.render(), "first")

    def is_in() -> bool:
        key = tmp_path / "first" / "identity.key"
        return key.exists() and Identity.load(key).peer_id in roster_of(islands[0])

    assert wait_until(lambda: first.poll() is not None or is_in(), 120) and first.poll() is None
    told["used up"] = joining(once.render(), "second")
    for reason, process in told.items():
        _, said = process.communicate(timeout=90)
        assert reason in said and process.returncode == 2, (reason, said)
        assert len([line for line in said.splitlines() if line.startswith("error[")]) == 1, said
