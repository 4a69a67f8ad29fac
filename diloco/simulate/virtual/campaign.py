"""Run many random disasters, one after the other or in several processes, and describe those that violate something."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace

from diloco.elastic.protocol.rules import ALL, Rules
from diloco.simulate.virtual.check import Violation
from diloco.simulate.virtual.cuts import draw, updates_under
from diloco.simulate.virtual.faults import PARTITIONS, Disaster, disaster, harsh_disaster, run, shorten

__all__ = ["CAMPAIGNS", "PARTITIONS", "Campaign", "Outcome", "rule_names"]

CAMPAIGNS = ("usual", "harsh", "cuts")
TAIL = 60  # lines of a transcript


@dataclass(frozen=True)
class Outcome:
    """Hold what came of one seed; `violation` is empty if every invariant held."""

    seed: int
    commits: int
    violation: str = ""


@dataclass(frozen=True)
class Campaign:
    """Run many disasters, with one rule switched off and a fixed number of islands if that is wanted."""

    without: str = ""  # a rule that is switched off
    islands: int | None = None
    kind: str = "usual"  # or harsh
    partition: str = ""  # each seed draws its own

    def disaster(self, seed: int) -> Disaster:
        """Draw a seed's disaster under the rules of this campaign."""
        make = harsh_disaster if self.kind == "harsh" else disaster
        return make(seed, self._rules, self.islands, self.partition)

    def run(self, seeds: Iterable[int], *, jobs: int = 1) -> Iterator[Outcome]:
        """Yield the outcome of each seed, in order; `jobs` is the number of processes."""
        if jobs == 1:
            yield from map(self.run_one, seeds)
        else:
            with ProcessPoolExecutor(jobs) as pool:
                yield from pool.map(self.run_one, seeds, chunksize=8)

    def run_one(self, seed: int) -> Outcome:
        """Run one seed; an error that is no violation gets a note with the command that repeats it."""
        if self.kind == "cuts":
            return self._run_cut(seed)
        try:
            return Outcome(seed, run(self.disaster(seed)).commits)
        except Violation as violation:
            return Outcome(seed, violation.args[1].commits, violation.args[0])
        except Exception as error:
            error.add_note(self._replay(seed))
            raise

    def _run_cut(self, seed: int) -> Outcome:
        topology = draw(seed, self.islands)
        updates, world = updates_under(topology, self._rules)
        cut = ", ".join(f"{one}-{other}" for one, other in sorted(topology.cut))
        stuck = f"I4: {updates} updates of {topology.islands} islands, cut for ever: {cut}" if updates < 2 else ""
        return Outcome(seed, world.commits, stuck)

    @property
    def _rules(self) -> Rules:
        return replace(ALL, **{self.without: False}) if self.without else ALL

    def describe(self, seed: int) -> str:
        """Describe a violation in its shortest form, with the command that shows it again."""
        if self.kind == "cuts":
            return f"seed {seed}: {self._run_cut(seed).violation}\nagain: {self._replay(seed)}"
        plan, violation = shorten(self.disaster(seed))
        reason, world = violation.args
        setup = plan.setup
        told = list(world.transcript.lines())
        left_out = [f"  … {len(told) - TAIL} lines"] if len(told) > TAIL else []
        return "\n".join([
            f"seed {seed}: {reason}",
            f"{setup.islands} islands, partition: {setup.partition}{setup.pace.told},"
            f" and of the faults ({plan.mix}) these are enough:",
            *(f"  {fault}" for fault in plan.faults),
            *left_out,
            *told[-TAIL:],
            f"again: {self._replay(seed)}",
        ])  # fmt: skip

    def _replay(self, seed: int) -> str:
        """Return the command that runs this seed again."""
        islands = f" --islands {self.islands}" if self.islands else ""
        without = f" --without {self.without}" if self.without else ""
        campaign = f" --campaign {self.kind}" if self.kind != "usual" else ""
        partition = f" --partition {self.partition}" if self.partition else ""
        return f"diloco simulate protocol --first {seed} --seeds 1{campaign}{partition}{islands}{without}"


def rule_names() -> list[str]:
    """List the rules that `--without` can switch off."""
    return [field.name for field in fields(Rules)]
