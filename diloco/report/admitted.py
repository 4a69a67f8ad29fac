"""Which requests of browsers are answered: those that ask this machine by an address, or by a name of its own.

A page elsewhere could let its own name point here (DNS rebinding), and read what only this machine may. Its requests
still carry that name as their `Host`.
"""

import ipaddress
import socket


def is_own_host(host: str, asked_for: str) -> bool:
    """Tell whether a request's `Host` is this machine, by an address or by a name that nobody else can have: its own,
    or the one at which it was asked to listen."""
    name = host.rsplit("]", 1)[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower().rstrip(".") in {"localhost", asked_for.lower(), socket.gethostname().lower()}
    return True
