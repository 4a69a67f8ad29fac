"""Count the lines of code: `python tests/count_code.py [--json]`, from anywhere.

A line is a physical line that holds a token of Python: an expression over three lines counts three, a string over three
lines counts three, two statements on one line count one. Blank lines, comments and docstrings do not count; a docstring
is a string that stands alone as the first statement of a module, a class or a function. The blank lines inside a string
that is not a docstring count, for they are part of it.

The product is `diloco/`, `comm/`, `elastic/` and `checkpoint/`. Links are not followed: `diloco/comm` is `comm/`.
"""

import argparse
import ast
import io
import json
import os
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("diloco", "comm", "elastic", "checkpoint")
# 22,300 until protocol 5; quorum, latch, who leads, soak, mutants, salvage, admission and relays came after it, then
# launching on clusters, supervision of an island's processes, own loops on a mesh, the dashboard, memory by leaf, and
# rounds at the speed of the machine
LIMIT = 40_350
LEAST_DOCUMENTED = 0.70  # of public functions and classes; docstrings.py says what counts
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count_lines(source: str) -> int:
    """Count the lines of one file's text."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = [(token.start[0], token.end[0]) for token in tokens if token.type not in SILENT]
    lines = {line for first, last in spans for line in range(first, last + 1)}
    return len(lines - docstring_lines(source))


def docstring_lines(source: str) -> set[int]:
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    firsts = [node.body[0] for node in ast.walk(ast.parse(source)) if isinstance(node, owners) and node.body]
    return {line for first in firsts if is_docstring(first) for line in range(first.lineno, first.end_lineno + 1)}


def is_docstring(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(ast.Constant(str())):
            return True
    return False


def files_below(folder: Path) -> list[Path]:
    """Find the Python files below a folder, links left out."""
    found = (Path(at) / name for at, _, names in os.walk(folder) for name in names if name.endswith(".py"))
    return sorted(file for file in found if not file.is_symlink())


def count_folder(folder: Path) -> int:
    """Count what lies below a folder, links left out."""
    return sum(count_lines(file.read_text(encoding="utf-8")) for file in files_below(folder))


def report(rooms: dict[str, int], tests_lines: int) -> dict[str, object]:
    """Return what `--json` prints, with the share of good docstrings."""
    from docstrings import share

    product = {"name": "house.code_lines", "value": sum(rooms.values()), "limit": LIMIT, "better": "lower"}
    documented = {"name": "house.docstring_share", "value": share(), "limit": LEAST_DOCUMENTED, "better": "higher"}
    return {"checks": [product, documented], "tests_lines": tests_lines, "rooms": rooms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rooms = {name: count_folder(ROOT / name) for name in PRODUCT}
    tests_lines = count_folder(ROOT / "tests")
    if options.json:
        print(json.dumps(report(rooms, tests_lines)))
        return
    for name, lines in {**rooms, "product": sum(rooms.values()), "tests": tests_lines}.items():
        print(f"{name:10} {lines:7,}")


if __name__ == "__main__":
    main()
