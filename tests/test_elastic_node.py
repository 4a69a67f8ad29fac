"""One node, input by input: what it says, what it makes durable first, and what it does not fall for."""

from dataclasses import replace

from nodes import OFFER, STATE, beat, begin, commit, from_disk, options, proposal, said, those

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import EMPTY, Ballot, Head, Key, Latch, Phases, Record
from diloco.simulate.virtual.world import owner


def node() -> Node:
    """B, which has heard A and C and is heard by them."""
    made = Node("B", STATE, options(), now=0.0, incarnation=1)
    for peer in ("A", "C"):
        made.receive(peer, beat(), 0.0)
    return made


def leader(roster: tuple[str, ...] = STATE.roster, **changes) -> Node:
    """A, which the others hear and follow."""
    made = Node("A", replace(STATE, roster=roster), options(**changes), now=0.0, incarnation=1)
    for peer in roster[1:]:
        made.receive(peer, beat(), 0.0)
    return made


def kinds(effects):
    """Of what is sent, and of what else is asked for."""
    return [type(effect.message) if isinstance(effect, msg.Send) else type(effect) for effect in effects]


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
    back = Node("A", later, options(), now=9.0, incarnation=2, memory=memory)
    asked: set[int] = set()
    for tenth in range(91, 130):
        for peer in ("B", "C"):
            back.receive(peer, beat(later.head), tenth / 10)
        asked |= {collect.term for collect in said(back.tick(tenth / 10), msg.Collect)}
    assert asked == {memory.term + 1}


def test_less_than_promised_is_refused_and_said():
    member = node()
    member.receive("A", msg.Collect(STATE.head, 5), 0.1)
    refusal = said(member.receive("C", msg.Collect(STATE.head, 4), 0.2), msg.Nack)
    assert refusal and refusal[0].promise == Ballot(5, "A", 0)
    assert said(member.receive("C", begin(Ballot(4, "C", 0)), 0.3), msg.Nack)


def test_nobody_promises_to_one_it_does_not_follow():
    """And it says whom it follows: who asks would otherwise take it for mute."""
    answer = said(node().receive("C", msg.Collect(STATE.head, 5), 0.1))
    assert answer == [msg.Follows(STATE.key, 5, "A")]
    unheard = Node("B", STATE, options(), now=0.0, incarnation=1)
    assert said(unheard.receive("A", msg.Collect(STATE.head, 5), 0.1), msg.Follows), "it has not said that it hears B"


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


def test_another_attempt_names_the_members_of_the_first_by_whose_spans_pages_are_kept():
    coordinator, member = leader(), node()
    for peer in ("B", "C"):
        coordinator.receive(peer, beat(sequence=2, roster_of=STATE.head.digest), 0.0)
    member.receive("A", beat(sequence=2, roster_of=STATE.head.digest), 0.0)
    begun = coordinator.offer(OFFER, 0.0) + coordinator.tick(0.0)
    for peer in ("B", "C"):
        begun += coordinator.receive(peer, msg.Promise(STATE.key, 1, 1, 0, None), 0.1)
        begun += coordinator.receive(peer, msg.Ready(STATE.key, 1, (OFFER,), 7), 0.1)
    (first,) = set(said([*begun, *coordinator.tick(0.2)], msg.Begin))
    assert first.first == () and first.members == ("A", "B", "C")
    member.offer(OFFER, 0.0)
    member.receive("A", msg.Collect(STATE.head, 1), 0.1)
    member.receive("A", first, 0.2)
    again = [effect for tenth in range(3, 10) for effect in coordinator.closed("C", tenth / 10)]
    (second,) = {send for send in said([*again, *coordinator.tick(1.0)], msg.Begin) if send.ballot != first.ballot}
    assert second.members == ("A", "B") and second.first == (("A", 0), ("B", 7), ("C", 7))
    assert member.own.tried == first, "who takes over knows of it, too"


def test_spans_that_cannot_be_right_are_not_taken_part_in():
    for first in ((("A", -1), ("B", 1)), tuple((f"island {number}", 1) for number in range(1025))):
        member = node()
        member.offer(OFFER, 0.0)
        member.receive("A", msg.Collect(STATE.head, 1), 0.1)
        wrong = replace(begin(Ballot(1, "A", 0), "A", "B"), first=first)
        assert not those(member.receive("A", wrong, 0.2), msg.Reduce) and member.peers.banned("A", 1.0)


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
        lambda node: node.receive("C", commit(), 60.0),
        lambda node: node.reduced(Ballot(1, "A", 0), EMPTY, 60.0),
    ):
        coordinator = leader()
        coordinator.tick(0.0)
        effects = wake(coordinator)
        assert coordinator.liveness.alive(60.0) == {"B", "C"}
        assert coordinator.own.term is None, "it asks again"
        assert not those(effects, msg.Note | msg.Append)


