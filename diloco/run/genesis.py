"""Record 0: what a run is, fixed by whoever founds it. A joiner takes its configuration from it and checks its data.

It holds settings, names, shapes and digests only: nothing in it is ever executed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.atomic import write_file
from diloco.comm.peers.identity import Identity, run_id_of, verify
from diloco.config.file import first_difference, flat, parse_config
from diloco.config.schema import Config
from diloco.data.samples import OWN_LOOP, Samples
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.record import Head, canonical
from diloco.elastic.protocol.state import Admitted, RunState
from diloco.elastic.protocol.wire import from_plain, to_plain
from diloco.errors import ConfigError, JoinRefused, MessageRefused, SaveError
from diloco.version import PROTOCOL, refusal

if TYPE_CHECKING:  # commands that read a genesis need not import torch
    from diloco.island.layout import Layout
    from diloco.model.frozen import FrozenDigests

CONTEXT = b"diloco genesis 1\0"  # what one key signs for one purpose can never pass for another
SHARED = ("run", "seed", "model", "data", "inner", "outer", "sync", "elastic")
SUGGESTED = ("batch", "accumulate")  # what an island does unless its owner says otherwise
OWN = {"data": ("path", "tokenizer"), "model": ("hf",)}  # where the same lies differs from machine to machine


@dataclass(frozen=True)
class Parent:
    """Name the round of another run that a run continues from, and what it takes over besides the vectors."""

    genesis: str
    round: int
    chain: str  # digest of the head
    vectors: str  # and of all vectors there
    tokens: int
    step: int
    updates: int
    ledger: Ledger

    def __str__(self) -> str:
        return f"round {self.round} (step {self.step}, {self.chain[:12]}) of the run {self.genesis[:12]}"


@dataclass(frozen=True)
class Genesis:
    """Hold what defines a run for good: settings, parameter names and shapes, and digests of the data and of what is
    not trained."""

    protocol: int
    config: dict[str, Any]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: str  # fingerprint: length and digest; or OWN_LOOP
    samples: int  # of one epoch; 0: not known
    founder: str
    frozen: tuple[tuple[str, str], ...] = ()  # digests of frozen parameters, buffers, and a base model's settings
    owner: str = ""  # public key of whoever may change settings later; "": nobody may
    parent: Parent | None = None
    signature: str = ""  # of the owner, in hex

    @classmethod
    def of(
        cls, config: Config, layout: "Layout", samples: Samples | None, founder: str, frozen: "FrozenDigests" = ()
    ) -> "Genesis":
        """Build a new run's genesis, unsigned. `samples` is None for a loop with its own (diloco.connect)."""
        shared = shared_of(config)
        data, count = (OWN_LOOP, 0) if samples is None else (samples.source.fingerprint(), samples.train_count)
        return cls(PROTOCOL, shared, layout.names, layout.shapes, data, count, founder, frozen)

    @classmethod
    def parse(cls, raw: bytes) -> "Genesis":
        """Read a genesis from its bytes; raise JoinRefused where that fails. The signature is not checked."""
        try:
            tree = json.loads(raw)
            names, shapes = tuple(map(str, tree["names"])), tuple(tuple(map(int, s)) for s in tree["shapes"])
            frozen = tuple((str(name), str(digest)) for name, digest in tree.get("frozen", ()))
            return cls(
                int(tree["protocol"]), dict(tree["config"]), names, shapes,
                str(tree["data"]), int(tree["samples"]), str(tree["founder"]), frozen, str(tree.get("owner", "")),
                from_plain(Parent | None, tree.get("parent")), str(tree.get("signature", "")),
            )  # fmt: skip
        except (
            ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, MessageRefused,
        ) as error:  # fmt: skip
            raise JoinRefused(
                f"the run's first record cannot be read ({error!r}): use the same diloco as its founder"
            ) from None

    @classmethod
    def given(cls, raw: bytes, run_id: bytes) -> "Genesis":
        """Read a genesis that a peer gave; raise MessageRefused unless it is of this run and signed by its owner."""
        genesis = cls.parse(raw)
        if not genesis.is_of(run_id):
            raise MessageRefused("the first record that a peer gives is of another run, or not signed by its owner")
        return genesis

    def signed(self, owner: Identity) -> "Genesis":
        """Return a copy that names this owner and has its signature."""
        draft = replace(self, owner=owner.public_key.hex(), signature="")
        return replace(draft, signature=owner.sign(draft._to_sign).hex())

    def is_of(self, run_id: bytes) -> bool:
        """Tell whether this run's owner has signed it: a run's id follows from its owner's key."""
        try:
            key, signature = bytes.fromhex(self.owner), bytes.fromhex(self.signature)
        except ValueError:
            return False
        return run_id_of(key) == run_id and verify(key, signature, self._to_sign)

    @property
    def raw(self) -> bytes:
        """Return the bytes that peers are given and the disk keeps, signature included."""
        return canonical({**self._unsigned, "signature": self.signature})

    @cached_property
    def digest(self) -> str:
        """Compute the SHA-256 of all but the signature: the digest of the run's first head."""
        return hashlib.sha256(canonical(self._unsigned)).hexdigest()

    @property
    def _unsigned(self) -> dict[str, Any]:
        tree = {**asdict(self), "parent": None if self.parent is None else to_plain(self.parent)}
        del tree["signature"]
        if not self.frozen:
            del tree["frozen"]
        return tree

    @property
    def _to_sign(self) -> bytes:
        return CONTEXT + bytes.fromhex(self.digest)

    def state(self) -> RunState:
        """Return the state that the run begins with: an empty one, or what it takes over from its parent."""
        epochs = self.config["data"].get("epochs")
        limit = None if epochs is None or self.data == OWN_LOOP else epochs * self.samples
        latch = self.digest if self.config.get("elastic", {}).get("partition") == "quorum" else ""
        empty = RunState(
            Head(0, 0, self.digest), (self.founder,), Ledger(self.samples, limit), owner=self.owner, latch=latch,
            admitted=(Admitted(self.founder, ""),),
        )  # fmt: skip
        if (came := self.parent) is None:
            return empty
        head, ledger = Head(came.tokens, 0, self.digest), replace(came.ledger, limit=limit)
        return replace(empty, head=head, ledger=ledger, step=came.step, updates=came.updates)

    def configure(self, own: Mapping[str, Any]) -> Config:
        """Return the run's settings with this island's own; raise JoinRefused if `own` sets what is the run's."""
        if self.protocol != PROTOCOL:
            raise JoinRefused(f"the run {refusal(self.protocol)}")
        tree: dict[str, Any] = {**self.config}
        for name, value in own.items():
            if name == "island":
                tree["island"] = tree["island"] | value
            elif name not in SHARED:
                tree[name] = value
            elif isinstance(value, dict) and self._may_lie_elsewhere(name, value):
                tree[name] = tree[name] | value
            else:
                raise JoinRefused(f"{name} is the run's own setting, the same for all: leave it out")
        try:
            return parse_config(tree)
        except ConfigError as error:
            raise JoinRefused(f"the run's configuration does not work here: {error}") from None

    def _may_lie_elsewhere(self, section: str, own: Mapping[str, Any]) -> bool:
        """Tell whether an island's settings only say where its copy of the same data or base model lies."""
        base = section != "model" or (self.config["model"].get("hf") is not None and own.get("hf") is not None)
        return base and set(own) <= set(OWN.get(section, ()))

    def check(self, layout: "Layout", samples: Samples | None, frozen: "FrozenDigests" = ()) -> None:
        """Raise JoinRefused unless this island would train the same model, frozen parts included, on the same data."""
        if samples is None and self.data != OWN_LOOP:
            raise JoinRefused("the run is one of the built-in trainer, with its data: take part by `diloco join`")
        if samples is not None and self.data == OWN_LOOP:
            raise JoinRefused("the run is a program of its own (diloco.connect): start that program with this ticket")
        for name, shape, own_name, own_shape in zip(self.names, self.shapes, layout.names, layout.shapes, strict=False):
            if (name, shape) != (own_name, own_shape):
                raise JoinRefused(f"the model differs: {own_name} {list(own_shape)} here, {name} {list(shape)} there")
        if len(self.names) != len(layout.names):
            raise JoinRefused(f"the model differs: {len(layout.names)} parameters here, {len(self.names)} there")
        self._refuse_other_base(dict(frozen))
        if samples is not None and samples.source.fingerprint() != self.data:
            hint = "the standard library differs between Python versions: use the same Python as the founder, "
            hint = hint if self.config["data"]["source"] == "stdlib" else ""
            raise JoinRefused(
                f"the data differs: {samples.source.name} is not what the run trains on; {hint}"
                "or set data.path to the same data"
            )

    def _refuse_other_base(self, here: dict[str, str]) -> None:
        there = dict(self.frozen)
        different = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if not different:
            return
        if self.data == OWN_LOOP:
            hint = "load the same weights, and freeze the same parameters, before diloco.connect"
        elif self.config["model"].get("hf") is not None:
            hint = "set model.hf to a copy of the founder's folder"
        else:
            hint = "it is drawn from the seed: use the founder's torch, on the same kind of processor"
        raise JoinRefused(f"what is not trained differs: {different[0]} is not that of the run; {hint}")

    def first_change(self, config: Config) -> str:
        """Describe the first of the run's own settings in which a configuration differs; empty where none does."""
        founded, tree = (one.model_dump(mode="json") for one in (self.configure({}), config))
        for name in SHARED:
            then, now = founded[name], tree[name]
            for key in OWN.get(name, ()):
                if name != "model" or None not in (then[key], now[key]):
                    then, now = ({**section, key: None} for section in (then, now))
            if changed := first_difference(name, then, now):
                return f"the run was founded with {changed}"
        return ""

    def changes(self, config: Config) -> dict[str, Any]:
        """Return the run's own settings in which a configuration differs, by dotted key, as it has them."""
        founded, tree = (flat(shared_of(one)) for one in (self.configure({}), config))
        own = {f"{section}.{key}" for section, names in OWN.items() for key in names}
        own |= {f"island.{key}" for key in SUGGESTED}
        return {key: tree.get(key) for key in founded | tree if key not in own and founded.get(key) != tree.get(key)}

    def refuse_changes(self, config: Config) -> None:
        """Raise SaveError if the run's own settings are not those that it was founded with."""
        if change := self.first_change(config):
            raise SaveError(
                f"{change}: undo that, take another branch from a round of it with `diloco rewind`, or start another "
                "one with --fresh (fresh=True)"
            )


