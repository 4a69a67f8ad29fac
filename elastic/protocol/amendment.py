"""A change of a run's settings while it goes on: only its owner can make one, and a record makes it so for everybody.

What it changes is opaque here. Amendments are numbered; whoever holds one brings it to rounds until one contains it.
"""

import json
from dataclasses import dataclass, replace

from diloco.comm.peers.identity import Identity, verify

CONTEXT = b"diloco amendment 1\0"  # what one key signs for one purpose can never pass for another


@dataclass(frozen=True)
class Amendment:
    number: int  # 1, 2, …: each follows the one before
    changes: str
    signature: str = ""  # in hex

    @classmethod
    def sign(cls, owner: Identity, number: int, changes: str) -> "Amendment":
        """The run is its owner's key, so that this is for no other run."""
        draft = cls(number, changes)
        return replace(draft, signature=owner.sign(draft._signed).hex())

    @property
    def _signed(self) -> bytes:
        return CONTEXT + json.dumps([self.number, self.changes], separators=(",", ":")).encode()

    def is_by(self, owner: str) -> bool:
        """`owner`: a public key in hex."""
        try:
            key, signature = bytes.fromhex(owner), bytes.fromhex(self.signature)
        except ValueError:
            return False
        return verify(key, signature, self._signed)
