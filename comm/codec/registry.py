"""All codecs by name. A new one is a class in a file of its own and a line in CODECS.

Importing this is cheap: a codec's module, and torch with it, is loaded when the codec is first asked for.

Four are for contributions under error feedback: `sparse`, `sign`, `dct` and `lowrank`. A mean of such vectors is not
of their kind, and no peer feeds its errors back, so it travels value by value: `result_codec_for` names its codec.
"""

import re
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from diloco.errors import CodecError

if TYPE_CHECKING:
    from diloco.comm.codec.base import Codec

__all__ = ["CODECS", "codec_named", "result_codec_for", "warm_up"]

UNION = re.compile(r"union:([1-9][0-9]{1,3})", re.ASCII)


class Codecs(Mapping[str, "Codec"]):
    """Map names to codecs. A codec's module is imported, and the codec made, when it is first looked up."""

    def __init__(self, **classes: str) -> None:
        """Take the class of each codec as `module:Class`."""
        self.classes = classes
        self._made: dict[str, Codec] = {}

    def __getitem__(self, name: str) -> "Codec":
        if name not in self._made:
            self._made[name] = resolve_name(self.classes[name])()
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self.classes

    def __iter__(self) -> Iterator[str]:
        return iter(self.classes)

    def __len__(self) -> int:
        return len(self.classes)


CODECS = Codecs(
    fp32="diloco.comm.codec.dense:Fp32",
    bf16="diloco.comm.codec.dense:Bf16",
    int8="diloco.comm.codec.dense:Int8",
    int4="diloco.comm.codec.dense:Int4",
    fp4="diloco.comm.codec.dense:Fp4",
    sparse="diloco.comm.codec.sparse:Sparse",
    sign="diloco.comm.codec.dense:Sign",
    dct="diloco.comm.codec.dct:Dct",
    lowrank="diloco.comm.codec.lowrank:LowRank",
)


def codec_named(name: str) -> "Codec":
    """Return one of CODECS, or `union:K` with K values of each chunk of 4096.

    Names come from peers: any other raises CodecError.
    """
    if name in CODECS:
        return CODECS[name]
    from diloco.comm.codec.chunks import CHUNK
    from diloco.comm.codec.sparse import KEPT, union

    match = UNION.fullmatch(name)
    if match and int(match[1]) <= CHUNK and int(match[1]) % KEPT == 0:
        return union(int(match[1]))
    raise CodecError(f"there is no codec {name[:60]!r}: there are {', '.join(CODECS)}")


def result_codec_for(name: str, members: int) -> str:
    """Name the codec in which the mean of `members` contributions, encoded with the named one, travels."""
    return codec_named(name).result_codec(members)


def warm_up(name: str = "int8") -> None:
    """Compile what a CPU needs for this codec and its results, or load it: seconds that no round should wait for."""
    import torch

    from diloco.comm.codec.noise import NoiseKey

    for each in (name, result_codec_for(name, members=2)):
        codec = codec_named(each)
        codec.decode(codec.encode(torch.ones(1), NoiseKey(0, 0, "warm-up")), 1)
