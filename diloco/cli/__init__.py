"""The command line. Light on purpose: `diloco --help` must answer at once, so commands import what they need inside.

May import: everything. Start with `app.py`.
"""

import ctypes
import os
import sys
from contextlib import suppress

from diloco.cli.app import app
from diloco.cli.completion import VARIABLE
from diloco.errors import ConfigError, DilocoError, LeaderFailed

M_ARENA_MAX = -8  # of malloc.h
SAME_EVERYWHERE = (ConfigError, LeaderFailed)  # the leader's message is enough


def main() -> None:
    """Run the command line; an error that a person can cause is one clear line and exit code 2.

    Anything else is a bug of ours and gives a traceback. Ctrl-C outside of training exits with 130.
    """
    # Before torch loads: threads that wait should sleep. Spinning is 5 % faster on an idle CPU and several times slower
    # on one that has anything else to do, such as another island.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # another C library than glibc
            # threads share freed memory: by default, each of dozens of pools keeps megabytes to itself
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 4)
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()  # teaches typer the shells
    try:
        app()
    except DilocoError as error:
        rank = int(os.environ.get("RANK", 0))
        if rank == 0 or not isinstance(error, SAME_EVERYWHERE):
            who = f"process {rank}: " if rank else ""
            for line in str(error).splitlines():
                print(f"{who}error[{error.code}]: {line}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:  # before or after training, which handles it by itself
        sys.exit(130)
