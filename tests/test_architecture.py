"""The rules of the architecture: imports point down, the command line is light, every file has one name."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import house
import pytest

LIGHT = ("diloco.errors", "diloco.units", "diloco.version")
SIMULATION = "simulate."


@pytest.mark.parametrize("limit", house.LIMITS)
def test_the_house_keeps_its_limits(limit: str) -> None:
    assert house.counts()[limit] <= house.LIMITS[limit]


def test_every_room_has_its_place_in_the_order() -> None:
    assert sorted(house.ORDER) == house.ROOMS


def test_imports_point_down() -> None:
    assert house.upward() == []


def test_production_never_imports_the_simulator() -> None:
    allowed = {"bench", "cli"}
    users = {here for here, there in house.ARROWS if there.startswith(SIMULATION) and not here.startswith(SIMULATION)}
    assert users <= allowed


@pytest.mark.parametrize("room", sorted(house.PACKAGES - house.PASSAGES))
def test_every_room_says_what_it_is_for(room: str) -> None:
    text = ast.get_docstring(ast.parse(house.MODULES[room].read_text()))
    assert text and "May import:" in text and "tart with" in text


def test_the_picture_is_that_of_the_imports() -> None:
    document = (house.ROOT / "ARCHITECTURE.md").read_text()
    assert document == house.written(document), "run `make picture`"


def test_imports_inside_functions_and_of_parents_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(
        "from .. import errors\nfrom diloco import units\ndef f():\n    from ..version import __version__\n"
    )
    assert sorted(house.imported("diloco.comm.m", file)) == sorted(LIGHT)


def heavy_modules_after(code: str) -> str:
    """Told on stderr: stdout belongs to the code."""
    code = f"import sys\n{code}\nprint(*sorted({{'torch', 'hivemind'}} & sys.modules.keys()), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=house.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr.strip()


def test_importing_diloco_is_light() -> None:
    assert heavy_modules_after("import diloco") == ""


def test_help_is_light() -> None:
    call = "sys.argv[1:] = ['--help']\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    assert heavy_modules_after(f"from diloco.cli import main\n{call}") == ""


def test_the_links_are_the_only_second_names() -> None:
    links = {str(path.relative_to(house.ROOT)): os.readlink(path) for path in listed_files() if path.is_symlink()}
    assert links == {f"diloco/{name}": f"../{name}" for name in house.LINKED}
    names = Counter(file.resolve() for file in house.MODULES.values())
    assert [file for file, count in names.items() if count > 1] == []


def test_nothing_is_imported_by_its_folder() -> None:
    """`import comm` would be a second copy of diloco.comm, with classes of its own."""
    others = {path for path in listed_files() if path.suffix == ".py"} - set(house.MODULES.values())
    sources = house.MODULES | {house.dotted("checkout", path.relative_to(house.ROOT)): path for path in others}
    tops = {name: {module.split(".")[0] for module in house.imported(name, path)} for name, path in sources.items()}
    assert {name: top & set(house.LINKED) for name, top in tops.items() if top & set(house.LINKED)} == {}


def test_no_test_is_imported() -> None:
    """What tests share lies in modules of its own, whose names say what they hold."""
    imports = {path.name: imported_names(path) for path in sorted((house.ROOT / "tests").glob("*.py"))}
    of_tests = re.compile(r"(^|\.)test_")
    assert [(file, name) for file, names in imports.items() for name in names if of_tests.search(name)] == []


def imported_names(path: Path) -> list[str]:
    """Modules, and what is taken from them: `a.b` for `from a import b`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return found


def test_no_large_file_is_kept() -> None:
    assert [path for path in listed_files() if path.lstat().st_size > 2**20] == []


def listed_files() -> list[Path]:
    """What git keeps or is about to keep."""
    if not (house.ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=house.ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in output.split("\0") if name and os.path.lexists(path := house.ROOT / name)]


DOCUMENTS = [*sorted(house.ROOT.glob("*.md")), *sorted((house.ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_that_documents_name_by_their_path_are_there(document: Path) -> None:
    named = set(re.findall(r"`([a-z_.]+/[a-z_/.0-9]+\.py)`", document.read_text()))
    assert not [path for path in sorted(named) if not (house.ROOT / path).exists()]
