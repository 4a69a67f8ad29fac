"""A real member whose contribution is not what it says: no honest island ends, and rounds go on without that one."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from islands import TestIsland, agree, team, wait_for
from torch import Tensor

from diloco.bench import bare
from diloco.comm.codec.noise import PAGE, NoiseKey
from diloco.comm.codec.registry import CODECS
from diloco.elastic.protocol.messages import Begin, Effect
from diloco.elastic.protocol.options import Options
from diloco.elastic.protocol.record import Offer
from diloco.elastic.runtime import reducing

LIAR = "B"


def sent_by(island: TestIsland, change: Callable[[Tensor], Tensor]) -> None:
    """Have an island send other bytes than it has measured, from now on."""
    honest, codec = island.driver.contribution, CODECS[island.setting.codec]

    def lying(begin: Begin) -> Tensor:
        values = change(codec.decode(honest(begin), island.setting.count))
        return codec.encode(values, NoiseKey(1, 0, "lie"), defer=True)

    island.driver.contribution = lying


def not_finite(values: Tensor) -> Tensor:
    values[1000] = torch.nan
    return values


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": not_finite,
    "1e30": lambda values: torch.full_like(values, 1e30),
    "a thousand times as much": lambda values: values * 1000,
    "three times as much": lambda values: values * 3,  # each sees a part only: twice might pass
}


def goes_on_without_the_liar(islands: list[TestIsland], *, rounds: int = 2) -> None:
    honest = [island for island in islands if island.name != LIAR]
    since = max(island.state.head.round for island in islands)

    def without_it() -> bool:
        records = [record for record in honest[0].session.records() if record.proposal.key.round > since + 1]
        names = {island.name for island in honest}
        return sum(set(record.proposal.islands) == names for record in records) >= rounds

    wait_for(without_it, honest)
    for record in honest[0].session.records():
        if record.proposal.key.round > since + 1:
            assert LIAR not in record.proposal.islands
    agree(honest)
    assert torch.isfinite(honest[0].driver.replica.vectors["parameters"]).all()


def is_refused(islands: list[TestIsland]) -> bool:
    return any(note.peer == LIAR and "refuse" in note.text for island in islands for note in list(island.notes))


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("codec", ["int8", "fp32"])
def test_bytes_that_are_not_what_the_offer_says_are_refused_by_name(lie, codec):
    with team(codec=codec, count=3 * PAGE) as (_, islands):
        wait_for(lambda: all(island.contained for island in islands), islands)
        sent_by(next(island for island in islands if island.name == LIAR), lie)
        wait_for(lambda: is_refused(islands), islands)  # under load it may be lost first, and come back
        goes_on_without_the_liar(islands)


def test_bytes_are_compared_with_the_offer_in_groups_too(monkeypatch):
    monkeypatch.setattr(bare, "Options", lambda *args, **more: Options(*args, **more, flat_up_to=1))
    monkeypatch.setattr(reducing, "FLAT_UP_TO", 3)
    with team(count=3 * PAGE, silence_s=2.0) as (_, islands):
        wait_for(lambda: all(island.contained for island in islands), islands)
        sent_by(next(island for island in islands if island.name == LIAR), lambda values: values * 1000)
        goes_on_without_the_liar(islands, rounds=1)


@pytest.mark.parametrize("names", [("A", "B"), ("A", "B", "C")])
def test_an_offer_that_says_it_is_a_thousand_times_as_large_is_not_begun_with(names, monkeypatch):
    """Among two, too: then it is compared with the norms of the last rounds."""
    with team(names, partition="quorum") as (_, islands):
        wait_for(lambda: all(island.contained > 2 for island in islands), islands)
        liar = next(island for island in islands if island.name == LIAR)
        offer = liar.driver.node.offer

        def larger(honest: Offer, now: float) -> list[Effect]:
            return offer(replace(honest, norm=1000 * honest.norm), now)

        monkeypatch.setattr(liar.driver.node, "offer", larger)
        goes_on_without_the_liar(islands)