def left_out(coordinator: Node, seconds: int, **write_s: float) -> list[str]:
    """Whom a coordinator leaves out, whose own disk takes no time, if B and C only show that they live."""
    notes = []
    for tenth in range(10 * seconds):
        now = tenth / 10
        for peer in ("B", "C"):
            coordinator.receive(peer, beat(write_s=write_s.get(peer, 0.0)), now)
        effects = coordinator.tick(now)
        for _ in those(effects, msg.Remember):
            coordinator.remembered(now)
        notes += [effect.peer for effect in those(effects, msg.Note)]
    return notes


def test_whoever_lives_and_does_not_answer_is_left_out_for_a_while_only():
    coordinator = leader()
    assert left_out(coordinator, 6) == ["B", "C"]
    assert not coordinator.peers.banned("B", 9.0)


def test_a_slow_disk_is_given_the_time_that_it_takes():
    assert left_out(leader(), 6, C=3.0) == ["B"]
    assert left_out(leader(), 30, B=1e9, C=1e9) == []
    coordinator = leader()
    assert left_out(coordinator, 40, B=1e9, C=1e9) == ["B", "C"], "but not for ever"
    assert coordinator.own.write_s("B") == 0.0, "and what it says of its disk is not believed until it has answered"
    coordinator.receive("B", msg.Promise(STATE.key, coordinator.own.term.number, 1, 0, None), 50.0)
    coordinator.receive("B", beat(sequence=9, write_s=-5.0), 50.0)
    assert coordinator.own.write_s("B") == 0.0
    coordinator.receive("B", beat(sequence=10, write_s=5.0), 50.0)
    assert coordinator.own.write_s("B") == 5.0


def test_heartbeats_say_what_the_disk_takes_the_write_under_way_included():
    member = node()
    member.tick(1.0)
    member.receive("A", msg.Collect(STATE.head, 1), 1.0)
    assert said(member.tick(4.0), msg.Heartbeat)[0].write_s == 3.0
    member.remembered(6.0)
    assert {beat.write_s for second in range(7, 12) for beat in said(member.tick(second), msg.Heartbeat)} == {5.0}


def test_an_attempt_whose_coordinator_has_given_it_up_is_not_followed_any_more():
    member = node()
    member.own.promise = Ballot(3, "C", 0)
    member.receive("C", begin(Ballot(3, "C", 0), members=("B", "C")), 0.4)
    assert member.leading.coordinator(0.4) == "C", "it takes part"
    member.receive("C", beat(sequence=2, leading=True), 0.5)
    assert member.leading.coordinator(0.5) == "C"
    member.receive("C", beat(sequence=3), 0.6)
    assert member.leading.coordinator(0.6) == "A"


def committed_early() -> tuple[Node, Record]:
    """B, whose all-reduce is under way when A says that its result is committed."""
    member, attempt = node(), begin(Ballot(1, "A", 0), "A", "B")
    member.offer(OFFER, 0.1)
    member.receive("A", msg.Collect(STATE.head, 1), 0.1)
    assert those(member.receive("A", attempt, 0.2), msg.Reduce)
    record = Record(attempt.proposal, "r" * 64)
    effects = member.receive("A", commit(record), 1.0)
    effects += member.receive("A", beat(STATE.head_after(record), sequence=2), 1.2)
    assert not those(effects, msg.CatchUp), "what it is about to have is not fetched"
    return member, record


def test_a_result_that_was_committed_before_it_was_here_is_appended_when_it_is():
    member, record = committed_early()
    effects = member.reduced(Ballot(1, "A", 0), record.payload, 1.5)
    assert [append.record for append in those(effects, msg.Append)] == [record]
    assert those(effects, msg.Append)[0].stored_by == ("A", "B")


def test_a_result_that_another_than_the_coordinator_says_is_committed_is_held_and_confirmed():
    member, attempt = node(), begin(Ballot(1, "A", 0), "A", "B")
    member.offer(OFFER, 0.1)
    member.receive("A", msg.Collect(STATE.head, 1), 0.1)
    member.receive("A", attempt, 0.2)
    member.receive("C", commit(Record(proposal(), EMPTY)), 0.3)
    effects = member.reduced(Ballot(1, "A", 0), "r" * 64, 0.4)
    assert said(effects, msg.Done, to="A") and not those(effects, msg.Append)


def test_a_result_that_was_committed_and_never_comes_is_fetched():
    member, record = committed_early()
    assert those(member.reduce_failed(Ballot(1, "A", 0), "C", "gone", 1.5), msg.CatchUp)
    for wrong in (False, True):
        member, record = committed_early()
        if wrong:
            assert those(member.reduced(Ballot(1, "A", 0), "w" * 64, 1.5), msg.CatchUp)
        else:
            assert those(member.receive("A", beat(STATE.head_after(record), sequence=3), 9.0), msg.CatchUp)


