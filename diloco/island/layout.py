"""The canonical order of trainable parameters, and where each lies in the flat fp32 vectors of the outer state."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names and shapes in canonical order, and where each lies in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, Tensor]]) -> "Layout":
        pairs = [(name, tuple(parameter.shape)) for name, parameter in parameters]
        return cls(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs))

    @classmethod
    def of_module(cls, module: nn.Module) -> "Layout":
        return cls.of((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)

    @property
    def size(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter as a view into the flat vector."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            yield name, vector[start : start + prod(shape)].view(shape)
            start += prod(shape)
