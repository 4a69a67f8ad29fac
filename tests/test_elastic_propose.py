"""How a coordinator chooses: pure functions."""

from dataclasses import replace
from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st
from records import contribution, record

from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.messages import Failed, Held, Promise
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.proposer import (
    ABSENT_RECORDS,
    culprits,
    deadline,
    outsize,
    propose,
    together,
    weigh,
    without_the_absent,
)
from diloco.elastic.protocol.protocol_state import Term
from diloco.elastic.protocol.record import EMPTY, Ballot, Head, Key, Offer, Proposal, Record, Settings, quorum, voters
from diloco.elastic.protocol.state import RunState

STATE = RunState(Head(0, 0, "0" * 64), ("A", "B", "C"), Ledger(epoch=1000))


def offer(tokens: int = 10, lo: int = 0, hi: int = 1) -> Offer:
    return Offer(0, lo, hi, tokens, (), incarnation=1)


def decide(state, fragment, contributions):
    return Settings(lr=0.5), state.step + 1


def test_the_deadline_is_a_multiple_of_what_half_needed():
    assert deadline(100.0, [110.0], 4, 1.5) is None
    assert deadline(100.0, [130.0, 110.0], 4, 1.5) == 145.0
    assert deadline(100.0, [110.0], 2, 1.5) == 115.0
    assert deadline(100.0, [90.0], 1, 1.5) == 100.0, "ready before the last commit: late progress"
    assert deadline(100.0, [], 0, 1.5) is None


def test_late_progress_is_not_kept_waiting_by_a_coordinator_that_has_led_nothing_yet():
    """It has seen the rounds that another one has led."""
    node = Node("B", STATE, Options(decide, straggler=1.5), now=0.0, incarnation=1)
    for number in (1, 2):
        node.member.append(record(node.state, contribution("A", number - 1, number)), 10.0 * number)
    proposer, term = node._coordinator.proposer, Term(1, "B")
    term.answers = {peer: Promise(node.state.key, 1, 1, 0, None) for peer in STATE.roster}
    late = {"B": replace(offer(), late=True)}
    assert not proposer._is_time(term, late, late, 49.0), "A and C train"
    assert proposer._is_time(term, late, late, 51.0), "but may never be ready"


def test_weights_are_capped_at_twice_the_median():
    assert weigh({"A": offer(10), "B": offer(12), "C": offer(900)}) == {"A": 10, "B": 12, "C": 24}
    assert weigh({"A": offer(0)}) == {"A": 1}


def test_a_quorum_is_a_majority_or_of_an_even_roster_the_half_with_the_first_member():
    assert all(quorum(tuple("ABCDE"), present) for present in ("ABC", "BCD"))
    assert not any(quorum(tuple("ABCDE"), present) for present in ("AB", "CD", "AD", "", "XYZ"))
    assert quorum(tuple("ABCD"), "AC") and not quorum(tuple("ABCD"), "BC")


def test_of_more_than_64_members_the_first_32_vote():
    names = tuple(f"{number:02}" for number in range(65))
    assert voters(names[:64]) == names[:64] and voters(names) == names[:32]
    assert quorum(names, names[:16]) and quorum(names, names[15:32]) and not quorum(names, names[16:])
    assert not quorum(names[:64], names[:31]), "of 64, all vote"


@given(st.integers(1, 8).flatmap(lambda n: st.lists(st.sampled_from("ABCDEFGH"[:n]), min_size=1, unique=True)))
def test_two_quorums_always_share_a_member(roster):
    parts = chain.from_iterable(combinations(roster, size) for size in range(len(roster) + 1))
    quorums = [set(some) for some in parts if quorum(tuple(roster), some)]
    assert all(one & other for one in quorums for other in quorums)


members = st.sets(st.sampled_from("ABCDEF"), min_size=1)
some_pairs = st.lists(st.sets(st.sampled_from("ABCDEF"), min_size=2, max_size=2).map(frozenset), max_size=6)


@given(some_pairs, members)
def test_those_kept_reach_each_other_and_everybody_has_a_turn_who_reaches_anybody(pairs, members):
    turns = [set(together(pairs, members, turn)) for turn in range(len(members))]
    for kept in turns:
        assert not any(pair <= kept for pair in pairs)
        for left_out in members - kept:
            assert any(left_out in pair and pair & kept for pair in pairs), "nobody is left out without need"
    reached = {one for one in members for other in members - {one} if frozenset((one, other)) not in pairs}
    assert set().union(*turns) >= reached


@given(st.sets(st.sampled_from("ABCDEF"), min_size=3), st.integers(0, 9))
def test_nobody_is_alone_because_it_accused_all_others_nor_because_all_others_accused_it(members, turn):
    one, *others = sorted(members)
    pairs = [frozenset((one, other)) for other in others]
    assert set(together(pairs, members, turn)) == set(others)
    assert set(together(pairs, members, turn, dict.fromkeys(pairs, one))) == set(others)
    assert set(together(pairs, members, turn, dict(zip(pairs, others, strict=True)))) == set(others)
    assert together(pairs[:1], {one, others[0]}, turn, {pairs[0]: one}) == [others[0]]