def test_a_coordinator_that_has_waited_in_vain_for_a_confirmation_begins_again_without():
    coordinator = leader(partition="quorum")
    asked: list[msg.Begin] = []
    for tenth in range(120):
        now = tenth / 10
        for peer in ("B", "C"):
            coordinator.receive(peer, beat(sequence=tenth + 1), now)
        effects = coordinator.tick(now)
        for collect in said(effects, msg.Collect, to="B"):
            for peer in ("B", "C"):
                promise = msg.Promise(STATE.key, collect.term, 1, 8, None)
                effects += coordinator.receive(peer, promise, now)
        for attempt in said(effects, msg.Begin, to="B"):  # C says nothing more
            done = msg.Done(STATE.key, attempt.ballot, EMPTY)
            effects += coordinator.receive("B", done, now) + from_disk(coordinator, effects, now)
        for _ in those(effects, msg.Remember):
            coordinator.remembered(now)
        asked += said(effects, msg.Begin)
        if those(effects, msg.Append):
            return
    raise AssertionError(asked[-1])


def test_one_that_has_just_come_back_is_given_time_to_answer():
    coordinator = leader(partition="quorum")
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
    effects = member.receive("A", commit(), 0.2)
    assert [effect.record.payload for effect in those(effects, msg.Append)] == [EMPTY]
    assert those(node().receive("A", commit(Record(proposal("A"), "f" * 64)), 0.2), msg.CatchUp)


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
    assert not those(member.receive("A", beat(state_digest="theirs"), 0.2), msg.CatchUp)
    assert those(member.receive("C", beat(state_digest="theirs"), 0.2), msg.CatchUp), "they are a majority"
    assert member.own.diverged
    member = node()
    member.report_digest("mine", 0.1)
    member.receive("C", beat(state_digest="mine"), 0.2)
    assert not those(member.receive("A", beat(state_digest="theirs"), 0.3), msg.CatchUp)
    first = leader()
    first.report_digest("mine", 0.1)
    assert not those(first.receive("B", beat(state_digest="theirs"), 0.2), msg.CatchUp), "of two, the first"


def test_goodbye_is_quicker_than_silence():
    member = node()
    member.receive("A", beat(), 0.1)
    assert member.leading.coordinator(0.2) == "A"
    member.receive("A", msg.Goodbye("leaves"), 0.2)
    member.receive("C", beat(hears=(1, 2)), 0.2)
    assert member.leading.coordinator(0.2) == "B"
    assert said(member.leave(0.3), msg.Goodbye)
    assert member.leading.coordinator(0.3) == "C"


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


def back(**changes) -> Node:
    """A after a restart, at round 1 of a run of A and B."""
    state = replace(STATE, head=Head(10, 1, "1" * 64), roster=("A", "B"))
    made = Node("A", state, options(**changes), now=0.0, incarnation=2)
    made.offer(replace(OFFER, incarnation=2), 0.0)
    return made


def test_whoever_comes_back_looks_for_its_roster_before_it_goes_on_alone():
    """Silence is believed after 2 s here; the others may need longer to start again."""
    coordinator = back(rejoin_s=60.0)
    assert not any(said_or_begun(coordinator.tick(half / 2)) for half in range(1, 120))
    effects = [effect for half in range(120, 124) for effect in coordinator.tick(half / 2)]
    assert those(effects, msg.Reduce) and [note.peer for note in those(effects, msg.Note)] == ["B"]


def test_where_a_quorum_decides_it_looks_for_ever():
    state = replace(STATE, head=Head(10, 1, "1" * 64))
    lonely = Node("A", state, options(partition="quorum"), now=0.0, incarnation=2)
    lonely.offer(replace(OFFER, incarnation=2), 0.0)
    assert not any(said_or_begun(lonely.tick(half / 2)) for half in range(1, 400))


def test_an_address_of_long_ago_tells_nothing():
    coordinator = back(rejoin_s=1.0)
    coordinator.closed("B", 0.1)
    assert coordinator.liveness.alive(0.1) == {"B"}
    coordinator.receive("B", beat(coordinator.state.head), 0.2)
    coordinator.closed("B", 0.3)
    assert coordinator.liveness.alive(0.3) == set()


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


def alone_at_the_end() -> tuple[Node, list[msg.Effect]]:
    """A, which has just reduced the first round of a run of its own, and what follows from that."""
    made = leader(("A",))
    made.tick(0.0)
    (reduce,) = those(made.offer(OFFER, 0.1), msg.Reduce)
    return made, made.reduced(reduce.begin.ballot, "f" * 64, 0.2)


