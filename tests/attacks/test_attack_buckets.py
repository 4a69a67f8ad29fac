"""Whoever can write to a bucket cannot write to our disk: `diloco restore` keeps inside its folder."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from alone import train
from conftest import SMALL
from trained_run import Command

from diloco.checkpoint.log.snapshot import Manifest, read_manifest
from diloco.config.file import parse_config

URL = "hostile://bucket"


class Hostile(fsspec.AbstractFileSystem):
    """List and give what its owner likes: a service does not look at the names of its objects."""

    protocol = "hostile"
    objects: ClassVar[dict[str, bytes]] = {}

    def find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        return {f"{path}/{name}": {"size": len(data), "type": "file"} for name, data in self.objects.items()}

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        Path(lpath).parent.mkdir(parents=True, exist_ok=True)
        Path(lpath).write_bytes(self.objects.get(rpath.removeprefix("bucket/"), b"evil"))


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an island has copied to a folder."""
    folder = tmp_path_factory.mktemp("copied")
    places = {"dir": str(folder / "run"), "remote": f"file://{folder}/far", "snapshot_every": 1}
    train(parse_config({**SMALL, "checkpoint": places}))
    (run,) = (folder / "far").iterdir()
    return run


@pytest.fixture
def bucket(copied: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The same in the hands of a stranger: objects by name."""
    fsspec.register_implementation("hostile", Hostile, clobber=True)
    monkeypatch.setattr("diloco.checkpoint.transfer.mirror.FIRST_WAIT_S", 0.0)
    objects = {str(path.relative_to(copied)): path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    monkeypatch.setattr(Hostile, "objects", objects)
    return objects


def tree(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_the_bucket_of_this_test_can_be_restored(bucket: dict[str, bytes], command: Command, tmp_path: Path):
    assert command("restore", URL, tmp_path / "back").code == 0
    assert (tmp_path / "back" / "outer" / "genesis.json").exists()


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "../../evil",
        "/tmp/evil",
        "..",
        "../manifest.json",
        "x/../../manifest.json",
        "A/log-/../../../evil",
        "A/log-00000001.seg/../../../../evil",
        "snapshot-00000000-aaaaaaaa/../../evil",
        "..\\evil",
        "C:\\evil",
        ".ssh/log-00000001.seg",
        "A//log-00000001.seg",
        "A/log-00000001.seg\n",
        "A/log-\x1b[2J.seg",
        "A/log-00000001.seg\x00",
        "~/log-00000001.seg",
        "ä/log-00000001.seg",
        f"A/log-{'1' * 300}.seg",
    ],
)
def test_a_name_that_no_island_gives_is_refused(bucket: dict[str, bytes], command: Command, tmp_path: Path, name: str):
    bucket[name] = b"evil"
    before = tree(tmp_path)
    told = command.refused("restore", URL, tmp_path / "deep" / "er" / "back")
    assert ("nothing was restored" in told and told.isprintable()) or told.rstrip("\n").isprintable()
    assert {path for path in tree(tmp_path) - before if path.is_file()} == set()
    assert not (tmp_path / "deep" / "er" / "back").exists()


def test_names_of_others_are_left_alone(bucket: dict[str, bytes], command: Command, tmp_path: Path):
    others = "README.txt", "notes/today.md", "elsewhere/manifest.json", "A/log-x.seg", "A/log-1/more.seg"
    bucket |= dict.fromkeys(others, b"evil")
    assert command("restore", URL, tmp_path / "back").code == 0
    found = {path.name for path in tree(tmp_path / "back") if path.is_file()}
    assert not found & {"README.txt", "today.md", "log-x.seg", "more.seg"}


@pytest.mark.parametrize("target", ["file", "folder"])
def test_a_link_is_refused(copied: Path, command: Command, tmp_path: Path, target: str):
    far = Path(shutil.copytree(copied, tmp_path / "far"))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "log-00000009.seg").write_text("mine")
    place = tmp_path / "secret" if target == "folder" else tmp_path / "secret" / "log-00000009.seg"
    (far / "A").mkdir()
    (far / "A" / "log-00000009.seg").symlink_to(place)
    told = command.refused("restore", f"file://{far}", tmp_path / "back")
    assert "A/log-00000009.seg', which is a link: nothing was restored" in told
    assert not (tmp_path / "back").exists()


def lie(manifest: Manifest, **about: Any) -> bytes:
    """A manifest with a right digest."""
    first, *others = manifest.shards
    return replace(manifest, shards=[replace(first, **about), *others]).encode()


LIES: list[dict[str, Any]] = [
    *({"file": file} for file in ("../evil", "/tmp/evil", "..", ".", "", "manifest.json", "a/b", "x\0y", "~")),
    {"count": 1 << 50},
    {"count": -1},
    {"count": "many"},
    {"start": 5},
    {"vector": "unheard of"},
]


@pytest.mark.parametrize("about", LIES, ids=str)
def test_a_manifest_that_lies_is_refused(
    bucket: dict[str, bytes], copied: Path, command: Command, tmp_path: Path, about: dict[str, Any]
):
    for snapshot in copied.glob("snapshot-*"):
        bucket[f"{snapshot.name}/manifest.json"] = lie(read_manifest(snapshot), **about)
    before = tree(tmp_path)
    said = command("restore", URL, tmp_path / "back")
    assert said.code == 2 and "holds no snapshot that is whole: nothing was restored" in said.err
    assert "Traceback" not in said.err and tree(tmp_path) == before


def test_a_vector_that_fits_no_memory_is_refused(
    bucket: dict[str, bytes], copied: Path, command: Command, tmp_path: Path
):
    for snapshot in copied.glob("snapshot-*"):
        manifest = read_manifest(snapshot)
        huge = replace(manifest, vectors=dict.fromkeys(manifest.vectors, 1 << 60))
        bucket[f"{snapshot.name}/manifest.json"] = huge.encode()
    assert command("restore", URL, tmp_path / "back").code == 2
    assert not (tmp_path / "back").exists()
