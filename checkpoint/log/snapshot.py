"""Snapshots of the outer state: safetensors files and a manifest with their digests, in a folder that appears at once.

`snapshot-00000020-1f0c9a3b/` has `manifest.json` and `parameters-00000.safetensors`, … of each vector. Its bytes follow
from the state alone, so they are the same on every island. What the state has besides vectors (`meta`) is opaque here.
"""

import hashlib
import json
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.atomic import PART, appearing, sync_path
from diloco.checkpoint.log.pinned import PinnedState
from diloco.checkpoint.log.writing import PIECE, Rest, canonical, header, no_rest, write_tensors
from diloco.comm.transport.wire import as_bytes
from diloco.errors import SnapshotDamaged

FORMAT = 1
SHARD_VALUES = 1 << 28  # of one file: 1 GiB
MAX_MANIFEST = 64 << 20
GONE, DAMAGED = ".gone", ".damaged"


@dataclass(frozen=True)
class SnapshotContents:
    """Hold a state that is to be written: nobody changes these vectors any more, or their version is pinned."""

    round: int
    version: str  # digest of the chain
    order: tuple[int, ...]  # snapshots of one island are ordered by it
    meta: Any  # JSON
    vectors: Mapping[str, Tensor] | PinnedState

    @property
    def pinned(self) -> PinnedState:
        """Return the vectors as they are read."""
        given = self.vectors
        return given if isinstance(given, PinnedState) else PinnedState(given, threading.Condition(), None)

    def release(self) -> None:
        """Let go of a version that was pinned: it is written, or never will be."""
        if isinstance(self.vectors, PinnedState):
            self.vectors.release()


@dataclass(frozen=True)
class Shard:
    """Describe one file of a snapshot: which values of which vector it holds, and its digest."""

    file: str
    vector: str
    start: int
    count: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Describe a snapshot: the state that it holds, its files, and the digests of both."""

    format: int
    round: int
    version: str
    order: tuple[int, ...]
    meta: Any
    vectors: dict[str, int]  # values of each
    state: str  # digest of all vectors
    shards: list[Shard]

    def encode(self) -> bytes:
        """Encode the manifest with its own digest. There is one text for one manifest, so that every byte counts."""
        tree = asdict(self)
        return canonical({**tree, "digest": hashlib.sha256(canonical(tree)).hexdigest()}) + b"\n"


def snapshots(folder: Path) -> list[Path]:
    """List the published snapshots, damaged or not, oldest first by round; those set aside are left out."""
    return sorted(path for path in folder.glob("snapshot-*") if path.suffix not in (PART, GONE, DAMAGED))


def write_snapshot(
    folder: Path, contents: SnapshotContents, *, shard_values: int = SHARD_VALUES, rest: Rest = no_rest
) -> Path:
    """Write a snapshot, durable when it returns, and return its folder; after an OSError nothing of it is left. One
    that exists already stays as it is."""
    final = folder / f"snapshot-{contents.round:08}-{contents.version[:8]}"
    if final.exists():
        return final
    with appearing(final, part_of(final), durable=True) as part:
        part.mkdir()
        shards, state, vectors = [], hashlib.sha256(), contents.pinned
        for name, length in sorted(vectors.counts.items()):
            for start in range(0, length, shard_values):
                count, digest = min(shard_values, length - start), hashlib.sha256()
                file = f"{name}-{start // shard_values:05}.safetensors"
                values = vectors.part(name, start, count).seen_by(state.update)
                write_tensors(part / file, {name: values}, rest, digest.update)
                shards.append(Shard(file, name, start, count, digest.hexdigest()))
        about = contents.round, contents.version, contents.order, contents.meta
        manifest = Manifest(FORMAT, *about, vectors.counts, state.hexdigest(), shards)
        (part / "manifest.json").write_bytes(manifest.encode())
        sync_path(part / "manifest.json")
    return final


def part_of(snapshot: Path) -> Path:
    """Return where a snapshot is written: `clean` finds it there, and whoever wants to see a writer's progress."""
    return snapshot.with_name(snapshot.name + PART)


def read_manifest(snapshot: Path) -> Manifest:
    """Read a snapshot's manifest; raise SnapshotDamaged where it does not fit its digest or has another format."""
    path = snapshot / "manifest.json"
    try:
        raw = path.read_bytes() if path.stat().st_size <= MAX_MANIFEST else b""
        tree = json.loads(raw)
        del tree["digest"]
        shards = [Shard(**shard) for shard in tree["shards"]]
        fields = {"order": tuple(tree["order"]), "vectors": dict(tree["vectors"]), "shards": shards}
        manifest = Manifest(**{**tree, **fields})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SnapshotDamaged(f"{path} cannot be read ({type(error).__name__})") from None
    if not _is_sound(manifest) or manifest.encode() != raw:
        raise SnapshotDamaged(f"{path} is not what was written: its digest does not fit")
    if manifest.format != FORMAT:
        raise SnapshotDamaged(f"{path} has format {manifest.format}, this diloco writes {FORMAT}: use the same version")
    return manifest


