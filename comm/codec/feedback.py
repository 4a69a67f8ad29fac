"""Error feedback around any codec: what an encoding loses is added to the next one.

e <- decay e + x, send C(e), e <- e - what C(e) says. SparseLoCo forgets a little (decay 0.95): what was left out long
ago describes parameters that have moved on.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from diloco.comm.codec.base import Codec, stretches
from diloco.comm.codec.noise import NoiseKey
from diloco.comm.codec.rooms import room_for


class ErrorFeedback:
    """Add what one encoding loses to the next one: whoever encodes keeps the bytes until they are in the log."""

    def __init__(self, codec: Codec, count: int, decay: float = 1.0) -> None:
        self.codec, self.decay = codec, decay
        self.residual = torch.zeros(count)

    def encode(self, parts: Iterable[Tensor], key: NoiseKey) -> Tensor:
        """Encode values that come in parts, plus the decayed residual. What that loses is the residual from then on."""
        payload: Tensor | None = None
        for start, values in stretches(parts, len(self.residual)):
            if payload is None:
                payload = room_for(self.codec.size(len(self.residual)), values.device)
            residual = self.residual[start : start + len(values)]
            wanted = values + residual.to(values.device) * self.decay
            part = self.codec.encode(wanted, key, start, out=payload[self.codec.bytes_of(start, len(values))])
            residual.copy_(wanted.sub_(self.codec.decode(part, len(values))))
        return torch.empty(0, dtype=torch.uint8) if payload is None else payload
