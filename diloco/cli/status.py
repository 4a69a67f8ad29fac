"""Declare the commands that look at runs which are going on: `status`, `why`, `ls`, `stop` and `bundle`."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.completion import run_names
from diloco.cli.shared import Json, RunName, say
from diloco.errors import SaveError

if TYPE_CHECKING:
    from diloco.comm.peers.ticket import Ticket
    from diloco.history.present import LocalIsland
    from diloco.report.status import RunStatus
    from diloco.report.why import Facts

OneRun = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|TICKET]",
        autocompletion=run_names,
        help="A run's folder, its name under runs/, or a ticket to watch (default: the run that is going on).",
        show_default=False,
    ),
]
WATCH_S = 1.0
LEAVE_S = 600.0


def status(
    run: OneRun = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show what each island of a run does now.

    Islands on other machines, too: their state, for whom they wait, share, bytes, loss, speed, and when the run will
    end. With a ticket whose right is watch it looks from anywhere: nobody is admitted by that, and no place is taken.
    """
    from diloco.report.shown import status_lines
    from diloco.report.watching import give_way

    if watch:
        give_way()
    found = _statuses(run, watch=watch)
    try:
        if watch and not as_json and sys.stdout.isatty():
            _draw(found)
        for each in found:
            if as_json:
                print(each.encode().decode(), flush=True)
            else:
                say(*status_lines(each))
    except KeyboardInterrupt:
        if not watch:
            raise


def _draw(found: "Iterator[RunStatus]") -> None:
    """Draw the run in place, as it changes; what was seen last stays in the terminal."""
    from rich.live import Live

    from diloco.report.console import LastingConsole
    from diloco.report.live import REFRESH_HZ
    from diloco.report.picture import RunPicture

    last = next(found)
    picture = RunPicture(lambda: last)
    with Live(picture, console=LastingConsole(highlight=False, emoji=False), refresh_per_second=REFRESH_HZ):
        for last in found:  # noqa: B007 -- the picture looks at it
            pass


def _statuses(run: str | None, *, watch: bool) -> "Iterator[RunStatus]":
    from diloco.history import present

    if run is not None and is_ticket(run):
        yield from _from_afar(run, watch=watch)
        return
    name = run or present.only_run()
    while True:
        islands = present.find_islands(name)
        present.ask_remote(islands)
        found = present.status_of(present.find_islands(name))
        if found is None:
            raise SaveError(
                f"{name} has said nothing yet: it is starting, or an earlier diloco trains there; `diloco log {name}` "
                "lists its rounds"
            )
        yield found
        if not watch:
            return
        time.sleep(WATCH_S)


def _from_afar(given: str, *, watch: bool) -> "Iterator[RunStatus]":
    ticket = read_watch_ticket(given)
    from diloco.run.watcher import watch_run  # hivemind, which takes seconds

    for found in watch_run(ticket, pause_s=WATCH_S):
        yield found
        if not watch:
            return


def read_watch_ticket(given: str) -> "Ticket":
    """Return the ticket that was given, or that is where it was said, and take it off the command line."""
    from diloco.cli.run import pass_on, read_ticket
    from diloco.comm.peers.ticket import Ticket

    text = read_ticket(given)
    pass_on(given, text)
    return Ticket.parse(text, 0.0)


def why(
    run: OneRun = None,
    island: Annotated[
        str | None, typer.Argument(metavar="[ISLAND]", help="Explain what this island does, or does not.")
    ] = None,
    round: Annotated[int | None, typer.Option("--round", metavar="N", min=1, help="Explain this round.")] = None,
    as_json: Json = False,
) -> None:
    """Say in words what holds a run up.

    Or why an island contributes nothing or was dropped, or why a round took long. Who is slow and by how much, and
    whether a link, a disk or a GPU is the bottleneck, as it was measured. An island's name alone is looked for in the
    run that is going on.
    """
    from diloco.report import why as reasons
    from diloco.report.tables import harmless

    try:
        facts = facts_of(run)
    except SaveError as unknown:
        if run is None or island is not None:
            raise
        try:
            facts, island = facts_of(None), run
        except SaveError:  # which names no run of that name
            raise unknown from None
        if not reasons.is_known(facts, run):
            raise
    if round is not None:
        found = reasons.why_round(facts, round)
    else:
        found = reasons.why_now(facts) if island is None else reasons.why_island(facts, island)
    if as_json:
        print(json.dumps(found))
    else:
        say(*map(harmless, found))  # events and headers have texts of peers, too


def facts_of(run: str | None) -> "Facts":
    """Collect what is known of a run: its status, the headers of its rounds, and what islands of this machine
    reported."""
    from diloco.history import present
    from diloco.history.find import find_logs
    from diloco.history.rounds import history_of
    from diloco.report.sinks import EVENTS
    from diloco.report.watching import recent_events
    from diloco.report.why import Facts
    from diloco.run.folder import has_log

    if run is not None and is_ticket(run):
        return Facts(next(_from_afar(run, watch=False)))
    name = run or present.only_run()
    present.ask_remote(present.find_islands(name))
    islands = present.find_islands(name)
    events = sorted(
        (event for each in islands for event in recent_events(each.folder / EVENTS)), key=lambda event: event.time
    )
    if not any(has_log(each.folder) for each in islands):  # it is starting, and has its first round still to come
        return Facts(present.status_of(islands), events=events)
    history = history_of(find_logs(name))
    return Facts(present.status_of(islands), history.rounds, events, history.names.of)


