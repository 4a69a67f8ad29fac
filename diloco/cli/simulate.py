"""`diloco simulate`: three commands in one. Real islands (`real.py`), the protocol alone, or virtual time
(`virtual.py`)."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.shared import Overrides, parse_option, parse_positive
from diloco.comm.codec.registry import CODECS
from diloco.errors import ConfigError
from diloco.units import parse_count, parse_duration, parse_link, parse_share

PROTOCOL = frozenset({"islands", "protocol", "seeds", "first", "without", "jobs"})
VIRTUAL = frozenset(
    {"islands", "link", "virtual", "first", "minutes", "mtbf", "back", "silence", "diurnal", "params", "codec", "phase"}
    | {"two_level", "json"}
)
NOT_REAL = (PROTOCOL | VIRTUAL) - {"islands", "link"}


def simulate(
    context: typer.Context,
    config: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[CONFIG]…", help="The run's YAML file; several are compared.", show_default=False),
    ] = None,
    set_: Overrides = None,
    islands: Annotated[
        int | None, typer.Option(min=1, help="Number of islands to start (default 4; with --virtual 1000).")
    ] = None,
    link: Annotated[str | None, typer.Option(help="Rate and one-way delay of each island: 20mbit,80ms")] = None,
    topology: Annotated[
        Path | None,
        typer.Option(help="Instead of --link: a file with regions, islands and paths; see examples/topology.yaml"),
    ] = None,
    kill: Annotated[list[str] | None, typer.Option(help="Send SIGKILL to island 1 at 60 s: 1@60s")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop island 2 for a while: 2@30s..45s")] = None,
    cut: Annotated[
        list[str] | None, typer.Option(help="Cut regions or islands off from each other: eu|us@90s..120s")
    ] = None,
    join: Annotated[list[str] | None, typer.Option(help="Start one more island at 100 s: 1@100s")] = None,
    slow: Annotated[list[str] | None, typer.Option(help="Make steps of island 3 take 2.5 times as long: 3x2.5")] = None,
    restart: Annotated[bool, typer.Option("--restart/--no-restart", help="Restart islands that are killed.")] = True,
    backend: Annotated[
        str, typer.Option(help="Who shapes the links. shaped: the islands themselves; netns: Linux's kernel, as root.")
    ] = "shaped",
    report: Annotated[
        Path | None, typer.Option(help="The page to write, with a .json beside it; report.html in the run's folder.")
    ] = None,
    protocol: Annotated[
        bool, typer.Option("--protocol", help="Simulate the round protocol alone, with random faults.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="With --protocol: number of disasters.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="With --protocol or --virtual: the first seed.")] = 0,
    without: Annotated[
        str | None, typer.Option(metavar="RULE", help="With --protocol: a rule to switch off, to see what it is for.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="With --protocol: number of processes.")] = 1,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Simulate up to 10000 modelled islands in virtual time.")
    ] = False,
    minutes: Annotated[float, typer.Option(min=1, help="With --virtual: minutes of virtual time.")] = 30,
    mtbf: Annotated[str | None, typer.Option(help="With --virtual: mean time between two failures: 1min")] = None,
    back: Annotated[str, typer.Option(help="With --virtual: time until a failed island is back.")] = "5min",
    silence: Annotated[
        str, typer.Option(help="With --virtual: elastic.silence_s; longer than it takes to tell all islands.")
    ] = "5s",
    diurnal: Annotated[
        str | None, typer.Option(help="With --virtual: share of a link that is lost at the worst time of its day: 50%")
    ] = None,
    params: Annotated[str, typer.Option(help="With --virtual: values in a round.")] = "150M",
    codec: Annotated[str, typer.Option(help=f"With --virtual: codec of the values: {', '.join(CODECS)}.")] = "int8",
    phase: Annotated[str, typer.Option(help="With --virtual: computing time between two rounds.")] = "5min",
    two_level: Annotated[
        bool | None,
        typer.Option(
            "--two-level/--one-level", help="With --virtual: reduce in groups first (default with more than 64)."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="With --virtual: print one JSON object.")] = False,
) -> None:
    """Train islands here over simulated links, with scripted faults.

    The islands are real processes; a report with plots tells what came of it. Times count from the moment when all
    islands train. Islands are numbered from 1; those that join later have the last numbers. Options for faults can be
    repeated. An earlier run of that name is kept as NAME.1, NAME.2, …

    With --protocol: the round protocol alone on a virtual network, with random faults; every invariant is checked. A
    violation is printed with its seed, its shortest transcript and how to see it again; the exit code is then 1.
    Example: diloco simulate --protocol --seeds 1000 --jobs 8

    With --virtual: the same protocol with modelled computers and links, for many islands that come and go: times of
    rounds, utilisation, bytes, messages; every invariant is checked. Then what is computed for other numbers of them.
    """
    refuse_misplaced(context, virtual=virtual, protocol=protocol)
    if virtual:
        from diloco.cli.virtual import simulate_virtual
        from diloco.plan.predict import Line
        from diloco.simulate.virtual.modelled import Setting

        rate, delay_s = parse_option("--link", link or "100mbit,40ms", parse_link)
        setting = Setting(
            1000 if islands is None else islands,
            Line(rate, rate, delay_s),
            values=parse_positive("--params", params, parse_count),
            codec=codec,
            phase_s=parse_positive("--phase", phase, parse_duration),
            mtbf_s=None if mtbf is None else parse_positive("--mtbf", mtbf, parse_duration),
            back_s=parse_positive("--back", back, parse_duration),
            silence_s=parse_positive("--silence", silence, parse_duration),
            diurnal=0.0 if diurnal is None else parse_option("--diurnal", diurnal, parse_share),
            seconds=60 * minutes,
            seed=first,
            two_level=two_level,
        )
        simulate_virtual(setting, as_json=json)
    elif protocol:
        simulate_protocol(range(first, first + seeds), islands, without, jobs=jobs)
    elif not config:
        raise ConfigError("simulate needs a CONFIG, such as examples/islands.yaml; or --protocol")
    else:
        from diloco.cli.real import refuse_backend, refuse_report, simulate_real, world_of

        refuse_backend(backend)
        if report is not None:
            refuse_report(report)
        faults = {"kill": kill or (), "stop": stop or (), "cut": cut or (), "join": join or (), "slow": slow or ()}
        world = world_of(islands, link, topology, faults)
        simulate_real(config, set_ or [], world, report=report, restart=restart, netns=backend == "netns")


def refuse_misplaced(context: typer.Context, *, virtual: bool, protocol: bool) -> None:
    """An option of another mode is refused, not ignored. Only what was given on the command line counts."""
    sources = {parameter: context.get_parameter_source(parameter.name or "") for parameter in context.command.params}
    given = [parameter for parameter, source in sources.items() if source and source.name == "COMMANDLINE"]
    if virtual:
        wrong, why = [p for p in given if p.name not in VIRTUAL], "has nothing to do with --virtual"
    elif protocol:
        wrong, why = [p for p in given if p.name not in PROTOCOL], "has nothing to do with --protocol"
    else:
        wrong = [p for p in given if p.name in NOT_REAL]
        why = "is for --virtual or --protocol: real islands do not take it"
    if wrong:
        raise ConfigError(f"{wrong[0].opts[0] if wrong[0].param_type_name == 'option' else 'a CONFIG'} {why}")


def simulate_protocol(seeds: range, islands: int | None, without: str | None, *, jobs: int) -> None:
    from diloco.simulate.virtual.faults import Campaign, rule_names

    if without is not None and without not in rule_names():
        raise ConfigError(f"--without {without}: the rules are {', '.join(rule_names())}")
    if islands is not None and not 2 <= islands <= 26:
        raise ConfigError(f"--islands {islands}: with --protocol 2 to 26, or none for 2 to 9 by chance")
    campaign = Campaign(without or "", islands)
    start, commits, violations = time.perf_counter(), 0, 0
    for outcome in campaign.run(seeds, jobs=jobs):
        commits += outcome.commits
        if outcome.violation:
            violations += 1
            print(campaign.describe(outcome.seed), flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(seeds)} seeds from {seeds[0]}: {commits} commits, {violations} violations, {seconds:.1f} s")
    sys.exit(1 if violations else 0)
