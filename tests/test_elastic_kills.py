"""Real processes, real sockets, real SIGKILL: in each phase, of anybody, again and again."""

import os
import random
import time
from collections import defaultdict
from itertools import pairwise

import pytest
from forked import FORKED

from diloco.bench.bare import BareConfig
from diloco.bench.crew import PHASES, Crew, crew
from diloco.elastic.protocol.ranges import minus, size
from diloco.elastic.protocol.record import LoggedRecord, Record
from diloco.elastic.protocol.wire import decode

pytestmark = pytest.mark.slow
NAMES = ("A", "B", "C", "D")
KILLS = int(os.environ.get("DILOCO_KILLS", "3"))
SMALL = BareConfig(count=300_000, silence_s=3.0, pace_s=0.5)


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes from a server that has their modules, and start none of them from nothing."""
    monkeypatch.setattr("diloco.bench.processes.mp.get_context", lambda _: FORKED)


def coordinator(team: Crew) -> str:
    team.expect(lambda event: event.kind == "begin", 60, since=0.0)  # the first commits may only lease samples
    begins = [event for event in team.events if event.kind == "begin"]
    return begins[-1].data["ballot"][1]


def bring_back(team: Crew, name: str) -> None:
    """A new life of a dead island, until a round has its contribution."""
    since = time.monotonic()
    team.start(name)
    try:
        team.expect(lambda e: e.kind == "commit" and name in e.data["islands"] and e.island != name, 60, since=since)
    except TimeoutError:
        own = [(event.kind, event.data) for event in team.events if event.island == name and event.at > since]
        raise AssertionError(f"{name} did not come back: {own[-8:]}") from None


def records_of(reports: dict[str, dict]) -> dict[str, Record]:
    records = [decode(LoggedRecord, raw).record for report in reports.values() for raw in report["records"]]
    return {record.digest: record for record in records}


def chain(records: dict[str, Record], digest: str) -> list[Record]:
    """From this record back to the first, oldest first."""
    found = []
    while digest in records:
        found.append(records[digest])
        digest = records[digest].proposal.key.parent
    assert found[-1].proposal.key.round == 1
    return found[::-1]


def assert_nothing_lost_or_twice(records: list[Record]) -> None:
    by_life = defaultdict(list)
    for record in records:
        for contribution in record.proposal.contributions:
            offer = contribution.offer
            by_life[contribution.island, offer.incarnation].append((offer.lo, offer.hi))
    for life, cuts in by_life.items():
        assert cuts[0][0] == 0, life
        assert all(one[1] == other[0] for one, other in pairwise(cuts)), (life, cuts)


def test_kills_in_a_row():
    """Twenty by `make prove`, one in each phase with the other tests."""
    chance = random.Random(3)
    with crew(SMALL, NAMES) as team:
        team.await_commits(3, NAMES)
        records: dict[str, Record] = {}
        for number in range(KILLS):
            phase = PHASES[number % 3]
            # only a coordinator collects; the founder is killed too, as is every other
            victim = coordinator(team) if phase == "collect" else chance.choice(team.alive())
            team.send(victim, "die", phase)
            team.join(victim)
            survivors = team.alive()
            assert len(survivors) == 3
            team.await_commits(team.newest() + 1, survivors)  # the next round is committed by all of them
            records |= records_of(team.reports(tuple(survivors)))
            bring_back(team, victim)
        team.await_commits(team.newest() + 2, NAMES)  # the last one back may have been late for a round
        reports = team.stand_still()
        assert len({report["digest"] for report in reports.values()}) == 1
        assert_nothing_lost_or_twice(chain(records | records_of(reports), reports["B"]["head"].digest))
        final = reports["B"]["state"]
        for name, report in reports.items():  # what the living trained is contained, but for the phase in hand
            assert report["phases"] - final.mark(name, report["incarnation"], 0) <= 1
        assert final.ledger.overlaps == ()


@pytest.mark.soak
def test_one_epoch_with_crashes_and_joins_uses_each_sample_once():
    """Five crashes and three joins; the ledger says which sample was consumed, and none twice."""
    chance = random.Random(5)
    setting = BareConfig(count=100_000, silence_s=2.0, pace_s=0.3, limit=9000, samples=20)
    faults = ["crash"] * 5 + ["join"] * 3
    chance.shuffle(faults)
    newcomers = iter("EFGHIJKL")
    with crew(setting, NAMES) as team:
        for fault in faults:
            team.await_commits(team.newest() + chance.randint(2, 5), team.alive())
            if fault == "crash":
                victim = chance.choice(team.alive())
                team.send(victim, "die", "reduce")
                team.join(victim)
            if fault == "join" or len(team.alive()) < 3:
                bring_back(team, next(newcomers))
        deadline = time.monotonic() + 200
        while not all(report["state"].ledger.exhausted() for report in team.reports().values()):
            assert time.monotonic() < deadline, {n: r["state"].ledger for n, r in team.reports().items()}
            time.sleep(0.3)
        reports = team.stand_still()
        ledger = next(iter(reports.values()))["state"].ledger
        missing = minus(((0, setting.limit),), minus(((0, ledger.next),), ledger.unconsumed))
        assert size(missing) <= 0.001 * setting.limit, f"missing: {missing}"
        assert ledger.overlaps == ()
        assert len({report["digest"] for report in reports.values()}) == 1
