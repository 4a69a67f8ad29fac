"""`diloco.connect`: any PyTorch loop takes part in a run. What it is handed is a `Run` (loop.py)."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diloco.checkpoint.save import saves
from diloco.comm.codec.registry import warm_up
from diloco.comm.peers.ticket import Ticket
from diloco.config.file import load_tree, parse_config
from diloco.config.schema import Config
from diloco.errors import ConfigError, DeviceError, SaveError
from diloco.island.optimizer import named_optimizer
from diloco.island.user_model import OwnModel
from diloco.loop import Run
from diloco.report.events import Events
from diloco.run.folder import has_log, open_folder, refuse_remote, release
from diloco.run.genesis import Genesis, read_genesis
from diloco.run.join import (
    OUTER,
    Search,
    Start,
    find_start,
    founding_peer,
    meeting,
    new_start,
    options_for,
    peer_at,
    write_ticket,
)
from diloco.run.peer import Connection, Peer, host_towards, own_name
from diloco.train.alone import Alone
from diloco.train.exchange import Outside
from diloco.train.outer import outer_vectors
from diloco.train.own_save import facts_to_go_on
from diloco.units import parse_link, parse_rate

TICKET = "diloco1-"  # what tickets begin with


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
) -> Iterator[Run]:
    """Found a run (`where`: a YAML file, a dict, a Config) or join one (a ticket, or a file that holds it).

    The model's parameters become those of the run. `optimizer` is yours, or the name of one of torch.optim, which is
    then in `run.optimizer`. Of the configuration, `inner.steps`, `sync`, `outer`, `elastic`, `checkpoint`, `log`, `run`
    and `seed` apply; model, data and inner optimizer are your own. `alone` trains without peers; `fresh` starts again
    where the folder holds a run already; `host` is where others reach this machine; `link`, `max_up` and `max_down`
    are written as 100mbit,40ms and 20mbit.

    Leaving the block contributes what is left and says goodbye. An exception leaves at once.

    A program that is started again goes on. Alone, from the newest save in its folder: model, state of the optimizer,
    rounds under way, position in the data, torch's random numbers; the optimizer's settings are the program's own (let
    a learning rate follow `run.step_count`). Among others, from where its own log of the run ends, or where the others
    are by now; its optimizer starts empty.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise DeviceError("diloco.connect takes part with one process an island: start it without torchrun")
    own = OwnModel.of(model)
    chosen = _optimizer(optimizer, optimizer_options or {}, own)
    where = _read(where)
    with ExitStack() as stack:
        island = _Island(own, _connection(name, host, max_up, max_down, link), stack)
        if isinstance(where, str):
            config, outside, ticket = island.join(where, dir)
        else:
            config = _in_folder(where, dir)
            config, outside, ticket = island.stay_alone(config, fresh) if alone else island.found(config, fresh)
        run = Run(config, own, chosen, island.events, outside, ticket)
        if island.resumes is not None:
            run.resume(island.resumes)
            print(
                f"{run.folder}: goes on from step {run.step_count} of {run.steps} (fresh=True starts again)", flush=True
            )
        with closing(run.saver):
            yield run
            run.leave()


Entered = tuple[Config, Outside, str | None]