def _is_sound(manifest: Manifest) -> bool:
    """Return whether values have their types, and each vector is in its shards once, in order: a bucket may lie."""
    shards = manifest.shards
    numbers = (manifest.round, *manifest.order, *manifest.vectors.values())
    numbers += tuple(number for shard in shards for number in (shard.start, shard.count))
    texts = (manifest.version, manifest.state, *(text for s in shards for text in (s.file, s.vector, s.sha256)))
    if not all(type(number) is int and number >= 0 for number in numbers):
        return False
    if not all(isinstance(text, str) for text in texts):
        return False
    ends = dict.fromkeys(manifest.vectors, 0)
    for shard in manifest.shards:
        if ends.get(shard.vector) != shard.start or "\0" in shard.file:
            return False
        ends[shard.vector] += shard.count
    return ends == manifest.vectors


def manifests(folder: Path) -> list[tuple[Manifest, Path]]:
    """List the manifests that can be read, with their snapshots' folders, oldest state first."""
    found = []
    for path in snapshots(folder):
        with suppress(SnapshotDamaged):
            found.append((read_manifest(path), path))
    return sorted(found, key=lambda pair: pair[0].order)


def read_vectors(snapshot: Path, manifest: Manifest, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Read a snapshot's vectors, piece by piece to the device where they are to lie, and compare every byte with its
    digest; raise SnapshotDamaged where they differ."""
    _refuse_misfit(snapshot, manifest)
    vectors = {name: torch.empty(count, device=device) for name, count in manifest.vectors.items()}
    for shard in manifest.shards:
        _read_shard(snapshot / shard.file, shard, vectors[shard.vector][shard.start : shard.start + shard.count])
    return vectors


def _refuse_misfit(snapshot: Path, manifest: Manifest) -> None:
    """Raise SnapshotDamaged unless the shards make up the vectors and the files are that long, before any memory is
    taken: whoever wrote the manifest may have lied."""
    ends = dict.fromkeys(manifest.vectors, 0)
    try:
        for shard in manifest.shards:
            path = snapshot / shard.file
            if path.stat().st_size <= 4 * shard.count:
                raise SnapshotDamaged(f"{path} is not what was written: it is too short")
            if shard.start != ends[shard.vector] or shard.count < 1:
                raise ValueError("the shards do not make up the vectors")
            ends[shard.vector] += shard.count
        if ends != manifest.vectors:
            raise ValueError("the shards do not make up the vectors")
    except OSError as error:
        raise SnapshotDamaged(f"{path} cannot be read ({error.strerror})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotDamaged(f"{snapshot}/manifest.json is not what an island writes ({error})") from None


def _read_shard(path: Path, shard: Shard, out: Tensor) -> None:
    head, digest, values = header({shard.vector: out}), hashlib.sha256(), torch.empty(min(len(out), PIECE // 4))
    try:
        with path.open("rb") as file:
            digest.update(file.read(len(head)))
            read = 0
            for part in out.split(max(1, len(values))):
                piece = as_bytes(memoryview(values[: len(part)].numpy()))  # type: ignore[arg-type]
                read += file.readinto(piece)
                digest.update(piece)
                part.copy_(values[: len(part)])
            right_size = read == 4 * len(out) and not file.read(1)
    except OSError as error:
        raise SnapshotDamaged(f"{path} cannot be read ({error.strerror})") from None
    if not right_size or digest.hexdigest() != shard.sha256:
        raise SnapshotDamaged(f"{path} is not what was written: its digest does not fit")


def set_aside(snapshot: Path) -> Path:
    """Rename a damaged snapshot so that it counts no more, and return its new path."""
    aside = snapshot.with_name(snapshot.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    return snapshot.rename(aside)


def remove(snapshot: Path) -> None:
    """Delete a snapshot, never half: it gets another name first."""
    if snapshot.suffix not in (PART, GONE):
        snapshot = snapshot.rename(snapshot.with_name(snapshot.name + GONE))
    shutil.rmtree(snapshot)


def clean(folder: Path) -> None:
    """Remove what a writer left half written or half deleted when it died."""
    for path in [path for path in folder.glob("snapshot-*") if path.suffix in (PART, GONE)]:
        remove(path)
