"""Run `diloco` with islands whose keys are sorted as their names: the roster's order is known before the run is.

    python sorted_islands.py simulate …

The founder comes first; the others follow by their ids, which are made at random: here, until they are in order.
"""

import tempfile
from pathlib import Path
from typing import ClassVar

from diloco.cli import main
from diloco.comm.peers.identity import Identity
from diloco.simulate.real import fleet

NAMES = [f"island-{number}" for number in range(1, 5)]


def keys_in_order() -> dict[str, bytes]:
    while True:
        with tempfile.TemporaryDirectory() as folder:
            ids = [Identity.load(Path(folder) / name).peer_id for name in NAMES]
            if ids[1:] == sorted(ids[1:]):
                return {name: (Path(folder) / name).read_bytes() for name in NAMES}


class SortedIdentity(Identity):
    """Make the keys of islands all at once, in order, where they are not there yet."""

    keys: ClassVar[dict[str, bytes]] = {}

    @classmethod
    def load(cls, path: Path) -> Identity:
        if not path.exists():
            cls.keys = cls.keys or keys_in_order()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_bytes(cls.keys[path.parent.name])
        return Identity.load(path)


if __name__ == "__main__":
    fleet.Identity = SortedIdentity  # type: ignore[misc]
    main()
