"""Run `diloco simulate CONFIG`: real islands over emulated links."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

from diloco.cli.shared import say
from diloco.config.file import load_config
from diloco.errors import ConfigError
from diloco.history.present import glance
from diloco.plan.plan import percent
from diloco.report.board import account
from diloco.report.live import open_islands_view
from diloco.report.page import need_plotly
from diloco.simulate.real.faults import joining, parse_faults
from diloco.simulate.real.fleet import SimulatedPlan, World, simulate
from diloco.simulate.real.netns import refuse_if_not_permitted
from diloco.simulate.real.outcome import SimulationOutcome, outcome_of, write_json
from diloco.simulate.real.page import write_page
from diloco.simulate.real.topology import MAX_ISLANDS, Topology, read_topology
from diloco.units import counted, format_duration, format_size, parse_link

DEFAULT_ISLANDS = 4
SHORTEST_S = 0.05  # a time that is shown
LONGER = "more inner.steps, or an elastic.min_islands that rounds wait for, leave time for it"


def simulate_real(
    configs: list[Path], overrides: list[str], world: World, *, report: Path | None, restart: bool, netns: bool
) -> None:
    """Simulate each configuration in turn; exit with 0 if all runs finished and their islands agree."""
    need_plotly("the report of simulate")
    named = {path: named_apart(path, overrides) for path in configs}
    loaded = [(path, load_config(path, named[path])) for path in configs]
    refuse_one_folder([(path, config.dir) for path, config in loaded])
    page = report or Path(loaded[0][1].dir) / "report.html"
    outcomes = list[SimulationOutcome]()
    for path, config in loaded:
        plan = SimulatedPlan(config, path, tuple(named[path]), world.topology.islands, restart=restart)
        with closing(open_islands_view(partial(glance, plan.folder))) as view:
            fleet = simulate(plan, view, world, netns=netns)
        say(*account(fleet.board))
        outcomes.append(outcome_of(config, world, fleet))
        show(outcomes, page)
        if fleet.asked:
            break
    left = [str(path) for path, _ in loaded[len(outcomes) :]]
    if left:
        say(f"not started: {', '.join(left)}")
    sys.exit(0 if not left and all(outcome.finished and outcome.agree for outcome in outcomes) else 1)


def named_apart(path: Path, overrides: list[str]) -> list[str]:
    """Return the overrides with a name that keeps the simulation out of the run's own folder, unless --set names the
    run, or the configuration a folder."""
    config = load_config(path, overrides)
    if config.checkpoint.dir is not None or any(one.partition("=")[0].strip() == "run" for one in overrides):
        return overrides
    return [*overrides, f"run={json.dumps(config.run + '-simulated')}"]


def world_of(
    islands: int | None, link: str | None, topology: Path | None, faults: Mapping[str, Sequence[str]]
) -> World:
    """Build the network that connects the islands, and the faults that will hit them, from the options."""
    if topology is not None:
        for option, value in (("--link", link), ("--islands", islands)):
            if value is not None:
                raise ConfigError(f"{option} {value}: --topology {topology} says that already: leave one out")
        made = read_topology(topology)
    else:
        if link is None:
            raise ConfigError("how are the islands connected? Add --link 20mbit,80ms, or --topology FILE")
        if link.lstrip().startswith("-"):
            raise ConfigError(f"--link {link}: a rate cannot be negative; write --link 20mbit,80ms")
        count = (DEFAULT_ISLANDS if islands is None else islands) + joining(faults.get("join", ()))
        if count > MAX_ISLANDS:
            raise ConfigError(f"{count} islands: up to {MAX_ISLANDS} can run on one machine")
        try:
            made = Topology.uniform(count, *parse_link(link))
        except ValueError as error:
            raise ConfigError(f"--link {link}: {error}; write --link 20mbit,80ms") from None
    return World(made, parse_faults(faults, made))


def refuse_backend(backend: str) -> None:
    """Check that the backend exists, and that this machine permits it."""
    if backend not in ("shaped", "netns"):
        raise ConfigError(f"--backend {backend}: there are shaped and netns")
    if backend == "netns":
        refuse_if_not_permitted()


def refuse_report(page: Path) -> None:
    """Check that the page can be written. Makes no folder yet: a run may want to make the same one."""
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
    """Check that no two configurations would train in the same folder."""
    seen: dict[str, Path] = {}
    for path, folder in folders:
        if folder in seen:
            raise ConfigError(f"{path} and {seen[folder]} would both train in {folder}: give one another `run` name")
        seen[folder] = path


def show(outcomes: list[SimulationOutcome], page: Path) -> None:
    """Print the last outcome in words, and write all of them to the page and to the JSON beside it."""
    page.parent.mkdir(parents=True, exist_ok=True)
    write_page(outcomes, page)
    write_json(outcomes, page.with_suffix(".json"))
    say(*summary(outcomes[-1]), f"report: {page} (open it in a browser), {page.with_suffix('.json')}")


def summary(outcome: SimulationOutcome) -> Iterator[str]:
    """Describe an outcome in lines: each island's time and bytes, faults that did not happen, data parallel."""
    yield f"{outcome.name}: {outcome.setting}; {counted(outcome.rounds, 'round')} in {format_duration(outcome.seconds)}"
    for island in outcome.islands:
        times = {state: seconds for state, seconds in outcome.times(island).items() if seconds >= SHORTEST_S}
        parts = ", ".join(f"{format_duration(seconds)} {state}" for state, seconds in times.items())
        share, sent = percent(island.utilisation), format_size(island.sent)
        yield f"  {island.name} trained {share} of its time: {parts}; sent {sent}"
    for fault in outcome.faults:
        if not fault.happened:
            yield f"  {fault.said} did not happen: the run, or the island, had ended; {LONGER}"
    if (computed := outcome.computed) is not None:
        share, time_s = percent(computed.data_parallel_utilisation), format_duration(computed.data_parallel_seconds)
        yield f"  data parallel over the same links (computed): trains {share} of the time, {time_s} for as many steps"