class _Island:
    """On its way in. What it opens is closed with the stack, the last first."""

    def __init__(self, model: OwnModel, connection: Connection, stack: ExitStack) -> None:
        self._model, self._connection, self._stack = model, connection, stack
        self.events = Events()
        self.resumes: Path | None = None  # the save to go on from
        stack.callback(self.events.close)

    def stay_alone(self, config: Config, fresh: bool) -> Entered:
        refuse_remote(config)
        fragments = self._model.fragments(config.sync)
        if not fresh and (found := saves(Path(config.dir))):
            self.resumes = found[-1]
            facts_to_go_on(self.resumes, config)  # refuses what does not fit, before the folder is touched
        self._open_folder(config, fresh=fresh, goes_on=self.resumes is not None)
        return config, Alone(config, self._model.vector(), fragments), None

    def found(self, config: Config, fresh: bool) -> Entered:
        """A new run; or, where the folder holds one that was founded there, that one again."""
        self._model.fragments(config.sync)  # refuses what cannot work, before anything on disk is touched
        folder = Path(config.dir)
        founded_here = not fresh and (folder / "owner.key").exists()
        known = read_genesis(folder / OUTER) if founded_here else None
        if known is not None:
            known.refuse_changes(config)
            known.check(self._model.layout, None)
        self._open_folder(config, fresh=fresh, goes_on=known is not None)
        name, host = self._connection.name or "island-1", self._connection.host or "127.0.0.1"
        connection = replace(self._connection, name=name, host=host)
        peer, ticket = self._stack.enter_context(founding_peer(folder, connection))
        if known is not None:
            peer.publish()
            start = find_start(peer, known, config, self._model.fragments(config.sync), self.events)
            print(f"{folder}: goes on from step {start.state.step} (fresh=True starts again)", flush=True)
        else:
            genesis = Genesis.of(config, self._model.layout, None, peer.id)
            vectors = outer_vectors(config.outer, self._model.vector())
            start = new_start(peer, genesis, vectors, config, self.events)
        together = self._meet(peer, start, config)
        text = ticket.render()
        self.events.emit("ticket", ticket=text)
        write_ticket(Path(config.dir), ticket)
        print(f"{config.run}: others join with the same program and this ticket:\n{text}", flush=True)
        return config, together, text

    def join(self, text: str, dir: str | Path | None) -> Entered:
        ticket = Ticket.parse(text, time.time())
        name, host = self._connection.name or own_name(), self._connection.host or host_towards(ticket.addresses)
        folder = Path(dir or Path("runs") / f"{ticket.run_id.hex()[:8]}-{name}")
        connection = replace(self._connection, name=name, host=host)
        own = read_genesis(folder / OUTER, ticket.run_id)
        lonely = own is not None
        peer = self._stack.enter_context(peer_at(folder, ticket.run_id, ticket, connection, lonely=lonely))
        peer.publish()
        genesis = own or Search(peer).genesis()
        config = genesis.configure({"checkpoint": {"dir": str(folder)}})
        genesis.check(self._model.layout, None)
        self._open_folder(config, goes_on=True)
        start = find_start(peer, genesis, config, self._model.fragments(config.sync), self.events)
        return config, self._meet(peer, start, config), text

    def _open_folder(self, config: Config, *, fresh: bool = False, goes_on: bool = False) -> None:
        folder = Path(config.dir)
        if not goes_on and not fresh and (saves(folder) or has_log(folder)):
            raise SaveError(
                f"{folder} already holds a run: alone=True goes on with that of an island alone, its ticket with one "
                "that was joined; fresh=True starts again (the old one is kept), dir=FOLDER goes elsewhere"
            )
        open_folder(config, self.events, resume=goes_on, fresh=fresh, view=False)
        self._stack.callback(release, folder)

    def _meet(self, peer: Peer, start: Start, config: Config) -> Outside:
        warm_up(config.sync.codec)
        options = replace(options_for(config), want=0)  # samples are asked for by whoever wants batches
        fragments = self._model.fragments(config.sync)
        return self._stack.enter_context(meeting(peer, start, config, fragments, self.events, options=options))


def _read(where: str | Path | Mapping[str, Any] | Config) -> str | Config:
    """A ticket, or the configuration of a run to be founded."""
    if isinstance(where, Config):
        return where
    if isinstance(where, Mapping):
        return _parse(where)
    if str(where).startswith(TICKET):
        return str(where)
    path = Path(where).expanduser()
    if path.is_file() and path.read_bytes()[: len(TICKET)] == TICKET.encode():
        return path.read_text().strip()
    return _parse(load_tree(path))


def _parse(tree: Mapping[str, Any]) -> Config:
    """Warm-up is of the built-in optimizer: left unsaid, its default does not stand against a short run."""
    inner = tree.get("inner")
    return parse_config({**tree, "inner": {"warmup": 0, **inner} if isinstance(inner, Mapping) else inner})


def _in_folder(config: Config, dir: str | Path | None) -> Config:
    if dir is None:
        return config
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"dir": str(dir)})})


def _connection(
    name: str | None, host: str | None, max_up: str | None, max_down: str | None, link: str | None
) -> Connection:
    """Without name and host where none is given: who founds and who joins has others."""
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
