"""For whom a coordinator holds a round back, and how often."""

from dataclasses import replace
from itertools import pairwise

from nodes import STATE, beat, options

from diloco.elastic.protocol.holding import EVERY, LONGEST_INTERVAL, SHARE
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import Head

ROUND_S = 10.0
READY = ("A", "B")


class Rounds:
    """Rounds of ten seconds that A leads, with B and, behind, C."""

    def __init__(self, round_s: float = ROUND_S, rounds_behind: int = 0, **behind):
        self.round_s, self.rounds_behind = round_s, rounds_behind
        self.node = Node("A", STATE, options(), now=0.0, incarnation=1)
        self.holding = self.node._coordinator.proposer.holding
        self.now, self.round, self.behind = 0.0, 0, behind
        for _ in range(4):
            self.commit()

    def commit(self, *contributors: str) -> None:
        self.now, self.round = self.now + self.round_s, self.round + 1
        own = self.node.own
        own.state = replace(STATE, head=Head(10 * self.round, self.round, f"{self.round:064}"), updates=self.round)
        own.last_contributors = frozenset(READY)
        self.holding.committed(contributors or READY, self.now)
        self.hear()

    def hear(self) -> None:
        head = self.node.state.head
        before = head._replace(round=max(0, head.round - self.rounds_behind))
        for peer, seen in (("B", head), ("C", before)):
            self.node.receive(peer, beat(seen, sequence=int(self.now * 100), **self.behind), self.now)

    def holds(self, *ready: str) -> bool:
        return self.holding.holds(ready or READY, self.now)

    def holds_in_vain(self) -> bool:
        """Wait as long as it holds the round back, which is at most a round."""
        held = again = self.holds()
        while again:
            self.now += ROUND_S / 10
            self.hear()
            again = self.holds()
        return held


def held_in_vain(rounds: Rounds, count: int) -> list[int]:
    held = []
    for _ in range(count):
        if rounds.holds_in_vain():
            held.append(rounds.round)
        rounds.commit()
    return held


def test_a_round_waits_for_one_that_is_nearly_there():
    rounds = Rounds(behind_s=3.0)
    held = next(number for number in range(20) if rounds.holds() or rounds.commit())
    assert held is not None and rounds.holds(), "it goes on waiting"
    assert not rounds.holds("A", "B", "C"), "until it is ready"
    assert rounds.holds(), "though it was given samples only"
    rounds.commit("A", "B", "C")
    assert not rounds.holds(), "and once it has contributed, not again so soon"


def test_who_comes_in_time_for_the_next_round_is_not_waited_for_in_this_one():
    rounds = Rounds(behind_s=0.0)
    assert not rounds.holds(), "it is at the head, and has missed nothing"
    rounds.commit()
    assert rounds.holds(), "now a round has passed it over"


def test_who_needs_most_of_a_round_to_fetch_one_is_waited_for_at_once():
    rounds = Rounds(behind_s=0.0)
    rounds.node.peers.views["C"].caught_up_in_s = 0.6 * ROUND_S
    assert rounds.holds(), "passed over, it would need most of the next round again"


def test_who_was_in_a_round_and_came_again_is_as_new():
    rounds = Rounds(behind_s=0.0)
    assert not rounds.holds()
    rounds.commit()
    assert not rounds.holds(*READY, "C")
    assert not rounds.holds()


def test_nobody_is_waited_for_who_needs_longer_than_a_round():
    assert held_in_vain(Rounds(behind_s=ROUND_S + 1), 40) == []


def test_of_rounds_shorter_than_a_heartbeat_those_that_were_not_told_of_yet_do_not_count():
    assert held_in_vain(Rounds(0.1, rounds_behind=5), 100), "what C had when it last spoke, 0.4 s ago"
    assert not any(held > 8 for held in held_in_vain(Rounds(0.1, rounds_behind=8), 100))
    assert held_in_vain(Rounds(10.0, rounds_behind=3), 40) == []


def test_who_was_waited_for_in_vain_with_one_fragment_may_have_work_of_another():
    rounds = Rounds(behind_s=3.0)
    rounds.node.own.options = options(fragments=2)
    held = held_in_vain(rounds, 400)
    of_0, of_1 = ([number for number in held if number % 2 == fragment] for fragment in (0, 1))
    assert min(len(of_0), len(of_1)) > 2, "that it has nothing for one says nothing of the other"
    gaps = [later - earlier for earlier, later in pairwise(of_1)]
    assert gaps == sorted(gaps) and gaps[-1] > EVERY


def test_without_the_rule_nobody_is_waited_for():
    rounds = Rounds(behind_s=3.0)
    rounds.node.own.rules = replace(rounds.node.own.rules, nobody_starves=False)
    assert held_in_vain(rounds, 40) == []


def test_those_who_contributed_are_not_waited_for():
    rounds = Rounds()
    rounds.node.own.last_contributors = frozenset("ABC")
    assert not rounds.holds()


def test_who_is_waited_for_in_vain_is_waited_for_half_as_often_after_each_two_times():
    held = held_in_vain(Rounds(behind_s=3.0), 1500)
    gaps = [later - earlier for earlier, later in pairwise(held)]
    assert gaps[0] < EVERY, "the second time may come soon: the first may have brought it samples only"
    assert min(gaps[1:]) >= EVERY and gaps == sorted(gaps)
    assert gaps[-1] >= LONGEST_INTERVAL
    assert {gap for gap in gaps if gap >= 32} <= {32, 64, 128, 256}


def test_all_waiting_together_takes_a_tenth_of_the_time():
    rounds = Rounds(behind_s=3.0)
    spent = 0.0
    for _ in range(300):
        before = rounds.now
        rounds.holding._intervals.clear()  # as if each time it were another island
        rounds.holding._failures.clear()
        rounds.holds_in_vain()
        spent += rounds.now - before
        rounds.commit()
    assert 0 < spent <= SHARE * rounds.now + ROUND_S
