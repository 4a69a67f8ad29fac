"""Declare the commands by which a run's owner changes who takes part: `evict`, `force-roster`."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.history import founding_folder
from diloco.cli.shared import RunName, say
from diloco.errors import SaveError

if TYPE_CHECKING:
    from diloco.comm.peers.identity import Identity
    from diloco.elastic.protocol.record import Amendment
    from diloco.elastic.protocol.state import RunState


def evict(
    run: RunName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The island, as rounds name it.", show_default=False)],
) -> None:
    """Take an island out of a run for good.

    It is signed with the key of the run's owner and takes effect with a round, which needs a quorum without counting on
    that island. The island stops if it is running. Its folder is not admitted again; from a new one it would join as
    another island.
    """
    from diloco.train.amend import FOLDER

    folder = founding_folder(run)
    while (found := write_eviction(folder, run, name)) is None:
        pass  # somebody else was quicker: look again
    say(
        f"change {found.number} of {run}: {name} is taken out",
        f"It waits in {folder / FOLDER}: the island that trains there, or the next one, brings it to the others.",
    )


def write_eviction(folder: Path, run: str, name: str) -> "Amendment | None":
    """Sign and write the amendment that takes an island out. None: another one has taken its number, so try again."""
    from diloco.comm.peers.identity import Identity
    from diloco.elastic.protocol.record import EVICT
    from diloco.history.find import find_logs, island_named, names_of
    from diloco.history.log import newest_state
    from diloco.run.folder import OUTER
    from diloco.train.amend import with_waiting, write_amendment

    state = newest_state(folder / OUTER)
    made = with_waiting(folder, state.amendments)
    out = {peer for amendment in made for peer in amendment.evicts}
    gone = set(state.invites) - {*state.roster, *out}  # it may come back, or whoever has its key
    peer = island_named(name, state.roster, names_of(find_logs(run)), gone)
    if (folder / "identity.key").is_file() and peer == Identity.load(folder / "identity.key").peer_id:
        raise SaveError(f"{name} brings your changes to the others, and cannot be taken out: stop it, and it leaves")
    if peer in out:
        raise SaveError(f"{name} is taken out already, by an earlier change that waits for a round")
    if set(state.roster) <= {*out, *state.witnesses, peer}:
        raise SaveError(f"without {name} nobody is left to train: start another island first")
    return write_amendment(folder, Identity.load(folder / "owner.key"), len(made) + 1, {EVICT: [peer]})


def force_roster(
    run: RunName,
    keep: Annotated[
        str, typer.Option(metavar="NAMES", help="The islands that go on: island-1,island-2.", show_default=False)
    ],
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The owner's key, where the run was founded elsewhere.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Continue a run whose quorum is lost for good.

    The owner's signature stands for the quorum of one round, after which those named are the roster. What the others
    commit, or have committed without them, is undone. If they come back, they follow, and bring their work late.
    """
    from diloco.history.find import find_logs, island_named, names_of
    from diloco.history.log import is_latched, newest_state
    from diloco.run.folder import OUTER
    from diloco.train.amend import FOLDER

    folders, names = island_folders(run), names_of(find_logs(run))
    states = {peer: newest_state(folder / OUTER) for peer, folder in folders.items()}
    newest = max(states.values(), key=lambda state: state.precedence)
    asked = [island_named(name.strip(), newest.roster, names) for name in keep.split(",")]
    named = set(asked)
    if len(named) < len(asked):
        raise SaveError(f"--keep {keep} names an island twice: write each one once")
    here = [peer for peer in newest.roster if peer in named and peer in folders]
    if not here:
        raise SaveError(
            f"none of {keep} has its folder on this machine: run this where one has, with --key and the run's owner.key"
        )
    target = max(here, key=lambda peer: states[peer].precedence)
    state, folder = states[target], folders[target]
    kept = tuple(peer for peer in state.roster if peer in named)
    left_out = ", ".join(sorted(names.of(peer) for peer in state.roster if peer not in named))
    owner = owner_of(state, folders, key)
    check_force(state, kept, latched=is_latched(folder / OUTER))
    asks = (
        f"After round {state.head.round} only {keep} decide. What {left_out} commit, or have committed without them "
        "since then, is undone. Go on?"
    )
    if not yes and not typer.confirm(asks):
        raise typer.Exit(1)
    number, dropped = write_force(folder, owner, state, kept)
    say(
        f"change {number} of {run}: only {keep} decide round {state.key.round} and those after it",
        *(f"{change} is discarded, since it has waited in vain: make it again" for change in dropped),
        f"It waits in {folder / FOLDER}: the island that trains there brings it to the others, and all of {keep} must "
        "be there. If a quorum has decided that round already, nothing is forced.",
    )


def island_folders(run: str) -> dict[str, Path]:
    """Return the folders of the run's islands on this machine, by peer id."""
    from diloco.comm.peers.identity import Identity
    from diloco.history.find import find_logs

    folders = [log.parent for log in find_logs(run)]
    found = [folder for folder in folders if (folder / "identity.key").is_file()]
    if not found:
        raise SaveError(f"{folders[0]} is no island's folder: it has a log, and no identity.key")
    return {Identity.load(folder / "identity.key").peer_id: folder for folder in found}


def owner_of(state: "RunState", folders: dict[str, Path], key: Path | None) -> "Identity":
    """Load the owner's key: from the file given, or from the folder in which the run was founded."""
    from diloco.comm.peers.identity import Identity

    found = key or next((folder / "owner.key" for folder in folders.values() if (folder / "owner.key").is_file()), None)
    if found is None:
        raise SaveError("this run was founded elsewhere: bring its owner's key (owner.key) and give it by --key")
    if not found.is_file():
        raise SaveError(f"{found} does not exist: give the run's owner.key")
    owner = Identity.load(found)
    if owner.public_key.hex() != state.owner:
        raise SaveError(f"{found} is not the key of this run's owner")
    return owner


def check_force(state: "RunState", kept: tuple[str, ...], *, latched: bool) -> None:
    """Raise SaveError where forcing this roster makes no sense."""
    if not latched:
        raise SaveError("this run needs no quorum (elastic.partition): whoever is there goes on")
    if set(kept) <= set(state.witnesses):
        raise SaveError("--keep names only witnesses: add an island that trains")
    if kept == state.roster:
        raise SaveError("--keep names every member: name only the islands that should continue")


def write_force(folder: Path, owner: "Identity", state: "RunState", kept: tuple[str, ...]) -> tuple[int, list[str]]:
    """Sign and write the amendment that forces a roster; return its number, and the waiting ones that are dropped."""
    from diloco.elastic.protocol.record import FORCE, canonical
    from diloco.train.amend import amendment_files, in_words, read_amendment, write_amendment

    number = len(state.amendments) + 1
    waiting = {path: read_amendment(path) for path in amendment_files(folder)}
    force = {"round": state.key.round, "parent": state.key.parent, "keep": kept}
    mark = hashlib.sha256(canonical(force)).hexdigest()[:8]  # another one replaces it, and is noticed
    if write_amendment(folder, owner, number, {FORCE: force}, mark=f"-force-{mark}") is None:
        raise SaveError("that roster is forced already: it waits until all who are named are there")
    dropped = {path: amendment for path, amendment in waiting.items() if amendment.number >= number}
    for path in dropped:
        path.unlink()
    return number, [f"change {amendment.number} ({in_words(amendment)})" for amendment in dropped.values()]
