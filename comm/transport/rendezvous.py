"""A rendezvous beside the directory: whoever was invited learns there who is in the run, and leaves its own record.

It is on the port for streams and needs no daemon: strangers can keep p2pd from running (SECURITY.md), and nobody who
was invited has to care. Neither side knows the other's certificate beforehand, so each proves inside TLS who it is by a
signature over the certificate that the serving side has shown: somebody in between has another one. The serving side
does so first, since a visitor tells nobody else what it was invited to:

    serving side    PROOF    its signature
    visitor         SHOW     its key, its admission, its signature; or MEET and the same
    serving side    RECORDS  the run's time, and all records that it knows (MEET: its own); or NO and why
    visitor         LEAVE    its own record, where it has one
    serving side    YES, or NO and why

Everything is bounded, and a visitor without an admission reads nothing but PROOF and NO.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from diloco.comm.peers import packing
from diloco.comm.peers.admission import ADMISSION_LIMIT, Admission, check_admission
from diloco.comm.peers.clock import RUN_CLOCK
from diloco.comm.peers.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, public_key_in, verify
from diloco.comm.peers.noticeboard import MAX_RECORDS, Noticeboard
from diloco.comm.peers.record import RECORD_LIMIT
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.transport import Frame, Stream, closed_after
from diloco.errors import FrameError, IdentityError, PeerRefused, RecordRefused, TicketError, TransportError, WrongPeer

PROOF, SHOW, MEET, RECORDS, LEAVE, YES, NO = 1, 2, 3, 4, 5, 6, 7
SERVING_CONTEXT, VISITING_CONTEXT = b"diloco rendezvous 1\0", b"diloco visitor 1\0"
CONNECT_S = 3.0
ASK_S = 10.0
VISIT_S = 20.0  # for all of a visit: who answers byte by byte keeps nobody for longer
AT_ONCE = 16  # visits
TELL_ALL = 4  # of those who are visited together: enough to hear of everybody
REASON_BYTES = 200
RECORDS_LIMIT = MAX_RECORDS * (RECORD_LIMIT + 8)

log = logging.getLogger(__name__)

HostPort = tuple[str, int]  # host and port


class Rendezvous:
    """Receive visitors, and visit others: one for each `DirectTransport`. What is learnt goes to the board."""

    def __init__(
        self, direct: DirectTransport, identity: Identity, admission: Admission, board: Noticeboard, *,
        objection: Callable[[str, Admission], str] = lambda peer, admission: "",
        is_cut: Callable[[str], bool] = lambda peer: False, when_left: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """`when_left` is called when a visitor has left its record: it is about to open streams, and looks into the
        directory may have to wait for p2pd."""
        self._when_left = when_left
        self._direct, self._identity, self._admission, self._board = direct, identity, admission.pack(), board
        self._objection, self._is_cut = objection, is_cut
        self._own_certificate = direct.address("").certificate_der
        self._proof = identity.sign(SERVING_CONTEXT + self._own_certificate)
        self.told: set[str] = set()  # of whom it has first heard on a visit, until it has visited them, too
        self.refusal = ""  # why another one did not let this one in, as it says itself
        self.refused_by: dict[str, tuple[str, float]] = {}  # who has said so last, what, and when
        direct.serve_visitors(self._serve)

    # whoever wants to get in

    def visit(self, places: Mapping[str, Sequence[HostPort]]) -> set[str]:
        """Visit peers, each at the first of its places that answers, and return who has let this one in.

        Some tell all records that they know, the others their own.
        """
        self.told -= places.keys()
        kinds = [SHOW if number < TELL_ALL else MEET for number in range(len(places))]
        with ThreadPoolExecutor(AT_ONCE, "visit") as pool:
            answers = pool.map(self._visit_anywhere, kinds, places, places.values())
            let_in = {peer for peer, answer in zip(places, answers, strict=True) if answer}
        if let_in:
            self.refusal = ""
            self.refused_by.clear()
        return let_in

    def _visit_anywhere(self, kind: int, peer: str, places: Sequence[HostPort]) -> bool:
        deadline = time.monotonic() + VISIT_S
        for host, port in places:
            if time.monotonic() > deadline:
                break
            try:
                self._visit(kind, peer, host, port)
            except PeerRefused as refused:
                self.refusal = str(refused)
                self.refused_by[peer] = self.refusal, time.monotonic()
                return False
            except (TransportError, IdentityError, ValueError) as error:  # ValueError: bytes that are no records
                log.info("%s does not let one in at %s:%d: %s", peer, host, port, error)
            else:
                return True
        return False

    def _visit(self, kind: int, peer: str, host: str, port: int) -> None:
        if self._is_cut(peer):
            raise TransportError("the link is cut")
        stream, certificate = self._direct.visit(peer, host, port, CONNECT_S)
        with closing(stream), closed_after(stream, VISIT_S):
            proof = stream.receive(_nothing, timeout_s=ASK_S)
            if proof.kind != PROOF or not verify(public_key_in(peer), proof.head, SERVING_CONTEXT + certificate):
                raise WrongPeer(f"{peer}: another one answers there")
            signature = self._identity.sign(VISITING_CONTEXT + certificate)
            shown = pack_shown(self._identity.public_key, self._admission, signature)
            stream.send(kind, shown, timeout_s=ASK_S)
            self._learn(_answer(stream, RECORDS))
            if own := self._board.signed_by(self._identity.public_key):
                stream.send(LEAVE, b"", own, timeout_s=ASK_S)
                _answer(stream, YES)

    def _learn(self, answer: Frame) -> None:
        if not RUN_CLOCK.hear(packing.Reader(answer.head).integer(8) / 1000):
            raise TransportError("its clock is more than a day from this machine's")
        known = {*self._board.peers(), self._identity.public_key}
        for raw in read_records(bytes(answer.payload)):
            try:
                record = self._board.take(raw)
            except RecordRefused as refused:
                log.info("a record is not used: %s", refused)
            else:
                if record.public_key not in known:
                    self.told.add(peer_id_of(record.public_key))

    # whoever lets others in

    def _serve(self, stream: Stream) -> None:
        with closed_after(stream, VISIT_S):
            self._receive(stream)

    def _receive(self, stream: Stream) -> None:
        stream.send(PROOF, self._proof, timeout_s=ASK_S)
        try:
            shown = stream.receive(_nothing, timeout_s=ASK_S)
            key = self._checked(shown)
        except TicketError as error:
            stream.send(NO, str(error).encode()[:REASON_BYTES], timeout_s=ASK_S)
            raise PeerRefused(str(error)) from None
        own = self._board.signed_by(self._identity.public_key)
        told = self._board.signed() if shown.kind == SHOW else [own] if own else []
        now = packing.integer(int(RUN_CLOCK.now() * 1000), 8)
        stream.send(RECORDS, now, pack_records(told), timeout_s=ASK_S)
        left = stream.receive(_one_record, timeout_s=ASK_S)  # most who only look hang up here
        try:
            self._board.take(bytes(left.payload), key)  # its own and nobody else's
            self._when_left()
        except RecordRefused as refused:
            stream.send(NO, str(refused).encode()[:REASON_BYTES], timeout_s=ASK_S)
        else:
            stream.send(YES, timeout_s=ASK_S)

    def _checked(self, shown: Frame) -> bytes:
        """Return the key of a visitor, if it holds it and the run's owner has let it in; else raise TicketError."""
        try:
            key, admission, signature = read_shown(shown.head)
        except packing.Malformed as error:
            raise FrameError(f"a visitor does not say who it is: {error}") from None
        if shown.kind not in (SHOW, MEET) or not verify(key, signature, VISITING_CONTEXT + self._own_certificate):
            raise FrameError("a visitor does not hold the key that it shows")
        checked, visitor = check_admission(admission, self._board.run_id, key), peer_id_of(key)
        if self._is_cut(visitor):
            raise FrameError("the link is cut")
        if objection := self._objection(visitor, checked):
            raise TicketError(objection)
        return key


