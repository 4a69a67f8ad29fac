"""How much memory operations really take: every tensor that is made inside, not what the code says of itself."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """`values` is the size of the largest new tensor, in fp32 values; views of older ones do not count."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and storage_of(leaf) not in before]
        self.values = max([self.values, *(tensor.untyped_storage().nbytes() // 4 for tensor in made)])
        return out


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
