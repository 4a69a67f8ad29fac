"""A peer's record: where to reach it, what it is, how far it is. Signed by its identity.

A record names its run, its peer and its own expiry inside the signature, so that a copy under another run or key, or
one kept alive by another peer, is refused.
"""

from dataclasses import dataclass, replace

from diloco.comm.peers import packing
from diloco.comm.peers.admission import ADMISSION_LIMIT
from diloco.comm.peers.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, verify
from diloco.errors import RecordRefused

VERSION = 2
CONTEXT = b"diloco peer record\0"
DIGEST_BYTES = 32
CERTIFICATE_LIMIT = 2048
ADDRESSES_LIMIT = 8
TEXT_LIMIT = 128
RECORD_LIMIT = 8192
LIFETIME_LIMIT_S = 3600.0
CLOCK_SKEW_S = 24 * 3600.0


@dataclass(frozen=True)
class PeerRecord:
    """Describe a peer to its run: addresses, certificate, machine, link rates, its round and what admits it."""

    run_id: bytes
    public_key: bytes
    control: tuple[str, ...]  # multiaddrs
    bulk: tuple[tuple[str, int], ...]  # host, port
    certificate: bytes  # DER, of the bulk connection
    name: str
    devices: str
    mesh: str
    up_bits_per_s: int
    down_bits_per_s: int
    round: int
    chain_digest: bytes
    admission: bytes = b""  # by which the run's owner lets it in, see `admission.py`
    relay: bytes = b""  # public key of the member through which it is reached, if nobody can dial it
    sequence: int = 0
    expires_ms: int = 0  # since 1970

    @property
    def expires_at(self) -> float:
        """Return the expiry in seconds since 1970."""
        return self.expires_ms / 1000


def encode(record: PeerRecord, identity: Identity) -> bytes:
    """Encode the record with the identity's public key, and sign it."""
    try:
        body = _body(replace(record, public_key=identity.public_key))
    except packing.Malformed as error:
        raise RecordRefused("malformed", str(error)) from error
    return body + identity.sign(CONTEXT + body)


def decode(data: bytes, now: float) -> PeerRecord:
    """Return the record in these bytes, if its peer signed it and it is valid now; else raise RecordRefused."""
    record = authenticate(data)
    check_not_too_long(record, now)
    if record.expires_at <= now:
        raise RecordRefused("expired", f"{now - record.expires_at:.0f} s ago; the peer has stopped renewing it")
    return record


def authenticate(data: bytes) -> PeerRecord:
    """Return the record like `decode`, without the clock: what this accepts once, it accepts always and everywhere."""
    if len(data) > RECORD_LIMIT:
        raise RecordRefused("too long", f"{len(data)} bytes, at most {RECORD_LIMIT} are allowed")
    record = unverified(data)
    if not verify(record.public_key, data[-SIGNATURE_BYTES:], CONTEXT + data[:-SIGNATURE_BYTES]):
        raise RecordRefused("bad signature", "it was changed, or another key signed it")
    return record


def unverified(data: bytes) -> PeerRecord:
    """Return the record in these bytes without a look at its signature: for what was authenticated before."""
    try:
        return _parse(data[:-SIGNATURE_BYTES])
    except packing.Malformed as error:
        raise RecordRefused("malformed", str(error)) from None


def check_not_too_long(record: PeerRecord, now: float) -> None:
    """Refuse an expiry too far ahead: no peer may ask the others to keep a record for ever.

    The limit is an hour, and a day for clocks that disagree: the run's clock follows such a record at once.
    """
    if record.expires_at > now + LIFETIME_LIMIT_S + CLOCK_SKEW_S:
        raise RecordRefused("expiry too far", f"{record.expires_at - now:.0f} s ahead: is that peer's clock right?")


def _body(record: PeerRecord) -> bytes:
    control = [packing.address(address) for address in record.control]
    bulk = [packing.text(host, packing.ADDRESS_LIMIT) + packing.integer(port, 2) for host, port in record.bulk]
    numbers = (record.up_bits_per_s, record.down_bits_per_s, record.round, record.sequence, record.expires_ms)
    fields = [
        packing.integer(VERSION, 1),
        packing.fixed(record.run_id, DIGEST_BYTES),
        packing.fixed(record.public_key, PUBLIC_KEY_BYTES),
        packing.fixed(record.chain_digest, DIGEST_BYTES),
        *(packing.integer(number, 8) for number in numbers),
        *(packing.text(words, TEXT_LIMIT) for words in (record.name, record.devices, record.mesh)),
        packing.blob(record.certificate, CERTIFICATE_LIMIT),
        packing.blob(record.admission, ADMISSION_LIMIT),
        packing.blob(record.relay, PUBLIC_KEY_BYTES),
        packing.count(len(control), ADDRESSES_LIMIT),
        *control,
        packing.count(len(bulk), ADDRESSES_LIMIT),
        *bulk,
    ]
    return b"".join(fields)


def _parse(body: bytes) -> PeerRecord:
    reader = packing.Reader(body)
    if (version := reader.integer(1)) != VERSION:
        raise packing.Malformed(f"version {version}, this is version {VERSION}: use the same diloco everywhere")
    record = PeerRecord(  # in the order of the bytes
        run_id=reader.take(DIGEST_BYTES),
        public_key=reader.take(PUBLIC_KEY_BYTES),
        chain_digest=reader.take(DIGEST_BYTES),
        up_bits_per_s=reader.integer(8),
        down_bits_per_s=reader.integer(8),
        round=reader.integer(8),
        sequence=reader.integer(8),
        expires_ms=reader.integer(8),
        name=reader.text(TEXT_LIMIT),
        devices=reader.text(TEXT_LIMIT),
        mesh=reader.text(TEXT_LIMIT),
        certificate=reader.blob(CERTIFICATE_LIMIT),
        admission=reader.blob(ADMISSION_LIMIT),
        relay=reader.blob(PUBLIC_KEY_BYTES),
        control=tuple(reader.address() for _ in range(reader.count(ADDRESSES_LIMIT))),
        bulk=tuple(
            (reader.text(packing.ADDRESS_LIMIT), reader.integer(2)) for _ in range(reader.count(ADDRESSES_LIMIT))
        ),
    )
    reader.finish()
    return record
