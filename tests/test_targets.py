"""What `make test` leaves out, another target runs: no test is run by nobody."""

import re
import tomllib
from pathlib import Path

import walk

ROOT = Path(__file__).parent.parent
RECIPES = dict(re.findall(r"^([a-z]+):(?!=)[^\n]*\n((?:\t[^\n]*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
MARKERS = {line.partition(":")[0] for line in SETTINGS["markers"]}
LEFT_OUT = set(re.findall(r"not (\w+)", RECIPES["unit"]))


def runs(command: str, file: Path, marker: str) -> bool:
    """Whether a line of a recipe runs those tests of a file that have this marker."""
    chosen = re.search(r"-m '?([^'\n]*?)'?(?: --|$)", command)
    files = re.findall(r"tests/\S+\.py", command)
    return (chosen is None or chosen[1] == marker) and (not files or str(file.relative_to(ROOT)) in files)


def test_make_test_leaves_out_what_is_long_by_its_nature_only() -> None:
    assert {"soak", "cluster"} == LEFT_OUT and LEFT_OUT <= MARKERS


def test_every_marked_test_that_make_test_leaves_out_is_run_by_another_target() -> None:
    commands = [
        line.split("pytest", 1)[1]
        for name, recipe in RECIPES.items()
        if name not in ("unit", "quick", "coverage")
        for line in recipe.splitlines()
        if "/pytest" in line
    ]
    marked = [
        (file, marker)
        for file in (ROOT / "tests").rglob("test_*.py")
        for marker in LEFT_OUT
        if re.search(rf"mark\.{marker}\b", file.read_text())
    ]
    assert {marker for _, marker in marked} == LEFT_OUT
    nobodys = [(str(file), marker) for file, marker in marked if not any(runs(line, file, marker) for line in commands)]
    assert nobodys == []


def test_make_walk_types_what_the_readme_shows() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [line for line in walk.SHOWN if not re.search(rf"^{re.escape(line)}", readme, re.MULTILINE)] == []
    assert "tests/walk.py" in RECIPES["walk"]
