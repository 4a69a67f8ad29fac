"""When an island launches, applies, waits and catches up. (test_elastic_simulator.py has the disasters.)"""

from dataclasses import dataclass, field, replace

from diloco.elastic.protocol.ranges import Ranges
from diloco.elastic.protocol.record import Head
from diloco.simulate.virtual.trainer import SyncPace
from diloco.train.policy import AppliedResult, SyncPolicy, View
from diloco.train.schedule import Apply, Launch, Schedule


@dataclass
class Seen:
    """What one island sees, and what its policy has had done."""

    fragments: int = 1
    updates: int = 0
    step: int = 0
    over: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    owed_steps: int = 0
    done: list[tuple[str, int]] = field(default_factory=list)
    then: tuple[int, set[int]] | None = None  # updates, and what is over, after the next result is taken

    def refresh(self) -> View:
        each = range(self.fragments)
        over, moved = (tuple(f in of for f in each) for of in (self.over, self.moved))
        return View(Head(0, self.updates, ""), self.step, self.updates, over, moved, (False,) * self.fragments)

    def launch(self, fragment: int, tokens: int, samples: Ranges, steps: int) -> None:
        self.done.append(("launch", fragment))

    def apply_result(self, fragment: int, steps: int, *, launched: bool) -> AppliedResult:
        self.done.append(("take", fragment))
        self.over.discard(fragment)
        self.moved.discard(fragment)
        if self.then is not None:
            (self.updates, self.over), self.then = self.then, None
        return AppliedResult(self.step, self.owed_steps)

    def policy(self, schedule: Schedule) -> SyncPolicy:
        return SyncPolicy(self, schedule, self.refresh())


def train(policy: SyncPolicy, steps: int) -> list[Head]:
    """Inner steps until one has to wait; the heads that are waited with."""
    for _ in range(steps):
        policy.trained((), 10)
        if waits := list(zip(policy.after_step(), range(1), strict=False)):
            return [head for head, _ in waits]
    return []


def launches(seen: Seen) -> list[int]:
    return [fragment for what, fragment in seen.done if what == "launch"]


def test_fragments_are_launched_in_turn_and_each_once_in_a_pass():
    seen = Seen(fragments=3)
    policy = seen.policy(replace(SyncPace(3).schedule, launches=range(2, 100, 2), delay=50))
    assert not train(policy, 7)
    assert launches(seen) == [0, 1, 2] and policy.step == 7


def test_what_others_have_moved_the_clock_past_is_launched_after_the_next_step():
    seen = Seen(fragments=3)
    policy = seen.policy(replace(SyncPace(3).schedule, launches=range(2, 100, 2), delay=50))
    seen.step, seen.updates, seen.moved = 5, 2, {0, 1}
    assert policy.follow() and policy.step == 5
    train(policy, 1)
    assert launches(seen) == [0, 1, 2]


def test_with_one_fragment_what_was_trained_since_the_cut_counts_on_top():
    seen = Seen()
    policy = seen.policy(Schedule(range(6, 100, 6)))
    train(policy, 2)
    seen.step, seen.updates, seen.moved, seen.owed_steps = 6, 1, {0}, 4
    assert policy.follow() and policy.step == 6 + 4 + 2


def test_asked_to_stop_it_leaves_what_it_was_waiting_for_and_goes_on_from_there():
    seen = Seen()
    policy = seen.policy(Schedule(range(1, 100)))
    policy.trained((), 10)
    waits = policy.after_step()
    assert next(waits) == seen.refresh().head
    waits.close()
    assert policy.left == [Apply(0)] and policy.in_flight == {0}
    seen.over, seen.step, seen.updates = {0}, 1, 1
    assert not list(policy.finish_step())
    assert seen.done == [("launch", 0), ("take", 0)] and not policy.left and not policy.in_flight


def test_who_waits_for_one_fragment_offers_what_is_due_before_and_takes_it_when_it_is_over():
    seen = Seen(fragments=2)
    policy = seen.policy(Schedule(range(1, 100), 2))
    policy.trained((), 10)
    assert policy.launch(1)
    waits = policy.finish(1)
    next(waits)
    assert launches(seen) == [1, 0] and policy.in_flight == {0, 1}
    seen.updates, seen.over = 1, {0}
    next(waits)
    assert seen.done[-1] == ("take", 0) and policy.in_flight == {1}
    seen.updates, seen.over = 2, {1}
    assert not list(waits) and not policy.in_flight


def test_what_it_waits_for_may_be_over_while_it_takes_something_else():
    """The round of 1 is committed while the result of 0 is taken: it is taken too, and not launched again."""
    seen = Seen(fragments=3)
    policy = seen.policy(Schedule(range(1, 100), 3, delay=2))
    policy.trained((), 10)
    assert policy.launch(1)
    policy.trained((), 10)
    waits = policy.finish(1)
    next(waits)
    seen.updates, seen.over, seen.then = 1, {0}, (2, {1})
    assert list(zip(waits, range(5), strict=False)) and not policy.in_flight & {0, 1}
    assert seen.done == [("launch", 1), ("launch", 0), ("take", 0), ("take", 1)]


def test_without_samples_it_waits_no_longer_than_it_has_none():
    seen, enough = Seen(fragments=2), []
    policy = seen.policy(Schedule(range(4, 100, 4), 2))
    policy.trained((), 10)
    waits = policy.without_samples(lambda: bool(enough))
    next(waits)
    assert launches(seen) == [0]
    enough.append(True)
    assert not list(waits)
    assert not policy.left and policy.in_flight == {0} and policy.owes(1)


def test_when_the_run_is_over_nobody_is_waited_for():
    seen = Seen(fragments=2)
    policy = seen.policy(Schedule((2, 4), 2))
    policy.trained((), 10)
    assert policy.launch(0)
    waits = policy.contribute_all()
    next(waits)
    seen.over, seen.step, seen.updates = {0}, 4, 3
    assert not list(waits) and launches(seen) == [0]


def test_early_islands_launch_at_their_share():
    seen = Seen()
    policy = seen.policy(Schedule(range(10, 100, 10)))
    policy.trained((), 10)
    assert next(policy.after_step(early=True)) and launches(seen) == [0]
    assert policy.left == [Apply(0)] and Launch(0) not in policy.left
