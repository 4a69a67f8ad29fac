"""What reads a value from the device, for which a GPU would have to finish all its work."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    torch.ops.aten._local_scalar_dense.default,  # .item(), float(), bool(), an if
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,  # an index by a mask, too
    torch.ops.aten.masked_select.default,
}


class Reads(TorchDispatchMode):
    """Count them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))