def pack_shown(key: bytes, admission: bytes, signature: bytes) -> bytes:
    """Return what a visitor shows as bytes, which `read_shown` reads."""
    return packing.fixed(key, PUBLIC_KEY_BYTES) + packing.blob(admission, ADMISSION_LIMIT) + signature


def read_shown(raw: bytes) -> tuple[bytes, bytes, bytes]:
    """Return key, admission and signature of a visitor, unchecked; raise Malformed where it is something else."""
    reader = packing.Reader(raw)
    key, admission = reader.take(PUBLIC_KEY_BYTES), reader.blob(ADMISSION_LIMIT)
    signature = reader.take(SIGNATURE_BYTES)
    reader.finish()
    return key, admission, signature


def pack_records(signed: Sequence[bytes]) -> bytes:
    """Return records as bytes, which `read_records` reads."""
    return packing.integer(len(signed), 2) + b"".join(packing.blob(raw, RECORD_LIMIT) for raw in signed)


def read_records(raw: bytes) -> list[bytes]:
    """Return the records that a visitor is told, unchecked; raise Malformed where it is something else."""
    reader = packing.Reader(raw)
    if (count := reader.integer(2)) > MAX_RECORDS:
        raise packing.Malformed(f"{count} records, at most {MAX_RECORDS} are allowed")
    signed = [reader.blob(RECORD_LIMIT) for _ in range(count)]
    reader.finish()
    return signed


def _answer(stream: Stream, kind: int) -> Frame:
    answer = stream.receive(_records, timeout_s=ASK_S)
    if answer.kind == NO:
        said = answer.head[:REASON_BYTES].decode(errors="replace")
        raise PeerRefused("".join(filter(str.isprintable, said)))  # no control characters on a terminal
    if answer.kind != kind:
        raise FrameError(f"{stream.peer} answers with {answer.kind}")
    return answer


def _nothing(kind: int, head: bytes, length: int) -> memoryview:
    if length or len(head) > PUBLIC_KEY_BYTES + ADMISSION_LIMIT + SIGNATURE_BYTES + 8:
        raise FrameError("a rendezvous speaks in short frames")
    return memoryview(bytearray())


def _one_record(kind: int, head: bytes, length: int) -> memoryview:
    if kind != LEAVE or length > RECORD_LIMIT:
        raise FrameError("a visitor leaves one record")
    return memoryview(bytearray(length))


def _records(kind: int, head: bytes, length: int) -> memoryview:
    if length > RECORDS_LIMIT or len(head) > REASON_BYTES:
        raise FrameError("more than all records of a run")
    return memoryview(bytearray(length))
