"""Find runs on this machine by what people call them: folders with a log, and the names of islands.

Nothing heavy is imported here: commands that only look use it.
"""

import re
from collections.abc import Collection
from pathlib import Path

from diloco.checkpoint.save.facts import saves
from diloco.comm.peers.identity import Identity
from diloco.errors import SaveError
from diloco.run.folder import IDENTITY_KEY, OUTER, has_log, refuse_other_protocols
from diloco.run.names import ID_LETTERS, Names, read_names, short_key

RUNS = Path("runs")


def find_logs(name: str) -> list[Path]:
    """List the folders with a log: of an island, or of all islands that a run has on this machine. Raise SaveError
    where there are none."""
    for place in (Path(name).expanduser(), RUNS / name):
        if found := logs_of(place):
            refuse_other_protocols(place)
            return found
    if saves_of(Path(name).expanduser()) or saves_of(RUNS / name):
        raise SaveError(
            f"{name}: an earlier diloco trained an island alone there, without a log of its rounds: "
            "`diloco export` reads it"
        )
    raise SaveError(
        f"{name}: no log there, neither as a folder nor under {RUNS}/: give the folder that checkpoint.dir named"
    )


def logs_of(folder: Path) -> list[Path]:
    """List the logs of a run, or of all the islands that it has on this machine."""
    return [island / OUTER for island in (folder, *sorted(folder.glob("island-*"))) if has_log(island)]


def saves_of(folder: Path) -> list[Path]:
    """List the saves of a run, or of all the islands that it has on this machine."""
    return [save for place in (folder, *folder.glob("island-*")) for save in saves(place)]


def names_of(logs: list[Path]) -> Names:
    """Return the names of islands: those on this machine, and those that these have heard of."""
    heard = {peer: name for log in logs for peer, name in read_names(log.parent).items()}
    keys = {log.parent / IDENTITY_KEY: log.parent.name for log in logs}
    here = {Identity.load(key).peer_id: name for key, name in keys.items() if key.exists()}
    return Names(here | heard)


def island_named(name: str, roster: Collection[str], names: Names, gone: Collection[str] = ()) -> str:
    """Return the id of the member with this name, or whose id ends so; if there is none, of those who are gone.

    Raise SaveError unless it is exactly one.
    """

    if shown := re.fullmatch(rf".+ \(…?(\w{{{ID_LETTERS}}})\)", name):  # as people see it where two share a name
        name = shown[1]

    def among(peers: Collection[str]) -> list[str]:
        by_key = len(name) >= ID_LETTERS
        return [peer for peer in peers if name == names.known.get(peer) or (by_key and peer.endswith(name))]

    found = among(roster) or among(gone)
    if len(found) == 1:
        return found[0]
    if not name:
        raise SaveError("an empty name: remove the extra comma")
    known = ", ".join(f"{names.known.get(peer, 'unknown')} (…{short_key(peer)})" for peer in (*roster, *gone))
    raise SaveError(f"{name}: {'two islands are called that' if found else 'no such island'}; the run has {known}")
