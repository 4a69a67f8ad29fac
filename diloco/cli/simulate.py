"""Declare `diloco simulate`: real islands over slow links (`real.py`), the protocol alone, or virtual time.

The last is in `virtual.py`.
"""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from diloco.cli.shared import Json, Overrides, parse_option, parse_positive
from diloco.comm.codec.registry import CODECS
from diloco.errors import ConfigError
from diloco.units import parse_count, parse_duration, parse_link, parse_share


class IslandsByDefault(TyperGroup):
    """Make `islands` the command that is meant where none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `simulate CONFIG` as `simulate islands CONFIG`."""
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named or not args else ["islands", *args])


simulate = typer.Typer(
    cls=IslandsByDefault,
    help="Train islands here over simulated links, with faults. `diloco simulate CONFIG` is short for `diloco simulate "
    "islands CONFIG`. The other commands simulate the protocol alone, or thousands of islands in virtual time.",
    no_args_is_help=True,
)
CUTS_MAY_STOP = 0.01  # of the topologies in which a quorum of linked islands exists
First = Annotated[int, typer.Option(min=0, help="The first seed.")]


@simulate.command(epilog="Example: diloco simulate examples/islands.yaml --link 20mbit,80ms --kill 3@20s")
def islands(
    config: Annotated[list[Path], typer.Argument(metavar="CONFIG…", help="The run's YAML file; several are compared.")],
    set_: Overrides = None,
    islands: Annotated[int | None, typer.Option(min=1, help="Number of islands to start (default 4).")] = None,
    link: Annotated[str | None, typer.Option(help="Rate and one-way delay of each island: 20mbit,80ms")] = None,
    topology: Annotated[
        Path | None,
        typer.Option(help="Instead of --link: a file with regions, islands and paths; see examples/topology.yaml"),
    ] = None,
    kill: Annotated[list[str] | None, typer.Option(help="Kill an island: 1@60s sends SIGKILL at 60 s.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop an island for a while: 2@30s..45s")] = None,
    cut: Annotated[
        list[str] | None, typer.Option(help="Cut regions or islands off from each other: eu|us@90s..120s")
    ] = None,
    join: Annotated[list[str] | None, typer.Option(help="Start one more island: 1@100s")] = None,
    slow: Annotated[list[str] | None, typer.Option(help="Make an island's steps take longer: 3x2.5")] = None,
    restart: Annotated[bool, typer.Option("--restart/--no-restart", help="Restart islands that are killed.")] = True,
    backend: Annotated[
        str, typer.Option(help="Who shapes the links. shaped: the islands themselves; netns: Linux's kernel, as root.")
    ] = "shaped",
    report: Annotated[
        Path | None, typer.Option(help="The page to write, with a .json beside it; report.html in the run's folder.")
    ] = None,
) -> None:
    """Train real islands over simulated links (the default).

    A report with plots says what happened. Times count from the moment when all islands train. Islands are numbered
    from 1; those that join later have the last numbers. Options for faults can be repeated. Files lie in
    runs/NAME-simulated, unless --set run=… or checkpoint.dir names a folder; an earlier run there is kept as NAME.1, …
    """
    from diloco.cli.real import refuse_backend, refuse_report, simulate_real, world_of

    refuse_backend(backend)
    if report is not None:
        refuse_report(report)
    faults = {"kill": kill or (), "stop": stop or (), "cut": cut or (), "join": join or (), "slow": slow or ()}
    world = world_of(islands, link, topology, faults)
    simulate_real(config, set_ or [], world, report=report, restart=restart, netns=backend == "netns")


