"""An island's inner state on disk: safetensors and JSON, from which nothing is ever executed.

`inner/` in a save holds two files of each process. `rank-00000.safetensors` has the tensors, of a sharded one the part
that this process held. `rank-00000.json` has the rest: the tree that they belong to (dicts, lists, numbers, text), and
of each tensor its whole shape, its type, and where the part lies in it. Whoever loads, on whatever mesh, reads of every
file what overlaps with its own parts, so that no process ever holds more than those.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from diloco.atomic import sync_path
from diloco.checkpoint.log.writing import DTYPES, Rest, no_rest, write_tensors
from diloco.errors import SaveError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

FORMAT = 1
MOST_RANKS = 1 << 16
OF_ONE_RANK = "rng."  # begins the name of what each process has by itself
OLD_INDEX = ".metadata"  # of a torch distributed checkpoint, which is a pickle
DICT, LIST, TUPLE, TENSOR, VALUE = "dict", "list", "tuple", "tensor", "value"  # the kinds of nodes in a tree

Keys = tuple[str | int, ...]  # keys and positions that lead to a leaf of a tree
Offset = tuple[int, ...]  # where a part lies in the whole tensor
Like = Callable[[Keys], Tensor | None]  # a tensor that is cut as the one at this place shall be; None: not at all


def whole_tensors(path: Keys) -> None:
    """Cut no tensor: the default for whoever reads all of a save."""


@dataclass
class StagedInner:
    """Hold one process' part of an inner state: a tree that JSON can say, and the tensors that it names."""

    tree: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "StagedInner":
        """Take the parts that this process holds. They are not copied."""
        staged = cls()
        staged.tree = staged._encode(dict(state), ())
        return staged

    def _encode(self, value: Any, path: Keys) -> dict[str, Any]:
        match value:
            case Tensor():
                return self._encode_tensor(value, path)
            case dict():
                for key in value:
                    if not isinstance(key, str | int):
                        raise SaveError(f"{_in_words(path)} has a key that no save can hold: {key!r}")
                return {DICT: [[key, self._encode(part, (*path, key))] for key, part in value.items()]}
            case list() | tuple():
                parts = [self._encode(part, (*path, place)) for place, part in enumerate(value)]
                return {TUPLE if isinstance(value, tuple) else LIST: parts}
            case None | bool() | int() | float() | str():
                return {VALUE: value}
        raise SaveError(f"{_in_words(path)} is a {type(value).__name__}, and saves hold tensors, numbers and text only")

    def _encode_tensor(self, tensor: Tensor, path: Keys) -> dict[str, Any]:
        shape, offset, gives = list(tensor.shape), list(offset_of(tensor)), _gives(tensor, path)
        part = local(tensor).detach()
        node: dict[str, Any] = {TENSOR: None, "shape": shape, "dtype": str(part.dtype).removeprefix("torch.")}
        if gives and part.numel():
            name = "/".join(map(str, path))
            name = name if name not in self.tensors else f"{name}#{len(self.tensors)}"
            self.tensors[name] = part if part.dtype in DTYPES else part.contiguous().flatten().view(torch.uint8)
            node |= {TENSOR: name, "offset": offset, "part": list(part.shape)}
        return node


def is_cut(tensor: Tensor) -> "TypeIs[DTensor]":
    """Tell whether a tensor is a DTensor. Whoever makes one has imported them; most never do, and save a second."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def offset_of(tensor: Tensor) -> Offset:
    """Return where the part that this process holds begins in the whole tensor."""
    if not is_cut(tensor):
        return (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # as torch's own checkpoints do

    offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]
    return tuple(int(at) for at in offset)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing its memory."""
    return tensor._local_tensor if is_cut(tensor) else tensor


def _gives(tensor: Tensor, path: Keys) -> bool:
    """Tell whether this process writes its part: of the holders of copies along a mesh's dimension, the first does. Of
    what is not sharded every process has a copy, except for its own random numbers."""
    if not is_cut(tensor):
        return not dist.is_initialized() or dist.get_rank() == 0 or str(path[0]).startswith(OF_ONE_RANK)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a process holds tensors of its own meshes only"
    return all(at == 0 for at, way in zip(coordinate, tensor.placements, strict=True) if way.is_replicate())


