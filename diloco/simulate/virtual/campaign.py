"""Many disasters, one after the other or in several processes, and what is said of one that violates an invariant."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial

from diloco.elastic.protocol.rules import ALL, Rules
from diloco.simulate.virtual import faults
from diloco.simulate.virtual.check import Violation

TAIL = 60  # lines of a transcript


@dataclass(frozen=True)
class Campaign:
    without: str = ""  # a rule that is switched off
    islands: int | None = None

    def disaster(self, seed: int) -> faults.Disaster:
        rules = replace(ALL, **{self.without: False}) if self.without else ALL
        return faults.disaster(seed, rules, self.islands)

    def replay(self, seed: int) -> str:
        islands = f" --islands {self.islands}" if self.islands else ""
        without = f" --without {self.without}" if self.without else ""
        return f"diloco simulate --protocol --first {seed} --seeds 1{islands}{without}"


@dataclass(frozen=True)
class Outcome:
    seed: int
    commits: int
    violation: str = ""


def run(campaign: Campaign, seeds: Iterable[int], *, jobs: int = 1) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(partial(run_one, campaign), seeds)
    else:
        with ProcessPoolExecutor(jobs) as pool:
            yield from pool.map(partial(run_one, campaign), seeds, chunksize=8)


def run_one(campaign: Campaign, seed: int) -> Outcome:
    try:
        return Outcome(seed, faults.run(campaign.disaster(seed)).commits)
    except Violation as violation:
        return Outcome(seed, violation.args[1].commits, violation.args[0])
    except Exception as error:
        error.add_note(campaign.replay(seed))
        raise


def describe(campaign: Campaign, seed: int) -> str:
    """The shortest form of a violation, and how to see it again."""
    plan, violation = faults.shorten(campaign.disaster(seed))
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
        f"again: {campaign.replay(seed)}",
    ])  # fmt: skip


def rule_names() -> list[str]:
    return [field.name for field in fields(Rules)]
