"""`diloco.connect` lets any PyTorch loop take part in a run, through the `Run` that it yields (train/user_loop.py)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from diloco.checkpoint.save.facts import saves
from diloco.comm.peers.ticket import PREFIX, Ticket
from diloco.config.file import load_tree, parse_config
from diloco.config.schema import Config
from diloco.errors import ConfigError, DilocoError, SaveError
from diloco.island.mesh import ProcessMesh, joined_processes
from diloco.island.optimizer import named_optimizer
from diloco.island.user_model import OwnModel, device_of
from diloco.report.sinks import Events
from diloco.run.attach import Attachment
from diloco.run.folder import OWNER_KEY, has_log, release
from diloco.run.invites import TICKET
from diloco.run.launched import Launched
from diloco.run.local import Connection
from diloco.run.machine import host_towards, own_name
from diloco.run.signals import LEFT, Stop, exit_on_signals_while_joining, stop_on_sigterm
from diloco.run.start import RunEntry
from diloco.train.user_loop import Run
from diloco.units import parse_link, parse_rate


@contextmanager
def connect(
    where: str | Path | Mapping[str, Any] | Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | str | None = None,
    *,
    optimizer_options: Mapping[str, Any] | None = None,
    alone: bool = False,
    fresh: bool = False,
    name: str | None = None,
    host: str | None = None,
    max_up: str | None = None,
    max_down: str | None = None,
    link: str | None = None,
    dir: str | Path | None = None,
    attach: str | Path | None = None,
) -> Iterator[Run]:
    """Found a run (`where`: a YAML file, a dict, a Config) or join one (a ticket, or a file that holds it).

    The model's parameters become those of the run. `optimizer` is yours, or the name of one of torch.optim, which is
    then in `run.optimizer`. Of the configuration, `inner.steps`, `sync`, `outer`, `elastic`, `checkpoint`, `log`, `run`
    and `seed` apply; model, data and inner optimizer are your own. `alone` trains without peers; `fresh` starts again
    where the folder holds a run already; `host` is where others reach this machine; `link`, `max_up` and `max_down`
    are written as 100mbit,40ms and 20mbit.

    Leaving the block contributes what is left and says goodbye. An exception leaves at once. After SIGTERM `run.step`
    returns False and `run.batches` ends, so that the loop leaves the block (unless the program handles SIGTERM itself).

    `attach` is an island's secret, as `diloco launch` makes them: this program founds the run, resumes it or joins it,
    whichever is right, however often it is started. A program that `diloco launch` has started (`launch.script`) needs
    no argument for that, and the configuration that was launched counts instead of `where`. Where the run has not ended
    yet, such a program exits with 75 when it leaves the block: it is to be started again.

    A program that is started again resumes. Alone, it continues exactly where it stopped: model, state of the
    optimizer, rounds under way, position in the data, torch's random numbers; the optimizer's settings are the
    program's own (let a learning rate follow `run.step_count`). Among others, it continues from where its own log of
    the run ends, or where the others are by now, with the optimizer's state of its newest save.

    Under torchrun all processes are one island. Cut the model with `fully_shard` and tensor parallelism (or give each
    process a copy, as DDP does) and make the optimizer first; then every process calls this with the same arguments.
    """
    connection = _connection(name, host, max_up, max_down, link)
    told = None if alone or attach is not None else Launched.given()
    if attach is not None:
        told = Launched("", str(attach), dir=None if dir is None else str(dir), host=host)
    stop = Stop()
    with stop_on_sigterm(stop), ExitStack() as stack:  # while it closes what it holds, too
        try:
            with exit_on_signals_while_joining(LEFT if told is not None else None):
                place = stack.enter_context(joined_processes(device_of(model)))
                own = OwnModel.of(model, place)
                chosen = _optimizer(optimizer, optimizer_options or {}, own)
                where = _read_together(told.config if told is not None and told.config else where, place)
                events = Events()
                stack.callback(events.close)

                def enter(connection: Connection | None) -> RunEntry:
                    build = partial(Run, model=own, optimizer=chosen, events=events)
                    return RunEntry(place, events, stack, connection, build, view=False, stop=stop)

                if told is not None:
                    run = _attach(enter, told, connection, where, own)
                elif isinstance(where, str):
                    run = _join(enter, place, connection, where, dir)
                else:
                    here = replace(connection, name=name or "island-1", host=host or "127.0.0.1")
                    run = _found(enter(None if alone else here), where, dir, own, fresh=fresh)
        except DilocoError as error:  # its message says what to do: no frames and causes from below
            raise error.with_traceback(None) from None
        run.should_stop = lambda: stop.asked
        run.begin()
        with closing(run.saver):
            yield run
            run.leave(pause=alone)
    if told is not None and not run.finished:
        raise SystemExit(LEFT)


def _attach(
    enter: Callable[[Connection], RunEntry], told: Launched, connection: Connection, where: str | Config, own: OwnModel
) -> Run:
    """Take part by a secret: found the run, resume it or join it, whichever is right."""
    if isinstance(where, str):
        raise ConfigError("diloco.connect(TICKET, attach=…): a secret has its own ticket; give the run's configuration")
    attachment = Attachment.of(told)
    folder = Path(told.dir or Path(where.dir) / attachment.secret.island)
    config = where.model_copy(update={"checkpoint": where.checkpoint.model_copy(update={"dir": str(folder)})})
    own.fragments(config.sync)  # refuses what cannot work, before anything on disk is touched
    rates = {"up_bits_per_s": connection.up_bits_per_s, "down_bits_per_s": connection.down_bits_per_s}
    entrance = enter(attachment.connection(told, delay_s=connection.delay_s, **rates))
    entrance.stack.callback(release, folder)
    run = cast(Run, entrance.attach(config, attachment))
    _say(own.place, f"{folder}: takes part as {attachment.secret.island}, at step {run.step_count} of {run.steps}")
    return run


def _found(entrance: RunEntry, config: Config, dir: str | Path | None, own: OwnModel, *, fresh: bool) -> Run:
    """Found a run; or, where the folder holds one that was founded there, resume that one."""
    if dir is not None:
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"dir": str(dir)})})
    own.fragments(config.sync)  # refuses what cannot work, before anything on disk is touched
    folder = Path(config.dir)
    entrance.stack.callback(release, folder)
    founded_here = has_log(folder) and (folder / OWNER_KEY).exists()
    left_alone = entrance.closed and bool(saves(folder))
    # the leader changes the folder as soon as it goes on: what it saw counts for all
    resumes, is_used = own.place.share((founded_here or left_alone, bool(saves(folder) or has_log(folder))))
    if not fresh and resumes:
        run = cast(Run, entrance.resume(config))
        _say(own.place, f"{folder}: resumes at step {run.step_count} of {run.steps} (fresh=True starts over)")
    else:
        if not fresh and is_used:
            raise SaveError(
                f"{folder} already holds a run: alone=True resumes one of an island alone, its ticket one that was "
                "joined; fresh=True starts over (the old one is kept), dir=FOLDER uses another folder"
            )
        run = cast(Run, entrance.found(config, fresh=fresh))
    run.ticket = own.place.share(entrance.ticket.render() if entrance.ticket is not None else None)
    if run.ticket is not None:
        _say(own.place, f"{config.run}: others join with the same program and the ticket in {folder / TICKET}")
    return run


def _say(place: ProcessMesh, text: str) -> None:
    """Print a line for people, once for all processes of the island."""
    if place.leader:
        print(text, flush=True)


def _join(
    enter: Callable[[Connection], RunEntry], place: ProcessMesh, connection: Connection, text: str,
    dir: str | Path | None,
) -> Run:  # fmt: skip
    ticket = Ticket.parse(text, 0.0)
    name, host = connection.name or place.share(own_name()), connection.host or host_towards(ticket.addresses)
    folder = Path(dir or Path("runs") / f"{ticket.run_id.hex()[:8]}-{name}")
    entrance = enter(replace(connection, name=name, host=host))
    entrance.stack.callback(release, folder)
    run = cast(Run, entrance.join(ticket, {}, folder))
    run.ticket = text
    return run


def _read_together(where: str | Path | Mapping[str, Any] | Config, place: ProcessMesh) -> str | Config:
    """Read a ticket or a configuration where the leader is: the files of an island of several machines are its own."""
    found: list[str | Config] = []
    place.leader_first(lambda: found.append(_read(where)))
    return cast(str | Config, place.share(found[0] if found else None))


def _read(where: str | Path | Mapping[str, Any] | Config) -> str | Config:
    """Return a ticket, or the configuration of a run to be founded."""
    if isinstance(where, Config):
        return where
    if isinstance(where, Mapping):
        return _parse(where)
    if str(where).startswith(PREFIX):
        return str(where)
    path = Path(where).expanduser()
    if path.is_file() and path.read_bytes()[: len(PREFIX)] == PREFIX.encode():
        return path.read_text().strip()
    return _parse(load_tree(path))


def _parse(tree: Mapping[str, Any]) -> Config:
    """Parse a configuration whose warm-up is 0 unless it says otherwise.

    Warm-up belongs to the built-in optimizer, and its default must not make a short run impossible.
    """
    inner = tree.get("inner")
    return parse_config({**tree, "inner": {"warmup": 0, **inner} if isinstance(inner, Mapping) else inner})


def _connection(
    name: str | None, host: str | None, max_up: str | None, max_down: str | None, link: str | None
) -> Connection:
    """Return the connection of this island, without name and host where none is given.

    Founding and joining have different defaults for these.
    """
    try:
        rate, delay_s = (None, 0.0) if link is None else parse_link(link)
        up, down = (None if text is None else parse_rate(text) for text in (max_up, max_down))
    except ValueError as error:
        raise ConfigError(f"diloco.connect(link={link!r}, max_up={max_up!r}, max_down={max_down!r}): {error}") from None
    return Connection(host or "", up or rate, down or rate, delay_s, name or "")


def _optimizer(
    given: torch.optim.Optimizer | str | None, options: Mapping[str, Any], model: OwnModel
) -> torch.optim.Optimizer | None:
    if isinstance(given, str):
        return named_optimizer(given, list(model.trainable.values()), **options)
    if options:
        raise ConfigError("optimizer_options are for an optimizer that is given by its name")
    if given is not None:
        held = {id(parameter) for group in given.param_groups for parameter in group["params"]}
        if not any(id(parameter) in held for parameter in model.trainable.values()):
            raise ConfigError("the optimizer holds none of the model's parameters: make it from model.parameters()")
    return given