def _in_words(path: Keys) -> str:
    return "the inner state's " + ("/".join(map(str, path)) or "tree")


def write_rank(
    folder: Path, rank: int, ranks: int, staged: StagedInner, rest: Rest = no_rest, *, durable: bool = True
) -> None:
    """Write the two files of one process, durable when it returns, if they are to be."""
    write_tensors(folder / f"rank-{rank:05}.safetensors", staged.tensors, rest, durable=False)
    index = folder / f"rank-{rank:05}.json"
    index.write_text(json.dumps({"format": FORMAT, "ranks": ranks, "tree": staged.tree}))
    if durable:
        sync_rank(folder, rank)


def sync_rank(folder: Path, rank: int) -> None:
    """Wait until the two files of one process are on the disk."""
    for path in sorted(folder.glob(f"rank-{rank:05}.*")):
        sync_path(path)


@dataclass(frozen=True)
class _Part:
    rank: int
    name: str
    offset: Offset
    shape: tuple[int, ...]


@dataclass
class _Leaf:
    """Describe a leaf of a saved tree: a plain value, or a tensor and which file holds which part of it."""

    value: Any = None
    shape: tuple[int, ...] | None = None  # None: it is a plain value
    dtype: torch.dtype = torch.float32
    parts: dict[Offset, _Part] = field(default_factory=dict)


