"""Declare `diloco launch`: start a run's islands here, on hosts, or by a scheduler; list, extend and end them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.shared import Overrides, next_commands, say
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco.launch.backend import Island, Launch
    from diloco.launch.view import Member


def launch(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The run's YAML file.", show_default=False)
    ] = None,
    set_: Overrides = None,
    on: Annotated[str, typer.Option(metavar="WHERE", help="local, ssh, slurm or kubernetes.")] = "local",
    islands: Annotated[int | None, typer.Option(min=1, max=64, help="Number of islands to start (default 1).")] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes-per-island", min=1, help="Machines of each island (default 1, or as island-0)."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus-per-node", min=0, help="GPUs of each machine (default 0, or as island-0)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files that would be submitted, and start nothing.")
    ] = False,
    join: Annotated[
        str | None, typer.Option(metavar="RUN", help="Add --islands to a run that was launched.", show_default=False)
    ] = None,
    list_: Annotated[
        str | None,
        typer.Option("--list", metavar="RUN", help="Show each island's job, and how far it is.", show_default=False),
    ] = None,
    cancel: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="RUN NAME", help="Let one island contribute, and end its job.", show_default=False),
    ] = None,
    stop: Annotated[
        str | None, typer.Option(metavar="RUN", help="End all islands; launching again continues.", show_default=False)
    ] = None,
) -> None:
    """Start a run's islands here, by ssh, Slurm or Kubernetes.

    Keys and invites are made here first, so that islands can start in any order and any number of times: one founds the
    run, the others join it, and whoever comes back resumes. The section `launch` of the configuration says how. The
    same command again starts those islands that are not running.
    """
    from diloco.config.file import load_config
    from diloco.launch import launching

    choices = {"CONFIG": config, "--join": join, "--list": list_, "--cancel": cancel, "--stop": stop}
    asked = [name for name, given in choices.items() if given]
    if len(asked) != 1:
        raise ConfigError(f"give one of {', '.join(choices)}, not {' and '.join(asked) or 'none'}")
    if set_ and config is None:
        raise ConfigError(f"--set goes with CONFIG: a launched run keeps its own, which {asked[0]} does not change")
    if config is not None:
        planned = launching.plan_launch(
            load_config(config, set_ or []), on, islands=islands or 1, nodes=nodes or 1, gpus=gpus or 0
        )
        if dry_run:
            print_files(planned, planned.islands)
        else:
            report(*launching.start(planned))
    elif join is not None:
        larger, added = launching.plan_join(launched(join), islands=islands or 1, nodes=nodes, gpus=gpus)
        if dry_run:
            print_files(larger, added)
        else:
            report(launching.add(larger, added), added)
    elif list_ is not None:
        show(launched(list_))
    elif cancel is not None:
        logs = launching.cancel(launched(cancel[0]), [cancel[1]])
        say(
            f"{cancel[1]} was asked to leave, and is not started again", *(f"its log: {path}" for path in logs.values())
        )
    elif stop is not None:
        started = launched(stop)
        limit = "Slurm's KillWait" if started.backend == "slurm" else f"{started.config.launch.grace_s:.0f} s"
        say(f"asking all islands to leave: they have {limit}")
        ended = launching.end(started, started.islands)
        say("all islands have left", *(f"{name}: {path}" for name, path in ended.items()))


def launched(run: str) -> "Launch":
    """Return what was launched in a run's folder, which is given as such or by its name under runs/."""
    from diloco.launch.backend import LAUNCH, Launch

    given = Path(run)
    return Launch.read(given if (given / LAUNCH).is_dir() or not (Path("runs") / run).is_dir() else Path("runs") / run)


def print_files(launch: "Launch", islands: "Sequence[Island]") -> None:
    """Print the files by which islands would be submitted, each under its name."""
    from diloco.launch.backend import backend_of

    for name, text in backend_of(launch).render(islands).items():
        print(f"# ---- {name}", text.rstrip(), sep="\n")


def report(launch: "Launch", islands: "Sequence[Island]") -> None:
    """Say what was started, and what can be done next."""
    run, names = launch.folder, ", ".join(island.name for island in islands)
    log = {f"tail -f {launch.here / 'logs'}/island-0.log": "shows what that island prints"}
    what = f"{names} of {run}" if names else f"nothing: all islands of {run} are at work, or have finished"
    say(
        f"started on {launch.backend}: {what}",
        *next_commands({
            **(log if launch.backend in ("local", "slurm") else {}),
            f"diloco launch --list {run}": "shows each island's job, and how far it is",
            f"diloco launch --join {run} --islands 1": "adds an island",
            f"diloco launch --stop {run}": "ends all islands; launching again continues",
        }),
    )  # fmt: skip


def show(launch: "Launch") -> None:
    """Print a line for each island: its job, where that is, and how far the island is; then who else takes part."""
    from diloco.errors import LaunchError
    from diloco.launch.launching import states_of
    from diloco.launch.view import Member, members, peers_of

    states, seen, note = states_of(launch), dict[str, Member](), ""
    if any(job.state == "running" for job in states.values()):
        try:
            seen = members(launch, states)
        except LaunchError as error:
            note = str(error)
    peers = peers_of(launch)
    for island in launch.islands:
        job, member = states.get(island.name), seen.pop(peers.get(island.name, ""), None)
        how = "not submitted" if job is None else " ".join(filter(None, (job.state, job.detail)))
        how += " (cancelled)" * island.cancelled
        say(f"{island.name:<12} {how:<24} {progress(member):<20} {job.where if job else '':<16} {island.job}".rstrip())
    for member in seen.values():
        say(f"{member.name:<12} {'not launched here':<24} {progress(member)}")
    if note:
        say(note)


def progress(member: "Member | None") -> str:
    """Describe how far an island is, as the run's directory has it."""
    if member is None:
        return "-"
    return f"round {member.round}" if member.has_state else "waits for the run"
