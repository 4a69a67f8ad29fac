"""A ticket: one URL-safe string that lets islands into a run.

It holds an invite signed by the run's owner, the invite's private key, addresses to join at and how far the run was.

The run is its owner's public key and the run id is that key's hash, so a ticket proves by itself which run it is for.
The private key is never sent to a peer: an island signs its own key with it, see `admission.py`.
"""

import base64
import binascii
import hashlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from diloco.comm.peers import packing
from diloco.comm.peers.admission import ISLANDS_LIMIT, LATEST, Admission, Invite, Right, read_invite
from diloco.comm.peers.clock import MAX_OFF_S
from diloco.comm.peers.identity import PUBLIC_KEY_BYTES, Identity, new_secret, public_key_of
from diloco.errors import TicketError

PREFIX = "diloco2-"
OLD_PREFIX = "diloco1-"
ADDRESSES_LIMIT = 8
TEXT_LIMIT = 3300  # 8 addresses of 255 bytes, keys, signature, as base64
ISLANDS = 100  # that a ticket admits, unless its owner says otherwise
DIGEST_BYTES = 32
CHECKSUM_BYTES = 4  # against a slip in copying; nobody else could gain by a change
NO_HEAD = 0, bytes(DIGEST_BYTES)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ticket:
    """Let islands into a run: an invite with its private key, addresses to join at, and how far the run was."""

    invite: Invite
    addresses: tuple[str, ...]
    secret: bytes = field(default=b"", repr=False)  # of the invite; a bound one has none
    head: tuple[int, bytes] = NO_HEAD  # round and digest, where the ticket was printed

    @classmethod
    def issue(
        cls, owner: Identity, addresses: Sequence[str], *, now: float, lifetime_s: float, peer: bytes | None = None,
        right: Right = Right.CONTRIBUTE, islands: int = ISLANDS,
    ) -> "Ticket":  # fmt: skip
        """Sign a ticket that is valid for `lifetime_s` seconds from now, for one peer's public key or for whoever has
        it."""
        if not 0 < lifetime_s < LATEST - now:
            raise TicketError(f"a ticket cannot be valid for {lifetime_s} s: use a positive number of seconds")
        if not 0 < islands <= ISLANDS_LIMIT:
            raise TicketError(f"a ticket cannot be for {islands} islands: use 1 to {ISLANDS_LIMIT}")
        secret = b"" if peer is not None else new_secret()
        key, expires_at = peer or public_key_of(secret), math.ceil(now + lifetime_s)
        draft = Invite(owner.public_key, key, peer is not None, right, 1 if peer else islands, expires_at)
        try:
            ticket = cls(draft.signed(owner), tuple(addresses), secret)
            ticket._body()
        except packing.Malformed as error:
            raise TicketError(f"no ticket can be made from this: {error}") from error
        return ticket

    @classmethod
    def parse(cls, text: str, now: float) -> "Ticket":
        """Return the ticket in this text; raise TicketError unless it is whole, signed by its owner and still valid."""
        try:
            ticket = _unpack(_decode("".join(text.split())))
        except packing.Malformed as error:
            raise TicketError(f"this is no whole ticket ({error}): copy all of it again") from None
        if not ticket.invite.is_signed:
            raise TicketError(
                "the ticket was changed or is forged (its owner's signature does not fit):"
                " copy it again or ask the run's owner for a new one"
            )
        if now >= ticket.expires_at:
            raise TicketError(f"the ticket expired at {ticket.expiry}: ask the run's owner for a new one")
        return ticket

    def refuse_newcomer(self, *, as_witness: bool) -> None:
        """Raise TicketError if nobody can come in with it as this: not today, or not with its right.

        If it expired within a day, there is a warning only: this machine's clock may be wrong, and the members judge by
        the run's time. Who was in the run before needs no valid ticket.
        """
        late_s = time.time() - self.expires_at
        if late_s >= MAX_OFF_S:
            raise TicketError(f"the ticket expired at {self.expiry}: ask the run's owner for a new one")
        if late_s >= 0:
            log.warning("by this machine's clock the ticket has expired: the run's members decide by theirs")
        right = self.invite.right
        if right == Right.WITNESS and not as_witness:
            raise TicketError("the ticket lets an island witness only: add --witness, or ask for one to contribute")
        if right in (Right.OBSERVE, Right.WATCH):
            what = {Right.OBSERVE: "observing", Right.WATCH: "watching"}[right]
            raise TicketError(f"this ticket only allows {what}: ask the owner for one to contribute")

    def refuse_unless_to_watch(self) -> None:
        """Raise TicketError if its right is not to watch."""
        if self.invite.right != Right.WATCH:
            raise TicketError(
                f"the ticket is to {self.invite.right.name.lower()}: ask the run's owner for one to watch "
                "(diloco ticket create RUN --right watch)"
            )

    @property
    def run_id(self) -> bytes:
        """Return the id of the run that it is for."""
        return self.invite.run_id

    @property
    def expires_at(self) -> int:
        """Return when it expires, in seconds since 1970."""
        return self.invite.expires_at

    @property
    def expiry(self) -> str:
        """Return when it expires, in words."""
        return datetime.fromtimestamp(self.expires_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

    def admission(self, island: bytes) -> Admission:
        """Return what admits the island with this public key; raise TicketError if the ticket is bound to another."""
        return Admission.make(self.invite, self.secret, island)

    def at(self, addresses: Sequence[str], head: tuple[int, bytes] | None = None) -> "Ticket":
        """Return the same invite with other addresses, and with the run's present head where that is known."""
        return replace(self, addresses=tuple(addresses)[:ADDRESSES_LIMIT], head=head or self.head)

    def render(self) -> str:
        """Return the ticket as one URL-safe string, which `parse` reads."""
        body = self._body()
        return PREFIX + _base64(body + _checksum(body))

    def _body(self) -> bytes:
        addresses = [packing.address(address) for address in self.addresses]
        round_number, digest = self.head
        return b"".join((
            self.invite.pack(),
            packing.fixed(self.secret, 0 if self.invite.bound else PUBLIC_KEY_BYTES),
            packing.integer(round_number, 8),
            packing.fixed(digest, DIGEST_BYTES),
            packing.count(len(addresses), ADDRESSES_LIMIT),
            *addresses,
        ))  # fmt: skip


def _unpack(raw: bytes) -> Ticket:
    body, checksum = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise packing.Malformed("a character is wrong, or some are missing")
    reader = packing.Reader(body)
    invite = read_invite(reader)
    secret = b"" if invite.bound else reader.take(PUBLIC_KEY_BYTES)
    if secret and public_key_of(secret) != invite.key:
        raise packing.Malformed("its private key is not that of its invite")
    head = reader.integer(8), reader.take(DIGEST_BYTES)
    addresses = tuple(reader.address() for _ in range(reader.count(ADDRESSES_LIMIT)))
    reader.finish()
    return Ticket(invite, addresses, secret, head)


def _decode(text: str) -> bytes:
    if text.startswith(OLD_PREFIX):
        raise TicketError("the ticket is of diloco with protocol 6 or before: ask the run's owner for a new one")
    if not text.startswith(PREFIX):
        raise packing.Malformed(f"it does not start with {PREFIX}")
    if len(text) > TEXT_LIMIT:
        raise packing.Malformed(f"it is longer than {TEXT_LIMIT} characters")
    payload = text.removeprefix(PREFIX)
    try:
        raw = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
    except (binascii.Error, ValueError):
        raise packing.Malformed("it has characters that do not belong") from None
    # Base64 skips foreign characters and ignores spare bits: one ticket shall have one spelling.
    if _base64(raw) != payload:
        raise packing.Malformed("it has characters that do not belong")
    return raw


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:CHECKSUM_BYTES]


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
