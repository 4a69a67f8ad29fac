"""Machines that ssh reaches, each an sshd of its own at a free port of this one, with a home of its own."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import house
from launched import wait_until

from diloco.comm.peers.addressbook import free_port

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
MISSING = "no sshd here, or not root: apt-get install openssh-server"


def can_serve() -> bool:
    """Tell whether an sshd can be started: it needs the program, and a folder that only root makes."""
    return SSHD is not None and shutil.which("ssh") is not None and os.geteuid() == 0


@contextmanager
def machines(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Serve machines of these names; yield the command of ssh that knows them. Machine NAME lives in folder/NAME."""
    Path("/run/sshd").mkdir(exist_ok=True)
    keys = folder / "keys"
    keys.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / key)], check=True)
    with ExitStack() as stack:
        ports = {name: stack.enter_context(_machine(folder / name, keys)) for name in names}
        known = "".join(f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n" for name, port in ports.items())
        options = f"IdentityFile {keys / 'user'}\nIdentitiesOnly yes\nUserKnownHostsFile /dev/null\n"
        (folder / "ssh_config").write_text(f"{options}StrictHostKeyChecking no\nLogLevel ERROR\n{known}")
        yield f"ssh -F {folder / 'ssh_config'}"


@contextmanager
def _machine(home: Path, keys: Path) -> Iterator[int]:
    home.mkdir()
    port = free_port("127.0.0.1")
    login = home / "login.sh"  # whatever is asked for runs in this machine's home
    login.write_text(f'#!/bin/sh\ncd {home}\nHOME={home} PYTHONPATH={house.ROOT} exec sh -c "$SSH_ORIGINAL_COMMAND"\n')
    login.chmod(0o755)
    (home / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys / 'host'}\nAuthorizedKeysFile {keys / 'user.pub'}\n"
        f"PidFile none\nUsePAM no\nStrictModes no\nPermitRootLogin yes\nMaxStartups 100\nForceCommand {login}\n"
    )
    assert SSHD is not None
    with (home / "sshd.log").open("wb") as log:
        sshd = subprocess.Popen([SSHD, "-D", "-e", "-f", str(home / "sshd_config")], stderr=log, stdout=log)
    try:
        assert wait_until(lambda: _answers(port), 30), (home / "sshd.log").read_text()
        yield port
    finally:
        sshd.terminate()
        sshd.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def program() -> str:
    return f"{sys.executable} -m diloco"
