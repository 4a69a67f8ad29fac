"""Islands behind routers, in namespaces: a founder with two ports forwarded, and joiners that nobody can dial."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from launched import wait_until
from real_islands import Island, end, open_islands
from ssh_hosts import MISSING, SSHD, can_serve

PUBLIC, PORT = "10.97.0.1", 31337

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces are made by root"),
]
FORWARD = """
import socket, sys, threading
def pump(a, b):
    try:
        while data := a.recv(65536):
            b.sendall(data)
    except OSError:
        pass
    for each in (a, b):
        try: each.shutdown(socket.SHUT_RDWR)
        except OSError: pass
def forward(port):
    server = socket.create_server(("0.0.0.0", port))
    while True:
        near, _ = server.accept()
        try:
            far = socket.create_connection((sys.argv[1], port), 5)
        except OSError:
            near.close()
            continue
        for pair in ((near, far), (far, near)):
            threading.Thread(target=pump, args=pair, daemon=True).start()
for port in map(int, sys.argv[2:]):
    threading.Thread(target=forward, args=(port,)).start()
print("ready", flush=True)
"""


def ip(*words: str, inside: str = "") -> None:
    subprocess.run(["ip", *(["-n", inside] if inside else []), *words], check=True, capture_output=True)


class Town:
    """Namespaces: the internet with a public address, and homes whose routers let nothing in but what they forward."""

    def __init__(self, stack: ExitStack) -> None:
        self.prefix, self._stack = f"nat{os.getpid()}", stack
        self.net = self._space("net")
        ip("addr", "add", f"{PUBLIC}/32", "dev", "lo", inside=self.net)

    def _space(self, name: str) -> str:
        space = f"{self.prefix}-{name}"
        ip("netns", "add", space)
        self._stack.callback(lambda: ip("netns", "del", space))
        ip("link", "set", "lo", "up", inside=space)
        return space

    def home(self, name: str, subnet: str) -> str:
        """A home with one machine, .2 of its subnet; its way out is .1. Packets do not go from home to home."""
        space, near, far = self._space(name), f"{name}0", f"{name}1"
        ip("link", "add", near, "netns", self.net, "type", "veth", "peer", "name", far, "netns", space)
        for device, where, last in ((near, self.net, 1), (far, space, 2)):
            ip("addr", "add", f"{subnet}.{last}/24", "dev", device, inside=where)
            ip("link", "set", device, "up", inside=where)
        ip("route", "add", "default", "via", f"{subnet}.1", inside=space)
        return space

    def forward(self, machine: str, *ports: int) -> None:
        """Forward these ports of the public address to a machine at home, as its router does."""
        command = ["ip", "netns", "exec", self.net, sys.executable, "-c", FORWARD, machine, *map(str, ports)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._stack.callback(lambda: (process.kill(), process.communicate()))
        assert process.stdout is not None and process.stdout.readline() == "ready\n"

    def publish(self, machine: str, *ports: int) -> None:
        """Lead these ports of the public address to a container, by the rules that `docker run -p` makes."""
        rules = [f"-t nat -A PREROUTING -d {PUBLIC} -p tcp --dport {port} -j DNAT --to {machine}" for port in ports]
        rules += [
            f"-t nat -A POSTROUTING -s {machine} -j MASQUERADE",
            "-A FORWARD -m conntrack --ctstate DNAT,ESTABLISHED -j ACCEPT",
            "-P FORWARD DROP",
        ]
        for rule in rules:
            subprocess.run([*inside(self.net), "iptables", *rule.split()], check=True, capture_output=True)
        subprocess.run([*inside(self.net), "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)

    def tunnel(self, space: str, folder: Path, *ports: int) -> None:
        """Lead these ports of the public address to a compute node, by its own `ssh -R` to the login node there."""
        Path("/run/sshd").mkdir(exist_ok=True)
        folder.mkdir(mode=0o700)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
        (folder / "sshd_config").write_text(
            f"Port 2222\nHostKey {folder / 'host'}\nAuthorizedKeysFile {folder / 'user.pub'}\nPidFile none\n"
            "UsePAM no\nStrictModes no\nPermitRootLogin yes\nGatewayPorts clientspecified\n"
        )
        server = [*inside(self.net), SSHD or "", "-D", "-e", "-f", str(folder / "sshd_config")]
        options = [f"IdentityFile={folder / 'user'}", "UserKnownHostsFile=/dev/null", "StrictHostKeyChecking=no"]
        options += ["ExitOnForwardFailure=yes", "LogLevel=ERROR"]
        given = [word for option in options for word in ("-o", option)]
        led = [word for port in ports for word in ("-R", f"*:{port}:localhost:{port}")]
        client = [*inside(space), "ssh", "-N", "-p", "2222", *given, *led, f"root@{PUBLIC}"]
        probe = [
            *inside(space),
            sys.executable,
            "-c",
            f"import socket; socket.create_connection(('{PUBLIC}', 2222), 1)",
        ]
        for command in (server, client):
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            self._stack.callback(lambda process=process: (process.kill(), process.wait()))
            assert wait_until(lambda: subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0, 30)


def inside(space: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", space)


@pytest.fixture
def town() -> Iterator[Town]:
    with ExitStack() as stack:
        yield Town(stack)


def all_contribute(islands: list[Island], since: float) -> bool:
    """Whether each of them has seen a round since then to which all have contributed."""
    rounds = [event for event in islands[0].events("round") if event["time"] >= since]
    return any(len(event["contributors"]) >= len(islands) for event in rounds)


def test_joiners_behind_routers_train_through_a_relay_and_find_another(town: Town, tmp_path: Path) -> None:
    founders = town.home("founder", "192.168.97")
    homes = [town.home(f"home{number}", f"172.16.{number}") for number in (1, 2)]
    other = town.home("other", "192.168.98")
    town.forward("192.168.97.2", PORT, PORT + 1)
    town.forward("192.168.98.2", PORT + 10, PORT + 11)
    settings = {"elastic": {"silence_s": 3, "partition": "merge"}}
    with open_islands(tmp_path, settings) as start:
        founder = start(1, prefix=inside(founders), host=PUBLIC, port=str(PORT))
        joined = [start(number, prefix=inside(homes[number - 2])) for number in (2, 3)]
        assert wait_until(lambda: all("through island-1" in str(each.told("reached")) for each in joined), 90)
        assert wait_until(lambda: all_contribute([founder, *joined], 0.0), 90)
        assert len(founder.told("relays")) >= 2, "it says whom it serves"
        public = start(4, prefix=inside(other), host=PUBLIC, port=str(PORT + 10))
        since = time.time()
        assert wait_until(lambda: all_contribute([founder, *joined, public], since), 90)
        founder.process.kill()
        assert wait_until(lambda: all("through island-4" in str(each.told("reached")) for each in joined), 120)
        since = time.time()
        assert wait_until(lambda: all_contribute([public, *joined], since), 120)


@pytest.mark.parametrize("way", ["docker -p", "ssh -R"])
def test_a_founder_in_a_container_or_behind_a_login_node_is_found(town: Town, tmp_path: Path, way: str) -> None:
    """As the how-to says; the joiner is at home, behind a router that forwards nothing."""
    missing = {"docker -p": not shutil.which("iptables"), "ssh -R": not can_serve()}
    if missing[way]:
        pytest.skip("no iptables" if way == "docker -p" else MISSING)
    machine, home = town.home("founder", "172.17.0"), town.home("home1", "172.16.1")
    if way == "docker -p":
        town.publish("172.17.0.2", PORT, PORT + 1)
    else:
        town.tunnel(machine, tmp_path / "ssh", PORT, PORT + 1)
    with open_islands(tmp_path) as start:
        founder = start(1, prefix=inside(machine), host=PUBLIC, port=str(PORT))
        joined = start(2, prefix=inside(home))
        assert wait_until(lambda: all_contribute([founder, joined], 0.0), 120), end(joined.process)
        assert wait_until(lambda: "through island-1" in str(joined.told("reached")), 60)
