"""`diloco restore`: what islands have copied to `checkpoint.remote` becomes a folder again, on any machine.

Keys are not copied, so it comes back as an island's folder without an identity: a ticket lets it into the run that it
was part of, and `diloco rewind` makes a new run of it, with a key of its own.
"""

from collections.abc import Callable
from pathlib import Path

from diloco.atomic import appearing
from diloco.checkpoint.log.journal import Header, Kind, header_frame
from diloco.checkpoint.log.segments import SegmentWriter, segment_paths
from diloco.checkpoint.log.snapshot import Manifest
from diloco.checkpoint.transfer.mirror import PLAIN, Remote, restore
from diloco.config.file import render_config
from diloco.errors import RemoteError, SaveError
from diloco.history.log import Findings, verify
from diloco.run.folder import OUTER
from diloco.run.genesis import FILE, read_genesis


def restore_run(url: str, folder: Path, report: Callable[[str, str], None]) -> Findings:
    """Restore all of a run or nothing, and verify it; the folder must be new."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SaveError(f"{folder} already exists: name a new folder")
    if folder.resolve() == Path.cwd():
        raise SaveError("the folder that you are in cannot be replaced: name a new folder")
    folder = folder.resolve()
    remote = _run_at(url)
    try:
        with appearing(folder) as draft:
            manifest = restore(draft / OUTER, remote, report)
            if manifest is None:
                raise RemoteError(f"{remote.url} holds no snapshot that is whole: nothing was restored")
            _finish(draft, folder, remote, manifest)
    except OSError as error:
        raise SaveError(f"{folder} cannot be written ({error.strerror}): nothing was restored") from None
    return verify(folder / OUTER)


def _run_at(url: str) -> Remote:
    """Return the store of the run at this address, or of the only one below it."""
    url = url.rstrip("/")
    names = [name.split("/") for name in Remote(url).sizes()]
    if any(parts[0].startswith("snapshot-") for parts in names):
        return Remote(url)
    runs = sorted({parts[0] for parts in names if len(parts) > 1 and parts[1].startswith("snapshot-")})
    runs = list(filter(PLAIN.fullmatch, runs))
    if len(runs) == 1:
        return Remote(f"{url}/{runs[0]}")
    if runs:
        raise RemoteError(f"{url} holds several runs, choose one: {', '.join(f'{url}/{run}' for run in runs)}")
    raise RemoteError(f"{url} holds no run: give what checkpoint.remote was, or the run's folder there")


def _finish(draft: Path, folder: Path, remote: Remote, manifest: Manifest) -> None:
    """Add what else an island's folder has: a log, if an empty one, and a configuration."""
    genesis = read_genesis(draft / OUTER)
    if genesis is None:
        raise RemoteError(f"{remote.url}/{FILE} is damaged or missing: copy {OUTER}/{FILE} of any island there")
    if not segment_paths(draft / OUTER):
        segment = SegmentWriter(draft / OUTER)
        segment.write(Kind.HEADER, header_frame(Header(genesis.digest, manifest.version, manifest.round)))
        segment.close()
    config = genesis.configure({"checkpoint": {"dir": str(folder)}})
    (draft / "config.yaml").write_text(render_config(config), encoding="utf-8")
