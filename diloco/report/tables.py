"""Tables as plain text that no width wraps: for a pipe, a file, and a terminal alike."""

from collections.abc import Iterable, Sequence

# what a peer calls itself, or a young model says, may hold anything, and a terminal would obey; half a surrogate cannot
# be printed at all
_HARMLESS = dict.fromkeys({*range(32), *range(127, 160), *range(0xD800, 0xE000)}, "\ufffd")
_HARMLESS_LINES = {letter: shown for letter, shown in _HARMLESS.items() if chr(letter) not in "\t\n"}


def harmless(text: str, *, lines: bool = False) -> str:
    """Return a text with every control character replaced, so that a terminal can show it; with `lines`, it may have
    several of them, and tabs."""
    return text.translate(_HARMLESS_LINES if lines else _HARMLESS)


def aligned(head: Sequence[str], rows: Iterable[Sequence[object]], *, left: Iterable[str] = ()) -> list[str]:
    """Return the lines of a table: columns padded to their widest cell, the last one as it is.

    Columns are aligned to the right, but those named in `left` and the last one. Control characters are replaced.
    """
    cells = [list(head), *([harmless(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(head))]
    to_left = {at for at, name in enumerate(head) if name in set(left) or at == len(head) - 1}
    return ["  ".join(_padded(row, widths, to_left)).rstrip() for row in cells]


def _padded(row: Sequence[str], widths: Sequence[int], to_left: set[int]) -> list[str]:
    return [
        cell.ljust(width) if at in to_left else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
