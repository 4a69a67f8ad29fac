"""An island's own progress for one fragment that the replicated state may not contain yet, in pieces, oldest first.

A piece is the displacement (base - local) between two cuts. It is encoded once, before it is first offered, and kept
after its commit: if this island moves to a branch that lacks it, it is owed again and comes as a late contribution.

Cuts are made by the trainer's thread; the encoding that an offer needs may run in another one.
"""

import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diloco.comm.codec.noise import PAGE
from diloco.comm.codec.rooms import on_host
from diloco.elastic.protocol.ranges import Ranges, normal
from diloco.elastic.protocol.record import Offer

MAX_PHASES = 2  # worth of late progress in one contribution
MAX_NORM = 2.0  # times the last round's median
CARRIED = (-1, -1)  # among the cuts of payloads: what is carried to the next one
DISK_SHARE = 0.25  # of what is free: so much may files of contained pieces take
AT_ONCE = 1 << 20  # values that are decoded together
KEEP_BYTES = 64 << 20  # of pieces of all fragments that are contained, for the case that a heavier branch lacks them

log = logging.getLogger(__name__)

Progress = Tensor | Iterator[Tensor]  # whole, or in parts that are worked out once, in order
Encode = Callable[[Progress, int], Tensor]
Part = Callable[[int, int], Tensor]  # the values from one place to another


class StepsDone(NamedTuple):
    """Count what was done between two cuts: tokens, samples and inner steps."""

    tokens: int
    samples: Ranges
    steps: int = 0
    loss: float = 0.0  # mean of the steps' losses; 0: not known


def trained(plain: list[Any]) -> StepsDone:
    """Read back the counts of a piece as they were written to a save."""
    tokens, samples, steps, loss = plain
    return StepsDone(tokens, normal((lo, hi) for lo, hi in samples), steps, loss)


def mean_loss(done: Iterable[StepsDone]) -> float:
    """Return the mean loss behind several pieces, by their steps; 0 if none is known."""
    known = [each for each in done if each.loss and each.steps]
    steps = sum(each.steps for each in known)
    return sum(each.loss * each.steps for each in known) / steps if steps else 0.0


class Encoded(NamedTuple):
    """Hold the bytes of a piece, and the norm of what they decode to: whoever adds it up compares."""

    payload: Tensor  # uint8
    norm: float


@dataclass
class EncodedCut:
    """Hold the progress between two cuts: a vector, or its parts, until it is first encoded, bytes from then on."""

    lo: int
    hi: int
    done: StepsDone
    vector: Progress | None  # until it is encoded
    _encoded: Encoded | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    file: Path | None = None  # that has its bytes, which are mapped while somebody uses them
    spilled: int = 0  # bytes in the file
    wanted: bool = True  # False: whoever writes it to a file need not, or removes that
    carried: Tensor | None = None  # progress of an earlier piece that did not count, to be encoded with it

    def encoded(self, encode: Callable[[Progress, int], Encoded]) -> Encoded:
        """Return the bytes of this piece, encoded by the first call only. Any thread may call it."""
        with self._lock:
            if self._encoded is None:
                assert self.vector is not None
                if self.carried is not None:
                    self.vector, self.carried = _sums(self.vector, self.carried), None
                self._encoded, self.vector = encode(self.vector, self.hi), None
            payload, norm = self._encoded
            if self.spilled:
                payload = torch.from_file(str(self.file), size=self.spilled, dtype=torch.uint8)
            return Encoded(payload, norm)

    def spill(self, path: Path) -> None:
        """Move the bytes of an encoded piece from memory to a file, unless nobody wants it any more."""
        with self._lock:
            if not self.wanted:
                return
            assert self._encoded is not None
            payload, norm = self._encoded
            self.file = path  # from now on: half of it is to be removed, too
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(memoryview(payload.numpy()))  # type: ignore[arg-type]
            self._encoded, self.spilled = Encoded(payload[:0].clone(), norm), payload.numel()

    def forget(self) -> None:
        """Remove the file that has its bytes, or keep it from being written."""
        with self._lock:
            self.wanted = False
            if self.file is not None:
                self.file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Owed:
    """Read the sum of progress that a state does not contain, stretch by stretch, from encoded pieces."""

    terms: Sequence[Part]

    def __call__(self, lo: int, hi: int) -> Tensor:
        """Return the values from one place in the fragment to another."""
        total = self.terms[0](lo, hi)
        for term in self.terms[1:]:
            total = total + term(lo, hi)
        return total


