"""Encoding and decoding on the way changes when things happen, not what comes out."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from golden import RESULT_KEY
from torch import Tensor

from diloco.comm.codec.noise import PAGE, NoiseKey
from diloco.comm.codec.registry import CODECS
from diloco.comm.reduce.allreduce import Reduction
from diloco.comm.reduce.spans import ReducePlan, spans_by_bandwidth
from diloco.comm.reduce.vector_reduce import VectorReduction
from diloco.comm.transport.memory import MemoryNetwork
from diloco.errors import CodecError, ReduceCancelled, ReduceFailed

MEMBERS = ("a", "b", "c")
COUNT = 7 * PAGE + 123


class Members:
    def __init__(self, codec: str) -> None:
        self.codec = CODECS[codec]
        network = MemoryNetwork()
        self.transports = {name: network.transport(name) for name in MEMBERS}
        self.addresses = {name: transport.address() for name, transport in self.transports.items()}
        torch.manual_seed(1)
        self.vectors = {name: torch.randn(COUNT) for name in MEMBERS}
        self.means = {name: torch.zeros(COUNT) for name in MEMBERS}
        self.started: dict[str, Reduction] = {}

    def plan(self, number: int) -> ReducePlan:
        spans = spans_by_bandwidth(COUNT, [1.0, 3.0, 2.0])
        return ReducePlan(f"reduce/{number}", MEMBERS, (1, 2, 3), spans, self.codec.name, RESULT_KEY, chunk_pages=1)

    def whole(self, name: str) -> Tensor:
        payload = self.codec.encode(self.vectors[name], NoiseKey(1, 0, name))
        return Reduction(self.plan(1), payload, self.transports[name], self.addresses).run()

    def by_chunks(self, name: str) -> Tensor:
        room = torch.empty(self.codec.size(COUNT), dtype=torch.uint8)
        reduction = self.started[name] = VectorReduction(
            self.plan(2), self.vectors[name], NoiseKey(1, 0, name), self.means[name], self.transports[name],
            self.addresses, contribution=room,
        )  # fmt: skip
        return reduction.run()


@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_the_bytes_are_those_of_vectors_that_were_encoded_before(codec: str) -> None:
    members = Members(codec)
    with ThreadPoolExecutor(3) as pool:
        expected = list(pool.map(members.whole, MEMBERS))
        got = list(pool.map(members.by_chunks, MEMBERS))
    assert all(torch.equal(one, expected[0]) for one in (*expected, *got))
    decoded = members.codec.decode(expected[0], COUNT)
    assert all(torch.equal(mean, decoded) for mean in members.means.values())


def test_a_vector_that_cannot_be_encoded_ends_it_for_all() -> None:
    members = Members("int8")
    members.vectors["b"][-1] = float("nan")
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(members.by_chunks, name) for name in MEMBERS]
        errors = [future.exception(20) for future in futures]
    assert all(isinstance(error, ReduceFailed | CodecError) for error in errors), errors
    assert "NaN" in str(errors[1])


def test_it_can_be_cancelled_while_chunks_are_being_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    members, gate = Members("int8"), threading.Event()
    monkeypatch.setattr(VectorReduction, "_await_own", lambda *_: gate.wait(20))
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(members.by_chunks, name) for name in MEMBERS]
        while len(members.started) < 3:
            pass
        for reduction in members.started.values():
            reduction.cancel()
        gate.set()
        assert {type(future.exception(20)) for future in futures} == {ReduceCancelled}
