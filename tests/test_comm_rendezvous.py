"""The rendezvous on the port for streams: who was invited learns who is there and leaves its record, nobody else."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from invited import owner_in, ticket_in
from streams import HERE, until

from diloco.comm.peers.admission import Admission
from diloco.comm.peers.identity import SIGNATURE_BYTES, Identity
from diloco.comm.peers.noticeboard import Noticeboard
from diloco.comm.peers.record import PeerRecord, encode
from diloco.comm.transport import rendezvous as module
from diloco.comm.transport.direct import KNOCK, MAX_HANDSHAKES, DirectTransport
from diloco.comm.transport.frame import pack_header
from diloco.comm.transport.rendezvous import LEAVE, NO, PROOF, RECORDS, SHOW, Rendezvous, pack_shown
from diloco.comm.transport.transport import Frame, Stream
from diloco.errors import RecordRefused, TransportError

SOON_S = 10.0


@dataclass
class Guest:
    """A peer with its port for streams, and nothing else."""

    identity: Identity
    admission: Admission
    direct: DirectTransport
    board: Noticeboard
    rendezvous: Rendezvous

    @property
    def id(self) -> str:
        return self.identity.peer_id

    @property
    def place(self) -> tuple[str, int]:
        address = self.direct.address(HERE)
        return address.host, address.port

    def publish(self, round_number: int = 1, expires_s: float = 60.0) -> bytes:
        now_ms, address = int(time.time() * 1000), self.direct.address(HERE)
        record = PeerRecord(
            self.board.run_id, self.identity.public_key, (), (self.place,), address.certificate_der, "guest", "cpu",
            "1", 0, 0, round_number, bytes(32), self.admission.pack(), sequence=now_ms + round_number,
            expires_ms=now_ms + int(expires_s * 1000),
        )  # fmt: skip
        raw = encode(record, self.identity)
        self.board.take(raw)
        return raw

    def visit(self, *others: "Guest") -> set[str]:
        return self.rendezvous.visit({other.id: [other.place] for other in others})

    def knows(self, other: "Guest") -> bool:
        return other.identity.public_key in self.board.peers()


Open = Callable[..., Guest]


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as stack:

        def make(name: str, run: str = "run", **options: object) -> Guest:
            folder = tmp_path / run
            identity = Identity.load(folder / name)
            admission = ticket_in(folder).admission(identity.public_key)
            direct = DirectTransport(identity.peer_id, HERE)
            stack.callback(direct.close)
            board = Noticeboard(admission.invite.run_id)
            return Guest(identity, admission, direct, board, Rendezvous(direct, identity, admission, board, **options))

        yield make


def test_a_visitor_learns_who_is_there_and_leaves_its_own_record(guest: Open) -> None:
    host, other, visitor = guest("host"), guest("other"), guest("visitor")
    for peer in (host, other, visitor):
        peer.publish()
    assert other.visit(host) == {host.id}
    assert visitor.visit(host) == {host.id}
    assert visitor.board.peers() == host.board.peers() and len(host.board.peers()) == 3
    assert visitor.rendezvous.told == {other.id, host.id}
    assert visitor.visit(other, host) == {other.id, host.id}
    assert other.knows(visitor) and not visitor.rendezvous.told


def test_who_has_no_record_yet_learns_all_the_same(guest: Open) -> None:
    host, visitor = guest("host"), guest("visitor")
    host.publish()
    assert visitor.visit(host) == {host.id} and visitor.knows(host)
    assert not host.knows(visitor)


def test_of_many_that_are_visited_together_most_tell_their_own_record_only(
    guest: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TELL_ALL", 0)
    host, other, visitor = guest("host"), guest("other"), guest("visitor")
    for peer in (host, other, visitor):
        peer.publish()
    other.visit(host)
    assert visitor.visit(host) == {host.id} and host.knows(visitor)
    assert visitor.knows(host) and not visitor.knows(other)


def shown(visitor: Guest, host: Guest, made: Callable[[bytes], bytes], kind: int = SHOW, then: bytes = b"") -> Frame:
    """What a host answers to one that shows what `made` makes of the certificate that it sees."""
    stream, certificate = host.direct.visit(host.id, *host.place, SOON_S)
    with closing(stream):
        assert stream.receive(timeout_s=SOON_S).kind == PROOF
        stream.send(kind, made(certificate), timeout_s=SOON_S)
        answer = stream.receive(timeout_s=SOON_S)
        if then and answer.kind == RECORDS:
            stream.send(LEAVE, b"", then, timeout_s=SOON_S)
            answer = stream.receive(timeout_s=SOON_S)
        return answer


def proof(visitor: Guest, certificate: bytes) -> bytes:
    return visitor.identity.sign(module.VISITING_CONTEXT + certificate)


def test_an_admission_of_another_run_or_of_another_key_reads_nothing(guest: Open) -> None:
    host, stranger, member = guest("host"), guest("stranger", run="elsewhere"), guest("member")
    host.publish()
    assert stranger.visit(host) == set()
    assert "for another run" in stranger.rendezvous.refusal
    assert host.board.run_id.hex()[:6] not in stranger.rendezvous.refusal, "strangers are not told which run this is"

    def with_a_copied_admission(certificate: bytes) -> bytes:
        return pack_shown(stranger.identity.public_key, member.admission.pack(), proof(stranger, certificate))

    answer = shown(stranger, host, with_a_copied_admission)
    assert (answer.kind, answer.head) == (NO, b"the admission was made for another key")

    def with_its_key(certificate: bytes) -> bytes:
        return pack_shown(member.identity.public_key, member.admission.pack(), proof(stranger, certificate))

    with pytest.raises(TransportError):
        shown(stranger, host, with_its_key)
    assert len(host.board.peers()) == 1


def test_who_passes_on_what_a_member_has_shown_elsewhere_reads_nothing(guest: Open) -> None:
    """Somebody in between has another certificate, so the member has signed another one."""
    host, between, member = guest("host"), guest("between"), guest("member")
    host.publish()
    signed = proof(member, between.direct.address(HERE).certificate_der)
    with pytest.raises(TransportError):
        shown(between, host, lambda _: pack_shown(member.identity.public_key, member.admission.pack(), signed))
    good = shown(member, host, lambda seen: pack_shown(*visiting(member, seen)))
    assert good.kind == RECORDS, "that was the only difference"


def visiting(visitor: Guest, certificate: bytes) -> tuple[bytes, bytes, bytes]:
    return visitor.identity.public_key, visitor.admission.pack(), proof(visitor, certificate)


def test_a_visitor_tells_nobody_else_what_it_was_invited_to(guest: Open) -> None:
    host, impostor, visitor = guest("host"), guest("impostor"), guest("visitor")
    heard: list[bytes] = []

    def listen(stream: Stream) -> None:
        stream.send(PROOF, impostor.rendezvous._proof, timeout_s=SOON_S)
        with suppress(TransportError):
            heard.append(stream.receive(timeout_s=SOON_S).head)
        heard.append(b"")

    impostor.direct.serve_visitors(listen)
    visitor.publish()
    assert visitor.rendezvous.visit({host.id: [impostor.place]}) == set()
    until(lambda: heard)
    assert heard == [b""] and not visitor.rendezvous.refusal


def test_who_answers_byte_by_byte_keeps_a_visitor_for_a_while_only(
    guest: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VISIT_S", 0.5)
    host, visitor = guest("host"), guest("visitor")
    sent: list[int] = []
    frame = memoryview(pack_header(PROOF, bytes(SIGNATURE_BYTES), b"") + bytes(SIGNATURE_BYTES))

    def drip(stream: Stream) -> None:
        with suppress(TransportError):
            for place in range(len(frame)):
                stream.carrier.wire.write(frame[place : place + 1], None)
                sent.append(place)
                time.sleep(0.05)
        sent.append(-1)

    host.direct.serve_visitors(drip)
    assert visitor.visit(host) == set()
    until(lambda: sent and sent[-1] < 0)
    assert len(sent) < len(frame), "the visitor had hung up"


def test_an_objection_keeps_a_visitor_out(guest: Open) -> None:
    host = guest("host", objection=lambda peer, admission: "its ticket was revoked")
    visitor = guest("visitor")
    host.publish()
    assert visitor.visit(host) == set() and visitor.rendezvous.refusal == "its ticket was revoked"
    assert not visitor.board.peers()


def test_a_visitor_leaves_nobody_elses_record(guest: Open) -> None:
    host, other, visitor = guest("host"), guest("other"), guest("visitor")
    raw = other.publish()

    def leave(certificate: bytes) -> bytes:
        return pack_shown(*visiting(visitor, certificate))

    answer = shown(visitor, host, leave, then=raw)
    assert answer.kind == NO and b"another peer" in answer.head and not host.knows(other)


def test_members_have_a_place_on_the_board_whoever_has_the_others(guest: Open, tmp_path: Path) -> None:
    host, ticket = guest("host"), ticket_in(tmp_path / "run", islands=1)
    stranger, member = (replace_admission(guest(name), ticket) for name in ("stranger", "member"))
    host.board.take(stranger.publish())
    with pytest.raises(RecordRefused, match="one too many"):
        host.board.take(member.publish())
    host.board.is_member = member.identity.public_key.__eq__
    host.board.take(member.publish(2))
    assert host.knows(member)


def test_records_of_a_revoked_ticket_take_no_place(guest: Open) -> None:
    host, visitor = guest("host"), guest("visitor")
    host.board.is_revoked = lambda admission: admission.invite == visitor.admission.invite
    with pytest.raises(RecordRefused, match="revoked"):
        host.board.take(visitor.publish())


def test_a_record_that_was_signed_after_its_end_is_refused(guest: Open) -> None:
    visitor = guest("visitor")
    with pytest.raises(RecordRefused, match="from the future"):
        visitor.publish(expires_s=-2.0)


def test_a_cut_holds_on_both_sides(guest: Open) -> None:
    cut: set[str] = set()
    host, visitor = guest("host", is_cut=cut.__contains__), guest("visitor", is_cut=cut.__contains__)
    cut.add(visitor.id)
    assert visitor.visit(host) == set()
    cut.clear()
    cut.add(host.id)
    assert visitor.visit(host) == set()
    cut.clear()
    assert visitor.visit(host) == {host.id}


def test_silent_strangers_keep_no_visitor_out_and_hold_no_threads(guest: Open) -> None:
    host, visitor = guest("host"), guest("visitor")
    host.publish()
    with ExitStack() as stack:
        for number in range(3 * MAX_HANDSHAKES):
            silent = stack.enter_context(socket.create_connection(host.place))
            silent.sendall(KNOCK if number % 2 else KNOCK[:3])
        assert visitor.visit(host) == {host.id}
        until(lambda: len(host.direct._handshakes._pending) <= MAX_HANDSHAKES)


@pytest.mark.parametrize("junk", [b"", b"x" * 300, b"k" * 32 + b"\xff\xff"])
def test_junk_ends_a_visit_and_nothing_else(guest: Open, junk: bytes) -> None:
    host, visitor = guest("host"), guest("visitor")
    with pytest.raises(TransportError):
        shown(visitor, host, lambda _: junk)
    assert visitor.visit(host) == {host.id}


def test_a_board_keeps_the_newest_that_is_valid(guest: Open, tmp_path: Path) -> None:
    host, visitor = guest("host"), guest("visitor")
    old, new = visitor.publish(1), visitor.publish(2)
    host.board.take(new)
    with pytest.raises(RecordRefused, match="stale"):
        host.board.take(old)
    visitor.publish(3, expires_s=0.5)
    assert visitor.visit(host) == {host.id}
    until(lambda: not host.knows(visitor))
    with pytest.raises(RecordRefused, match="stale"):
        host.board.take(new)


def test_an_invite_fills_no_more_places_on_a_board_than_it_has(guest: Open, tmp_path: Path) -> None:
    host, ticket = guest("host"), ticket_in(tmp_path / "run", islands=1)
    first, second = (replace_admission(guest(name), ticket) for name in ("first", "second"))
    host.board.take(first.publish())
    with pytest.raises(RecordRefused, match="one too many"):
        host.board.take(second.publish())


def replace_admission(one: Guest, ticket: object) -> Guest:
    return replace(one, admission=ticket.admission(one.identity.public_key))  # type: ignore[attr-defined]


def test_a_record_of_another_run_is_on_no_board(guest: Open, tmp_path: Path) -> None:
    host, stranger = guest("host"), guest("stranger", run="elsewhere")
    assert owner_in(tmp_path / "run").public_key != owner_in(tmp_path / "elsewhere").public_key
    with pytest.raises(RecordRefused, match="foreign run"):
        host.board.take(stranger.publish())
