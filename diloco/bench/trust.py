"""Measure what admission costs: bytes of control a round among four islands, and seconds of a newcomer's way in.

The islands are real peers, each with its directory and its daemon, that train nothing. Bytes are those of admissions in
what their directories say to each other; messages of a round carry those of newcomers only. The way in ends when a
stream of the newcomer is open to everybody. For comparison, newcomers also come in where nobody checks a signature.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from diloco.bench.report import Check, Report
from diloco.comm.peers import admission as admissions
from diloco.comm.peers import dht
from diloco.comm.peers.identity import Identity
from diloco.comm.peers.packing import Reader
from diloco.comm.peers.ticket import Ticket
from diloco.elastic.protocol.messages import Promise
from diloco.elastic.protocol.record import Key
from diloco.elastic.protocol.wire import encode_message
from diloco.errors import TransportError
from diloco.run.local import Connection
from diloco.run.peer import Peer

ROUND_S = 5.0  # short: what is sent by the second counts for more in a longer one
OFFER_S = 60.0  # for a newcomer to be let in


def measure(*, islands: int, seconds: float, newcomers: int) -> Report:
    """Let islands meet, watch what they say for some seconds, and let newcomers in, with and without checks."""
    with TemporaryDirectory(prefix="diloco-bench-") as folder, ExitStack() as stack:
        owner = Identity.load(Path(folder) / "owner.key")
        ticket = Ticket.issue(owner, [], now=time.time(), lifetime_s=3600)
        peers: list[Peer] = []
        for number in range(islands):
            peers.append(_enter(stack, Path(folder) / str(number), ticket.at(peers[0].addresses if peers else ())))
        for peer in peers:
            peer.watch(lambda addresses: None, _fail)
        with _counted() as traffic:
            time.sleep(seconds)
            directory = {what: count / seconds for what, count in traffic.items()}
        place, there = Path(folder), ticket.at(peers[0].addresses)
        checked, unchecked = [], []
        for number in range(newcomers):  # in turn: the machine is as busy for both
            checked.append(_way_in(stack, place / f"checked-{number}", there, peers))
            with _unchecked():
                unchecked.append(_way_in(stack, place / f"unchecked-{number}", there, peers))
    return Report(
        [
            Check("trust.control_bytes_more", directory["admissions"] * ROUND_S, 10_000, "lower"),
            Check("trust.join_s_more", median(checked) - median(unchecked), 0.5, "lower"),
        ],
        {
            "round_s": ROUND_S, "directory_bytes_per_s": directory["bytes"],
            "admission_bytes_per_s": directory["admissions"], "bytes_of_a_newcomers_promise": _promise_more(peers[0]),
            "join_s": checked, "join_s_unchecked": unchecked,
        },
    )  # fmt: skip


def _enter(stack: ExitStack, folder: Path, ticket: Ticket) -> Peer:
    folder.mkdir()
    peer = Peer(folder, ticket, Connection(name=folder.name))
    stack.callback(peer.close)
    peer.publish()
    return peer


def _way_in(stack: ExitStack, folder: Path, ticket: Ticket, members: list[Peer]) -> float:
    """Return the seconds from a newcomer's first packet until it has a stream open to every member."""
    started = time.monotonic()
    newcomer, deadline = _enter(stack, folder, ticket), time.monotonic() + OFFER_S
    missing = {member.id for member in members}
    while missing and time.monotonic() < deadline:
        addresses = newcomer.find_peers()
        for member in list(missing & addresses.keys()):
            try:
                newcomer.plain.connect(addresses[member], "bench", timeout_s=5.0).close()
                missing.discard(member)
            except TransportError:  # it has not seen our record yet
                time.sleep(0.05)
    if missing:
        raise TimeoutError(f"{len(missing)} members did not let a newcomer in within {OFFER_S:.0f} s")
    return time.monotonic() - started


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count the bytes of the directories' requests and answers, and those of admissions in them."""
    traffic: Counter[str] = Counter()
    call = dht.GuardedP2P._call

    async def counting(self: dht.GuardedP2P, *arguments: Any) -> Any:
        response = await call(self, *arguments)
        raw = [arguments[2].SerializeToString(), response.SerializeToString()]
        own = self.admission
        traffic["bytes"] += sum(map(len, raw))
        traffic["admissions"] += sum(each.count(own[:32]) for each in raw) * (len(own) + 2)  # all have one owner
        return response

    dht.GuardedP2P._call = counting  # type: ignore[assignment,method-assign]
    try:
        yield traffic
    finally:
        dht.GuardedP2P._call = call  # type: ignore[method-assign]


@contextmanager
def _unchecked() -> Iterator[None]:
    """Take every admission for good, as if there were none to check."""
    check = dht.check_admission  # type: ignore[attr-defined]

    def take_for_good(raw: bytes, run_id: bytes, island: bytes) -> admissions.Admission:
        return admissions.Admission(admissions.read_invite(Reader(raw)), raw[-64:])

    dht.check_admission = take_for_good  # type: ignore[assignment,attr-defined]
    try:
        yield
    finally:
        dht.check_admission = check  # type: ignore[attr-defined]


def _promise_more(peer: Peer) -> int:
    """Return by how much the promise of a newcomer is longer: those of members carry no admission."""
    bare = Promise(Key(1, "0" * 64), 1, 1, 1, None)
    with_it = Promise(Key(1, "0" * 64), 1, 1, 1, None, admission=peer.admission.pack().hex())
    return len(encode_message(with_it)) - len(encode_message(bare))


def _fail(error: BaseException) -> None:
    raise error
