"""Put an island of a run together: its node, its network, its store, and the driver that runs them."""

import time
from collections.abc import Callable

from diloco.checkpoint.log.store import Store
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.transport import Transport
from diloco.elastic.protocol.messages import Note
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.runtime.driver import Driver, Network, Run
from diloco.elastic.runtime.restoring import Origin


def ignore(_: object) -> None:
    """Do nothing with it."""


def open_island(
    run: Run,
    origin: Origin,
    options: Options,
    network: Network,
    *,
    incarnation: int = 1,
    store: Store | None = None,
    tell: Callable[[Note], None] = ignore,
    prepare: Callable[[Node], None] = ignore,
    driver: Callable[..., Driver] = Driver,
) -> Driver:
    """Start an island and return its driver, which a `with` statement closes.

    `tell` gets what people should know; `prepare` may change the node before it takes part in anything.
    """
    now, me = time.monotonic(), network.plain.identity
    node = Node(me, origin.state, options, now=now, incarnation=incarnation, memory=origin.memory)
    prepare(node)
    return driver(node, run, origin.vectors, network, tell, store)


def among_friends(transport: Transport) -> Network:
    """Return a network whose islands let everybody in who can reach them."""
    return Network(transport, PooledTransport(transport), b"", lambda peer, greeting: None)