@simulate.command(epilog="Example: diloco simulate protocol --seeds 1000 --jobs 8")
def protocol(
    seeds: Annotated[int, typer.Option(min=1, help="Number of random fault scripts.")] = 100,
    first: First = 0,
    islands: Annotated[
        int | None, typer.Option(help="Number of islands, 2 to 26. Without it, 2 to 9 at random.")
    ] = None,
    campaign: Annotated[
        str, typer.Option(help="usual; harsh: long exchanges, slow disks, lost messages; cuts: links cut for ever.")
    ] = "usual",
    partition: Annotated[
        str | None, typer.Option(help="quorum, merge or auto. Without it, each seed draws its own.")
    ] = None,
    without: Annotated[
        str | None, typer.Option(metavar="RULE", help="A rule to switch off, to see what it is for.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
) -> None:
    """Simulate the round protocol, with random faults.

    Nothing is trained, and the network is virtual. Every invariant is checked at every commit. A violation is printed
    with its seed, its shortest transcript and the command that shows it again; the exit code is then 1.
    """
    from diloco.simulate.virtual.campaign import CAMPAIGNS, PARTITIONS, Campaign, rule_names

    if without is not None and without not in rule_names():
        raise ConfigError(f"--without {without}: the rules are {', '.join(rule_names())}")
    if islands is not None and not 2 <= islands <= 26:
        raise ConfigError(f"--islands {islands}: 2 to 26, or none for 2 to 9 at random")
    if campaign not in CAMPAIGNS:
        raise ConfigError(f"--campaign {campaign}: the campaigns are {', '.join(CAMPAIGNS)}")
    if partition not in (None, *PARTITIONS):
        raise ConfigError(f"--partition {partition}: {', '.join(PARTITIONS)}")
    chosen = Campaign(without or "", islands, campaign, partition or "")
    start, commits, violations = time.perf_counter(), 0, 0
    for outcome in chosen.run(range(first, first + seeds), jobs=jobs):
        commits += outcome.commits
        if outcome.violation:
            violations += 1
            print(chosen.describe(outcome.seed), flush=True)
    seconds = time.perf_counter() - start
    print(f"{seeds} seeds from {first}: {commits} commits, {violations} violations, {seconds:.1f} s")
    if campaign == "cuts":
        print(f"{1 - violations / seeds:.1%} of the topologies go on")
    sys.exit(1 if violations > (CUTS_MAY_STOP * seeds if campaign == "cuts" else 0) else 0)


@simulate.command(epilog="Example: diloco simulate virtual --islands 100 --link 100mbit,40ms --mtbf 1min")
def virtual(
    islands: Annotated[int, typer.Option(help="Number of islands, 2 to 10,000.")] = 1000,
    link: Annotated[str, typer.Option(help="Rate and one-way delay of each island.")] = "100mbit,40ms",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the faults.")] = 0,
    minutes: Annotated[float, typer.Option(min=1, help="Minutes of virtual time.")] = 30,
    mtbf: Annotated[str | None, typer.Option(help="Mean time between two failures of any islands: 1min")] = None,
    back: Annotated[str, typer.Option(help="Mean time until a failed island is back.")] = "5min",
    silence: Annotated[str, typer.Option(help="elastic.silence_s; longer than it takes to reach all islands.")] = "5s",
    diurnal: Annotated[
        str | None, typer.Option(help="Share of a link that is lost at the worst time of its day: 50%")
    ] = None,
    params: Annotated[str, typer.Option(help="Parameters that a round exchanges.")] = "150M",
    codec: Annotated[str, typer.Option(help=f"Codec of the values: {', '.join(CODECS)}.")] = "int8",
    phase: Annotated[str, typer.Option(help="Computing time between two rounds.")] = "5min",
    two_level: Annotated[
        bool | None, typer.Option("--two-level/--one-level", help="Reduce in groups first (default with more than 64).")
    ] = None,
    json: Json = False,
) -> None:
    """Simulate thousands of islands in virtual time.

    They come and go, and run the same protocol without training. The figures are times of rounds, utilisation, bytes
    and messages; every invariant is checked. A table then computes the figures for other numbers of islands.
    """
    from diloco.cli.virtual import simulate_virtual
    from diloco.plan.predict import LinkModel
    from diloco.simulate.virtual.modelled import VirtualConfig

    rate, delay_s = parse_option("--link", link, parse_link)
    setting = VirtualConfig(
        islands,
        LinkModel(rate, rate, delay_s),
        values=parse_positive("--params", params, parse_count),
        codec=codec,
        phase_s=parse_positive("--phase", phase, parse_duration),
        mtbf_s=None if mtbf is None else parse_positive("--mtbf", mtbf, parse_duration),
        back_s=parse_positive("--back", back, parse_duration),
        silence_s=parse_positive("--silence", silence, parse_duration),
        diurnal=0.0 if diurnal is None else parse_option("--diurnal", diurnal, parse_share),
        seconds=60 * minutes,
        seed=seed,
        two_level=two_level,
    )
    simulate_virtual(setting, as_json=json)
