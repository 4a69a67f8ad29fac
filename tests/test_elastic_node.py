"""One node, input by input: what it says, what it makes durable first, and what it does not fall for."""

from dataclasses import replace

from nodes import OFFER, STATE, begin, options, proposal, said, those
from records import record

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import EMPTY, NO_BALLOT, Ballot, Head, Record


def node() -> Node:
    made = Node("B", STATE, options(), now=0.0, incarnation=1)
    made.know(["A", "B", "C"], 0.0)
    return made


def leader(roster: tuple[str, ...] = STATE.roster, **changes) -> Node:
    return Node("A", replace(STATE, roster=roster), options(**changes), now=0.0, incarnation=1)


def kinds(effects):
    """Of what is sent, and of what else is asked for."""
    return [type(effect.message) if isinstance(effect, msg.Send) else type(effect) for effect in effects]


def beat(head: Head = STATE.head, promise: Ballot = NO_BALLOT, digest: str = "") -> msg.Heartbeat:
    return msg.Heartbeat(head, promise, False, 1, digest)


def test_a_promise_is_durable_before_it_is_given():
    effects = node().receive("A", msg.Collect(STATE.head, 1), 0.1)
    assert kinds(effects)[:2] == [msg.Remember, msg.Promise]
    assert said(effects, msg.Promise)[0].term == 1


def test_a_coordinators_own_promise_is_durable_before_it_asks():
    asked = kinds(leader().tick(0.0))
    assert asked.index(msg.Remember) < asked.index(msg.Collect)


def test_terms_are_never_used_twice_not_even_after_a_restart_at_another_round():
    memory = those(leader().tick(0.0), msg.Remember)[-1].memory
    later = replace(STATE, head=Head(0, 1, "1" * 64))
    effects = Node("A", later, options(), now=9.0, incarnation=2, memory=memory).tick(9.0)
    assert {collect.term for collect in said(effects, msg.Collect)} == {memory.term + 1}


def test_less_than_promised_is_refused_and_said():
    member = node()
    member.receive("C", msg.Collect(STATE.head, 5), 0.1)
    refusal = said(member.receive("A", msg.Collect(STATE.head, 4), 0.2), msg.Nack)
    assert refusal and refusal[0].promise == Ballot(5, "C", 0)
    assert said(member.receive("A", begin(Ballot(4, "A", 0)), 0.3), msg.Nack)


def test_another_head_is_answered_with_ones_own():
    effects = node().receive("A", msg.Collect(Head(0, 0, "f" * 64), 1), 0.1)
    assert said(effects, msg.Heartbeat, to="A") and not said(effects, msg.Promise)


def test_done_is_durable_first_and_said_again():
    member = node()
    first = kinds(member.receive("A", begin(Ballot(1, "A", 0)), 0.1))
    assert first.index(msg.Remember) < first.index(msg.Done) and first.count(msg.Remember) == 2
    assert said(member.receive("A", begin(Ballot(1, "A", 0)), 0.6), msg.Done)


def test_a_failure_is_said_again_too():
    """Its report may have been lost with the connection, and the coordinator waits for nobody else."""
    member = node()
    member.offer(OFFER, 0.0)
    member.receive("A", msg.Collect(STATE.head, 1), 0.1)
    asked = begin(Ballot(1, "A", 0), "A", "B")
    assert those(member.receive("A", asked, 0.2), msg.Reduce)
    assert said(member.reduce_failed(asked.ballot, "A", "cannot be reached", 0.5), msg.Failed)
    assert said(member.receive("A", asked, 0.9), msg.Failed)


def test_an_offer_of_an_earlier_life_is_not_stood_by():
    refusal = said(node().receive("A", begin(Ballot(1, "A", 0), "A", "B"), 0.1), msg.Failed)
    assert refusal and refusal[0].blamed == "B"


def test_a_result_that_was_not_asked_for_is_not_adopted():
    coordinator = leader()
    coordinator.tick(0.0)
    assert coordinator.own.term is not None
    effects = coordinator.fetched(Record(proposal("C"), EMPTY), 0.1)
    assert coordinator.own.term.adopted is None and not said(effects, msg.Begin)