def failed(blamed: str) -> Failed:
    return Failed(STATE.key, Ballot(1, "A", 0), blamed, "cannot be reached")


def test_those_who_accuse_each_other_are_the_pair():
    assert culprits([("A", failed("B")), ("C", failed("D")), ("D", failed("C"))]) == ("C", "D")
    assert culprits([("B", failed("")), ("A", failed("B"))]) == ("A", "B")
    assert culprits([("B", failed("B")), ("C", failed(""))]) is None, "who blames itself is no pair"


def test_a_proposal_admits_releases_and_leases():
    before, _ = STATE.ledger.grant("A#1", 8)
    before, _ = before.grant("B#1", 8)
    state = RunState(STATE.head, STATE.roster, before)
    alive, wants = {"A": 1, "C": 1, "D": 3}, {"A": 8, "D": 6}
    proposal = propose(state, 0, {"D": offer(), "A": offer()}, alive, wants, decide)
    assert proposal.roster == ("A", "C", "D"), "B is gone, D is new; C is alive without a contribution"
    assert proposal.islands == ("A", "D")
    assert proposal.releases == ("B#1",)
    assert [(grant.holder, grant.samples) for grant in proposal.grants] == [("D#3", ((16, 22),))]
    assert proposal.settings.lr == 0.5
    state.after(Record(proposal, EMPTY))  # and it can follow


def absent(*names: str, roster: str = "ABCDE", records: int = ABSENT_RECORDS - 1) -> RunState:
    return replace(STATE, roster=tuple(roster), absent=tuple((name, records) for name in names))


def test_with_a_quorum_silence_takes_three_records_to_leave_the_roster():
    assert without_the_absent(absent("E", records=1), "ABCD", (), 3) == tuple("ABCDE")
    assert without_the_absent(absent("E"), "ABCD", (), 3) == tuple("ABCD")
    assert without_the_absent(absent("E"), "ABCDE", (), 3) == tuple("ABCDE"), "it has answered"


def test_silence_alone_never_makes_the_roster_smaller_than_the_floor():
    assert without_the_absent(absent(*"BCDE"), "A", (), 3) == tuple("ABC"), "the last of the roster go first"
    assert without_the_absent(absent(*"BC", roster="ABC"), "A", (), 3) == tuple("ABC")
    assert without_the_absent(absent(*"BC", roster="ABC"), "A", (), 1) == ("A",)


def test_a_goodbye_makes_the_roster_smaller_than_the_floor():
    assert without_the_absent(absent(roster="ABC"), "AB", {"C"}, 3) == ("A", "B")
    assert without_the_absent(absent("B", roster="ABC"), "A", {"C"}, 3) == ("A", "B")


def test_a_roster_that_is_given_stays_whoever_lives():
    proposal = propose(STATE, 0, {"D": offer(), "A": offer()}, {"A": 1, "D": 1}, {}, decide, roster=("A", "B"))
    assert proposal.roster == ("A", "B", "D")


def test_a_witness_enters_without_a_contribution():
    proposal = propose(STATE, 0, {"A": offer()}, {"A": 1, "W": 1}, {}, decide, witnesses=("W",))
    assert proposal.roster == ("A", "W") and proposal.witnesses == ("W",) and proposal.islands == ("A",)


def test_without_offers_nothing_but_admission():
    proposal = propose(STATE, 0, {}, {"A": 1}, {"A": 4}, decide)
    assert proposal.fragment == -1 and proposal.contributions == ()
    assert proposal.grants[0].samples == ((0, 4),)


def test_the_result_of_the_highest_ballot_is_adopted():
    def promise(ballot: Ballot | None) -> Promise:
        proposal = Proposal(Key(1, "p"), -1, (), (), (), (), Settings(), 0)
        held = Held(ballot, Record(proposal, EMPTY)) if ballot else None
        return Promise(STATE.key, 9, 1, 0, held)

    answers = {"A": promise(Ballot(1, "Z", 7)), "B": promise(Ballot(2, "A", 0)), "C": promise(None), "D": None}
    found = Term(9, "A", answers=answers).highest_held()
    assert found is not None and found[0] == "B"
    assert Term(9, "A", answers={"C": promise(None), "D": None}).highest_held() is None
    own_attempt = answers | {"E": promise(Ballot(9, "A", 0))}
    assert Term(9, "A", answers=own_attempt).highest_held() == found, "only A itself can have committed that one"


def test_an_island_that_has_diverged_is_outsize():
    offers = {name: replace(Offer(0, 0, 1, 10, ()), norm=norm) for name, norm in (("A", 1.0), ("B", 2.0), ("C", 500.0))}
    assert outsize(offers) == ["C"]
    assert outsize({name: offers[name] for name in "AC"}) == []  # of two, who is to say
    assert outsize({name: replace(offer, norm=0.0) for name, offer in offers.items()}) == []
