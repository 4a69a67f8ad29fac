"""Changes of settings during a run: which keys may change, what they make of a configuration, where they are stored.

Only the run's owner signs changes (`diloco set`). They are files in the folder of an island, which brings them to the
others. A change applies from the record that contains it on, to every island, also to those that join later.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco.atomic import create_file
from diloco.comm.peers.identity import Identity
from diloco.config.file import flat, overrides_tree, parse_config
from diloco.config.schema import Config
from diloco.elastic.protocol.record import EVICT, FORCE, REVOKE, Amendment
from diloco.elastic.protocol.wire import MAX_TEXT, decode, encode
from diloco.errors import ConfigError, MessageRefused, SaveError

FOLDER = "amendments"  # in an island's folder
CHANGEABLE = (
    "inner.lr", "inner.warmup", "inner.schedule", "inner.final_lr", "inner.decay", "inner.steps",
    "inner.weight_decay", "inner.clip",
    "outer.lr", "outer.momentum", "outer.beta2", "outer.second", "outer.eps",
    "elastic.min_islands", "elastic.straggler",
)  # fmt: skip
RENAMED = {"outer.second": "outer.beta2"}
OWN = ("island", "checkpoint", "evaluate", "log")
IDENTITY = ("run", "seed", "model", "data")


class AmendedConfig:
    """Hold a run's configuration with the changes that its owner has made so far."""

    def __init__(self, founded: Config) -> None:
        self._founded = self.now = founded
        self._heeded: tuple[Amendment, ...] = ()

    def at(self, amendments: tuple[Amendment, ...]) -> Config:
        """Return the founding configuration with all of these amendments, computed anew only when they differ."""
        if amendments != self._heeded:
            self._heeded, self.now = amendments, amended(self._founded, amendments)
        return self.now


def amended(config: Config, amendments: Iterable[Amendment]) -> Config:
    """Apply the amendments to a configuration, in order. Raise ConfigError for one that this diloco cannot apply."""
    for amendment in amendments:
        try:
            config = changed(config, _changes_of(amendment, config))
        except (ConfigError, ValueError, TypeError, RecursionError) as error:
            told = "".join(letter if letter.isprintable() else " " for letter in str(error)[:300])  # it may travel
            raise ConfigError(
                f"change {amendment.number} of the run's settings does not work here ({told}): "
                "use the same diloco as the run's owner"
            ) from None
    return config


def objection(config: Config, amendments: Iterable[Amendment]) -> str:
    """Return why this diloco cannot apply these amendments, or an empty string if it can."""
    try:
        amended(config, amendments)
    except ConfigError as error:
        return str(error)
    return ""


