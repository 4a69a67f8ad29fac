"""Draw the house from the imports: rooms, floors and arrows. `make picture` writes the picture into ARCHITECTURE.md.

A *room* is a package without packages inside, or a module that lies loose in a folder that has some. An *arrow* leads
from a room to one that it imports. A room's *floor* is one above the highest room that it imports. An import is
*upward* if it leads to a room that ORDER has above the importing one.

    python tests/house.py            print the picture
    python tests/house.py --json     print the counts against their limits
    python tests/house.py --write    put the picture into ARCHITECTURE.md
"""

import argparse
import ast
import importlib.util
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINKED = ("comm", "elastic", "checkpoint")
LIMITS = {"house.rooms": 30, "house.floors": 14, "house.upward": 0}
BEGIN, END = "<!-- picture: written by `make picture` -->", "<!-- end of the picture -->"

# Lowest first: a room imports rooms before it, never after it.
ORDER = [
    "atomic", "errors", "units", "version",
    "comm.codec", "comm.peers", "comm.transport", "comm.reduce",
    "checkpoint.log", "checkpoint.save", "checkpoint.transfer",
    "elastic.protocol", "elastic.runtime",
    "config", "model", "island", "data", "report", "train",
    "run", "launch", "history", "dashboard", "plan", "simulate.virtual", "simulate.real",
    "api", "integrations", "bench", "cli",
]  # fmt: skip


def python(folder: Path) -> list[Path]:
    return [Path(at) / name for at, _, names in os.walk(folder) for name in names if name.endswith(".py")]


def dotted(package: str, file: Path) -> str:
    return ".".join([package, *file.with_suffix("").parts]).removesuffix(".__init__")


def modules() -> dict[str, Path]:
    """Every module by its dotted name. The links are left out of the walk, their targets are walked instead."""
    folders = {"diloco": ROOT / "diloco"} | {f"diloco.{name}": ROOT / name for name in LINKED}
    found = [(package, folder, file) for package, folder in folders.items() for file in python(folder)]
    return {dotted(package, file.relative_to(folder)): file for package, folder, file in found}


MODULES = modules()
PACKAGES = {name for name, file in MODULES.items() if file.name == "__init__.py"}
PASSAGES = {package for package in PACKAGES if any(other.startswith(f"{package}.") for other in PACKAGES)}


def imported(name: str, file: Path) -> Iterator[str]:
    """All that a module imports, at its top or inside a function."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            submodules = [f"{source}.{alias.name}" for alias in node.names]
            yield from (module if module in MODULES else source for module in submodules)


def room_of(module: str) -> str | None:
    """The room that a module lies in, without `diloco.`; None for what only opens a folder or starts the program."""
    if module in PASSAGES or module == "diloco.__main__":
        return None
    parent = module.rpartition(".")[0]
    room = module if module in PACKAGES or parent in PASSAGES else parent
    return room.removeprefix("diloco.")


def arrows() -> dict[tuple[str, str], list[tuple[str, str]]]:
    """The imports that lead from one room to another."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for name, file in MODULES.items():
        for target in imported(name, file):
            here, there = room_of(name), room_of(target) if target in MODULES else None
            if here is not None and there is not None and here != there:
                found[here, there].append((name, target))
    return found


ARROWS = arrows()
ROOMS = sorted({room for name in MODULES if (room := room_of(name)) is not None})


@cache
def floor(room: str) -> int:
    return 1 + max((floor(there) for here, there in ARROWS if here == room), default=0)


def upward() -> list[tuple[str, str]]:
    """Imports of a room that ORDER has above the importing one."""
    rank = {room: number for number, room in enumerate(ORDER)}
    return [pair for (here, there), pairs in ARROWS.items() if rank[there] > rank[here] for pair in pairs]


def picture() -> str:
    """All floors, highest first, and what each room imports that nothing else it imports brings along."""
    lines = []
    for number in range(max(map(floor, ROOMS)), 0, -1):
        here = [room for room in ROOMS if floor(room) == number]
        lines += [f"{number:>2}  {room:<20}{' '.join(_direct(room))}".rstrip() for room in here]
    return "\n".join(lines)


def _direct(room: str) -> list[str]:
    """Without rooms that are reached through another one."""
    targets = {there for here, there in ARROWS if here == room}
    through = {far for target in targets for far in _below(target)}
    return sorted(targets - through)


@cache
def _below(room: str) -> frozenset[str]:
    targets = {there for here, there in ARROWS if here == room}
    return frozenset(targets.union(*(_below(target) for target in targets)))


def counts() -> dict[str, int]:
    return {"house.rooms": len(ROOMS), "house.floors": max(map(floor, ROOMS)), "house.upward": len(upward())}


def written(document: str) -> str:
    """The document with today's picture in it."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n```\n{picture()}\n```\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.json:
        checks = [{"name": k, "value": v, "limit": LIMITS[k], "better": "lower"} for k, v in counts().items()]
        print(json.dumps({"checks": checks, "arrows": len(ARROWS)}))
        return
    print(picture())
    if options.write:
        document = ROOT / "ARCHITECTURE.md"
        document.write_text(written(document.read_text()))


if __name__ == "__main__":
    main()
