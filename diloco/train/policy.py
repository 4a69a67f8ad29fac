"""When an island launches, applies, waits and catches up: decisions only, without clocks, tensors or sockets.

Real islands (`sync.py`) and simulated ones (diloco/simulate/virtual/trainer.py) both run this policy, so what disasters
try is what ships. It counts what was trained and decides; an `Actor` does it. Where a decision has to wait, a method is
a generator: it yields the head by which it has decided, and goes on when there is another one. Whoever stops asking
leaves what was still to be done in `left`.

Rounds take the fragments in turn and wait for those who train, so the protocol asks of an island that it always comes
to have something for the fragment that is due. Each of these rules has its disaster:

- while it waits for one fragment, it offers those whose turn comes before (`_keep_up`; tests/scenarios/waiting.txt);
- it waits without training only as long as it has no samples (`without_samples`);
- if others have moved its clock past a launch, it launches after its next step (`_wanted`);
- what it owes is measured from the mark that it will cut from (`View.owes`).
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, Protocol

from diloco.elastic.protocol.ranges import Ranges, normal
from diloco.elastic.protocol.record import Head
from diloco.train.schedule import Action, Apply, Launch, Schedule, Since, TimedSchedule


class View(NamedTuple):
    """What an island sees of the run and of its own part in it. The last three are by fragment."""

    head: Head
    step: int  # the run's clock
    updates: int
    over: tuple[bool, ...]  # the round that it was last launched for
    changed: tuple[bool, ...]  # its outer parameters are others than those that were last taken
    owes: tuple[bool, ...]  # progress up to its last cut is not contained: it can be offered without training first


class AppliedResult(NamedTuple):
    step: int  # the run's clock after the update that was taken
    owed_steps: int = 0  # inner steps up to the last cut that the outer state does not contain


class Actor(Protocol):
    def refresh(self) -> View: ...

    def launch(self, fragment: int, tokens: int, samples: Ranges, steps: int) -> None:
        """Cut, and offer what was trained since the last cut together with what is owed from before."""

    def apply_result(self, fragment: int, steps: int, *, launched: bool) -> AppliedResult:
        """The island goes to the fragment's outer parameters, with what they do not contain and with `steps` done since
        the last cut. `launched`: its own contribution was under way; what is left of the offer is withdrawn."""


Waits = Generator[Head, None, None]


class SyncPolicy:
    def __init__(self, actor: Actor, schedule: Schedule | TimedSchedule, view: View) -> None:
        self._actor, self.schedule, self.view = actor, schedule, view
        self._count = fragments = len(view.over)
        self.steps = 0  # inner steps done here
        self.step = self.synced = view.step  # the run's clock; the schedule was followed up to there
        self.in_flight: set[int] = set()
        self.left: list[Action] = []  # of what the schedule wanted after the last step
        self.used: Ranges = ()  # samples since the last cut of any fragment
        self._cut_at = [0] * fragments  # inner steps done at the last cut
        self._tokens = [0] * fragments  # since the last cut

    @property
    def over(self) -> bool:
        """The run has come to its end: nobody comes to rounds any more."""
        return self.schedule.is_over(self.view.step, self.view.updates)

    @property
    def owes_something(self) -> bool:
        """There is progress that the outer state does not contain."""
        return any(map(self.owes, range(self._count)))

    def owes(self, fragment: int) -> bool:
        return self._tokens[fragment] > 0 or self._refresh().owes[fragment]

    def since_cut(self, fragment: int) -> int:
        """Inner steps."""
        return self.steps - self._cut_at[fragment]

    def trained(self, samples: Ranges, tokens: int) -> None:
        """One inner step."""
        self.steps += 1
        self.step += 1
        self._tokens = [count + tokens for count in self._tokens]
        self.used = normal((*self.used, *samples))

    def after_step(self, *, round_s: float = 0.0, early: bool = False) -> Waits:
        """`round_s` since a round was over or launched here; `early`: a slow island is at its share of a phase."""
        return self._carry_out(self._wanted(round_s, early))

    def _wanted(self, round_s: float, early: bool) -> list[Action]:
        if isinstance(self.schedule, TimedSchedule):
            return self.schedule.after(self.step, Since(round_s, self.since_cut(0) if self.in_flight else None))
        several = self._count > 1  # then others may have moved the clock past a launch
        passed = range((min(self.synced, self.step - 1) if several else self.step - 1) + 1, self.step + 1)
        self.synced = self.step
        return [Launch(0), Apply(0)] if early else [work for step in passed for work in self.schedule.after(step)]

    def finish_step(self) -> Waits:
        """What it was waiting for when it was last asked to stop."""
        return self._carry_out(self.left)

    def without_samples(self, enough: Callable[[], bool]) -> Waits:
        """Give what there is until there are samples again: rounds may need what is trained on them."""
        try:
            for head in self.contribute_all():
                if enough():
                    break
                yield head
        finally:
            self.left = []  # it will look again

    def contribute_all(self) -> Waits:
        """Fragment after fragment, in the order of their rounds; what is in flight first."""
        order = [(self._refresh().updates + more) % self._count for more in range(self._count)]
        return self._carry_out([work for f in order for work in (Apply(f), Launch(f), Apply(f))])

    def _carry_out(self, works: list[Action]) -> Waits:
        self.left = []
        for number, work in enumerate(works):
            match work:
                case Launch(fragment):
                    self.launch(fragment)
                case Apply(fragment) if fragment in self.in_flight:
                    self.left = works[number:]
                    yield from self.finish(fragment)
                    self.left = []
                    if self.over:
                        break

    def launch(self, fragment: int) -> bool:
        """Contribute what was trained since this fragment's last cut. False: nothing is left, or it is in flight."""
        if fragment in self.in_flight or not self.owes(fragment):
            return False
        self._actor.launch(fragment, self._tokens[fragment], self.used, self.since_cut(fragment))
        self._cut_at[fragment], self._tokens[fragment], self.used = self.steps, 0, ()
        self.in_flight.add(fragment)
        return True

    def finish(self, fragment: int) -> Waits:
        """Wait until the round of what is in flight is over, with or without this island's part; take the result."""
        early: list[int] = []
        while not (view := self._refresh()).over[fragment]:
            self._keep_up(fragment, early)
            yield view.head
        for each in (fragment, *early):
            self._conclude(each)

    def _keep_up(self, awaited: int, early: list[int]) -> None:
        """Rounds come in turn: whoever waits for a later one takes part in those before it, or they may never come.
        More of them may be over each time that something was taken; what is awaited then is not launched again."""
        for fragment in {*early, self.view.updates % self._count} - {awaited}:
            self._conclude(fragment)
        self.follow()
        due = self.view.updates % self._count
        if not self.view.over[awaited] and self.launch(due):
            early.append(due)

    def _conclude(self, fragment: int) -> None:
        if fragment in self.in_flight and self.view.over[fragment]:
            self._apply_result(fragment)

    def follow(self) -> bool:
        """Others went on without this island, or it moved to another branch. What is in flight has its own time.
        Returns whether anything was taken."""
        view = self._refresh()
        changed = [each for each in range(self._count) if view.changed[each] and each not in self.in_flight]
        for fragment in changed:
            self._apply_result(fragment)
        return bool(changed)

    def _apply_result(self, fragment: int) -> None:
        """On time, the clock stays. Left behind with one fragment, an island finishes its phase: all that it has
        trained since counts on top. With several, that would carry it past launches of rounds that wait for it."""
        launched, since = fragment in self.in_flight, self.since_cut(fragment)
        self.in_flight.discard(fragment)
        taken = self._actor.apply_result(fragment, since, launched=launched)
        if self._count == 1:
            self.step = taken.step + taken.owed_steps + since
        elif launched:
            self.step = taken.step + since
        else:
            self.step = max(self.step, taken.step)
        self._refresh()

    def _refresh(self) -> View:
        self.view = self._actor.refresh()
        return self.view

    # what a save holds of it

    def facts(self) -> dict[str, Any]:
        return {
            "steps": self.steps, "step": self.step, "in_flight": sorted(self.in_flight), "cut_at": list(self._cut_at),
            "tokens": list(self._tokens), "used": self.used,
        }  # fmt: skip

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        self.steps, self.step, self.in_flight = facts["steps"], facts["step"], set(facts["in_flight"])
        self._cut_at = list(facts["cut_at"])
        self._tokens, self.used = list(facts["tokens"]), normal((lo, hi) for lo, hi in facts["used"])

    def start_again(self, steps: int) -> None:
        """From the outer parameters, after so many inner steps of earlier lives."""
        self.steps, self._cut_at = steps, [steps] * self._count