def shared_of(config: Config) -> dict[str, Any]:
    """Return those settings of a configuration that are the same for all islands, or suggested to them."""
    tree = config.model_dump(mode="json")
    return {name: tree[name] for name in SHARED} | {"island": {name: tree["island"][name] for name in SUGGESTED}}


def own_sections(config: Config) -> dict[str, Any]:
    """Return those settings of a configuration that were given and are an island's own business."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    own = {name: section for name, section in tree.items() if name not in SHARED}
    for section, names in OWN.items():
        given = tree.get(section, {})
        if places := {name: given[name] for name in names if given.get(name) is not None}:
            own[section] = places
    return own


FILE = "genesis.json"


def write_genesis(folder: Path, run_id: bytes, genesis: Genesis) -> None:
    """Write the genesis next to the log that follows from it: record, run id, digest of both. A whole one stays."""
    if read_genesis(folder, run_id) is None:
        lines = genesis.raw, run_id.hex().encode()
        write_file(folder / FILE, b"\n".join([*lines, _seal(*lines), b""]), durable=True)


def read_genesis(folder: Path, run_id: bytes | None = None) -> Genesis | None:
    """Read the genesis of a log; None where there is none that is whole and signed: others have it. Raise SaveError
    where it is that of another run than `run_id`."""
    try:
        raw, run, seal, end = (folder / FILE).read_bytes().split(b"\n")
        written_for = bytes.fromhex(run.decode())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise SaveError(f"{folder / FILE} cannot be read: {error.strerror}") from None
    if end or seal != _seal(raw, run):
        return None
    if run_id is not None and written_for != run_id:
        raise SaveError(
            f"{folder} holds the log of another run (one that was rewound is another one, too): choose another folder"
        )
    genesis = Genesis.parse(raw)
    if genesis.protocol != PROTOCOL:
        raise SaveError(f"{folder} {refusal(genesis.protocol)}")
    return genesis if genesis.is_of(written_for) else None


def _seal(raw: bytes, run: bytes) -> bytes:
    return hashlib.sha256(raw + run).hexdigest().encode()
