"""The part of the directory that uses hivemind.

hivemind refuses a whole reply for one record that its validator refuses, so the validator may only refuse what no
honest peer would ever have stored: it does not look at whether a record has expired.

Whoever asks a node for anything shows its admission with the request, in the field that hivemind has for such things;
libp2p has proven whose key the asker holds. Strangers get no answer, and enter no routing table.

p2pd waits ever longer between dials of one address that fail, up to minutes. So it is asked to dial only where somebody
accepts connections: after a long cut, peers are found as soon as it heals.
"""

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pydantic.v1 as pydantic
from hivemind.dht import node as dht_node
from hivemind.dht import protocol as dht_protocol
from hivemind.dht import routing as dht_routing
from hivemind.dht.node import DHTID, DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.schema import SchemaValidator, conbytes
from hivemind.dht.storage import DHTLocalStorage
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, DispatchFailure, P2PHandlerError
from hivemind.proto.dht_pb2 import PingRequest, PingResponse
from hivemind.utils import timed_storage
from hivemind.utils.multiaddr import Multiaddr

from diloco.comm.peers import guard
from diloco.comm.peers.admission import Admission, Invite, check_admission
from diloco.comm.peers.clock import RUN_CLOCK
from diloco.comm.peers.identity import PUBLIC_KEY_BYTES, Identity, public_key_in
from diloco.comm.peers.noticeboard import MAX_RECORDS, authenticate_entry, check_times
from diloco.comm.peers.record import RECORD_LIMIT, unverified
from diloco.errors import RecordRefused, TicketError

FIELD = "peers"
PING = "DHTProtocol.rpc_ping"
RELAY_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
PROBE_S = 2.5  # for a connection to be accepted: round trips of a second, and a lost packet
ANSWER_S = 3.0
CRASHING_S = 30.0  # for which p2pd is started again and again at first
GO_CRASH, SIGNALLED = 2, 128  # its exit status after a crash; what is greater tells a signal
# What hivemind raises when the network, a peer or p2pd fails; RuntimeError is its "bootstrap failed".
FAILURES = (P2PDaemonError, ControlFailure, DispatchFailure, ValidationError, RuntimeError, OSError, EOFError)

# Strangers can have p2pd log errors, a line each: not in an island's output, unless its operator asks for them.
os.environ.setdefault("GOLOG_LOG_LEVEL", "fatal")

for module in (dht_node, dht_protocol, dht_routing, timed_storage):  # each has a name of its own for the function
    module.get_dht_time = RUN_CLOCK.now


Objection = Callable[[str, Admission], str]  # why a peer is not let in, though its admission is good; "": it is


@dataclass(frozen=True)
class NodeOptions:
    """Configure one node of the DHT: which peers it joins, where it listens, and how others reach it."""

    bootstrap: Sequence[str] = ()
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    fixed: bool = False  # the port: no other one will do, and the next one is for streams
    announce: Sequence[str] = ()  # multiaddrs under which others see this peer, where they differ from its own
    behind_nat: bool = False  # look for relays and open a port on the router
    # "private" uses relays from the start, "public" never does; without it libp2p asks its peers, for minutes
    reachability: str | None = None
    relays: bool = False  # let p2pd pass on for whoever asks: it asks nobody for an admission
    is_cut: Callable[[str], bool] = lambda peer: False  # from which peers a simulation cuts this one off, by their ids
    objection: Objection = lambda peer, admission: ""


