"""What is built and installed is what is in the tree, all of it under the one name diloco."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import lock
import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("comm", "elastic", "checkpoint")
LIGHT = ("typer", "rich", "pydantic", "pyyaml")  # all that `diloco --help` may need


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)


def succeed(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kept_files() -> list[str]:
    """What git keeps or is about to keep."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = succeed("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    return [name for name in listed if name and os.path.lexists(ROOT / name)]


def copy_tree(target: Path) -> Path:
    """Building litters: it is done in copies, links kept as links."""
    for name in kept_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def build(tree: Path, *kinds: str) -> subprocess.CompletedProcess[str]:
    """Into `dist` of the tree. Without a kind: a source archive, and a wheel from that archive."""
    quick = ["--no-isolation"] if int(version("setuptools").split(".")[0]) >= 77 else []
    return run(sys.executable, "-m", "build", *quick, *kinds, tree, cwd=tree.parent)


def built(tree: Path, *kinds: str) -> Path:
    done = build(tree, *kinds)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (file,) = built(copy_tree(tmp_path_factory.mktemp("wheel") / "tree"), "--wheel").glob("*.whl")
    return file


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source archive and the wheel made from it."""
    return built(copy_tree(tmp_path_factory.mktemp("release") / "tree"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_the_wheel_holds_diloco_and_nothing_else(wheel: Path) -> None:
    distribution = "-".join(wheel.name.split("-")[:2])
    assert {name.split("/")[0] for name in contents(wheel)} == {"diloco", f"{distribution}.dist-info"}
    assert f"{distribution}.dist-info/licenses/LICENSE" in contents(wheel)


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    linked = tuple(f"{name}/" for name in LINKED)
    kept = [f"diloco/{name}" if name.startswith(linked) else name for name in kept_files()]
    links = {f"diloco/{name}" for name in LINKED}
    expected = {name for name in kept if name.startswith("diloco/")} - links
    assert {"diloco/py.typed", *(f"{link}/__init__.py" for link in links)} <= expected
    assert expected - contents(wheel).keys() == set()


@pytest.mark.slow
def test_the_source_archive_gives_the_same_wheel(wheel: Path, release: Path) -> None:
    (again,) = release.glob("*.whl")
    assert contents(again) == contents(wheel)


@pytest.mark.slow
def test_the_source_archive_holds_no_links_and_no_second_copy(release: Path) -> None:
    (archive,) = release.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        members = source.getmembers()
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    assert {member.name.split("/")[1] for member in members if "/" in member.name}.isdisjoint(LINKED)


def empty_environment(folder: Path) -> Path:
    venv.create(folder, symlinks=True)
    return folder / "bin"


def install(environment: Path, *what: str | Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "python")]
    succeed(*pip, "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", *what, cwd=environment)


@pytest.fixture(scope="module", params=["wheel", pytest.param("editable", marks=pytest.mark.soak)])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with diloco, what its command line needs, and Jupyter's `comm`."""
    folder = tmp_path_factory.mktemp(request.param)
    environment = empty_environment(folder / "venv")
    if request.param == "wheel":
        install(environment, "--no-deps", request.getfixturevalue("wheel"))
    else:
        install(environment, "--no-deps", "-e", copy_tree(folder / "tree"))
    install(environment, *LIGHT, "comm")
    return environment


@pytest.mark.slow
def test_installed_beside_jupyter_both_keep_their_comm(installed: Path, tmp_path: Path) -> None:
    succeed(installed / "python", "-c", "from comm import create_comm", cwd=tmp_path)
    ours = succeed(installed / "python", "-c", "import diloco.comm as c; print(c.__name__, c.__doc__)", cwd=tmp_path)
    assert ours.startswith("diloco.comm Bytes between peers")


@pytest.mark.slow
def test_installed_the_command_line_runs_anywhere(installed: Path, tmp_path: Path) -> None:
    assert "Usage" in succeed(installed / "diloco", "--help", cwd=tmp_path)


@pytest.mark.parametrize("name", LINKED)
def test_a_linked_folder_is_not_imported_by_its_bare_name(name: str) -> None:
    refused = run(sys.executable, "-c", f"import {name}", cwd=ROOT)
    assert (refused.returncode, f"use `import diloco.{name}`" in refused.stderr) == (1, True)


@pytest.fixture(params=LINKED)
def checkout_without_links(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What git makes of a link where core.symlinks is false: a text file that holds the target's name."""
    tree = copy_tree(tmp_path / "tree")
    link = tree / "diloco" / request.param
    target = os.readlink(link)
    link.unlink()
    link.write_text(target)
    return tree


def test_a_checkout_without_links_is_not_imported(checkout_without_links: Path) -> None:
    refused = run(sys.executable, "-c", "import diloco", cwd=checkout_without_links)
    assert (refused.returncode, "git config core.symlinks true" in refused.stderr) == (1, True)


def test_a_checkout_without_links_is_not_built(checkout_without_links: Path) -> None:
    refused = build(checkout_without_links, "--wheel")
    assert refused.returncode != 0
    assert "git config core.symlinks true" in refused.stdout + refused.stderr
    assert list(checkout_without_links.rglob("*.whl")) == []


def test_the_checks_reach_the_linked_folders() -> None:
    """coverage and ruff do not follow links: started from `diloco` they would skip three packages and say nothing."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert settings["coverage"]["run"]["source"] == ["."]
    checked = succeed(sys.executable, "-m", "ruff", "check", "--show-files", ".", cwd=ROOT).splitlines()
    assert {str(ROOT / name / "__init__.py") for name in LINKED} <= set(checked)


def test_the_lock_has_digests_of_exactly_the_versions_that_are_tested() -> None:
    assert {name: version for name, (version, digests) in lock.locked().items() if digests} == lock.pins()
    assert "://" not in lock.LOCK.read_text(), "where files come from is everybody's own matter"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mergedeep", "varint"])  # a wheel, and a source archive
def test_a_file_with_another_digest_is_not_installed(tmp_path: Path, name: str) -> None:
    environment, (version, digests) = empty_environment(tmp_path / "venv"), lock.locked()[name]
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "python"), "install", "--no-deps"]
    asked = tmp_path / "asked.txt"
    asked.write_text(lock.entry(name, version, {"0" * 64}))
    refused = run(*pip, "--require-hashes", "--no-build-isolation", "-r", asked, cwd=tmp_path)
    assert refused.returncode and "DO NOT MATCH THE HASHES" in refused.stderr, refused
    asked.write_text(lock.entry(lock.FIRST, *lock.locked()[lock.FIRST]))
    succeed(*pip, "--require-hashes", "-r", asked, cwd=tmp_path)
    asked.write_text(lock.entry(name, version, digests))
    succeed(*pip, "--require-hashes", "--no-build-isolation", "-r", asked, cwd=tmp_path)


def test_a_build_at_hand_that_the_lock_knows_goes_before_that_of_an_index(tmp_path: Path, monkeypatch) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu-py3-none-any.whl"
    wheel.write_bytes(b"a build of torch")
    (tmp_path / "torch-2.13.0+cpu-py2-none-any.whl").write_bytes(b"one for another Python")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digest = sha256(b"a build of torch").hexdigest()
    assert lock.at_hand("torch", {digest}) == wheel and lock.at_hand("torch", {"0" * 64}) is None
    assert lock.entry("torch", "2.13.0", {digest}, wheel).startswith(f"{wheel} \\\n    --hash=sha256:{digest}")
