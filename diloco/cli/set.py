"""`diloco set`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.shared import RunName, say
from diloco.errors import ConfigError, SaveError

if TYPE_CHECKING:
    from diloco.elastic.protocol.amendment import Amendment
    from diloco.elastic.protocol.state import RunState
    from diloco.run.genesis import Genesis


def set_settings(
    run: RunName,
    changes: Annotated[list[str], typer.Argument(metavar="KEY=VALUE…", help="What changes.", show_default=False)],
) -> None:
    """Change settings of a run with others, while it trains or not.

    The change is signed with the key of the run's owner, in the folder in which the run was founded. A round makes it
    hold for every island at once; diloco log shows which.
    """
    from diloco.history.log import genesis_of, newest_state
    from diloco.run.folder import OUTER
    from diloco.train.amend import FOLDER, in_words

    folder = owners_folder(run)
    genesis, state = genesis_of(folder / OUTER), newest_state(folder / OUTER)
    while (amendment := amend(folder, genesis, state, changes)) is None:
        pass  # somebody else was quicker: look again
    say(
        f"change {amendment.number} of {run}: {in_words(amendment)}",
        f"It waits in {folder / FOLDER}: the island that trains there, or the next one that does, brings it to the "
        "others. It holds for all of them from one round on, which diloco log shows.",
    )


def owners_folder(run: str) -> Path:
    """That of the island which founded the run: there its owner's key is."""
    from diloco.history.log import find_logs

    folders = [log.parent for log in find_logs(run)]
    found = [folder for folder in folders if (folder / "owner.key").is_file()]
    if not found:
        raise SaveError(
            f"{folders[0]} joined a run that was founded elsewhere: only its owner changes its settings, "
            "in the folder in which it was founded"
        )
    return found[0]


def amend(folder: Path, genesis: "Genesis", state: "RunState", overrides: list[str]) -> "Amendment | None":
    """After those that are in force, and those that wait. None where another one has taken its number."""
    from diloco.comm.peers.identity import Identity
    from diloco.data.samples import OWN_LOOP
    from diloco.train.amend import amended, amendment_files, check, read_amendment, write_amendment

    left = map(read_amendment, amendment_files(folder))
    made = (*state.amendments, *(amendment for amendment in left if amendment.number > len(state.amendments)))
    config = amended(genesis.configure({}), made)
    changes = check(config, overrides, own_loop=genesis.data == OWN_LOOP)
    if state.step >= config.inner.steps:
        raise ConfigError(
            f"the run is at its end, step {state.step}: diloco rewind RUN {state.head.round} --set … trains on"
        )
    if changes.get("inner.steps", state.step + 1) <= state.step:
        raise ConfigError(f"inner.steps={changes['inner.steps']}: the run is at step {state.step} already")
    return write_amendment(folder, Identity.load(folder / "owner.key"), len(made) + 1, changes)
