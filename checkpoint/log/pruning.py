"""What an island's folder keeps: the last snapshots, and the log since the oldest of them."""

import threading
from pathlib import Path

from diloco.checkpoint.log.journal import Journal
from diloco.checkpoint.log.segments import segment_paths
from diloco.checkpoint.log.snapshot import DAMAGED, manifests, remove


def prune(folder: Path, journal: Journal, lock: threading.Condition, keep: int) -> None:
    """Snapshots that cannot be read count for nothing; `keep` 0 keeps everything. The lock is the journal's."""
    found = manifests(folder)
    if not keep or len(found) < keep:
        return
    for _, path in found[:-keep]:
        remove(path)
    for path in folder.glob(f"snapshot-*{DAMAGED}"):
        remove(path)
    oldest = found[-keep][0].version
    with lock:
        paths = segment_paths(folder)
        follows = [path in journal.headers and journal.headers[path].base == oldest for path in paths]
        for path in paths[: follows.index(True)] if any(follows) else []:
            path.unlink()
            journal.forget(path)