def _changes_of(amendment: Amendment, config: Config) -> dict[str, Any]:
    """Parse an amendment's changes, by dotted key, and refuse keys that cannot change during a run."""
    changes = json.loads(amendment.changes)
    if not isinstance(changes, dict):
        raise ConfigError("it is no table of settings")
    for key in (EVICT, FORCE, REVOKE):
        changes.pop(key, None)  # who takes part is the protocol's business
    for key in changes:
        if reason := reason_against(key, config, own_loop=False):
            raise ConfigError(f"{key} {reason}")
    return changes


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the configuration with these changes, by dotted key, validated as a whole."""
    tree = config.model_dump(mode="json")
    for key, value in changes.items():
        section, _, leaf = RENAMED.get(key, key).partition(".")
        if leaf:
            tree[section] = {**tree.get(section, {}), leaf: value}
        else:
            tree[section] = value
    return parse_config(tree)


def key_end(peer: str) -> str:
    """Return the end of a peer id, for an island whose name is not at hand."""
    return f"…{peer[-8:]}"


def in_words(amendment: Amendment, name: Callable[[str], str] = key_end) -> str:
    """Format an amendment for people: `inner.lr=0.0001, inner.steps=4000`. One that cannot be parsed stays as it is.

    `name` says what islands are called, by their ids.
    """
    try:
        changes = json.loads(amendment.changes)
        told = [f"{name(peer)} is taken out" for peer in sorted(amendment.evicts)]
        told += [f"the ticket {invite[:8]} is revoked" for invite in sorted(amendment.revokes)]
        if FORCE in changes:
            told.append(f"only {', '.join(map(name, changes[FORCE]['keep']))} go on")
        others = {key: value for key, value in changes.items() if key not in (EVICT, FORCE, REVOKE)}
        return ", ".join([*told, *(f"{key}={value}" for key, value in others.items())])
    except (
        ValueError,
        AttributeError,
        TypeError,
        LookupError,
        RecursionError,
    ):  # in the log of a run whose owner has another diloco
        return amendment.changes


def check(config: Config, overrides: Iterable[str], *, own_loop: bool) -> dict[str, Any]:
    """Return what these overrides change, by dotted key. Refuse what cannot change during a run, or is so already.

    `own_loop`: the run is trained by a user's own loop, which sets all of `inner` but its steps.
    """
    asked = {RENAMED.get(key, key): value for key, value in flat(overrides_tree(overrides)).items()}
    new = flat(changed(config, asked).model_dump(mode="json"))
    for key in asked:
        if reason := reason_against(key, config, own_loop=own_loop):
            raise ConfigError(f"{key} {reason}")
    before = flat(config.model_dump(mode="json"))
    same = [key for key in asked if new[key] == before[key]]
    if same:
        raise ConfigError(f"{same[0]} is {before[same[0]]} already: there is nothing to change")
    return {key: new[key] for key in asked}


def reason_against(key: str, config: Config, *, own_loop: bool) -> str:
    """Return why this key cannot change during the run, or an empty string if it can."""
    section = key.partition(".")[0]
    rewind = "diloco rewind RUN ROUND --set starts a new branch with it"
    if section in OWN or key in ("data.path", "data.tokenizer"):
        return "is each island's own business: give it to `diloco run --resume` or `diloco join` by --set"
    if section in IDENTITY and key != "data.epochs":
        return "is part of what the run is and cannot change: start another run"
    if key not in CHANGEABLE:
        return f"cannot change while the run continues: {rewind}"
    if own_loop and section == "inner" and key != "inner.steps":
        return "is the business of the program that trains (diloco.connect)"
    if section == "inner" and config.sync.growth and config.sync.fragments > 1:
        return f"decides with sync.growth when each fragment takes its turn: {rewind}"
    return ""


def write_amendment(
    folder: Path, owner: Identity, number: int, changes: Mapping[str, Any], *, mark: str = ""
) -> Amendment | None:
    """Sign a change of settings and write it to an island's folder. Return None if its number is taken already.

    `mark` is part of the file's name: one that replaces another is to be noticed.
    """
    text = json.dumps(changes, sort_keys=True, separators=(",", ":"))
    if len(text) > MAX_TEXT:
        raise ConfigError(f"these are too many changes at once ({len(text)} characters): make several of them")
    amendment = Amendment.sign(owner, number, text)
    path = folder / FOLDER / f"{number:06}{mark}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        return amendment if create_file(path, encode(amendment)) else None
    except OSError as error:
        raise SaveError(f"{path} cannot be written ({error.strerror}): nothing was changed") from None


def amendment_files(folder: Path) -> list[Path]:
    """List the files of all amendments in an island's folder, in the order of their numbers."""
    return sorted((folder / FOLDER).glob("*.json"))


def read_amendment(path: Path) -> Amendment:
    """Read a signed change of settings from its file. Raise SaveError if the file is damaged or unreadable."""
    try:
        return decode(Amendment, path.read_bytes())
    except (OSError, MessageRefused) as error:
        raise SaveError(f"{path} is no change of settings that diloco wrote ({error}): remove it") from None


def with_waiting(folder: Path, in_force: tuple[Amendment, ...]) -> tuple[Amendment, ...]:
    """Return the owner's changes in force, and then those in an island's folder that still wait for a round."""
    left = map(read_amendment, amendment_files(folder))
    return (*in_force, *(amendment for amendment in left if amendment.number > len(in_force)))


class Inbox:
    """Collect the amendments that the owner leaves in an island's folder, each of them once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[Path] = set()

    def new(self) -> Iterator[Amendment | SaveError]:
        """Yield the amendments that have appeared since the last call; for a file that cannot be read, its error."""
        for path in amendment_files(self._folder):
            if path not in self._seen:
                self._seen.add(path)
                try:
                    yield read_amendment(path)
                except SaveError as error:
                    yield error
