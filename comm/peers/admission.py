"""Who may enter a run: an invite signed by its owner, and an admission that binds it to one island's own key.

A joiner makes its admission alone, with the invite's private key, which it never sends. Anybody can check it against
the run's id, offline, and nobody can use it with another key: it travels inside the island's record, with every request
to the directory, and in the record of the log that makes the island a member.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

from diloco.comm.peers import packing
from diloco.comm.peers.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, run_id_of, sign_with, verify
from diloco.errors import TicketError

INVITE_CONTEXT = b"diloco invite 1\0"  # what one key signs for one purpose can never pass for another
ADMISSION_CONTEXT = b"diloco admission 1\0"
ISLANDS_LIMIT = 2**16 - 1
LATEST = 253402300799  # the year 9999, so that every expiry can be shown as a date
ADMISSION_LIMIT = 256
CHECKED = 4096  # admissions that are remembered as good: signatures are checked once


class Right(IntEnum):
    """Say what an invite allows. *contribute* allows *witness*, too; the last two make nobody a member."""

    CONTRIBUTE = 1
    WITNESS = 2
    OBSERVE = 3
    WATCH = 4


@dataclass(frozen=True)
class Invite:
    """Let some islands into a run, under its owner's signature: whoever holds the private half of `key` may use it.

    One that is `bound` is for a single island, whose own key it names.
    """

    owner: bytes
    key: bytes
    bound: bool
    right: Right
    islands: int  # how many keys it admits, ever
    expires_at: int  # seconds since 1970
    signature: bytes = b""

    def signed(self, owner: Identity) -> "Invite":
        """Return it with the signature of the run's owner."""
        return replace(self, signature=owner.sign(INVITE_CONTEXT + self._body()))

    @property
    def is_signed(self) -> bool:
        """Tell whether the signature is its owner's."""
        return verify(self.owner, self.signature, INVITE_CONTEXT + self._body())

    @property
    def run_id(self) -> bytes:
        """Return the id of the run that it is for, which follows from its owner's key."""
        return run_id_of(self.owner)

    def pack(self) -> bytes:
        """Return it as bytes, which `read_invite` reads."""
        return self._body() + packing.fixed(self.signature, SIGNATURE_BYTES)

    def _body(self) -> bytes:
        keys = packing.fixed(self.owner, PUBLIC_KEY_BYTES) + packing.fixed(self.key, PUBLIC_KEY_BYTES)
        kind = packing.integer(self.bound, 1) + packing.integer(self.right, 1)
        return keys + kind + packing.integer(self.islands, 2) + packing.integer(self.expires_at, 8)


@dataclass(frozen=True)
class Admission:
    """Hold an invite and the signature of its key over an island's own key; a bound invite needs none."""

    invite: Invite
    signature: bytes = b""

    @classmethod
    def make(cls, invite: Invite, secret: bytes, island: bytes) -> "Admission":
        """Admit an island's public key by the invite's private key; raise TicketError if it is bound to another."""
        if not invite.bound:
            return cls(invite, sign_with(secret, ADMISSION_CONTEXT + invite.run_id + island))
        if invite.key != island:
            raise TicketError("the ticket was issued for another peer: ask the run's owner for one for your own key")
        return cls(invite)

    def pack(self) -> bytes:
        """Return it as bytes, which `check_admission` reads."""
        return self.invite.pack() + self.signature


def read_invite(reader: packing.Reader) -> Invite:
    """Read an invite; raise Malformed where it is none. Its signature is not checked."""
    owner, key = reader.take(PUBLIC_KEY_BYTES), reader.take(PUBLIC_KEY_BYTES)
    bound, right = bool(reader.count(1)), reader.count(max(Right))
    islands, expires_at = reader.integer(2), reader.integer(8)
    if not right or not islands or expires_at > LATEST:
        raise packing.Malformed("an invite without a right, an island or a date")
    return Invite(owner, key, bound, Right(right), islands, expires_at, reader.take(SIGNATURE_BYTES))


@lru_cache(CHECKED)
def check_admission(raw: bytes, run_id: bytes, island: bytes) -> Admission:
    """Return the admission in these bytes, if by it the run's owner lets this key in; else raise TicketError.

    Only what never changes is looked at: neither the time, nor what the owner has revoked, nor how many came before.
    """
    reader = packing.Reader(raw)
    try:
        invite = read_invite(reader)
        signature = b"" if invite.bound else reader.take(SIGNATURE_BYTES)
        reader.finish()
    except packing.Malformed as error:
        raise TicketError(f"this is no admission ({error})") from None
    if invite.run_id != run_id:
        raise TicketError("the ticket is for another run: use one of the run at this address")  # strangers read this
    if not invite.is_signed:
        raise TicketError("its invite was not signed by the run's owner")
    signed = ADMISSION_CONTEXT + run_id + island
    if not (invite.key == island if invite.bound else verify(invite.key, signature, signed)):
        raise TicketError("the admission was made for another key")
    return Admission(invite, signature)