def test_a_coordinators_own_done_comes_back_from_its_disk():
    coordinator, effects = alone_at_the_end()
    asked = kinds(effects)
    assert asked.index(msg.Remember) < asked.index(msg.Done) and not those(effects, msg.Append)
    (append,) = those(from_disk(coordinator, effects, 0.3), msg.Append)
    assert append.stored_by == ("A",)
    assert append.phases == Phases(collect_ms=100, exchange_ms=200)


def test_a_head_is_told_when_it_is_durable():
    coordinator, effects = alone_at_the_end()
    from_disk(coordinator, effects, 0.3)
    coordinator.know(["B"], 0.3)
    before = [told.head for told in said(coordinator.tick(0.8), msg.Heartbeat, to="B")]
    after = [told.head for told in said(coordinator.stored(coordinator.state.head, 0.9), msg.Heartbeat, to="B")]
    assert set(before) == {STATE.head} and set(after) == {coordinator.state.head}


def test_a_very_late_heartbeat_changes_nothing():
    member = node()
    member.receive("A", beat(promise=Ballot(3, "A", 0), sequence=9), 0.1)
    member.receive("A", beat(Head(99, 9, "9" * 64), sequence=8), 0.2)
    view = member.peers.views["A"]
    assert (view.head, view.promise, member.own.catching_up) == (STATE.head, Ballot(3, "A", 0), None)


def test_a_promise_outlives_a_change_of_state_until_a_durable_head_lies_beyond():
    member, ballot = node(), Ballot(3, "A", 0)
    member.receive("A", msg.Collect(STATE.head, 3), 0.1)
    moved = member.caught_up(replace(STATE, head=Head(10, 1, "1" * 64)), 0.2)
    memory = those(moved, msg.Remember)[-1].memory
    assert msg.Vow(STATE.head, ballot) in memory.vows
    crashed = Node("B", STATE, options(), now=1.0, incarnation=2, memory=memory)  # before it wrote what it took over
    assert crashed.own.promise == ballot
    member.stored(member.state.head, 0.3)
    assert member.own.vows == {}


def test_a_result_that_was_fetched_is_begun_only_when_everybody_has_answered():
    coordinator, record_ = leader(), Record(proposal("B"), "f" * 64)
    coordinator.tick(0.0)
    held = msg.Held(Ballot(0, "B", 1), record_)
    coordinator.receive("B", msg.Promise(STATE.key, 1, 1, 0, held), 0.1)
    effects = coordinator.receive("C", msg.Promise(STATE.key, 1, 1, 0, None), 0.1)
    assert [fetch.holder for fetch in those(effects, msg.FetchResult)] == ["B"]
    coordinator.receive("D", beat(), 0.2)  # one more has come meanwhile
    assert not said(coordinator.fetched(record_, 0.3), msg.Begin)
    begun = said(coordinator.receive("D", msg.Promise(STATE.key, 1, 1, 0, None), 0.4), msg.Begin)
    assert {begin.adopted for begin in begun} == {"f" * 64}


def test_only_the_first_round_waits_for_all_who_are_to_begin():
    """Of three that have begun, one may leave: the others do not wait for a third for the rest of `start_s`."""
    node = Node("A", replace(STATE, roster=("A",)), options(start_islands=3, start_s=300.0), now=0.0, incarnation=1)
    assert not those(node.offer(OFFER, 0.1) + node.tick(0.2), msg.Reduce)
    node.own.state = replace(node.own.state, updates=1)
    assert those(node.tick(0.3), msg.Reduce)


def test_ones_own_done_that_comes_back_late_makes_no_peer_of_oneself():
    node = Node("A", STATE, options(), now=0.0, incarnation=1)
    node.receive("A", msg.Done(Key(9, "elsewhere"), Ballot(1, "A", 0), EMPTY), 0.1)
    assert "A" not in node.peers.views


def test_whether_a_head_had_a_quorum_is_believed_of_one_that_has_the_same():
    """B has appended by hearsay, and does not know whose *done* there was; A, which has led that round, does."""
    state = replace(STATE, owner=owner().public_key.hex())
    latch, record_ = Latch.sign(owner(), state.head), Record(proposal(), EMPTY)
    made = Node("B", state, options(partition="auto"), now=0.0, incarnation=1)
    made.member.append(record_, 0.1)
    head = made.state.head
    made.receive("C", beat(head._replace(round=9), rank=1, latch=latch), 0.2)
    assert made.own.needs_quorum and made.own.rank == 0, "what another head had is nothing to it"
    made.receive("A", beat(head, rank=1, latch=latch), 0.3)
    assert made.own.rank == 1