class SavedInner:
    """Read an inner state, whatever mesh has written it. Raise SaveError where it is not what was written."""

    def __init__(self, folder: Path) -> None:
        """Read the indexes of all processes; the tensors are read later, part by part."""
        self._folder = folder
        if (folder / OLD_INDEX).exists():
            raise SaveError(
                f"{folder} was written by an earlier diloco, with an index that could run code, and is never loaded: "
                f"delete {folder.parent}, and the island resumes from its log with an empty optimizer"
            )
        self.leaves: dict[Keys, _Leaf] = {}
        first = self._read_index(0)
        entries: dict[str | int, Any] = {}  # of the trees of all processes, which differ in what each has by itself
        for rank in range(first["ranks"]):
            index = first if rank == 0 else self._read_index(rank)
            for path, node in _leaves(index["tree"], ()):
                self._add(rank, path, node)
            entries = dict(index["tree"][DICT]) | entries
        self.tree = {DICT: list(entries.items())}

    def _read_index(self, rank: int) -> dict[str, Any]:
        path = self._folder / f"rank-{rank:05}.json"
        index = json.loads(path.read_text())
        if index["format"] != FORMAT or not 1 <= int(index["ranks"]) <= MOST_RANKS:
            raise ValueError(f"{path.name} has another format than this diloco writes")
        return dict(index)

    def _add(self, rank: int, path: Keys, node: Mapping[str, Any]) -> None:
        if VALUE in node:
            self.leaves.setdefault(path, _Leaf(node[VALUE]))
            return
        shape, dtype = tuple(map(int, node["shape"])), getattr(torch, node["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{_in_words(path)} has no type that torch knows: {node['dtype']!r}")
        leaf = self.leaves.setdefault(path, _Leaf(None, shape, dtype))
        if (leaf.shape, leaf.dtype) != (shape, dtype):
            raise ValueError(f"{_in_words(path)} has several shapes or types")
        if node[TENSOR] is not None:
            offset, part = tuple(map(int, node["offset"])), tuple(map(int, node["part"]))
            leaf.parts.setdefault(offset, _Part(rank, str(node[TENSOR]), offset, part))  # of copies, the first

    def fill(self, into: Any, path: Keys = ()) -> Any:
        """Copy the saved values into the tensors of a tree, each process its own parts; return the tree, in which plain
        values are replaced."""
        with ExitStack() as stack:
            files: dict[int, Any] = {}

            def file_of(rank: int) -> Any:
                if rank not in files:
                    name = f"rank-{rank:05}.safetensors"
                    files[rank] = stack.enter_context(safe_open(self._folder / name, "pt"))
                return files[rank]

            return self._fill(into, path, file_of)

    def _fill(self, into: Any, path: Keys, file_of: Any) -> Any:
        if isinstance(into, dict):
            for key in into:
                into[key] = self._fill(into[key], (*path, key), file_of)
            return into
        if isinstance(into, list | tuple):
            return type(into)(self._fill(part, (*path, place), file_of) for place, part in enumerate(into))
        leaf = self.leaves.get(path)
        if leaf is None or (leaf.shape is None) == isinstance(into, Tensor):
            raise ValueError(f"it lacks {_in_words(path)}")
        if leaf.shape is None:
            return leaf.value
        if leaf.shape != tuple(into.shape):
            raise ValueError(f"{_in_words(path)} is {list(leaf.shape)} there and {list(into.shape)} here")
        self._fill_tensor(into, leaf, path, file_of)
        return into

    @torch.no_grad()
    def _fill_tensor(self, into: Tensor, leaf: _Leaf, path: Keys, file_of: Any) -> None:
        mine, at, filled = local(into), offset_of(into), 0
        for part in leaf.parts.values():
            ends = zip(at, mine.shape, part.offset, part.shape, strict=True)
            shared = [(max(a, b), min(a + n, b + m)) for a, n, b, m in ends]
            if any(lo >= hi for lo, hi in shared):
                continue
            here = tuple(slice(lo - a, hi - a) for (lo, hi), a in zip(shared, at, strict=True))
            there = tuple(slice(lo - b, hi - b) for (lo, hi), b in zip(shared, part.offset, strict=True))
            target = mine[here]
            target.copy_(_read_part(file_of(part.rank), part, leaf.dtype, there))
            filled += target.numel()
        if filled != mine.numel():
            raise ValueError(f"it lacks a part of {_in_words(path)}")

    def read(self, like: Like) -> Any:
        """Return the whole tree in this process' memory, except for tensors that are cut as `like` says: of those it
        holds its own part."""
        return self.fill(self._empty(self.tree, (), like))

    def _empty(self, node: Mapping[str, Any], path: Keys, like: Like) -> Any:
        if DICT in node:
            return {key: self._empty(part, (*path, key), like) for key, part in node[DICT]}
        if LIST in node or TUPLE in node:
            parts = enumerate(node.get(LIST, node.get(TUPLE)))
            return (list if LIST in node else tuple)(self._empty(part, (*path, at), like) for at, part in parts)
        if VALUE in node:
            return None
        shape, dtype, cut = tuple(map(int, node["shape"])), getattr(torch, node["dtype"]), like(path)
        if cut is None or not is_cut(cut) or not shape:
            return torch.empty(shape, dtype=dtype)
        if shape != tuple(cut.shape):
            raise ValueError(f"{_in_words(path)} is {list(shape)} there and its parameter {list(cut.shape)}")
        return torch.empty_like(cut, dtype=dtype, requires_grad=False)


def _read_part(file: Any, part: _Part, dtype: torch.dtype, there: tuple[slice, ...]) -> Tensor:
    """Read a box of a part, and no more of the file than that where the format can tell its values apart."""
    if dtype not in DTYPES:
        return file.get_tensor(part.name).view(dtype).view(part.shape)[there]
    if all((box.start, box.stop) == (0, length) for box, length in zip(there, part.shape, strict=True)):
        return file.get_tensor(part.name).view(part.shape)
    return file.get_slice(part.name)[there]


def _leaves(node: Mapping[str, Any], path: Keys) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
    if DICT in node:
        for key, part in node[DICT]:
            yield from _leaves(part, (*path, key))
    elif LIST in node or TUPLE in node:
        for place, part in enumerate(node.get(LIST, node.get(TUPLE))):
            yield from _leaves(part, (*path, place))
    else:
        yield path, node