def test_who_slept_judges_nobody_whatever_comes_first():
    for wake in (
        lambda node: node.tick(60.0),
        lambda node: node.receive("C", msg.Commit(Record(proposal(), EMPTY)), 60.0),
        lambda node: node.reduced(Ballot(1, "A", 0), EMPTY, 60.0),
    ):
        coordinator = leader()
        coordinator.tick(0.0)
        effects = wake(coordinator)
        assert coordinator.liveness.alive(60.0) == {"B", "C"}
        assert coordinator.own.term is None, "it asks again"
        assert not those(effects, msg.Note | msg.Append)


def test_whoever_lives_and_does_not_answer_is_left_out_for_a_while_only():
    coordinator = leader()
    notes = []
    for tenth in range(60):
        now = tenth / 10
        for peer in ("B", "C"):
            coordinator.receive(peer, beat(), now)
        notes += [effect.peer for effect in those(coordinator.tick(now), msg.Note)]
    assert notes == ["B", "C"]
    assert not coordinator.peers.banned("B", 9.0)


def test_one_that_has_just_come_back_is_given_time_to_answer():
    coordinator = leader(partition="pause")
    for tenth in range(200):
        coordinator.tick(tenth / 10)
    coordinator.receive("B", beat(), 20.0)
    coordinator.tick(20.1)
    assert coordinator.liveness.alive(20.1) == {"B"}


def test_a_higher_promise_ends_a_term_and_the_next_is_above_it():
    coordinator = leader()
    coordinator.tick(0.0)
    coordinator.receive("B", beat(promise=Ballot(7, "C", 0)), 0.2)
    assert coordinator.own.term is None
    asked: set[int] = set()
    for tenth in range(3, 30):
        coordinator.receive("B", beat(promise=Ballot(7, "C", 0)), tenth / 10)
        asked |= {collect.term for collect in said(coordinator.tick(tenth / 10), msg.Collect)}
    assert min(asked) == 8


def test_a_greater_head_is_caught_up_with_and_a_lesser_one_is_not():
    member = node()
    greater = Head(10, 1, "f" * 64)
    assert [e.head for e in those(member.receive("A", beat(greater), 0.1), msg.CatchUp)] == [greater]
    assert not those(member.receive("C", beat(greater), 0.2), msg.CatchUp), "once at a time"
    for state in (replace(STATE, head=greater), STATE):
        member.caught_up(state, 0.5)
        assert member.state.head == greater


def test_a_commit_of_what_is_held_is_appended_and_other_bytes_are_fetched():
    member = node()
    member.receive("A", begin(Ballot(1, "A", 0)), 0.1)
    effects = member.receive("A", msg.Commit(Record(proposal(), EMPTY)), 0.2)
    assert [effect.record.payload for effect in those(effects, msg.Append)] == [EMPTY]
    assert those(node().receive("A", msg.Commit(Record(proposal("A"), "f" * 64)), 0.2), msg.CatchUp)


def test_a_ballot_that_cannot_be_right_bans_its_sender_by_name():
    for wrong in (
        begin(Ballot(1, "C", 0)),
        begin(Ballot(1, "A", 0), members=("A", "C")),
        replace(begin(Ballot(1, "A", 0)), proposal=replace(proposal(), key=STATE.key._replace(round=9))),
    ):
        member = node()
        effects = member.receive("A", wrong, 0.1)
        assert [effect.peer for effect in those(effects, msg.Note)] == ["A"]
        assert member.peers.banned("A", 1.0) and not said(effects, msg.Done)


def test_of_three_the_one_with_other_vectors_fetches_theirs():
    member = node()
    member.report_digest("mine", 0.1)
    assert not those(member.receive("A", beat(digest="theirs"), 0.2), msg.CatchUp)
    assert those(member.receive("C", beat(digest="theirs"), 0.2), msg.CatchUp), "they are a majority"
    assert member.own.diverged
    member = node()
    member.report_digest("mine", 0.1)
    member.receive("C", beat(digest="mine"), 0.2)
    assert not those(member.receive("A", beat(digest="theirs"), 0.3), msg.CatchUp)
    first = leader()
    first.report_digest("mine", 0.1)
    assert not those(first.receive("B", beat(digest="theirs"), 0.2), msg.CatchUp), "of two, the first"


