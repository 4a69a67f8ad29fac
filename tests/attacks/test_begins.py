"""A *begin* with invented settings, length or roster, of the coordinator or of somebody else: nobody takes part."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from islands import agree, at_round, team, wait_for
from liars import Liar
from nodes import OFFER, STATE, beat, options, proposal, said

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import Ballot, Head, Key, Proposal, Settings
from diloco.elastic.protocol.wire import encode_message

Change = Callable[[Proposal], Proposal]


def with_weight(proposal: Proposal, weight: int) -> Proposal:
    first, *others = proposal.contributions
    return replace(proposal, contributions=(replace(first, weight=weight), *others))


INVENTED: dict[str, tuple[Change, str]] = {
    "another learning rate": (lambda p: replace(p, settings=Settings(lr=1.0)), "settings that are not the run's"),
    "a scalar that is off by more than libm": (lambda p: replace(p, settings=Settings(eps=1e-11)), "settings"),
    "another codec": (lambda p: replace(p, settings=Settings(codec="fp32")), "settings that are not the run's"),
    "the end of the run": (lambda p: replace(p, step=10**9), "where 0 is next"),
    "a weight": (lambda p: with_weight(p, 11), "weights that do not follow"),
    "no weight": (lambda p: with_weight(p, 0), "weights that do not follow"),
    "a stranger": (lambda p: replace(p, roster=(*p.roster, "Z")), "a roster that does not follow"),
    "another order": (lambda p: replace(p, roster=p.roster[::-1]), "a roster that does not follow"),
    "somebody twice": (lambda p: replace(p, roster=(*p.roster, "A")), "a roster that does not follow"),
    "a contribution twice": (lambda p: replace(p, contributions=p.contributions * 2), "cannot be right"),
    "a roster without its receiver": (lambda p: replace(p, roster=("A", "C"), contributions=()), "without B"),
    "its receiver as silent": (lambda p: replace(p, answered=("A", "C")), "B as silent"),
    "a release of nothing": (lambda p: replace(p, releases=("C#1",)), "releases of leases that nobody has"),
}


def member() -> Node:
    """B, which follows A, has offered, and has promised A its first term."""
    made = Node("B", STATE, options(), now=0.0, incarnation=1)
    for peer in ("A", "C"):
        made.receive(peer, beat(), 0.0)
    made.offer(OFFER, 0.0)
    made.receive("A", msg.Collect(STATE.head, 1), 0.1)
    return made


def begun(ballot: Ballot, change: Change = lambda honest: honest) -> msg.Begin:
    made = change(proposal("A", "B"))
    made = made if made.contributions else replace(made, fragment=-1)
    return msg.Begin(STATE.key, ballot, made, made.islands or ("A", "B"), (1,) * len(made.islands))


def test_what_follows_from_the_state_is_taken_part_in():
    assert said(member().receive("A", begun(Ballot(1, "A", 0)), 0.2), msg.Begun)


@pytest.mark.parametrize(("change", "reason"), INVENTED.values(), ids=INVENTED)
def test_what_does_not_is_refused_by_name(change, reason):
    island = member()
    effects = island.receive("A", begun(Ballot(1, "A", 0), change), 0.2)
    assert not said(effects, msg.Begun) and island.own.current is None
    (note,) = (effect for effect in effects if isinstance(effect, msg.Note))
    assert (note.kind, note.peer) == ("excluded", "A") and reason in note.text
    assert not island.peers.banned("A", 100.0), "patience comes back"


def test_the_last_bits_of_a_scalar_may_differ():
    island, exact = member(), options()
    near = replace(exact, decide=lambda state, *_: (Settings(lr=0.7 * (1 + 1e-15)), state.step))
    island.own.options = near
    assert said(island.receive("A", begun(Ballot(1, "A", 0), lambda p: replace(p, settings=Settings(lr=0.7))), 0.2))
    assert island.own.current is not None


def test_one_that_is_not_followed_begins_nothing():
    island = member()
    honest = msg.Begin(STATE.key, Ballot(9, "C", 0), proposal("B", "C"), ("B", "C"), (1, 1))
    assert not said(island.receive("C", honest, 0.2), msg.Begun) and island.own.current is None


def test_a_member_that_is_heard_is_not_said_to_have_gone():
    """Its goodbye may be on its way: nobody is excluded for that."""
    island = Node("B", STATE, options(partition="quorum"), now=0.0, incarnation=1)
    for peer in ("A", "C"):
        island.receive(peer, beat(), 0.0)
    island.offer(OFFER, 0.0)
    island.receive("A", msg.Collect(STATE.head, 1), 0.1)
    without = begun(Ballot(1, "A", 0), lambda p: replace(p, roster=("A", "B")))
    assert not said(island.receive("A", without, 0.2), msg.Begun) and not island.peers.banned("A", 0.2)
    island.receive("C", msg.Goodbye(), 0.3)
    assert said(island.receive("A", without, 0.4), msg.Begun)


LIES: dict[str, Callable[[Head, int], msg.Message]] = {
    "settings": lambda head, step: _begin(head, step + 1, ("A", "B", "C", "D"), Settings(1e30, 0.9, "int8")),
    "length": lambda head, step: _begin(head, 10**9, ("A", "B", "C", "D"), Settings(0.7, 0.9, "int8")),
    "roster": lambda head, step: _begin(head, step, ("Z",), Settings(0.7, 0.9, "int8")),
    "a term of its own": lambda head, step: msg.Collect(head, 500),
}


def _begin(head: Head, step: int, roster: tuple[str, ...], settings: Settings) -> msg.Begin:
    key = Key(head.round + 1, head.digest)
    members = ("A", "B", "C", "D", "Z")
    return msg.Begin(key, Ballot(1000, "Z", 0), Proposal(key, -1, (), roster, (), (), settings, step), members, ())


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_peer_that_leads_nobody_changes_nothing(lie):
    with team(silence_s=1.0) as (network, islands):
        at_round(islands, 2)
        liar = Liar(network, islands)
        last = max(island.state.head.round for island in islands)

        def goes_on() -> bool:
            liar.say(encode_message(lie(islands[0].state.head, islands[0].state.step)))
            return min(island.state.head.round for island in islands) > last + 10

        wait_for(goes_on, islands)
        assert all(record.proposal.settings.lr <= 1 for record in islands[0].session.records())
        assert islands[0].state.step < 10**6 and "A" in islands[0].state.roster
        agree(islands)
