"""Run a dashboard beside an island, as a process of its own: the island shares neither threads nor time with viewers.

The listening socket and the token are made here, so that a port that is taken is told before anything is trained, and
handed on: the socket by its number, the token by the environment, which only the owner of a process can read.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

from diloco.dashboard.feed import Feed
from diloco.dashboard.local import LocalRun
from diloco.dashboard.server import Door, need_dashboard, open_door, serve
from diloco.launch.processes import end_with_parent

LISTENER, TOKEN, HOST = "DILOCO_DASHBOARD_LISTENER", "DILOCO_DASHBOARD_TOKEN", "DILOCO_DASHBOARD_HOST"
LEAVE_S = 3.0


class Beside:
    """Show the run in a folder, which may come into being later, until it is closed or this process ends."""

    def __init__(self, folder: Path, host: str, port: int | None) -> None:
        need_dashboard()
        door = open_door(host, port)
        with door.listener as listener:
            handed = {LISTENER: str(listener.fileno()), TOKEN: door.token, HOST: door.host}
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(folder.absolute())], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, env={**os.environ, **handed}, pass_fds=[listener.fileno()],
                preexec_fn=end_with_parent(), start_new_session=True,
            )  # fmt: skip
            self.url = door.url

    @property
    def pid(self) -> int:
        """Return the number of its process."""
        return self._process.pid

    def close(self) -> None:
        """End it, and let viewers go."""
        self._process.terminate()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Serve by what the environment hands over."""
    listener = socket.socket(fileno=int(os.environ.pop(LISTENER)))
    door = Door(listener, os.environ.pop(HOST), os.environ.pop(TOKEN))
    serve(Feed(LocalRun(Path(sys.argv[1]))), door)


if __name__ == "__main__":
    main()