class PendingProgress:
    """Keep this island's pieces of progress for one fragment, and make offers of those not contained yet.

    `encode`, `decode`, `decode_part` and `measure`, the norm of what bytes decode to, are the codec's, for `count`
    values; two late pieces are joined in one offer. Contained pieces are kept until nothing can undo them; those beyond
    `keep_bytes` go to the folder `spill`, written by `later` (another thread, say), or are lost where there is none.

    With error feedback, joined pieces are encoded by `join` instead, and what that lost is handed to `on_loss` when the
    state contains them: whether a joined offer ever enters the log is not known before.
    """

    def __init__(
        self, fragment: int, incarnation: int, encode: Encode, decode: Callable[[Tensor], Tensor], *,
        decode_part: Callable[[Tensor, int, int], Tensor] | None = None, count: int = 0, join: Encode | None = None,
        on_loss: Callable[[Tensor], None] | None = None, measure: Callable[[Tensor], float] | None = None,
        keep_bytes: int = KEEP_BYTES, spill: Path | None = None, disk_share: float = DISK_SHARE,
        later: Callable[[Callable[[], None]], object] = lambda act: act(),
    ) -> None:  # fmt: skip
        self.fragment, self.incarnation = fragment, incarnation
        self._decode, self._measure = decode, measure or (lambda raw: float(torch.linalg.vector_norm(decode(raw))))
        self._decode_part, self._count = decode_part or (lambda raw, lo, hi: decode(raw)[lo:hi]), count
        self._encode, self._join, self._on_loss = self._measured(encode), self._measured(join or encode), on_loss
        self._keep_bytes, self._spill, self._disk_share, self._later = keep_bytes, spill, disk_share, later
        self._spilling: set[tuple[int, int]] = set()
        self.pieces: list[EncodedCut] = []
        self._offered: dict[tuple[int, int], Tensor] = {}
        self._scales: dict[tuple[int, int], float] = {}  # of joined offers
        self.hi = 0  # the last cut
        self.mark = 0  # of the state that the island's parameters were last rebased on
        self.carried: Tensor | None = None  # where what was contained last did not count, until the next cut

    def cut(self, progress: Progress, done: StepsDone, *, usual_norm: float = 0.0) -> Callable[[], Offer]:
        """Make a piece of what was trained since the last cut, and return a function that makes the offer.

        The offer is of all that is owed, but only of the oldest phases where some is late.
        """
        if done.tokens:
            self.hi += 1
            self.pieces.append(EncodedCut(self.hi - 1, self.hi, done, progress, carried=self.carried))
            self.carried = None
        owed = self.owed(self.mark)
        if owed[0].lo > self.mark:  # what lies between was kept for long, and is gone
            log.warning("progress %d..%d of this island is lost", self.mark, owed[0].lo)
            owed[0].lo = self.mark
        oldest, late = owed[:MAX_PHASES], len(owed) > 1
        return lambda: self._offer(oldest, late, usual_norm)

    def encode_last(self) -> None:
        """Encode the newest piece now."""
        self.pieces[-1].encoded(self._encode)

    def _offer(self, oldest: list[EncodedCut], late: bool, usual_norm: float) -> Offer:
        """Make the offer of these pieces, which stay apart: another branch may contain the first only.

        Joined progress is scaled to at most twice the usual norm, so that momentum is not hit by one huge step.
        """
        encoded = oldest[0].encoded(self._encode) if len(oldest) == 1 else self._joined(oldest, usual_norm)
        lo, hi = oldest[0].lo, oldest[-1].hi
        self._offered[lo, hi] = encoded.payload
        tokens, steps = sum(piece.done.tokens for piece in oldest), sum(piece.done.steps for piece in oldest)
        samples = normal(part for piece in oldest for part in piece.done.samples)
        loss = mean_loss(piece.done for piece in oldest)
        return Offer(self.fragment, lo, hi, tokens, samples, encoded.norm, self.incarnation, late, steps, loss=loss)

    def _joined(self, late: list[EncodedCut], usual_norm: float) -> Encoded:
        norm = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in self._stretches(late)))
        scale = MAX_NORM * usual_norm / norm if usual_norm and norm > MAX_NORM * usual_norm else 1.0
        self._scales[late[0].lo, late[-1].hi] = scale
        return self._join((part * scale for part in self._stretches(late)), late[-1].hi)

    def _stretches(self, pieces: list[EncodedCut]) -> Iterator[Tensor]:
        """Yield the sum of pieces, worked out stretch by stretch."""
        total = Owed([self._reader(piece) for piece in pieces])
        count = self._count or len(self._decode(pieces[0].encoded(self._encode).payload))
        for lo in range(0, count, AT_ONCE):
            yield total(lo, min(lo + AT_ONCE, count))

    def _measured(self, encode: Encode) -> Callable[[Progress, int], Encoded]:
        def measured(progress: Progress, hi: int) -> Encoded:
            payload = encode(progress, hi)  # where the progress lies, and measured there
            return Encoded(on_host(payload), self._measure(payload))

        return measured

    def payload(self, offer: Offer) -> Tensor:
        """Return the bytes of an offer, which are the same in every ballot."""
        return self._offered[offer.lo, offer.hi]

    def owed(self, mark: int) -> list[EncodedCut]:
        """Return the pieces that a state with this mark does not contain, oldest first."""
        return [piece for piece in self.pieces if piece.lo >= mark]

    def used(self, mark: int) -> Ranges:
        """Return the samples behind progress that a state with this mark does not contain."""
        return normal(part for piece in self.owed(mark) for part in piece.done.samples)

    def rebase(self, mark: int, *, settled: int = 0, hole: tuple[int, Ranges] = (0, ())) -> Owed | None:
        """Move to a state with this mark, as the island's parameters do, and return what it does not contain.

        That is the sum of the pieces owed; None if there are none. Every branch that may take its place contains what
        is before `settled`.
        `hole` are the pages on which the last contribution does not count, and where that begins: the next one brings
        its progress there, with the oldest piece that is owed, or with the next where none is.
        """
        lo, pages = hole
        if mark < self.mark:  # what would be carried is owed again
            self.carried = None
        elif pages and mark > self.mark and (missed := [piece for piece in self.pieces if lo <= piece.lo < mark]):
            offered = self._offered.get((lo, mark))
            carried = _on_pages(self._decode(offered) if offered is not None else self._sum(missed), pages)
            self.carried = carried if self.carried is None else self.carried + carried
        if self._on_loss is not None and (scale := self._scales.get((self.mark, mark))):
            joined = [piece for piece in self.pieces if self.mark <= piece.lo < mark]
            self._on_loss(self._sum(joined) * scale - self._decode(self._offered[self.mark, mark]))
        self.mark = mark
        self._forget(settled=settled)
        self._load_oldest()
        terms: list[Part] = [self._reader(piece) for piece in self.owed(mark)]
        if self.carried is not None:
            terms.append(partial(_cut, self.carried))
        return Owed(terms) if terms else None

    def _reader(self, piece: EncodedCut) -> Part:
        return partial(self._decode_part, piece.encoded(self._encode).payload)

    def _load_oldest(self) -> None:
        """Add what is carried to the oldest piece that is owed, if there is one: no offer has begun with it yet."""
        if self.carried is not None and (owed := self.owed(self.mark)):
            oldest = owed[0]
            loaded = EncodedCut(oldest.lo, oldest.hi, oldest.done, self._sum([oldest]), carried=self.carried)
            self.pieces[self.pieces.index(oldest)], self.carried = loaded, None
            self._spilling.discard((oldest.lo, oldest.hi))
            oldest.forget()

    def facts(self) -> dict[str, Any]:
        """Return what a save holds of this besides `payloads`. Pieces that are contained are left out."""
        owed = [(piece, piece.encoded(self._encode).norm) for piece in self.owed(self.mark)]
        pieces = [[piece.lo, piece.hi, norm, *piece.done] for piece, norm in owed]
        return {"hi": self.hi, "mark": self.mark, "pieces": pieces}

    def payloads(self) -> dict[tuple[int, int], Tensor]:
        """Return encoded progress by its cuts, for a save. An offer of one piece has the piece's bytes."""
        pieces = {(piece.lo, piece.hi): piece.encoded(self._encode).payload for piece in self.owed(self.mark)}
        carried = {CARRIED: self.carried} if self.carried is not None else {}
        return {**self._offered, **pieces, **carried}

    def restore(self, facts: Mapping[str, Any], payloads: Mapping[tuple[int, int], Tensor]) -> None:
        """Take over the pieces and offers of a save, with the same bytes."""
        self.hi, self.mark, self._offered = facts["hi"], facts["mark"], dict(payloads)
        self.carried = self._offered.pop(CARRIED, None)
        self.pieces = [
            EncodedCut(lo, hi, trained(done), None, Encoded(payloads[lo, hi], norm))
            for lo, hi, norm, *done in facts["pieces"]
        ]

    def _sum(self, pieces: list[EncodedCut]) -> Tensor:
        total = self._decode(pieces[0].encoded(self._encode).payload).clone()
        for piece in pieces[1:]:
            total += self._decode(piece.encoded(self._encode).payload)
        return total

    def _forget(self, *, settled: int) -> None:
        for cuts in [cuts for cuts in list(self._offered) if cuts[0] < self.mark]:
            self._offered.pop(cuts, None)
            self._scales.pop(cuts, None)
        contained = [piece for piece in self.pieces if piece.hi <= self.mark]
        for piece in [piece for piece in contained if piece.hi <= settled or not piece.wanted]:
            self._drop(piece)
            contained.remove(piece)
        in_memory = [piece for piece in contained if (piece.lo, piece.hi) not in self._spilling]
        size = sum(piece.encoded(self._encode).payload.numel() for piece in in_memory)
        while in_memory and size > self._keep_bytes:
            oldest = in_memory.pop(0)
            size -= oldest.encoded(self._encode).payload.numel()
            self._make_room(oldest)

    def _make_room(self, piece: EncodedCut) -> None:
        if self._spill is None:
            self._drop(piece)
            return
        path = self._spill / f"{self.incarnation}-{self.fragment}-{piece.lo}-{piece.hi}"

        def spill() -> None:
            try:
                piece.spill(path)
            except OSError as error:
                log.warning("progress %d..%d cannot be kept for another branch: %s", piece.lo, piece.hi, error.strerror)
                piece.forget()  # and goes the next time

        self._spilling.add((piece.lo, piece.hi))
        self._later(spill)
        self._keep_the_disk_free(self._spill)

    def _keep_the_disk_free(self, folder: Path) -> None:
        """Drop the oldest files where they take more than a share of what the disk still has."""
        files = [piece for piece in self.pieces if piece.spilled and piece.hi <= self.mark]
        size = sum(piece.spilled for piece in files)
        while files and size > self._disk_share * shutil.disk_usage(folder).free:
            oldest = files.pop(0)
            size -= oldest.spilled
            log.warning("progress %d..%d is not kept for another branch: the disk is too full", oldest.lo, oldest.hi)
            self._drop(oldest)

    def _drop(self, piece: EncodedCut) -> None:
        self.pieces.remove(piece)
        self._spilling.discard((piece.lo, piece.hi))
        if piece.file is None:
            piece.forget()
        else:
            self._later(piece.forget)  # a large file takes a while to go


def _on_pages(vector: Tensor, pages: Ranges) -> Tensor:
    """Return a vector with zeros outside of these pages."""
    kept = torch.zeros_like(vector)
    for lo, hi in pages:
        kept[lo * PAGE : hi * PAGE] = vector[lo * PAGE : hi * PAGE]
    return kept


def parts_of(progress: Progress) -> Iterator[Tensor]:
    """Return progress in parts, in order."""
    return iter([progress]) if isinstance(progress, Tensor) else progress


def _cut(values: Tensor, lo: int, hi: int) -> Tensor:
    return values[lo:hi]


def _sums(progress: Progress, more: Tensor) -> Progress:
    """Add a vector to progress, part by part."""
    if isinstance(progress, Tensor):
        return progress + more.to(progress.device)
    return _added(progress, more)


def _added(parts: Iterator[Tensor], more: Tensor) -> Iterator[Tensor]:
    at = 0
    for part in parts:
        yield part + more[at : at + len(part)].to(part.device)
        at += len(part)
