"""The pure part of `diloco bench soak`: which faults a seed draws, when rounds were possible, and what is judged."""

import pytest

from diloco.bench.soak_checks import (
    LAST_ROUNDS,
    Observation,
    Sample,
    SeenRecord,
    SeenWork,
    Told,
    chain_to,
    commits_of,
    growth,
    judge,
    lives_in,
    work_lost,
)
from diloco.bench.soak_plan import AWAY_S, CUT_S, ENDS_PROCESS, STOP_S, WEIGHTS, Fault, PlanConfig, draw_faults
from diloco.bench.soak_proc import Usage
from diloco.bench.soak_report import render_report
from diloco.bench.soak_timeline import (
    HEAL_S,
    Commit,
    Moment,
    Span,
    heal_times,
    linked_quorum,
    longest_gap,
    percentile,
    quorum_spans,
    rounds_per_s,
)

TEN_MINUTES = PlanConfig(7, 6, 600.0)
A, B, C, D = "ABCD"
ALL = frozenset("ABCD")
ROSTER = tuple("ABCD")


# the plan


def test_a_seed_always_draws_the_same_faults_and_another_seed_draws_others():
    assert draw_faults(TEN_MINUTES) == draw_faults(PlanConfig(7, 6, 600.0))
    assert draw_faults(TEN_MINUTES) != draw_faults(PlanConfig(8, 6, 600.0))


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_have_faults_of_every_kind_within_their_limits(seed):
    faults = draw_faults(PlanConfig(seed, 6, 600.0))
    assert {fault.kind for fault in faults} == set(WEIGHTS)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert all(fault.at_s <= fault.until_s <= 600.0 for fault in faults)
    limits = {"kill": AWAY_S, "leave": AWAY_S, "stop": STOP_S, "freeze": STOP_S, "cut": CUT_S, "pair": CUT_S}
    for fault in faults:
        assert fault.until_s - fault.at_s <= limits.get(fault.kind, CUT_S)[1]
        assert fault.describe()
    assert len(faults) > 60


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("islands", [2, 4, 6])
def test_what_is_hit_is_there(seed, islands):
    there, away = set(range(1, islands + 1)), {}
    config = PlanConfig(seed, islands, 300.0)
    for fault in draw_faults(config):
        if fault.kind == "join":
            assert fault.islands[0] not in there and fault.islands[0] <= config.most
            there |= set(fault.islands)
            continue
        assert {*fault.islands, *fault.others} <= there
        assert not set(fault.islands) & set(fault.others)
        if fault.kind in (*ENDS_PROCESS, "stop", "freeze"):
            (island,) = fault.islands
            assert away.get(island, 0.0) <= fault.at_s
            away[island] = fault.until_s
            assert 2 * sum(until_s > fault.at_s for until_s in away.values()) < len(there) + 1
        if fault.kind == "depart":
            there -= set(fault.islands)


@pytest.mark.parametrize("seed", range(20))
def test_two_processes_live_through_the_second_half(seed):
    faults = draw_faults(PlanConfig(seed, 6, 600.0))
    ends = [fault for fault in faults if fault.kind in ENDS_PROCESS]
    ended = {fault.islands[0] for fault in ends if fault.until_s > 300.0 or fault.kind == "depart"}
    assert len(set(range(1, 7)) - ended) >= 2


def test_without_one_way_cuts_none_is_drawn():
    kinds = {fault.kind for fault in draw_faults(PlanConfig(7, 6, 600.0, one_way=False))}
    assert kinds == set(WEIGHTS) - {"one-way"}


def test_a_cut_severs_both_directions_and_a_one_way_cut_only_one():
    assert Fault("cut", 0, 9, (1,), (2, 3)).links == {(1, 2), (2, 1), (1, 3), (3, 1)}
    assert Fault("one-way", 0, 9, (1,), (2,)).links == {(1, 2)}
    assert Fault("kill", 0, 9, (1,)).links == frozenset()


# when rounds were possible


@pytest.mark.parametrize(
    ("able", "cut", "expected"),
    [
        ("ABCD", [], True),
        ("BCD", [], True),
        ("AB", [], True),  # half, with the first of the roster
        ("CD", [], False),
        ("A", [], False),
        ("ABCDE", [(A, B), (B, A), (A, C), (C, A), (A, D), (D, A)], True),
        ("BCD", [(B, C)], False),  # one direction is enough to break a pair
        ("BCD", [(C, B)], False),
        ("ABCD", [(A, B), (C, D)], True),  # A and C are half with the first
        ("ABCD", [(A, B), (A, C), (A, D), (B, C)], False),
    ],
)
def test_a_linked_quorum_is_a_quorum_whose_members_all_reach_each_other(able, cut, expected):
    assert linked_quorum(frozenset(able), frozenset(cut), ROSTER, False, 2) is expected


def test_with_merge_any_two_that_reach_each_other_can_decide():
    assert linked_quorum(frozenset("CD"), frozenset(), ROSTER, True, 2)
    assert not linked_quorum(frozenset("CD"), frozenset({(C, D)}), ROSTER, True, 2)


