import sys
import time

from diloco.elastic.simulator.campaign import Campaign, Outcome, describe, rule_names, run
from diloco.errors import ConfigError


def simulate_command(
    *, protocol: bool, seeds: int, first: int, islands: int | None, without: str | None, jobs: int
) -> None:
    if not protocol:
        raise ConfigError("simulate CONFIG is not there yet: add --protocol")
    if without is not None and without not in rule_names():
        raise ConfigError(f"--without {without}: the rules are {', '.join(rule_names())}")
    campaign = Campaign(without or "", islands)
    start, outcomes = time.perf_counter(), list[Outcome]()
    for outcome in run(campaign, range(first, first + seeds), jobs=jobs):
        outcomes.append(outcome)
        if outcome.violation:
            print(describe(campaign, outcome.seed), flush=True)
    violations = sum(bool(outcome.violation) for outcome in outcomes)
    commits = sum(outcome.commits for outcome in outcomes)
    seconds = time.perf_counter() - start
    print(f"{seeds} seeds from {first}: {commits} commits, {violations} violations, {seconds:.1f} s")
    if violations:
        sys.exit(1)
