"""This machine as others see it: what it is called, and at which address."""

import re
import socket

from diloco.comm.peers.addressbook import free_port
from diloco.errors import ConfigError

ANYWHERE = "0.0.0.0"


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
