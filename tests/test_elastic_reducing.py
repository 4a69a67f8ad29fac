"""The path that a round's vectors take: encode, the all-reduce that *begin* asks for, decode."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue

import pytest
import torch
from golden import digest
from islands import SMALL, TestIsland, training, wait_for
from torch import Tensor

from diloco.comm.codec.noise import PAGE, NoiseKey
from diloco.comm.codec.registry import CODECS
from diloco.comm.transport.memory import MemoryNetwork
from diloco.elastic.protocol.messages import Begin
from diloco.elastic.protocol.record import Ballot, Contribution, Key, Offer, Proposal, Settings
from diloco.elastic.runtime import reducing
from diloco.elastic.runtime.reducing import Attempt, Outcome, connect_s, plan_of, reduction_of
from diloco.errors import CodecError, PlanRefused

MEMBERS = ("a", "b", "c", "d")
WEIGHTS = (1, 2, 3, 4)
COUNT = 9 * PAGE + 123


def begin(codec: str, rates: tuple[int, ...] = (0, 0, 0, 0)) -> Begin:
    key = Key(1, "p" * 64)
    contributions = tuple(
        Contribution(member, Offer(0, 0, 1, weight, (), norm=COUNT), weight)
        for member, weight in zip(MEMBERS, WEIGHTS, strict=True)
    )
    proposal = Proposal(key, 0, contributions, MEMBERS, (), (), Settings(codec=codec), 1)
    return Begin(key, Ballot(1, "a", 0), proposal, MEMBERS, rates)


def vector(member: str) -> Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(ord(member)))


def reduce(asked: Begin) -> list[Tensor]:
    """What each member holds in the end, encoded."""
    network, codec = MemoryNetwork(), CODECS[asked.proposal.settings.codec]
    transports = {name: network.transport(name) for name in MEMBERS}
    addresses = {name: transport.address() for name, transport in transports.items()}

    def take_part(name: str) -> Tensor:
        payload = codec.encode(vector(name), NoiseKey(1, 0, name))
        return reduction_of(asked, payload, COUNT, transports[name], addresses).run()

    with ThreadPoolExecutor(len(MEMBERS)) as pool:
        return list(pool.map(take_part, MEMBERS))


def mean_by_hand(codec: str) -> Tensor:
    """In the order of the members, of what their codec leaves of the vectors."""
    total = torch.zeros(COUNT)
    for name, weight in zip(MEMBERS, WEIGHTS, strict=True):
        CODECS[codec].accumulate(CODECS[codec].encode(vector(name), NoiseKey(1, 0, name)), total, weight / sum(WEIGHTS))
    return total


@pytest.mark.parametrize("flat_up_to", [4, 3], ids=["flat", "two levels"])
@pytest.mark.parametrize("codec", ["fp32", "int8", "int4"])
def test_all_hold_the_bytes_of_the_weighted_mean(codec: str, flat_up_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducing, "FLAT_UP_TO", flat_up_to)
    results = reduce(begin(codec))
    assert len({digest(result) for result in results}) == 1
    expected = mean_by_hand(codec)
    bound = CODECS[codec].bound(expected[: 9 * PAGE].view(-1, 256)).max().item() + 1e-6
    assert (CODECS[codec].decode(results[0], COUNT) - expected).abs().max().item() <= bound


def test_who_reduces_how_much_does_not_change_the_bytes() -> None:
    uneven = begin("int8", (1, 1000, 3000, 2000))
    assert plan_of(uneven, COUNT).spans != plan_of(begin("int8"), COUNT).spans  # type: ignore[union-attr]
    assert torch.equal(reduce(uneven)[0], reduce(begin("int8"))[0])


def test_a_begin_that_does_not_fit_what_was_encoded_is_refused() -> None:
    transport = MemoryNetwork().transport("a")
    addresses = {name: transport.address() for name in MEMBERS}
    payload = CODECS["int4"].encode(vector("a"), NoiseKey(1, 0, "a"))
    with pytest.raises(PlanRefused, match="int8 is not what this island has encoded"):
        reduction_of(begin("int8"), payload, COUNT, transport, addresses)
    with pytest.raises(PlanRefused, match="a rate for each member was due"):
        reduction_of(begin("int4", (1, 2)), payload, COUNT, transport, addresses)


class Diverged(TestIsland):
    def _displacement(self) -> Tensor:
        found = super()._displacement()
        found[-1] = float("nan")
        return found


def test_what_cannot_be_encoded_is_told_to_its_trainer_and_rounds_go_on_without_it() -> None:
    network, setting = MemoryNetwork(), replace(SMALL, silence_s=1.0)
    kinds = {"A": TestIsland, "B": Diverged}
    team = [kind(network.transport(name), setting.beginning(("A", "B")), setting) for name, kind in kinds.items()]
    with training(team):
        good, bad = team
        wait_for(lambda: bad.error is not None, [])
        assert isinstance(bad.driver.failure, CodecError) and "NaN" in str(bad.error)
        wait_for(lambda: any(record.proposal.islands == ("A",) for record in good.session.records()), [good])


def test_the_time_to_connect_grows_with_what_telling_all_members_takes():
    assert connect_s(4, 1e6) == pytest.approx(10.0, abs=0.01)
    assert connect_s(1000, 12.5e6) == pytest.approx(16.4)


def test_an_attempt_that_finds_no_threads_fails_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise RuntimeError("can't start new thread")

    asked, network, outcomes = begin("int8"), MemoryNetwork(), Queue[Outcome]()
    transports = {name: network.transport(name) for name in MEMBERS}
    addresses = {name: transport.address() for name, transport in transports.items()}
    payload = CODECS["int8"].encode(vector("a"), NoiseKey(1, 0, "a"))
    monkeypatch.setattr(reducing, "Follower", refuse)
    Attempt(
        asked,
        reduction_of(asked, payload, COUNT, transports["a"], addresses),
        lambda _, outcome: outcomes.put(outcome),
    )
    assert outcomes.get(timeout=30).reason == "RuntimeError: can't start new thread"