class GuardedP2P(P2P):  # type: ignore[misc]
    """Run p2pd under the guard, so that it ends with its parent: hivemind leaves it behind when that is killed."""

    is_cut: Callable[[str], bool] = staticmethod(lambda peer: False)
    check: Callable[[str, bytes], object] = staticmethod(lambda peer, admission: None)  # raises TicketError
    whereabouts: Callable[[str], Sequence[str]] = staticmethod(lambda peer: ())  # the multiaddrs of a peer
    admission: bytes = b""  # this peer's own
    refusal: str = ""  # why another one did not let this one in, as it says itself

    def __init__(self) -> None:
        super().__init__()
        self._shown: set[str] = set()  # to whom the admission has been shown

    @staticmethod
    def _make_process_args(*arguments: Any, **options: Any) -> list[str]:
        command = P2P._make_process_args(*arguments, **options)
        return [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *command]

    @property
    def running(self) -> bool:
        """Tell whether p2pd is alive, as far as this process has noticed."""
        return self._child.returncode is None

    def _terminate(self) -> None:
        """End p2pd. hivemind also calls this from a finalizer, where an error would only be printed."""
        with suppress(OSError):  # /tmp, where the sockets are, cannot be written
            super()._terminate()

    async def ended(self) -> None:
        """Wait until p2pd has exited."""
        await self._child.wait()

    async def open_stream(
        self, peer: str, addresses: Sequence[str], protocol: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to the peer of this id: p2pd has verified that it holds the id's key."""
        peer_id = await self.meet(peer, addresses)
        opening = asyncio.ensure_future(self.call_binary_stream_handler(peer_id, protocol))
        try:
            _, reader, writer = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # p2pd cannot be told that nobody waits any more, and hivemind would forget the open connection to it
            opening.add_done_callback(_close_unused)
            raise
        return reader, writer

    async def meet(self, peer: str, addresses: Sequence[str]) -> PeerID:
        """Connect to a peer at one of these multiaddrs, if that has not been done; return its id as hivemind has it."""
        peer_id, places = _dialable(peer, addresses)
        self._check_link(peer_id)
        if places and not await self._connected(peer_id):
            if not await _somebody_at(places):
                raise P2PDaemonError(f"nobody accepts connections at {', '.join(map(str, places))}")
            await self._client.connect(peer_id, places)
        return peer_id

    async def _connected(self, peer_id: PeerID) -> bool:
        return any(info.peer_id == peer_id for info in await self._client.list_peers())

    def _check_link(self, peer_id: PeerID) -> None:
        if self.is_cut(str(peer_id)):
            raise P2PDaemonError(f"{peer_id}: the link is cut")

    async def _call_unary_protobuf_handler(self, peer_id: PeerID, name: str, request: Any, *arguments: Any) -> Any:
        """Call a peer, with this one's admission.

        A ping's answer carries its time: the run's clock takes it in, and hivemind sees no other.
        """
        self._check_link(peer_id)
        if places := self.whereabouts(str(peer_id)):
            await self.meet(str(peer_id), places)
        try:
            response = await self._call(peer_id, name, request, *arguments)
        except P2PHandlerError as error:  # its text is the other's: a class and what it says
            kind, _, said = str(error).partition("(")
            self.refusal = said.strip("'\")") if kind == TicketError.__name__ else self.refusal
            raise P2PDaemonError(f"{peer_id} refuses: {said[:200]!r}") from None
        if isinstance(response, PingResponse) and RUN_CLOCK.hear(response.dht_time):
            response.dht_time = RUN_CLOCK.now()
        return response

    async def _call(self, peer_id: PeerID, name: str, request: Any, *arguments: Any) -> Any:
        """Call a peer; the admission goes with the first request, and again when the other has forgotten it."""
        if str(peer_id) in self._shown:
            with suppress(P2PHandlerError):
                return await super()._call_unary_protobuf_handler(peer_id, name, request, *arguments)
        request.auth.signature = self.admission
        response = await super()._call_unary_protobuf_handler(peer_id, name, request, *arguments)
        self._shown.add(str(peer_id))
        return response

    async def _add_protobuf_unary_handler(
        self, name: str, handler: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any, **options: Any
    ) -> None:
        async def answer(request: Any, context: Any) -> Any:
            self._check_link(context.remote_id)
            self.check(str(context.remote_id), request.auth.signature)
            return await handler(request, context)

        await super()._add_protobuf_unary_handler(name, answer, *arguments, **options)


class RunValidator(SchemaValidator):  # type: ignore[misc]
    """Check every record of this DHT for its form, its signature, its subkey and its expiry, and count refusals."""

    def __init__(self, run_id: bytes, refusals: Counter[str]) -> None:
        super().__init__(_schema(), allow_extra_keys=False, prefix=run_id.hex())
        self._run_id, self._refusals = run_id, refusals

    def validate(self, record: DHTRecord) -> bool:
        """Return whether the DHT may keep the record; a refusal is counted by its reason."""
        try:
            if not super().validate(record):
                raise RecordRefused("malformed", "not what this run keeps in its DHT")
            load = DHTProtocol.serializer.loads
            peer = authenticate_entry(load(record.subkey), load(record.value), self._run_id)
            check_times(peer)
            if record.expiration_time != peer.expires_at:
                raise RecordRefused("expiry changed", "the DHT was told another expiry than the peer signed")
        except (RecordRefused, TypeError) as refused:  # TypeError: hivemind's, on a subkey that cannot be hashed
            self._refusals[getattr(refused, "reason", "malformed")] += 1
            return False
        return True


class DaemonCrashed(P2PDaemonError):  # type: ignore[misc]
    """Signal that p2pd ended while it was started: it was killed, or has crashed."""


class NotLetIn(P2PDaemonError):  # type: ignore[misc]
    """Signal that those who were asked do not admit this peer to the run."""


class RunStorage(DHTLocalStorage):  # type: ignore[misc]
    """Keep records of no more islands than each invite allows, and of so many in all: replies have a limit."""

    def store_subkey(self, key: DHTID, subkey: Any, value: Any, expiration_time: float) -> bool:
        """Add a record to the run's dictionary; return False where it is older than the present one, or one too many.

        The validator has accepted it before.
        """
        known = self.get(key)
        if known is not None and subkey not in (others := known.value):
            invites = Counter(_invite_in(entry.value) for _, entry in others.items())
            invite = _invite_in(value)
            if len(others) >= MAX_RECORDS or invites[invite] >= invite.islands:
                return False
        return bool(super().store_subkey(key, subkey, value, expiration_time))


def _invite_in(value: bytes) -> Invite:
    """Return the invite in a serialized record that the validator has accepted."""
    record = unverified(DHTProtocol.serializer.loads(value))
    return check_admission(record.admission, record.run_id, record.public_key).invite


dht_protocol.DHTLocalStorage = RunStorage  # DHTProtocol makes its own


def dht_key(run_id: bytes) -> str:
    """Return the name under which hivemind's SchemaValidator knows the field."""
    return f"{run_id.hex()}_{FIELD}"


def _dialable(peer: str, addresses: Sequence[str]) -> tuple[PeerID, list[Multiaddr]]:
    try:
        places = [_for_p2pd(Multiaddr(address.removesuffix(f"/p2p/{peer}"))) for address in addresses]
        return PeerID.from_base58(peer), places
    except ValueError as error:
        raise P2PDaemonError(f"{peer} cannot be dialled: {error}") from None


def _for_p2pd(address: Multiaddr) -> Multiaddr:
    """Rewrite an address for p2pd: hivemind writes a relay's peer id as a CID of version 1, which p2pd cannot read."""
    parts = [bytes(part) for part in address.split()]
    for index, (protocol, value) in enumerate(address.items()):
        if protocol.name == "p2p":
            raw = PeerID.from_base58(value).to_bytes()
            parts[index] = protocol.vcode + bytes([len(raw)]) + raw
    return Multiaddr(b"".join(parts))


async def _somebody_at(places: Sequence[Multiaddr]) -> bool:
    """Tell whether a connection is accepted at one of these. Through a relay nobody can know: that counts as yes."""
    probes = [asyncio.ensure_future(_accepts(str(place).split("/"))) for place in places]
    try:
        for probe in asyncio.as_completed(probes):
            if await probe:
                return True
        return False
    finally:
        for task in probes:
            task.cancel()


async def _accepts(parts: list[str]) -> bool:
    match parts:
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port]:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), PROBE_S)
            except (OSError, TimeoutError, ValueError):  # ValueError: a host that is no name
                return False
            writer.close()
            return True
        case _:
            return True


