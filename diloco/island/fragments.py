"""Which parameters are synchronised together. Blocks are dealt out; what is in no block is a fragment of its own."""

import re
from itertools import pairwise

from diloco.elastic.protocol.ranges import normal
from diloco.elastic.runtime.fragments import Fragments
from diloco.errors import ConfigError
from diloco.island.layout import Layout


def fragments_of(layout: Layout, count: int, pattern: str, blocks: str) -> Fragments:
    """`blocks` is the name of the list of blocks: parameters are called `{blocks}.{number}.…`.

    strided: block l goes to fragment l mod (count - 1); sequential: neighbours stay together.
    """
    if count == 1:
        return Fragments.whole(layout.size)
    of_block = re.compile(re.escape(blocks) + r"\.(\d+)\.")
    numbers = [int(found[1]) if (found := of_block.match(name)) else None for name in layout.names]
    depth = max((number for number in numbers if number is not None), default=-1) + 1
    groups, rest = count - 1, any(number is None for number in numbers)
    if depth < groups or not rest:
        raise ConfigError(
            f"sync.fragments={count}: the model has {depth} blocks, and what is in none of them is a fragment of its "
            f"own: use at most {depth + 1 if rest else 1}"
        )
    parts: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for number, lo_hi in zip(numbers, pairwise(layout.edges), strict=True):
        parts[_group(number, groups, depth, pattern)].append(lo_hi)
    return Fragments(tuple(normal(part) for part in parts))


def names_of(layout: Layout, fragments: Fragments) -> list[frozenset[str]]:
    """The parameters of each fragment."""
    where = dict(zip(layout.names, layout.edges, strict=False))
    return [
        frozenset(name for name, start in where.items() if any(lo <= start < hi for lo, hi in ranges))
        for ranges in fragments.ranges
    ]


def _group(number: int | None, groups: int, depth: int, pattern: str) -> int:
    if number is None:
        return groups
    return number % groups if pattern == "strided" else number * groups // depth
