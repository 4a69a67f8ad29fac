"""The rules of the architecture: imports point down, the command line is light, every file has one name."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("comm", "elastic", "checkpoint")

# Lowest first. A module belongs to the innermost package named here.
LAYERS = [
    {"diloco.errors", "diloco.units", "diloco.version"},
    {"diloco.comm"},
    {"diloco.checkpoint"},
    {"diloco.elastic"},
    {"diloco"},
    {"diloco.__main__", "diloco.cli", "diloco.bench", "diloco.doctor"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def rank(module: str) -> int:
    while module not in RANK:
        module = module.rpartition(".")[0]
    return RANK[module]


def modules() -> dict[str, Path]:
    """Every module by its dotted name. The links are left out of the walk, their targets are walked instead."""
    folders = {"diloco": ROOT / "diloco"} | {f"diloco.{name}": ROOT / name for name in LINKED}
    found = [(package, folder, file) for package, folder in folders.items() for file in python(folder)]
    return {dotted(package, file.relative_to(folder)): file for package, folder, file in found}


def python(folder: Path) -> list[Path]:
    return [Path(at) / name for at, _, names in os.walk(folder) for name in names if name.endswith(".py")]


def dotted(package: str, file: Path) -> str:
    return ".".join([package, *file.with_suffix("").parts]).removesuffix(".__init__")


MODULES = modules()


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


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str) -> None:
    own = {module for module in imported(name, MODULES[name]) if module.split(".")[0] == "diloco"}
    assert [module for module in sorted(own) if rank(module) > rank(name)] == []


def test_the_layers_are_told_apart() -> None:
    ranks = [rank(name) for name in ("diloco.units", "diloco.comm.tls", "diloco.checkpoint", "diloco.elastic.roster")]
    assert ranks == [0, 1, 2, 3]
    assert [rank(name) for name in ("diloco", "diloco.trainer", "diloco.cli.run")] == [4, 4, 5]


def test_imports_inside_functions_and_of_parents_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text("from .. import errors\nfrom diloco import units\ndef f():\n    from ..doctor import examine\n")
    assert sorted(imported("diloco.comm.m", file)) == ["diloco.doctor", "diloco.errors", "diloco.units"]


def heavy_modules_after(code: str) -> str:
    """Told on stderr: stdout belongs to the code."""
    code = f"import sys\n{code}\nprint(*sorted({{'torch', 'hivemind'}} & sys.modules.keys()), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr.strip()


def test_importing_diloco_is_light() -> None:
    assert heavy_modules_after("import diloco") == ""


def test_help_is_light() -> None:
    call = "sys.argv[1:] = ['--help']\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    assert heavy_modules_after(f"from diloco.cli import main\n{call}") == ""


def test_the_links_are_the_only_second_names() -> None:
    links = {str(path.relative_to(ROOT)): os.readlink(path) for path in listed_files() if path.is_symlink()}
    assert links == {f"diloco/{name}": f"../{name}" for name in LINKED}
    names = Counter(file.resolve() for file in MODULES.values())
    assert [file for file, count in names.items() if count > 1] == []


def test_nothing_is_imported_by_its_folder() -> None:
    """`import comm` would be a second copy of diloco.comm, with classes of its own."""
    others = {path for path in listed_files() if path.suffix == ".py"} - set(MODULES.values())
    sources = MODULES | {dotted("checkout", path.relative_to(ROOT)): path for path in others}
    tops = {name: {module.split(".")[0] for module in imported(name, path)} for name, path in sources.items()}
    assert {name: top & set(LINKED) for name, top in tops.items() if top & set(LINKED)} == {}


def test_no_large_file_is_kept() -> None:
    assert [path for path in listed_files() if path.lstat().st_size > 2**20] == []


def listed_files() -> list[Path]:
    """What git keeps or is about to keep."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in output.split("\0") if name and os.path.lexists(path := ROOT / name)]


DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_in_documents_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)|(?:src|href)=\"([^\"]+)\"", text)
    local = [link for pair in targets for link in pair if link and not re.match(r"[a-z]+:|#", link)]
    assert [link for link in local if not (document.parent / link.split("#")[0]).exists()] == []
