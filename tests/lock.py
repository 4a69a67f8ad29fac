"""Write, or install by, requirements.lock: the digest of every file that the versions of constraints.txt may come as.

    python tests/lock.py --write      # ask the indexes that pip is set up with; what is known of a version is kept
    python tests/lock.py --install    # `make locked`: into the environment of this Python, and then this project

pip checks either all digests or none, and knows none of a folder: so the packages are installed by the lock, without
asking for more, and then the project with what the lock does not name. That is nothing with a CPU build of torch; the
build of the plain index wants CUDA libraries, which come without digests and are named at the end. Source archives are
built with the setuptools of the lock.
"""

import argparse
import hashlib
import os
import re
import ssl
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import urlopen

from pip._internal.models.index import PyPI  # the index that pip asks unless it is told otherwise: we name none
from pip._vendor.packaging.tags import sys_tags
from pip._vendor.packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
LOCK, PINS = ROOT / "requirements.lock", ROOT / "constraints.txt"
FIRST = "setuptools"  # builds the others' source archives
LINK = re.compile(r"<a [^>]*href=\"([^\"]+)\"")
WANTED = re.compile(r"-(py3|py2\.py3|py3\d*|cp31[123]|cp3\d+-abi3)[-.].*(any|manylinux.*(x86_64|aarch64).*)\.whl$")
HEAD = "# The versions of constraints.txt: `python tests/lock.py --write` writes this, `make locked` installs by it.\n"


def pip(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)


def setting(name: str) -> list[str]:
    """What pip is set up with, by its files or the environment."""
    said = os.environ.get(f"PIP_{name.upper().replace('-', '_')}") or pip("config", "get", f"global.{name}").stdout
    return said.split()


def pins() -> dict[str, str]:
    lines = (line.strip() for line in PINS.read_text().splitlines())
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def files_of(name: str, indexes: list[str], folders: list[str]) -> dict[str, str]:
    """Return the digests of all files of a package, by their names."""
    plain, found = normal(name), {}
    context = ssl.create_default_context(cafile=next(iter(setting("cert")), None))
    for index in indexes:
        place = f"{index.rstrip('/')}/{plain}/"
        try:
            page = urlopen(place + ("index.html" if place.startswith("file:") else ""), context=context).read().decode()
        except HTTPError as error:
            if error.code != 404:
                raise
            continue
        except URLError:
            if not place.startswith("file:"):
                raise
            continue
        for link in LINK.findall(page):
            address, _, digest = link.partition("#sha256=")
            if digest:
                found[unquote(urlsplit(address).path.rpartition("/")[2])] = digest
    for folder in folders:
        for path in Path(folder).glob("*"):
            if is_of(path.name, name):
                found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def digests_of(name: str, version: str, indexes: list[str], folders: list[str]) -> set[str]:
    """Return the digests of the files of one version that Linux can use, or of its source if there is none of these."""
    of_version = re.compile(rf"^[^-]+-{re.escape(version)}(\+cpu)?(-|\.tar\.gz$|\.zip$)")
    archive = re.compile(rf"^.+-{re.escape(version)}\.(tar\.gz|zip)$")
    files = files_of(name, indexes, folders)
    wheels = {digest for file, digest in files.items() if of_version.match(file) and WANTED.search(file)}
    return wheels or {digest for file, digest in files.items() if archive.match(file)}


def at_hand(name: str, digests: set[str]) -> Path | None:
    """Return the file of a package in a folder of pip's that this Python can use and the lock knows.

    pip itself would rather take one of an index, which says its digest beforehand: another build, perhaps.
    """
    usable = set(sys_tags())
    for path in (path for folder in setting("find-links") for path in Path(folder).glob("*.whl")):
        fits = is_of(path.name, name) and usable & parse_wheel_filename(path.name)[3]
        if fits and hashlib.sha256(path.read_bytes()).hexdigest() in digests:
            return path
    return None


def is_of(file: str, name: str) -> bool:
    return normal(file.split("-")[0]) == normal(name)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, tuple[str, set[str]]]:
    """Return the version and the digests of each package of the lock."""
    if not LOCK.exists():
        return {}
    entries = re.findall(r"^(\S+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", LOCK.read_text(), re.M)
    return {name: (version, set(re.findall(r"sha256:(\w+)", rest))) for name, version, rest in entries}


def entry(name: str, version: str, digests: set[str], file: Path | None = None) -> str:
    return (
        str(file or f"{name}=={version}")
        + "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(digests))
        + "\n"
    )


def write() -> int:
    before, wanted = locked(), pins()
    indexes = [*(setting("index-url") or [PyPI.simple_url]), *setting("extra-index-url")]
    folders = setting("find-links")
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(wanted, pool.map(lambda pin: digests_of(*pin, indexes, folders), wanted.items()), strict=True))
    for name, (version, digests) in before.items():
        if wanted.get(name) == version:
            found[name] |= digests
    if missing := [name for name, digests in found.items() if not digests]:
        print(f"no file of {', '.join(missing)}: nothing was written")
        return 1
    LOCK.write_text(HEAD + "".join(entry(name, version, found[name]) for name, version in wanted.items()))
    return 0


def install() -> int:
    """Install by the lock, then the project; stop at the first digest that differs."""
    lock = locked()
    with tempfile.TemporaryDirectory() as folder:
        for number, names in enumerate(([FIRST], [name for name in lock if name != FIRST])):
            part = Path(folder) / f"{number}.txt"
            part.write_text("".join(entry(name, *lock[name], at_hand(name, lock[name][1])) for name in names))
            words = ["install", "--quiet", "--no-deps", "--require-hashes", "--no-build-isolation", "-r", str(part)]
            if (done := pip(*words)).returncode:
                print(done.stdout + done.stderr)
                return done.returncode
    before = installed()
    done = pip("install", "--quiet", "--no-build-isolation", "-c", str(PINS), "-e", f"{ROOT}[dev]")
    if done.returncode:
        print(done.stdout + done.stderr)
    if unchecked := sorted(installed() - before - {"diloco"}):
        print(f"INSTALLED WITHOUT A DIGEST, because the lock does not name them: {', '.join(unchecked)}")
    return done.returncode


def installed() -> set[str]:
    return {line.partition("==")[0].partition(" @")[0] for line in pip("list", "--format", "freeze").stdout.split("\n")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--install", action="store_true")
    chosen = parser.parse_args()
    return write() if chosen.write else install() if chosen.install else parser.print_help() or 2


if __name__ == "__main__":
    sys.exit(main())
