import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from rich.console import Console

from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.simulate.real.fleet import SimulatedFleet, SimulatedPlan, World
    from diloco.simulate.real.story import Story

MAX_ISLANDS = 64
DEFAULT_ISLANDS = 4
LONGER = "more inner.steps, or an elastic.min_islands that rounds wait for, leave time for it"


def protocol_command(*, seeds: int, first: int, islands: int | None, without: str | None, jobs: int) -> None:
    from diloco.simulate.virtual.campaign import Campaign, Outcome, describe, rule_names, run

    if without is not None and without not in rule_names():
        raise ConfigError(f"--without {without}: the rules are {', '.join(rule_names())}")
    if islands is not None and not 2 <= islands <= 26:
        raise ConfigError(f"--islands {islands}: with --protocol 2 to 26, or none for 2 to 9 by chance")
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
    sys.exit(1 if violations else 0)


@dataclass(frozen=True)
class Given:
    """How the islands are connected and what befalls them, as a person writes it."""

    islands: int | None = None
    link: str | None = None
    topology: Path | None = None
    kill: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    join: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()


def simulate_command(
    configs: list[Path], overrides: list[str], given: Given, *, report: Path | None, restart: bool, backend: str
) -> None:
    """Exit code 0 if all runs finished and their islands agree."""
    if not configs:
        raise ConfigError("simulate needs a CONFIG, such as examples/islands.yaml; or --protocol")
    refuse_backend(backend)
    if report is not None:
        refuse_report(report)
    world = world_of(given)
    from diloco.config.file import load_config
    from diloco.simulate.real.drawing import need_matplotlib
    from diloco.simulate.real.fleet import SimulatedPlan
    from diloco.simulate.real.story import Story, story_of

    need_matplotlib()
    loaded = [(path, load_config(path, overrides)) for path in configs]
    refuse_one_folder([(path, config.dir) for path, config in loaded])
    page = report or Path(loaded[0][1].dir) / "report.html"
    stories = list[Story]()
    for path, config in loaded:
        plan = SimulatedPlan(config, path, tuple(overrides), world.topology.islands, restart=restart)
        fleet = run_one(plan, world, netns=backend == "netns")
        stories.append(story_of(config, world, fleet))
        show(stories, page)
        if fleet.asked:
            break
    left = [str(path) for path, _ in loaded[len(stories) :]]
    if left:
        _print([f"not started: {', '.join(left)}"])
    sys.exit(0 if not left and all(story.finished and story.agree for story in stories) else 1)


def world_of(given: Given) -> "World":
    from diloco.simulate.real.faults import joining, parse_faults
    from diloco.simulate.real.fleet import World
    from diloco.simulate.real.topology import Topology
    from diloco.simulate.real.topologyfile import read_topology
    from diloco.units import parse_link

    if given.topology is not None:
        for option, value in (("--link", given.link), ("--islands", given.islands)):
            if value is not None:
                raise ConfigError(f"{option} {value}: --topology {given.topology} says that already: leave one out")
        topology = read_topology(given.topology)
    else:
        if given.link is None:
            raise ConfigError("how are the islands connected? Add --link 20mbit,80ms, or --topology FILE")
        if given.link.lstrip().startswith("-"):
            raise ConfigError(f"--link {given.link}: a rate cannot be negative; write --link 20mbit,80ms")
        count = (DEFAULT_ISLANDS if given.islands is None else given.islands) + joining(given.join)
        if count > MAX_ISLANDS:
            raise ConfigError(f"{count} islands: up to {MAX_ISLANDS} can run on one machine")
        try:
            topology = Topology.uniform(count, *parse_link(given.link))
        except ValueError as error:
            raise ConfigError(f"--link {given.link}: {error}; write --link 20mbit,80ms") from None
    kinds = ("kill", "stop", "cut", "join", "slow")
    return World(topology, parse_faults({kind: getattr(given, kind) for kind in kinds}, topology))


def refuse_backend(backend: str) -> None:
    from diloco.simulate.real.netns import refuse_if_not_permitted

    if backend not in ("shaped", "netns"):
        raise ConfigError(f"--backend {backend}: there are shaped and netns")
    if backend == "netns":
        refuse_if_not_permitted()


def refuse_report(page: Path) -> None:
    """Makes no folder yet: a run may want to make the same one."""
    if page.suffix == ".json":
        raise ConfigError(f"--report {page} is the page, with the JSON beside it; write {page.with_suffix('.html')}")
    for file in (page, page.with_suffix(".json")):
        if file.is_dir():
            raise ConfigError(f"--report {page}: {file} is a folder; write --report {file / 'report.html'}")
    try:
        with TemporaryFile(dir=next(folder for folder in page.parents if folder.exists())):
            pass
    except OSError as error:
        raise ConfigError(f"--report {page} cannot be written: {error}; name another place") from None


def refuse_one_folder(folders: list[tuple[Path, str]]) -> None:
    seen: dict[str, Path] = {}
    for path, folder in folders:
        if folder in seen:
            raise ConfigError(f"{path} and {seen[folder]} would both train in {folder}: give one another `run` name")
        seen[folder] = path


def run_one(plan: "SimulatedPlan", world: "World", *, netns: bool) -> "SimulatedFleet":
    from diloco.report.board import account
    from diloco.report.watching import open_islands_view
    from diloco.simulate.real.fleet import simulate

    view = open_islands_view()
    try:
        fleet = simulate(plan, view, world, netns=netns)
    finally:
        view.close()
    _print(account(fleet.board))
    return fleet


def show(stories: "list[Story]", page: Path) -> None:
    """The last one in words, all of them on the page."""
    from diloco.simulate.real.page import write_page
    from diloco.simulate.real.story import write_json

    page.parent.mkdir(parents=True, exist_ok=True)
    write_page(stories, page)
    write_json(stories, page.with_suffix(".json"))
    _print(summary(stories[-1]))
    _print([f"report: {page} (open it in a browser), {page.with_suffix('.json')}"])


def summary(story: "Story") -> Iterator[str]:
    from diloco.plan.plan import percent
    from diloco.units import format_duration, format_size

    yield f"{story.name}: {story.setting}; {story.rounds} rounds in {format_duration(story.seconds)}"
    for island in story.islands:
        lost = {state: island.seconds[state] for state in ("waiting", "stopped", "dead") if island.seconds[state]}
        parts = [f"{format_duration(seconds)} {state}" for state, seconds in lost.items()]
        parts.append(f"sent {format_size(island.sent)}")
        yield f"  {island.name} trained {percent(island.utilisation)} of the time; {', '.join(parts)}"
    for fault in story.faults:
        if not fault.happened:
            yield f"  {fault.said} did not happen: the run, or the island, had ended; {LONGER}"
    if (computed := story.computed) is not None:
        share, time_s = percent(computed.data_parallel_utilisation), format_duration(computed.data_parallel_seconds)
        yield f"  data parallel over the same links (computed): trains {share} of the time, {time_s} for as many steps"


def _print(lines: "list[str] | Iterator[str]") -> None:
    Console(highlight=False).print("\n".join(lines), soft_wrap=True, markup=False)