def commit(at_s: float, number: int = 1, roster: tuple[str, ...] = ROSTER) -> Commit:
    return Commit(at_s, number, roster, roster)


def test_spans_follow_islands_links_and_the_roster():
    moments = [Moment(0, ALL), Moment(10, frozenset("CD")), Moment(20, ALL), Moment(30, frozenset("CD"))]
    commits = [commit(-1), commit(25, 2, (C, D))]
    spans = quorum_spans(moments, commits, A, 40, merge=False)
    assert spans == [Span(0, 10), Span(20, 40)]  # after 25 s C and D are the roster


def test_before_the_first_commit_the_founder_is_the_roster():
    assert quorum_spans([Moment(0, ALL)], [], A, 10, merge=False, least=1) == [Span(0, 10)]
    assert quorum_spans([Moment(0, ALL)], [], A, 10, merge=False) == []  # rounds need two islands


def test_every_change_within_a_quorum_waits_for_the_next_commit():
    moments = [Moment(0, ALL), Moment(4, frozenset("ABC")), Moment(7, ALL), Moment(50, frozenset())]
    commits = [commit(1), commit(5), commit(10)]
    assert heal_times(moments, commits, [Span(0, 50)]) == [1, 1, 3]


def test_a_quorum_that_never_committed_counts_if_it_had_long_enough():
    moments = [Moment(0, ALL)]
    assert heal_times(moments, [], [Span(0, HEAL_S - 1)]) == []
    assert heal_times(moments, [commit(200)], [Span(0, HEAL_S + 5)]) == [HEAL_S + 5]


def test_rates_and_gaps_count_only_the_time_with_a_quorum():
    commits = [commit(1), commit(5), commit(15), commit(25), Commit(26, 9, (), ROSTER)]
    spans = [Span(0, 10), Span(20, 30)]
    assert rounds_per_s(commits, spans) == 3 / 20  # one is outside, one has no contributions
    assert longest_gap(commits, spans) == 5
    assert rounds_per_s(commits, []) == 0.0


def test_percentiles():
    assert percentile([], 0.95) == 0.0
    assert percentile(range(100), 0.95) == 95
    assert percentile([3.0], 0.95) == 3.0


# what is judged


def told(number: int, digest: str, at_s: float, island: str = A) -> Told:
    return Told(at_s, island, number, digest, ROSTER)


def record(number: int, digest: str, parent: str) -> SeenRecord:
    return SeenRecord(number, digest, parent, ROSTER)


def observation() -> Observation:
    """Three rounds in a chain, of four islands that all hold it."""
    seen = Observation(A, 40.0, 60.0, 5.0, [Moment(0, ALL)], head="r3", digests_equal=True)
    seen.told = [told(1, "r1", 1), told(2, "r2", 20), told(2, "r2", 19, B), told(3, "r3", 45)]
    seen.records = {each.digest: each for each in (record(1, "r1", "r0"), record(2, "r2", "r1"), record(3, "r3", "r2"))}
    return seen


def failing(seen: Observation, **options) -> set[str]:
    verdict = judge(seen, **{"merge": False, "quiet_per_s": None, **options})
    return {check.name.removeprefix("soak.") for check in verdict.checks if not check.holds}


def test_a_soak_in_which_all_went_well():
    assert failing(observation()) == set()


def test_a_chain_ends_where_records_are_unknown():
    records = observation().records
    assert [each.round for each in chain_to(records, "r3")] == [1, 2, 3]
    del records["r2"]
    assert [each.round for each in chain_to(records, "r3")] == [3]


def test_a_commit_happened_when_it_was_first_reported():
    seen = observation()
    assert [each.at_s for each in commits_of(seen.told, chain_to(seen.records, "r3"))] == [1, 19, 45]


def test_a_round_that_is_not_in_the_final_chain_is_lost_unless_branches_merge():
    seen = observation()
    seen.told += [told(2, "other", 20, C), told(2, "other", 21, D)]
    verdict = judge(seen, merge=False, quiet_per_s=None)
    assert [each.digest for each in verdict.lost] == ["other"]
    assert failing(seen) == {"rounds_lost"}
    assert failing(seen, merge=True) == set()
    assert "round 2 (other)" in render_report("Soak", seen, verdict)


def work(island: str, first: int, stop: int, life: int = 1) -> SeenWork:
    return SeenWork(island, life, ((first, stop),))


def branched(*late: SeenWork) -> Observation:
    """Return what is seen where C and D committed rounds 2 and 3 alone, and their branch was given up for A's."""
    seen = observation()
    seen.records |= {
        "r2": SeenRecord(2, "r2", "r1", ROSTER, (work(A, 0, 8), work(C, 8, 16), work(D, 16, 24))),
        "o2": SeenRecord(2, "o2", "r1", ROSTER, (work(C, 24, 32), work(D, 32, 40))),
        "o3": SeenRecord(3, "o3", "o2", ROSTER, (work(C, 40, 48), work(D, 48, 56, life=2))),
        "r3": SeenRecord(3, "r3", "r2", ROSTER, (work(A, 60, 64), *late)),
    }
    return seen


