"""Pack what a bug report needs into one archive, without secrets.

Only files that are named here go in, each with everything that looks like a ticket, and every key and ticket of the
run itself, taken out. Of long files the end goes in.
"""

import base64
import io
import json
import os
import platform
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from diloco.atomic import appearing
from diloco.errors import SaveError
from diloco.version import PROTOCOL, __version__

FILES = (
    "config.yaml", "events.jsonl", "diloco.log", "output.log", "status.json", "names", "islands.json",
    "outer/history.jsonl", "outer/genesis.json",
)  # fmt: skip
SECRET_FILES = ("identity.key", "owner.key", "ticket", "invites")
PACKAGES = ("torch", "hivemind", "numpy", "numba", "transformers", "wandb", "tensorboard")
LAST_BYTES = 8 << 20  # of each file
KEPT_OUT = b"(secret)"
PATTERNS = (
    re.compile(rb"diloco\d+-[A-Za-z0-9_=-]{16,}"),  # tickets, whoever's
    re.compile(rb"(?<=://)[^/\s@\"']+:[^/\s@\"']+(?=@)"),  # a name and a password in an address
    re.compile(rb"(?i)(?<=[?&])(?:[a-z_-]*(?:token|key|secret|signature|password)[a-z_-]*)=[^&\s\"']+"),
)


def pack(folder: Path, out: Path, texts: dict[str, str]) -> list[str]:
    """Write the archive of a run's folder, with these texts beside its files, and return what is in it."""
    if out.exists():
        raise SaveError(f"{out} already exists: name another file with --out")
    islands = [folder, *sorted(folder.glob("island-*"))]
    secrets = sorted(set(_secrets(islands)), key=len, reverse=True)
    name, packed = folder.resolve().name, list[str]()
    with appearing(out) as draft, tarfile.open(draft, "w:gz") as archive:
        for path in [island / file for island in islands for file in FILES if (island / file).is_file()]:
            inside = f"{name}/{path.relative_to(folder)}"
            _add(archive, inside, without_secrets(_end_of(path), secrets))
            packed.append(inside)
        for file, text in {"about.json": json.dumps(about(), indent=1), **texts}.items():
            _add(archive, f"{name}/{file}", without_secrets(text.encode(), secrets))
            packed.append(f"{name}/{file}")
    return packed


def about() -> dict[str, str]:
    """Return which diloco, Python, system and packages these are."""
    found = {"diloco": __version__, "protocol": str(PROTOCOL), "python": sys.version, "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def without_secrets(data: bytes, secrets: Iterable[bytes]) -> bytes:
    """Return a file's bytes without these secrets and without anything that looks like one."""
    for secret in secrets:
        data = data.replace(secret, KEPT_OUT)
    for pattern in PATTERNS:
        data = pattern.sub(KEPT_OUT, data)
    return data


def _secrets(islands: Iterable[Path]) -> Iterator[bytes]:
    """Yield the keys and tickets of these folders, each as it may be written."""
    for path in [island / name for island in islands for name in SECRET_FILES if (island / name).is_file()]:
        raw = path.read_bytes()
        for part in [raw, *raw.split()] if path.suffix != ".key" else [raw]:
            if len(part) >= 16:  # shorter is no key, and would take harmless text along
                yield from (part, part.hex().encode(), base64.b64encode(part), base64.urlsafe_b64encode(part))


def _end_of(path: Path) -> bytes:
    """Return the last lines of a file, whole ones only: half a secret would not be known as one."""
    with path.open("rb") as file:
        skip = max(0, os.fstat(file.fileno()).st_size - LAST_BYTES)
        file.seek(skip)
        return file.read().partition(b"\n")[2] if skip else file.read()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o600
    archive.addfile(entry, io.BytesIO(data))
