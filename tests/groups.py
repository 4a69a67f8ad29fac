"""Members of an all-reduce, each in a thread, and the transports between them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from golden import RESULT_KEY, encoded_contribution
from torch import Tensor

from diloco.comm.codec.registry import result_codec_for
from diloco.comm.reduce.allreduce import Reduction
from diloco.comm.reduce.spans import ReducePlan, spans_by_bandwidth
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.link import Link, Path, Paths
from diloco.comm.transport.memory import MemoryNetwork
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import PeerAddress, Transport

SOON = 20.0


class Group:
    """Members a, b, c, … with a contribution each, and the transports between them."""

    def __init__(self, transports: Sequence[Transport], addresses: dict[str, PeerAddress]) -> None:
        self.transports = {transport.identity: transport for transport in transports}
        self.addresses = addresses
        self.reductions: dict[str, Any] = {}
        self.outcomes: dict[str, Tensor | BaseException] = {}

    def plan(self, count: int, codec: str, **changes: object) -> ReducePlan:
        members = tuple(self.transports)
        fields = {
            "channel": "reduce/1", "members": members, "weights": tuple(range(1, len(members) + 1)),
            "spans": spans_by_bandwidth(count, [1.0] * len(members)), "codec_name": codec, "key": RESULT_KEY,
            "result_codec_name": result_codec_for(codec, len(members)),
        }  # fmt: skip
        return ReducePlan(**(fields | changes))  # type: ignore[arg-type]

    def begin(
        self, plan: Any, contributions: dict[str, Tensor], members: Sequence[str] | None = None,
        kind: Callable[..., Any] = Reduction,
    ) -> None:  # fmt: skip
        members, self.outcomes = members or plan.members, {}
        for name in members:
            self.reductions[name] = kind(plan, contributions[name], self.transports[name], self.addresses)
        self.threads = [threading.Thread(target=self._run, args=(name,)) for name in members]
        for thread in self.threads:
            thread.start()

    def _run(self, name: str) -> None:
        try:
            self.outcomes[name] = self.reductions[name].run()
        except BaseException as error:  # noqa: BLE001 -- the test looks at it
            self.outcomes[name] = error

    def finish(self) -> dict[str, Tensor | BaseException]:
        for thread in self.threads:
            thread.join(SOON)
            assert not thread.is_alive(), "a member still waits"
        return self.outcomes

    def reduce(self, plan: Any, contributions: dict[str, Tensor], kind: Callable[..., Any] = Reduction) -> Tensor:
        self.begin(plan, contributions, kind=kind)
        outcomes = list(self.finish().values())
        assert len(outcomes) == len(plan.members)
        for outcome in outcomes:
            assert isinstance(outcome, Tensor), outcome
            assert torch.equal(outcome, outcomes[0])
        return outcomes[0]

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()


def memory_group(size: int) -> Group:
    network = MemoryNetwork()
    transports = [network.transport(name) for name in names(size)]
    return Group(transports, {transport.identity: transport.address() for transport in transports})


def direct_group(size: int) -> Group:
    transports = [DirectTransport(name, "127.0.0.1") for name in names(size)]
    addresses = {transport.identity: transport.address("127.0.0.1") for transport in transports}
    for transport in transports:
        transport.allow(addresses.values())
    return Group(transports, addresses)


def wrapped(group: Group, wrap: Callable[[Transport], Transport]) -> Group:
    return Group([wrap(transport) for transport in group.transports.values()], group.addresses)


def jittery(transport: Transport) -> Transport:
    return ShapedTransport(transport, Link(1e9, 1e9), Paths(Path(delay_s=0.001, jitter_s=0.01), seed=3))


def names(size: int) -> list[str]:
    return [f"m{number:02}" for number in range(size)]


def encoded(group: Group, count: int, codec: str) -> dict[str, Tensor]:
    return {name: encoded_contribution(codec, count, number) for number, name in enumerate(group.transports)}
