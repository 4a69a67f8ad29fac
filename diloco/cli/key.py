"""Declare `diloco key`: an island's identity moves to another machine or folder. Keys are never on a command line."""

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.shared import next_commands, say
from diloco.errors import IdentityError, SaveError

key = typer.Typer(help="Move an island's identity to another machine.", no_args_is_help=True)
IslandFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The island's folder.", show_default=False)]


@key.command("export", epilog="Example: diloco key export runs/second second.key")
def export_key(
    dir: IslandFolder,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write, readable by you alone.", show_default=False)
    ],
) -> None:
    """Write an island's key to a file.

    With it, and a ticket, the island is the same member on another machine. Its state and log need not move: they come
    from the other members. Whoever has the file can pass for the island: move it over a safe way, and delete it.
    """
    from diloco.atomic import create_file
    from diloco.comm.peers.identity import Identity
    from diloco.run.folder import IDENTITY_KEY

    source = dir.expanduser() / IDENTITY_KEY
    if not source.is_file():
        raise SaveError(f"{dir} is no island's folder: it has no {IDENTITY_KEY}")
    identity = Identity.load(source)
    try:
        written = create_file(file, source.read_bytes(), mode=0o600, durable=True)
    except OSError as error:
        raise SaveError(f"{file} cannot be written ({error.strerror}): nothing was exported") from None
    if not written:
        raise SaveError(f"{file} exists already: name another file")
    say(
        f"{file} holds the key of {identity.peer_id}, for nobody but you",
        *next_commands({f"diloco key import {file} DIR": "on the other machine; then diloco join TICKET --dir DIR"}),
        f"Two islands with one key hide each other: do not start the one in {dir} again.",
    )


@key.command("import", epilog="Example: diloco key import second.key runs/second")
def import_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What key export has written.", show_default=False)],
    dir: IslandFolder,
) -> None:
    """Give an island's folder the key in a file.

    The folder is made if there is none. One that has a key already is refused, unless it is the same.
    """
    from diloco.comm.peers.identity import PRIVATE_HEADER, Identity
    from diloco.run.folder import IDENTITY_KEY, refuse_foreign

    file, target = file.expanduser(), dir.expanduser() / IDENTITY_KEY
    if not file.is_file():
        raise IdentityError(f"{file} does not exist: diloco key export writes one")
    found = Identity.load(file)
    refuse_foreign(target.parent)
    secret = file.read_bytes()[len(PRIVATE_HEADER) :][:32]
    try:
        Identity.keep(target, secret)
    except OSError as error:
        raise SaveError(f"{target} cannot be written ({error.strerror}): nothing was imported") from None
    say(
        f"{dir} is the folder of {found.peer_id} now",
        *next_commands({f"diloco join TICKET --dir {dir}": "takes part as that island"}),
        f"Delete {file} when it works: whoever has it can pass for this island.",
    )