def test_goodbye_is_quicker_than_silence():
    member = node()
    member.receive("A", beat(), 0.1)
    assert member.liveness.coordinator(0.2) == "A"
    member.receive("A", msg.Goodbye("leaves"), 0.2)
    assert member.liveness.coordinator(0.2) == "B"
    assert said(member.leave(0.3), msg.Goodbye)
    assert member.liveness.coordinator(0.3) == "C"


def test_adopting_fetches_from_the_holder():
    member = node()
    adopted = replace(begin(Ballot(2, "A", 0), "A"), adopted="f" * 64, holder="C")
    fetch = those(member.receive("A", adopted, 0.1), msg.FetchResult)
    assert fetch[0].holder == "C"
    assert said(member.fetch_failed("C", fetch[0].record, "gone", 0.2), msg.Failed)[0].blamed == "C"
    another = node()
    another.receive("A", adopted, 0.1)
    assert said(another.fetched(fetch[0].record, 0.3), msg.Done)


def test_a_greater_head_that_cannot_be_fetched_holds_a_round_up_only_so_long():
    coordinator = leader(("A", "B"))
    fetches, begun = 0, []
    for tenth in range(200):
        now = tenth / 10
        effects = coordinator.receive("B", beat(Head(10, 1, "f" * 64)), now) + coordinator.tick(now)
        if not tenth:
            effects += coordinator.offer(OFFER, now)
        for _ in those(effects, msg.CatchUp):
            fetches += 1
            effects += coordinator.catch_up_failed("B", now + 0.05)
        begun += [fetches for _ in those(effects, msg.Reduce)]
    assert begun[0] == 3
    assert fetches < 30, "and it is asked less and less"


def test_whoever_comes_back_waits_for_the_rest_of_the_roster_until_something_is_committed():
    """Silence is believed after 2 s here; the others may need longer to start again."""
    coordinator = leader(("A", "B"))
    coordinator.peers.expect(["A", "B"], 60.0)
    coordinator.tick(0.0)
    assert not said_or_begun(coordinator.offer(OFFER, 0.1))
    assert not any(said_or_begun(coordinator.tick(half / 2)) for half in range(1, 100))
    coordinator.caught_up(coordinator.state.after(record(coordinator.state)), 51.0)
    assert "B" not in coordinator.liveness.alive(54.0)


def said_or_begun(effects) -> list[object]:
    return [*those(effects, msg.Reduce | msg.Append), *said(effects, msg.Begin | msg.Commit)]


def test_who_pauses_neither_goes_on_alone_nor_says_anything():
    """Without that, the last of several islands that stop would commit a round without the others."""
    paused, going_on = leader(("A", "B")), leader(("A", "B"))
    for coordinator in (paused, going_on):
        coordinator.tick(0.0)
        coordinator.receive("B", msg.Promise(STATE.key, 1, 1, 0, None), 0.1)
    paused.pause(0.2)
    effects = [*paused.closed("B", 0.3), *paused.offer(OFFER, 0.4), *paused.tick(30.0)]
    effects += paused.receive("B", msg.Collect(STATE.head, 9), 31.0)
    assert set(kinds(effects)) <= {msg.Note}
    assert said_or_begun([*going_on.closed("B", 0.3), *going_on.offer(OFFER, 0.4)])  # as it would be


def test_a_member_that_was_never_heard_of_is_lost_without_a_word():
    """It stands in the roster of a state that others gave; here, nobody knows it."""
    alone = leader(("A",))
    alone.caught_up(replace(STATE, head=Head(10, 1, "1" * 64), roster=("A", "Z")), 0.1)
    effects = [effect for tick in range(1, 100) for effect in alone.tick(0.1 * tick)]
    effects += alone.offer(replace(OFFER, lo=0, hi=1), 10.0)
    for tick in range(100, 200):
        effects += alone.tick(0.1 * tick)
    assert those(effects, msg.Reduce)  # the round goes on
