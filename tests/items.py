"""An item in many small chunks, and a library that holds it."""

from random import Random

from diloco.checkpoint.log.library import Item, Library
from diloco.comm.transport.frame import Buffer

SMALL_CHUNK = 1 << 12
STATE = Random(7).randbytes(40 * SMALL_CHUNK + 1234)  # 41 chunks, the last one short
MANIFEST = Item("state", STATE, SMALL_CHUNK).description()


def holding(data: Buffer, name: str = "state") -> Library:
    library = Library()
    library.put(name, data, chunk_bytes=SMALL_CHUNK)
    return library
