"""When an island launches, applies, waits and catches up: decisions only, without clocks, tensors or sockets.

Real islands (`sync.py`) and simulated ones (diloco/simulate/virtual/trainer.py) both run this policy, so simulated
disasters test what ships. It counts what was trained and decides; an `Actor` carries it out. Where a decision has to
wait, a method is a generator: it yields the head on which it has decided, and is resumed when there is another one. A
caller that stops early leaves what was still to be done in `left`.

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
    """Describe what an island sees of the run and of its own part in it. The last three fields are by fragment."""

    head: Head
    step: int  # the run's clock
    updates: int
    over: tuple[bool, ...]  # the round that it was last launched for
    changed: tuple[bool, ...]  # its outer parameters are others than those that were last taken
    owes: tuple[bool, ...]  # progress up to its last cut is not contained: it can be offered without training first


class AppliedResult(NamedTuple):
    """Describe a result that has been applied: the run's clock after it, and the progress that it does not contain."""

    step: int  # the run's clock after the update that was taken
    owed_steps: int = 0  # inner steps up to the last cut that the outer state does not contain


class Actor(Protocol):
    """Carry out what a policy decides, on a real island or on a simulated one."""

    def refresh(self) -> View:
        """Return the current view of the run, which replaces the policy's last one."""

    def launch(self, fragment: int, tokens: int, samples: Ranges, steps: int) -> None:
        """Cut, and offer what was trained since the last cut together with what is owed from before."""

    def apply_result(self, fragment: int, steps: int, *, launched: bool) -> AppliedResult:
        """Move the island to the fragment's outer parameters, with what they do not contain and with the `steps` done
        since the last cut.

        `launched`: its own contribution was in flight; what is left of that offer is withdrawn.
        """


Waits = Generator[Head, None, None]


class SyncPolicy:
    """Decide when an island launches, applies, waits and catches up, by counting what it has trained."""

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
        """Tell whether the run has come to its end: no island comes to rounds any more."""
        return self.schedule.is_over(self.view.step, self.view.updates)

    @property
    def owes_something(self) -> bool:
        """Tell whether any fragment has progress that the outer state does not contain."""
        return any(map(self.owes, range(self._count)))

    def owes(self, fragment: int) -> bool:
        """Tell whether the outer state lacks progress of this fragment, cut already or not."""
        return self._tokens[fragment] > 0 or self._refresh().owes[fragment]

    def since_cut(self, fragment: int) -> int:
        """Return the inner steps done since the fragment's last cut."""
        return self.steps - self._cut_at[fragment]

    def trained(self, samples: Ranges, tokens: int) -> None:
        """Count one inner step on these samples, towards every fragment."""
        self.steps += 1
        self.step += 1
        self._tokens = [count + tokens for count in self._tokens]
        self.used = normal((*self.used, *samples))

    def after_step(self, *, round_s: float = 0.0, early: bool = False) -> Waits:
        """Carry out what the schedule wants after an inner step.

        `round_s`: seconds since a round was over or launched here. `early`: a slow island has done its share of a
        phase.
        """
        return self._carry_out(self._wanted(round_s, early))

    def _wanted(self, round_s: float, early: bool) -> list[Action]:
        """List what the schedule wants after this step, and after those that others have moved the clock past."""
        if isinstance(self.schedule, TimedSchedule):
            return self.schedule.after(self.step, Since(round_s, self.since_cut(0) if self.in_flight else None))
        several = self._count > 1  # then others may have moved the clock past a launch
        passed = range((min(self.synced, self.step - 1) if several else self.step - 1) + 1, self.step + 1)
        self.synced = self.step
        return [Launch(0), Apply(0)] if early else [work for step in passed for work in self.schedule.after(step)]

    def finish_step(self) -> Waits:
        """Carry out what the island was still waiting for when it was last asked to stop."""
        return self._carry_out(self.left)

    def without_samples(self, enough: Callable[[], bool]) -> Waits:
        """Contribute what there is until there are `enough` samples again: rounds may need what is trained on them."""
        try:
            for head in self.contribute_all():
                if enough():
                    break
                yield head
        finally:
            self.left = []  # it will look again

    def contribute_all(self) -> Waits:
        """Contribute fragment after fragment, in the order of their rounds; what is in flight is awaited first."""
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
        """Contribute what was trained since a fragment's last cut. Return False if nothing is, or it is in flight."""
        if fragment in self.in_flight or not self.owes(fragment):
            return False
        self._actor.launch(fragment, self._tokens[fragment], self.used, self.since_cut(fragment))
        self._cut_at[fragment], self._tokens[fragment], self.used = self.steps, 0, ()
        self.in_flight.add(fragment)
        return True

    def finish(self, fragment: int) -> Waits:
        """Wait until the round of what is in flight is over, with or without this island's part; apply the result."""
        early: list[int] = []
        while not (view := self._refresh()).over[fragment]:
            self._keep_up(fragment, early)
            yield view.head
        for each in (fragment, *early):
            self._conclude(each)

    def _keep_up(self, awaited: int, early: list[int]) -> None:
        """Take part in the rounds before the awaited one, or it may never come: rounds take the fragments in turn.

        More of them may be over each time that a result was applied; once the awaited one is, nothing more is launched.
        """
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
        """Apply what others have committed without this island, or what is on the branch that it has moved to. A
        fragment in flight is left to `finish`. Return whether anything was applied."""
        view = self._refresh()
        changed = [each for each in range(self._count) if view.changed[each] and each not in self.in_flight]
        for fragment in changed:
            self._apply_result(fragment)
        return bool(changed)

    def _apply_result(self, fragment: int) -> None:
        """Apply a fragment's result and set the clock.

        On time, the clock stays. Left behind with one fragment, an island finishes its phase: all that it has trained
        since counts on top. With several, that would carry it past launches of rounds that wait for it.
        """
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
        """Return the counts that a save holds."""
        return {
            "steps": self.steps, "step": self.step, "in_flight": sorted(self.in_flight), "cut_at": list(self._cut_at),
            "tokens": list(self._tokens), "used": self.used,
        }  # fmt: skip

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Restore the counts that a save holds, as `facts` returned them."""
        self.steps, self.step, self.in_flight = facts["steps"], facts["step"], set(facts["in_flight"])
        self._cut_at = list(facts["cut_at"])
        self._tokens, self.used = list(facts["tokens"]), normal((lo, hi) for lo, hi in facts["used"])

    def start_again(self, steps: int) -> None:
        """Start from the outer parameters, after so many inner steps of earlier lives."""
        self.steps, self._cut_at = steps, [steps] * self._count
