"""A ticket: one URL-safe string that lets a peer into a run, signed by the run's owner and checked offline.

The run is its owner's public key and the run id is that key's hash, so a ticket proves by itself which run it is for.
"""

import base64
import binascii
import hashlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from diloco.comm.peers import packing
from diloco.comm.peers.clock import MAX_OFF_S
from diloco.comm.peers.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, verify
from diloco.errors import TicketError

PREFIX = "diloco1-"
CONTEXT = b"diloco ticket 1\0"  # what one key signs for one purpose can never pass for another
ADDRESSES_LIMIT = 8
TEXT_LIMIT = 3000  # 8 addresses of 255 bytes, keys, signature, as base64
LATEST = 253402300799  # the year 9999, so that every expiry can be shown as a date

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ticket:
    """Let a peer into a run: name the run's owner, addresses to join at and an expiry, under the owner's signature."""

    owner: bytes
    addresses: tuple[str, ...]
    expires_at: int  # seconds since 1970
    peer: bytes | None = None  # the one public key that it admits; None admits anybody
    signature: bytes = b""

    @classmethod
    def issue(
        cls, owner: Identity, addresses: Sequence[str], *, now: float, lifetime_s: float, peer: bytes | None = None
    ) -> "Ticket":
        """Sign a ticket that is valid for `lifetime_s` seconds from now, for one peer's public key or for anybody."""
        if not 0 < lifetime_s < LATEST - now:
            raise TicketError(f"a ticket cannot be valid for {lifetime_s} s: use a positive number of seconds")
        draft = cls(owner.public_key, tuple(addresses), math.ceil(now + lifetime_s), peer)
        try:
            return replace(draft, signature=owner.sign(CONTEXT + draft._body()))
        except packing.Malformed as error:
            raise TicketError(f"no ticket can be made from this: {error}") from error

    @classmethod
    def parse(cls, text: str, now: float) -> "Ticket":
        """Return the ticket in this text; raise TicketError unless it is whole, signed by its owner and still valid."""
        try:
            ticket = _unpack(_decode(text.strip()))
        except packing.Malformed as error:
            raise TicketError(f"this is no whole ticket ({error}): copy all of it again") from None
        if not verify(ticket.owner, ticket.signature, CONTEXT + ticket._body()):
            raise TicketError(
                "the ticket was changed or is forged (its owner's signature does not fit):"
                " copy it again or ask the run's owner for a new one"
            )
        if now >= ticket.expires_at:
            when = datetime.fromtimestamp(ticket.expires_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            raise TicketError(f"the ticket expired at {when}: ask the run's owner for a new one")
        return ticket

    @classmethod
    def parse_invitation(cls, text: str) -> "Ticket":
        """Return the ticket with which this machine wants to join; if it expired within a day, there is a warning only.

        This machine's clock may be wrong: the members judge by the run's time.
        """
        ticket = cls.parse(text, time.time() - MAX_OFF_S)
        if time.time() >= ticket.expires_at:
            log.warning("by this machine's clock the ticket has expired: the run's members decide by theirs")
        return ticket

    @property
    def run_id(self) -> bytes:
        """Return the id of the run that it is for, which follows from its owner's key."""
        return run_id_of(self.owner)

    def render(self) -> str:
        """Return the ticket as one URL-safe string, which `parse` reads."""
        return PREFIX + _base64(self._body() + packing.fixed(self.signature, SIGNATURE_BYTES))

    def _body(self) -> bytes:
        bound = b"\0" if self.peer is None else b"\1" + packing.fixed(self.peer, PUBLIC_KEY_BYTES)
        addresses = [packing.address(address) for address in self.addresses]
        listed = packing.count(len(addresses), ADDRESSES_LIMIT) + b"".join(addresses)
        return packing.fixed(self.owner, PUBLIC_KEY_BYTES) + bound + packing.integer(self.expires_at, 8) + listed


def check_greeting(greeting: bytes, run_id: bytes, peer_public_key: bytes, now: float, *, known: bool) -> None:
    """Raise TicketError unless the holder of this key may enter this run with the ticket that it greets with.

    This needs no other peer: any member can check it. A ticket has to be valid when an island joins, not whenever the
    connection of a `known` one breaks: runs outlast tickets.
    """
    ticket = Ticket.parse(greeting.decode(errors="replace"), 0.0 if known else now)
    if ticket.run_id != run_id:
        theirs, ours = ticket.run_id.hex()[:12], run_id.hex()[:12]
        raise TicketError(f"the ticket is for run {theirs}, not for run {ours}: use a ticket of this run")
    if ticket.peer is not None and ticket.peer != peer_public_key:
        raise TicketError("the ticket was issued for another peer: ask the run's owner for one for your own key")


def run_id_of(public_key: bytes) -> bytes:
    """Return the id of the run that the holder of this key owns: the key's SHA-256."""
    return hashlib.sha256(public_key).digest()


def _unpack(raw: bytes) -> Ticket:
    reader = packing.Reader(raw)
    owner = reader.take(PUBLIC_KEY_BYTES)
    peer = reader.take(PUBLIC_KEY_BYTES) if reader.count(1) else None
    expires_at = reader.integer(8)
    if expires_at > LATEST:
        raise packing.Malformed("its expiry is no date")
    addresses = tuple(reader.address() for _ in range(reader.count(ADDRESSES_LIMIT)))
    signature = reader.take(SIGNATURE_BYTES)
    reader.finish()
    return Ticket(owner, addresses, expires_at, peer, signature)


def _decode(text: str) -> bytes:
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


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