def is_ticket(given: str) -> bool:
    """Tell whether what was given is a ticket, or says where one is, rather than a run."""
    from diloco.comm.peers.ticket import PREFIX

    return given.startswith((PREFIX, "env:", "-")) or Path(given).is_file()


def ls(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where runs lie.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs on this machine, and how far each is."""
    from diloco.history.present import islands_in, status_of
    from diloco.report.tables import aligned
    from diloco.units import format_duration

    runs = [(path, islands_in(path)) for path in sorted(folder.glob("*")) if path.is_dir()]
    found = [(path, islands, status_of(islands)) for path, islands in runs if islands]
    if as_json:
        print(json.dumps([_listed(*each) for each in found], indent=1))
        return
    now = time.time()
    table = [
        (
            path.name, f"{sum(island.running for island in islands)} of {len(islands)} running",
            "" if at is None else at.round, "" if at is None else f"{at.step}/{at.steps}",
            "" if at is None else f"{format_duration(max(0.0, now - at.at))} ago",
        )
        for path, islands, at in found
    ]  # fmt: skip
    if table:
        say(*aligned(("run", "islands", "round", "step", "heard"), table, left=("run", "islands")))
    else:
        say(f"no runs in {folder}/")


def _listed(path: Path, islands: "list[LocalIsland]", status: "RunStatus | None") -> dict[str, object]:
    told = {} if status is None else {name: getattr(status, name) for name in ("round", "step", "steps", "at")}
    running = sum(island.running for island in islands)
    return {"run": path.name, "folder": str(path), "islands": len(islands), "running": running, **told}


def stop(
    run: RunName,
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="How long to wait for the end of islands that were not launched."),
    ] = LEAVE_S,
) -> None:
    """Ask a run, or one island of it, to stop in good order.

    It is what Ctrl-C does where it was started: islands finish their step, save, and can be continued. Launched
    islands are stopped through the launcher, as by `diloco launch --stop`; otherwise it would restart them.
    Exits with 1 if one is still there when the time is over.
    """
    from diloco.history.present import find_islands, is_diloco
    from diloco.history.present import stop as ask_to_stop
    from diloco.report.terminal import names

    if _end_launched(run):
        return
    islands = find_islands(run)
    going = [island.folder.name for island in islands if island.running]
    if not going:
        say(f"{run} is not running")
        return
    pids = ask_to_stop(islands)
    say(f"asked {names(going)} to stop (process {', '.join(map(str, pids))}); waiting for up to {wait:.0f} s")
    deadline = time.monotonic() + wait
    # who has said goodbye still has its process to end; a program of somebody's own may go on after its run
    while left := [island.folder.name for island in find_islands(run) if island.running] or [
        f"process {pid}" for pid in pids if is_diloco(pid)
    ]:
        if time.monotonic() > deadline:
            say(f"still running: {names(left)}")
            raise SystemExit(1)
        time.sleep(WATCH_S / 4)
    say(f"{run} has stopped")


def _end_launched(run: str) -> bool:
    """End the jobs of a run, or of one island of it, that was launched; return False if none is at work."""
    from diloco.history import present
    from diloco.launch import launching
    from diloco.launch.backend import LAUNCH, STATE, Launch

    folder = present.folder_of(run).resolve()
    top = next((place for place in (folder, folder.parent) if (place / LAUNCH / STATE).is_file()), None)
    if top is None:
        return False
    launch = Launch.read(top)
    jobs = launching.states_of(launch)
    asked = [island for island in launch.islands if folder in (top, top / island.name)]
    if not any(island.name in jobs and jobs[island.name].state in ("running", "waiting") for island in asked):
        return False
    say(f"asking {run}, which was launched, to leave: it has {launch.config.launch.grace_s:.0f} s")
    launching.end(launch, asked)
    say(f"{run} has stopped; the same `diloco launch` command continues it")
    return True


def bundle(
    run: RunName,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The archive to write (default: RUN-bundle.tar.gz).")
    ] = None,
) -> None:
    """Pack what a bug report needs, without secrets.

    One archive: configuration, events, logs, status and the headers of all rounds; no weights and no data. Look into it
    before you send it: paths, addresses and the names of islands are in it.
    """
    from diloco.history import present
    from diloco.history.bundle import pack
    from diloco.report.shown import status_lines
    from diloco.report.why import why_now

    facts = facts_of(run)
    folder = present.folder_of(run)
    seen = [] if facts.status is None else status_lines(facts.status)
    texts = {"status.txt": "\n".join(seen) + "\n", "why.txt": "\n".join(why_now(facts)) + "\n"}
    path = out or Path(f"{folder.resolve().name}-bundle.tar.gz")
    packed = pack(folder, path, texts)
    say(f"{path}: {len(packed)} files, without keys and tickets; tar -tzf {path} lists them")
