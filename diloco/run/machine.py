"""This machine: what others call it, at which address they see it, and how much memory it has left."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from diloco.comm.peers.addressbook import free_port
from diloco.errors import ConfigError

ANYWHERE = "0.0.0.0"
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Set for an island that is started here together with others: how many they are, and how many on its GPU; "0 0" where
# one of them looks for all whether there is memory enough.
TOGETHER = "DILOCO_TOGETHER"


def own_name() -> str:
    """Return this machine's host name, in safe characters: what an island is called unless its owner says otherwise."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40]


def listen_host(host: str) -> str:
    """Return where to listen for others who see this machine as `host`: there, if that is an address of this machine or
    a name for one; else, where a cloud or a router forwards it, on any address."""
    try:
        address = host if ":" in host else socket.gethostbyname(host)
    except (OSError, ValueError):  # ValueError: no name at all
        raise ConfigError(f"--host {host}: there is no machine of that name") from None
    try:
        free_port(address)
    except OSError:
        return "::" if ":" in host else ANYWHERE
    return address


def host_towards(addresses: tuple[str, ...]) -> str:
    """Return the address under which the peers at these multiaddrs would see this machine; nothing is sent to them."""
    for address in addresses:
        parts = address.split("/")
        if len(parts) > 2 and parts[1] in ("ip4", "dns4"):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((parts[2], 9))  # sends nothing
                    return str(probe.getsockname()[0])
                except OSError:
                    continue
    return "127.0.0.1"


def total_memory() -> int:
    """Return this machine's memory in bytes, or the smallest limit of the groups that this process is in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _limits(PROC, GROUPS))])


def available_memory(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return the bytes that can still be had, within the limits of containers; None where /proc is missing (macOS)."""
    meminfo = proc / "meminfo"
    if not meminfo.exists():
        return None
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *(max(0, limit - used) for limit, used in _limits(proc, groups))])


def _limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group around this process that has a limit."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            number, controllers, own = line.split(":", 2)
            if number == "0":
                yield from _limits_above(groups, own, ("memory.max", "memory.current", "inactive_file"))
            elif "memory" in controllers.split(","):
                files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                yield from _limits_above(groups / "memory", own, files)


def _limits_above(root: Path, own: str, files: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
    place = root / own.strip("/")
    for group in (place, *place.parents[: len(place.parents) - len(root.parents)]):
        with suppress(OSError, ValueError, KeyError):  # it has no limit, or is not seen from inside a container
            limit, used = (int((group / name).read_text()) for name in files[:2])
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield limit, used - int(stat[files[2]])  # less what is kept of files: the kernel gives that back