def test_work_of_an_undone_branch_is_lost_unless_a_later_round_of_the_chain_contains_it():
    def lost(*late: SeenWork) -> int:
        seen = branched(*late)
        chain = chain_to(seen.records, seen.head)
        return work_lost(seen.records, chain, lives_in(chain))

    assert lost() == 24  # of C, and of the life of D that the chain's rounds know; its second never came back
    assert lost(work(C, 24, 32), work(D, 32, 40)) == 8
    assert lost(work(C, 24, 32), work(C, 40, 48), work(D, 32, 36)) == 4
    assert lost(work(A, 24, 56)) == 24  # trained by somebody else it is that island's work
    assert lost(work(C, 24, 32), work(C, 40, 48), work(D, 32, 40)) == 0
    seen = branched()
    seen.lives = {(C, 1)}
    assert failing(seen, merge=True) == {"work_lost"}


def test_work_of_a_life_that_has_ended_is_not_asked_for():
    seen = branched()
    for number in range(4, 4 + LAST_ROUNDS):
        seen.records[f"r{number}"] = SeenRecord(
            number, f"r{number}", f"r{number - 1}", ROSTER, (work(D, 100 * number, 100 * number + 1),)
        )
    chain = chain_to(seen.records, f"r{number}")
    assert lives_in([*chain, *[record(number + 1, "empty", "")] * 9]) == {(D, 1)}
    assert work_lost(seen.records, chain, lives_in(chain)) == 8  # C's is not counted


def test_a_round_before_all_known_records_is_not_taken_for_lost():
    seen = observation()
    del seen.records["r1"]
    assert failing(seen) == {"rounds_unchecked"}


def test_each_kind_of_harm_fails_its_own_check():
    for field, value, check in (
        ("samples_twice", 4, "samples_twice"),
        ("digests_equal", False, "digests_equal"),
        ("together_s", None, "together"),
        ("sockets_left", 1, "sockets_left"),
        ("crashes", [(1.0, "B: exit code 1")], "crashes"),
    ):
        seen = observation()
        setattr(seen, field, value)
        assert failing(seen) == {check}


def test_rounds_that_do_not_go_on_fail_and_so_do_few_and_late_ones():
    seen = observation()
    seen.seconds = 50.0
    assert failing(seen) == {"rounds_after_heal"}
    assert failing(observation(), quiet_per_s=1.0) == {"rounds_share"}
    late = observation()
    late.told[-1] = told(3, "r3", 59)
    late.moments.append(Moment(22, frozenset("ABC")))
    assert failing(late) == {"heal_p95_s"}


def test_the_quiet_time_after_the_last_heal_does_not_make_up_for_rounds_that_did_not_come():
    seen = observation()
    before = judge(seen, merge=False, quiet_per_s=None).per_s
    for number in range(4, 14):
        seen.told.append(told(number, f"r{number}", 46))
        seen.records[f"r{number}"] = record(number, f"r{number}", f"r{number - 1}")
    seen.head = "r13"
    verdict = judge(seen, merge=False, quiet_per_s=None)
    assert len(verdict.commits) == 13 and verdict.per_s == before > 0


def usage(descriptors: int) -> Usage:
    return Usage(descriptors, 10, 2**20, 5, 0)


def test_growth_is_that_of_the_worst_life_which_spans_the_second_half():
    samples = [Sample(at_s, A, 1, usage(20 + (at_s >= 75))) for at_s in range(0, 100, 5)]
    samples += [Sample(at_s, B, 2, usage(20 + 50 * (at_s >= 75))) for at_s in range(0, 100, 5)]
    samples += [Sample(at_s, C, 3, usage(20 + 900 * (at_s >= 75))) for at_s in range(70, 100, 5)]  # began later
    grown = growth(samples, 100.0)
    assert grown == {"descriptors": 50, "threads": 0, "files": 0, "temporary": 0, "resident_mib": 0}
    seen = observation()
    seen.seconds, seen.samples, seen.told[-1] = 40.0, [], told(3, "r3", 45)
    assert "descriptors_grown" not in {check.name for check in judge(seen, merge=False, quiet_per_s=None).checks}
    assert growth(samples[-6:], 100.0) == {}


def test_the_report_shows_rounds_faults_and_ends():
    seen = observation()
    seen.faults, seen.refusals = [(3.0, "2: SIGKILL")], [(4.0, "B: exit code 2: error[join]: nobody")]
    text = render_report("Soak: 4 islands", seen, judge(seen, merge=False, quiet_per_s=None))
    assert text.startswith("# Soak: 4 islands\n")
    assert "- 3.0 s: 2: SIGKILL" in text and "- 4.0 s: B: exit code 2" in text
    assert "| 0 | 9 | 1 |" in text and "soak.rounds_lost | 0 | ≤ 0 | holds" in text
