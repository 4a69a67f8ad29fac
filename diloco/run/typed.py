"""The command by which this process was started, to be typed again."""

import os
import shlex
import sys
from pathlib import Path

TICKET_WORD = "env:DILOCO_TICKET"  # stands in sys.argv for a ticket, which nobody is to read on a command line
MAIN = Path(__file__).parent.parent / "__main__.py"
STARTS_OVER, GOES_ON = "--fresh", ("--resume", "--attach")
LIMIT = 900  # characters: a status is not to be cut off within it


def program() -> str:
    """Return how this program is called from a shell, as it was just now."""
    path = Path(sys.argv[0])
    return shlex.join([sys.executable, "-m", "diloco"] if path.name == "__main__.py" else [str(path)])


def launcher() -> list[str]:
    """Return the words by which this process was started: torchrun, `python -m diloco` or the program."""
    started = _torchrun()
    return [*started, "-m", "diloco"] if started else shlex.split(program())


def again() -> str:
    """Return the command that starts this island again and lets it continue; empty where it is too long.

    A ticket is left out of it, and so is what follows a program of somebody's own: it may be a secret, too.
    """
    from diloco.comm.peers.ticket import PREFIX

    path, words = Path(sys.argv[0]), sys.argv[1:]
    if path.name == "diloco" or path.resolve() == MAIN:
        words = ["TICKET" if word == TICKET_WORD or PREFIX in word else word for word in words if word != STARTS_OVER]
        if words[:1] == ["run"] and not any(word.partition("=")[0] in GOES_ON for word in words):
            words.append("--resume")
        command = shlex.join([*launcher(), *words])
    else:
        command = shlex.join([*(_torchrun() or [sys.executable]), str(path)]) + " …" * bool(words)
    command = f"cd {shlex.quote(os.getcwd())} && {command}"
    return command if len(command) <= LIMIT else ""


def _torchrun() -> list[str]:
    processes = os.environ.get("LOCAL_WORLD_SIZE")
    if processes is None or "DILOCO_MEETING" in os.environ:
        return []
    return ["torchrun", "--nproc-per-node", processes]
