"""Error feedback around any codec: what an encoding loses is added to the next one.

e <- decay e + x, send C(e), e <- e - what C(e) says. SparseLoCo forgets a little (decay 0.95): what was left out long
ago describes parameters that have moved on.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from diloco.comm.codec.base import Codec, room_for, stretches
from diloco.comm.codec.noise import NoiseKey


class ErrorFeedback:
    """Add what one encoding loses to the next one.

    The residual changes at `commit` only: an encoding whose round fails has lost nothing.
    """

    def __init__(self, codec: Codec, count: int, decay: float = 1.0) -> None:
        self.codec, self.decay = codec, decay
        self.residual = torch.zeros(count)
        self._pending: Tensor | None = None

    def encode(self, values: Tensor, key: NoiseKey) -> Tensor:
        """Encode the values plus the decayed residual. What that loses is pending until `commit`."""
        wanted = values + self.residual.to(values.device) * self.decay
        payload = self.codec.encode(wanted, key)
        self._pending = wanted.sub_(self.codec.decode(payload, len(values)))
        return payload

    def encode_parts(self, parts: Iterable[Tensor], key: NoiseKey) -> Tensor:
        """Encode values that come in parts, plus the decayed residual, and commit what that loses at once."""
        payload: Tensor | None = None
        for start, values in stretches(parts, len(self.residual)):
            if payload is None:
                payload = room_for(self.codec.size(len(self.residual)), values.device)
            residual = self.residual[start : start + len(values)]
            wanted = values + residual.to(values.device) * self.decay
            part = self.codec.encode(wanted, key, start, out=payload[self.codec.bytes_of(start, len(values))])
            residual.copy_(wanted.sub_(self.codec.decode(part, len(values))))
        return torch.empty(0, dtype=torch.uint8) if payload is None else payload

    def commit(self) -> None:
        """Make what the last encoding lost the residual. Called once that encoding is sure to reach the log."""
        if self._pending is not None:
            self.residual, self._pending = self._pending, None