def _close_unused(opening: asyncio.Future[Any]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[2].close()


async def open_node(
    identity: Identity, admission: Admission, options: NodeOptions, refusals: Counter[str],
    whereabouts: Callable[[str], Sequence[str]],
) -> DHTNode:  # fmt: skip
    """Start p2pd and a DHT node on it, which joins the bootstrap peers and caches no records.

    If it fails, p2pd is ended; where that was killed or has crashed, it is started again, for CRASHING_S seconds.
    """
    until = time.monotonic() + CRASHING_S
    while True:
        try:
            return await _open_node(identity, admission, options, refusals, whereabouts)
        except DaemonCrashed:
            if time.monotonic() > until:
                raise


async def _open_node(
    identity: Identity, admission: Admission, options: NodeOptions, refusals: Counter[str],
    whereabouts: Callable[[str], Sequence[str]],
) -> DHTNode:  # fmt: skip
    family = "ip6" if ":" in options.listen_host else "ip4"
    p2p = await _start_daemon(
        initial_peers=list(options.bootstrap),
        host_maddrs=[f"/{family}/{options.listen_host}/tcp/{options.listen_port}"],
        announce_maddrs=list(options.announce) or None,
        identity_path=str(identity.path),
        check_if_identity_free=False,  # hivemind's check can read RSA keys only
        nat_port_map=options.behind_nat,
        use_auto_relay=options.behind_nat,
        force_reachability=options.reachability,
        startup_timeout=30,
        # libp2p's own DHT would keep what strangers put there, and tell them where everybody is. Only its relays need
        # it; for all else there is `whereabouts`
        dht_mode="server" if options.behind_nat or options.relays else "client",
    )
    run_id = admission.invite.run_id

    seen: dict[str, bytes] = {}  # who has shown its admission to this node need not do so again

    def check(peer: str, raw: bytes) -> None:
        shown = check_admission(raw or seen.get(peer, b""), run_id, public_key_in(peer))
        if objection := options.objection(peer, shown):
            raise TicketError(objection)
        if raw:
            if len(seen) >= MAX_RECORDS:
                seen.clear()
            seen[peer] = raw

    p2p.is_cut, p2p.check, p2p.admission = options.is_cut, check, admission.pack()
    p2p.whereabouts = whereabouts
    try:
        if not options.relays:
            await p2p.add_binary_stream_handler(RELAY_PROTOCOL, _refuse)  # instead of p2pd's own, which no flag ends
        await asyncio.gather(*(_take_time(p2p, address.rpartition("/p2p/")[2]) for address in options.bootstrap))
        await p2p.get_visible_maddrs(latest=True)  # p2pd may end before it is asked for them
        return await DHTNode.create(
            p2p=p2p,
            node_id=DHTID.generate(source=identity.public_key),
            initial_peers=list(options.bootstrap) or None,
            record_validator=RunValidator(run_id, refusals),
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
        )
    except BaseException as error:
        crashed = isinstance(error, FAILURES) and await _has_crashed(p2p)
        await p2p.shutdown()
        if crashed:
            raise DaemonCrashed(str(error)) from error
        if p2p.refusal and isinstance(error, FAILURES):
            raise NotLetIn(p2p.refusal) from error
        raise


async def _refuse(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _start_daemon(**options: Any) -> GuardedP2P:
    """Start p2pd. If that fails, wait for the end of what was started: asyncio complains of a child without a loop."""
    started: list[GuardedP2P] = []

    class Noted(GuardedP2P):
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    try:
        return await Noted.create(**options)
    except BaseException as error:
        crashed = False
        for p2p in started:
            if p2p._child is not None:
                crashed |= isinstance(error, FAILURES) and await _has_crashed(p2p)
                await p2p.shutdown()
                p2p._child._transport.close()
        if crashed:
            raise DaemonCrashed(str(error)) from error
        raise


async def _has_crashed(p2p: GuardedP2P) -> bool:
    """Tell whether p2pd has crashed or was killed, and did not end by itself, with a reason."""
    with suppress(TimeoutError):
        await asyncio.wait_for(p2p.ended(), 2 * guard.LOOK_EVERY_S)  # the guard notices it after a moment
    status = p2p._child.returncode or 0
    return status == GO_CRASH or status > SIGNALLED


async def _take_time(p2p: GuardedP2P, peer: str) -> None:
    """Ask a peer for the run's time, before hivemind compares it with that of this node or stores anything by it."""
    with suppress(*FAILURES, TimeoutError):  # who does not answer is noticed afterwards, by hivemind
        peer_id, _ = _dialable(peer, [])
        question = p2p.call_protobuf_handler(peer_id, PING, PingRequest(), PingResponse)
        await asyncio.wait_for(question, ANSWER_S)


async def reach(node: DHTNode, peer: str, addresses: Sequence[str]) -> bool:
    """Tell whether a peer answers at one of these multiaddrs; if it does, it is in this node's routing table."""
    try:
        peer_id = await node.p2p.meet(peer, addresses)
        await _take_time(node.p2p, peer)
        if await node.protocol.call_ping(peer_id, validate=True) is None:
            return False
    except FAILURES:
        return False
    node.blacklist.register_success(peer_id)  # else it is asked for nothing, for longer after every failure
    return True


async def close_node(node: DHTNode) -> None:
    """Shut down the node and its p2pd. If p2pd is dead already, no answer is waited for."""
    writer = node.p2p._client.control._write_task
    goodbye, end = asyncio.ensure_future(node.shutdown()), asyncio.ensure_future(node.p2p.ended())
    # a dead daemon gives no answers, and its death may be noticed only now
    done, others = await asyncio.wait({goodbye, end}, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await node.p2p.shutdown()
    node.p2p._child._transport.close()  # of a killed daemon: asyncio would complain when the loop is gone
    # hivemind never asks how its writer ended; asyncio would complain of that at some later garbage collection
    await asyncio.gather(writer, return_exceptions=True)
    for task in done:
        task.result()
    with suppress(FileNotFoundError):  # still there if the guard was killed
        os.remove(node.p2p._daemon_listen_maddr["unix"])


def _schema() -> type[pydantic.BaseModel]:
    """Create the schema anew each time, because SchemaValidator changes the class it is given."""
    key = conbytes(min_length=PUBLIC_KEY_BYTES, max_length=PUBLIC_KEY_BYTES, strict=True)
    value = conbytes(max_length=RECORD_LIMIT, strict=True)
    return pydantic.create_model("Run", **{FIELD: (dict[key, value], ...)})  # type: ignore[call-overload,valid-type]
