"""The names of islands: for people, names instead of keys, everywhere.

An island's folder remembers the names that it has heard (`names`), so that commands can use them when nobody is there.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

NAMES = "names"  # in an island's folder
ID_LETTERS = 8  # of a peer id, where a name alone would not do


class Names:
    """Say what islands are called. Where two share a name, the end of the key stands beside it."""

    def __init__(self, known: Mapping[str, str]) -> None:
        """`known` holds the names of islands by their peer ids."""
        self.known = dict(known)
        self._count = Counter(self.known.values())

    def of(self, peer: str) -> str:
        """Return what an island is called: its name, or the end of its id where that is not known."""
        name = self.known.get(peer)
        if name is None:
            return short_key(peer)
        return name if self._count[name] == 1 else f"{name} ({short_key(peer)})"

    def in_text(self, text: str) -> str:
        """Return a text with islands' names instead of their ids."""
        for peer in self.known:
            text = text.replace(peer, self.of(peer))
        return text


def short_key(peer: str) -> str:
    """Return the end of a peer id, by which people tell islands apart; a short id as it is."""
    return peer[-ID_LETTERS:]


def read_names(folder: Path) -> dict[str, str]:
    """Return the names of islands, by their ids, that the island in this folder has heard of."""
    try:
        names = json.loads((folder / NAMES).read_bytes())
        return {str(peer): str(name) for peer, name in names.items()}
    except (OSError, ValueError, AttributeError):
        return {}
