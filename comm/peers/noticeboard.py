"""The newest record of each peer as its peer has signed it, by the DHT or by a visit (`rendezvous.py`).

What is taken here was signed by an island that the run's owner has invited, and expires. So it can be handed on.
"""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from diloco.comm.peers.admission import Admission, check_admission
from diloco.comm.peers.clock import RUN_CLOCK
from diloco.comm.peers.identity import public_key_in
from diloco.comm.peers.record import LIFETIME_LIMIT_S, PeerRecord, authenticate, check_not_too_long
from diloco.errors import IdentityError, RecordRefused, TicketError

MAX_RECORDS = 1000  # of all peers together
CLOCKS_APART_MS = 5000  # the run's clock is that of the first: it goes at another rate
FORGET_S = 26 * 3600.0  # after which no record can be valid that was signed before


class Noticeboard:
    """Hold the records of one run. Safe to use from several threads."""

    def __init__(self, run_id: bytes) -> None:
        self.run_id = run_id
        self._lock = threading.Lock()
        self._signed: dict[bytes, tuple[PeerRecord, bytes]] = {}  # by public key
        self._sequences: dict[bytes, int] = {}  # of records that have expired, too
        self.is_member: Callable[[bytes], bool] = lambda key: False  # members have a place, whoever else has one
        self.is_revoked: Callable[[Admission], bool] = lambda admission: False

    def take(self, raw: object, key: object = None) -> PeerRecord:
        """Return the record in these bytes and keep it, if it is valid now and of this run, and no newer one was seen.

        Else raise RecordRefused. `key` is the public key under which it was found, if it came with one.
        """
        record = authenticate_entry(key, raw, self.run_id)
        assert isinstance(raw, bytes)
        check_times(record)
        if record.expires_at <= RUN_CLOCK.now():
            raise RecordRefused("expired", "the peer has stopped renewing it")
        with self._lock:
            if record.sequence < self._sequences.get(record.public_key, 0):
                raise RecordRefused("stale", "a newer record of this peer was seen before")
            self._remove_expired()
            self._refuse_one_too_many(record)
            self._signed[record.public_key] = record, raw
            self._sequences[record.public_key] = record.sequence
            if len(self._sequences) > 2 * MAX_RECORDS:
                oldest = 1000 * (RUN_CLOCK.now() - FORGET_S)
                self._sequences = {key: last for key, last in self._sequences.items() if last > oldest}
        return record

    def peers(self) -> dict[bytes, PeerRecord]:
        """Return the records that are valid now, by public key."""
        with self._lock:
            self._remove_expired()
            return {key: record for key, (record, _) in self._signed.items()}

    def signed(self) -> list[bytes]:
        """Return the same records, as they were signed."""
        with self._lock:
            self._remove_expired()
            return [raw for _, raw in self._signed.values()]

    def signed_by(self, public_key: bytes) -> bytes:
        """Return the record of one peer as it was signed; b"" where it has none that is valid."""
        with self._lock:
            self._remove_expired()
            return self._signed[public_key][1] if public_key in self._signed else b""

    def whereabouts(self, peer: str) -> tuple[str, ...]:
        """Return the multiaddrs in the record of the peer with this id; none where that is not known."""
        with self._lock, suppress(IdentityError):  # an id of another kind: it is nobody here
            known = self._signed.get(public_key_in(peer))
            return known[0].control if known is not None else ()
        return ()

    def _remove_expired(self) -> None:
        now = RUN_CLOCK.now()
        for key in [key for key, (record, _) in self._signed.items() if record.expires_at <= now]:
            del self._signed[key]

    def _refuse_one_too_many(self, record: PeerRecord) -> None:
        if record.public_key in self._signed or self.is_member(record.public_key):
            return
        admission = _admission_in(record)
        if self.is_revoked(admission):
            raise RecordRefused("revoked", "its ticket was revoked")
        others = [known for key, (known, _) in self._signed.items() if not self.is_member(key)]
        invites = Counter(_admission_in(known).invite for known in others)
        if len(others) >= MAX_RECORDS or invites[admission.invite] >= admission.invite.islands:
            raise RecordRefused("one too many", "the places of its ticket are taken")


def _admission_in(record: PeerRecord) -> Admission:
    return check_admission(record.admission, record.run_id, record.public_key)


def authenticate_entry(key: object, raw: object, run_id: bytes) -> PeerRecord:
    """Return the record in these bytes; raise RecordRefused unless it is of this run, admitted, and the key's own.

    `key` may be None, where it was found under none.
    """
    if not isinstance(raw, bytes):
        raise RecordRefused("malformed", "it is not bytes")
    record = authenticate(raw)
    if key is not None and record.public_key != key:
        raise RecordRefused("foreign key", "it was copied to another peer's place")
    if record.run_id != run_id:
        raise RecordRefused("foreign run", "it was copied from another run")
    try:
        check_admission(record.admission, run_id, record.public_key)
    except TicketError as error:
        raise RecordRefused("not admitted", str(error)) from None
    return record


def check_times(record: PeerRecord) -> None:
    """Put the run's clock forward to when a record was signed, and refuse one that is to be kept for too long."""
    RUN_CLOCK.advance_to(record.sequence / 1000)  # by the time of its peer
    check_not_too_long(record, RUN_CLOCK.now())
    if record.expires_ms - record.sequence > 1000 * LIFETIME_LIMIT_S:  # by its own clock: no skew excuses it
        raise RecordRefused("expiry too far", "it is to be kept for longer than an hour")
    if record.sequence > min(record.expires_ms, 1000 * RUN_CLOCK.now() + CLOCKS_APART_MS):
        raise RecordRefused("from the future", "it was signed later than now")
