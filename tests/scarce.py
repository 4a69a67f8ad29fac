"""An accelerator that has memory for so many rows of a batch at a time: more of them end as it would end them."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diloco.model.decoder import Decoder

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 139 GiB in total")


class Scarce:
    """While entered, a forward pass of more rows fails; `late`: instead the optimizer's step after it. `tried` has the
    rows of all passes in training."""

    def __init__(self, rows: int, *, late: bool = False, error: Exception = OUT_OF_MEMORY) -> None:
        self._rows, self._late, self._error = rows, late, error
        self.tried: list[int] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for hook in (register_module_forward_pre_hook(self._forward), register_optimizer_step_pre_hook(self._step)):
                stack.callback(hook.remove)
            self._end: Callable[[], None] = stack.pop_all().close
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _forward(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(module, Decoder) and module.training:
            self.tried.append(len(inputs[0]))
            self._fail(late=False)

    def _step(self, *_: Any) -> None:
        self._fail(late=True)

    def _fail(self, *, late: bool) -> None:
        if late == self._late and self.tried and self.tried[-1] > self._rows:
            raise self._error
