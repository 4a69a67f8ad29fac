"""Declare the commands by which a run's owner changes who takes part: `evict`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.history import founding_folder
from diloco.cli.shared import RunName, say
from diloco.errors import SaveError

if TYPE_CHECKING:
    from diloco.elastic.protocol.record import Amendment


def evict(
    run: RunName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The island, as rounds name it.", show_default=False)],
) -> None:
    """Take an island out of a run for good.

    It is signed with the key of the run's owner and takes effect with a round, which needs a quorum without counting on
    that island. The island stops if it is alive, and so does its folder: with a new one, it would be another island.
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
    from diloco.history.log import find_logs, island_named, names_of, newest_state
    from diloco.run.folder import OUTER
    from diloco.train.amend import amendment_files, read_amendment, write_amendment

    state = newest_state(folder / OUTER)
    left = map(read_amendment, amendment_files(folder))
    made = (*state.amendments, *(amendment for amendment in left if amendment.number > len(state.amendments)))
    out = {peer for amendment in made for peer in amendment.evicts}
    peer = island_named(name, state.roster, names_of(find_logs(run)))
    if peer in out:
        raise SaveError(f"{name} is taken out already, by an earlier change that waits for a round")
    if set(state.roster) <= {*out, *state.witnesses, peer}:
        raise SaveError(f"without {name} nobody is left to train")
    return write_amendment(folder, Identity.load(folder / "owner.key"), len(made) + 1, {EVICT: [peer]})
