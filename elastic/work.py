"""An island's own progress that the replicated state may not contain yet, cut into pieces, oldest first.

A piece is the displacement (base - local) between two cuts. It is encoded once, when it is first offered, and kept
after its commit: if this island moves to a branch that lacks it, it is owed again and comes as a late contribution.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diloco.elastic.ranges import Ranges, normal
from diloco.elastic.record import Offer

MAX_PHASES = 2  # worth of late progress in one contribution
MAX_NORM = 2.0  # times the last round's median
KEEP_BYTES = 2 << 30  # of pieces that are contained here, for the case that a heavier branch lacks them

log = logging.getLogger(__name__)


@dataclass
class Piece:
    lo: int
    hi: int
    tokens: int
    samples: Ranges
    encoded: Tensor  # uint8
    norm: float


class Work:
    """`encode` and `decode` are the codec's, for this fragment's vector."""

    def __init__(
        self, incarnation: int, encode: Callable[[Tensor, int], Tensor], decode: Callable[[Tensor], Tensor]
    ) -> None:
        self.incarnation = incarnation
        self._encode, self._decode = encode, decode
        self.pieces: list[Piece] = []
        self._offered: dict[tuple[int, int], Tensor] = {}
        self.hi = 0  # the last cut
        self.mark = 0  # of the state that the island's parameters were last rebased on

    def cut(
        self, displacement: Tensor, tokens: int, samples: Ranges, *, step_ms: int = 0, usual_norm: float = 0.0
    ) -> Offer:
        """Offer what is not contained: all of it where nothing is late, else the oldest phases only.

        `displacement` is all progress since `mark`, owed pieces included.
        """
        owed = self.owed(self.mark)
        open_part = displacement - self._sum(owed) if owed else displacement
        if tokens:
            self._add(open_part, tokens, samples)
        return replace(self.next_offer(usual_norm), step_ms=step_ms)

    def _add(self, vector: Tensor, tokens: int, samples: Ranges) -> None:
        self.hi += 1
        norm = float(torch.linalg.vector_norm(vector))
        self.pieces.append(Piece(self.hi - 1, self.hi, tokens, samples, self._encode(vector, self.hi), norm))

    def next_offer(self, usual_norm: float = 0.0) -> Offer:
        """The oldest progress that is not contained. Pieces stay apart: another branch may contain the first only.

        Late progress is scaled to at most twice the usual norm, so that momentum is not hit by one huge step.
        """
        owed = self.owed(self.mark)
        if owed[0].lo > self.mark:  # what lies between was kept for long, and is gone
            log.warning("progress %d..%d of this island is lost", self.mark, owed[0].lo)
            owed[0].lo = self.mark
        oldest = owed[:MAX_PHASES]
        piece = oldest[0] if len(oldest) == 1 else self._joined(oldest, usual_norm)
        self._offered[piece.lo, piece.hi] = piece.encoded
        return Offer(
            0, piece.lo, piece.hi, piece.tokens, piece.samples, piece.norm, self.incarnation, late=len(owed) > 1
        )  # fmt: skip

    def _joined(self, late: list[Piece], usual_norm: float) -> Piece:
        vector = self._sum(late)
        norm = float(torch.linalg.vector_norm(vector))
        if usual_norm and norm > MAX_NORM * usual_norm:
            vector *= MAX_NORM * usual_norm / norm
            norm = MAX_NORM * usual_norm
        samples = normal(part for piece in late for part in piece.samples)
        tokens, lo, hi = sum(piece.tokens for piece in late), late[0].lo, late[-1].hi
        return Piece(lo, hi, tokens, samples, self._encode(vector, hi), norm)

    def payload(self, offer: Offer) -> Tensor:
        """The bytes of an offer, the same in every ballot."""
        return self._offered[offer.lo, offer.hi]

    def owed(self, mark: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.lo >= mark]

    def used(self, mark: int) -> Ranges:
        """Samples behind progress that a state with this mark does not contain."""
        return normal(part for piece in self.owed(mark) for part in piece.samples)

    def rebase(self, mark: int) -> Tensor | None:
        """What to add to the island's displacement when its parameters move to a state with this mark."""
        before, self.mark = self.mark, mark
        lo, hi = min(mark, before), max(mark, before)
        between = [piece for piece in self.pieces if lo <= piece.lo and piece.hi <= hi]
        if not between:
            return None
        total = self._sum(between)
        self._forget()
        return total.neg_() if mark > before else total

    @property
    def clean(self) -> bool:
        """Everything up to the last cut is contained."""
        return self.mark == self.hi

    def _sum(self, pieces: list[Piece]) -> Tensor:
        total = self._decode(pieces[0].encoded).clone()
        for piece in pieces[1:]:
            total += self._decode(piece.encoded)
        return total

    def _forget(self) -> None:
        self._offered = {cuts: raw for cuts, raw in self._offered.items() if cuts[0] >= self.mark}
        size = sum(piece.encoded.numel() for piece in self.pieces)
        while self.pieces and size > KEEP_BYTES and self.pieces[0].hi <= self.mark:
            size -= self.pieces.pop(0).encoded.numel()
