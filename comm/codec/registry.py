"""How vectors travel: all codecs by name. Each is in `codec_dense`, `sign`, `sparse`, `dct` or `lowrank`.

Four are for contributions under error feedback: `sparse`, `sign`, `dct` and `lowrank`. A mean of such vectors is none
of its kind and has nobody to feed errors back, so it travels value by value: `result_codec_for` says how.
"""

import re
from functools import cache

import torch

from diloco.comm.codec.base import Codec
from diloco.comm.codec.chunks import CHUNK
from diloco.comm.codec.dct import Dct
from diloco.comm.codec.dense import BLOCK, Bf16, Fp4, Fp32, Int4, Int8
from diloco.comm.codec.lowrank import LowRank
from diloco.comm.codec.noise import PAGE, NoiseKey
from diloco.comm.codec.sign import Sign
from diloco.comm.codec.sparse import KEPT, Sparse, union
from diloco.errors import CodecError

__all__ = ["BLOCK", "CODECS", "Codec", "codec_named", "result_codec_for", "warm_up"]

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (Fp32(), Bf16(), Int8(), Int4(), Fp4(), Sparse(), Sign(), Dct(), LowRank())
}  # fmt: skip
UNION = re.compile(r"union:([1-9][0-9]{1,3})", re.ASCII)


@cache
def codec_named(name: str) -> Codec:
    """One of CODECS, or `union:K` with K values of each chunk of 4096. Names come from peers: any other is refused."""
    if name in CODECS:
        return CODECS[name]
    match = UNION.fullmatch(name)
    if match and int(match[1]) <= CHUNK and int(match[1]) % KEPT == 0:
        return union(int(match[1]))
    raise CodecError(f"there is no codec {name[:60]!r}")


def result_codec_for(name: str, members: int) -> str:
    """How a mean of so many contributions travels. Where most of a chunk may be kept, int8 is the smaller one."""
    if codec_named(name).closed:
        return name
    together = union(min(KEPT * members, CHUNK))
    return together.name if name == "sparse" and together.size(PAGE) < CODECS["int8"].size(PAGE) else "int8"


def warm_up(name: str = "int8") -> None:
    """Compile what a CPU needs for this codec and its results, or load it: seconds that no round should wait for."""
    for each in (name, result_codec_for(name, members=2)):
        codec = codec_named(each)
        codec.decode(codec.encode(torch.ones(1), NoiseKey(0, 0, "warm-up")), 1)
