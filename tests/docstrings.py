"""Count which public functions and classes say what they do: `python tests/docstrings.py [PREFIX …]` lists the others.

A docstring counts if its first word is a verb in the imperative, as in "Return the bytes sent so far", and if it has a
word of substance that the name does not have. Words are looked up in a list, `verbs.txt`: a new verb is added there.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from count_code import PRODUCT, ROOT, files_below

VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text().split())
SMALL = frozenset(
    re.findall(r"\w+", "a an and are as at be by for from in is it its of on or that the this to what with")
)
DEFINITION = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Item:
    path: str
    line: int
    name: str
    docstring: str


def public_items() -> list[Item]:
    """List every public class, function and method of the product."""
    files = [file for room in PRODUCT for file in files_below(ROOT / room)]
    return [item for file in files for item in items_in(ast.parse(file.read_text()), str(file.relative_to(ROOT)))]


def items_in(node: ast.Module | ast.ClassDef, path: str) -> Iterator[Item]:
    """Yield what is public in a module or a class: no part of its name begins with an underscore."""
    for child in node.body:
        if isinstance(child, DEFINITION) and not child.name.startswith("_"):
            yield Item(path, child.lineno, child.name, ast.get_docstring(child) or "")
            if isinstance(child, ast.ClassDef):
                yield from items_in(child, path)


def is_good(item: Item) -> bool:
    """Tell whether its docstring starts with a verb and says something that its name does not."""
    words = re.findall(r"[a-z]+", item.docstring.lower())
    if not words or words[0] not in VERBS or not item.docstring[0].isupper():
        return False
    named = set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", item.name).lower()))
    return bool(set(words[1:]) - SMALL - named)


def share() -> float:
    """Return the share of public functions and classes with a good docstring."""
    items = public_items()
    return sum(map(is_good, items)) / len(items)


if __name__ == "__main__":
    found = [item for item in public_items() if not sys.argv[1:] or item.path.startswith(tuple(sys.argv[1:]))]
    bad = [item for item in found if not is_good(item)]
    for item in bad:
        print(f"{item.path}:{item.line} {item.name}: {item.docstring.partition(chr(10))[0] or 'nothing'}")
    print(f"{len(found) - len(bad)} of {len(found)} are good: {1 - len(bad) / max(1, len(found)):.3f}")
