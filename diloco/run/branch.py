"""A run that begins where another one was: a genesis that names its parent, and that state as its first snapshot.

`diloco rewind` makes one in a folder of its own. An island alone makes one in its own folder, when it is resumed with
other settings.
"""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from diloco.atomic import sync_path
from diloco.checkpoint.log.journal import Header, Journal, Kind, header_frame
from diloco.checkpoint.log.replica import vectors_digest
from diloco.checkpoint.log.segments import SegmentWriter
from diloco.checkpoint.log.snapshot import SnapshotContents, write_snapshot
from diloco.checkpoint.save.facts import saves
from diloco.comm.peers.identity import Identity, run_id_of
from diloco.config.file import flat
from diloco.config.schema import Config
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.ranges import Ranges, minus, normal
from diloco.elastic.protocol.record import holder_name
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import to_plain
from diloco.elastic.runtime.applier import RunContext, SnapshotMeta
from diloco.elastic.runtime.restoring import restore
from diloco.errors import ConfigError, SaveError
from diloco.run.amending import is_over, refuse_past
from diloco.run.folder import OUTER, OWNER_KEY, has_log, numbered
from diloco.run.genesis import Genesis, Parent, read_genesis, shared_of, write_genesis
from diloco.train.amend import amended
from diloco.train.optimizers import optimizer_named
from diloco.train.outer import apply_record
from diloco.train.participant import Participant
from diloco.train.resume import CONTAINED
from diloco.train.schedule import Schedule, schedule_of
from diloco.version import PROTOCOL

FIXED = ("model", "seed", "data", "sync.fragments", "sync.pattern")  # the outer state was made with them
FREE = ("data.epochs", "data.path", "data.tokenizer", "model.hf")  # the same lies elsewhere: digests tell
NEW = "outer.new"  # in an island's folder: a branch that is not in force yet
READY = "ready"  # a file in it: it is whole


def refuse_other_state(before: Config, after: Config, what: str) -> None:
    """Refuse other values of settings that the outer state was made with, by a ConfigError."""
    then, now = flat(before.model_dump(mode="json")), flat(after.model_dump(mode="json"))
    for key in now:
        fixed = any(key == name or key.startswith(f"{name}.") for name in FIXED) and key not in FREE
        kept = {optimizer_named(config.outer.optimizer).vectors for config in (before, after)}
        if (fixed or (key == "outer.optimizer" and len(kept) > 1)) and then.get(key) != now[key]:
            raise ConfigError(f"{key} cannot change: {what} was made with {then.get(key)}")


def updates_at(config: Config, step: int, updates: int) -> int:
    """Return how many launches lie behind the run's clock, in the schedule that holds from now on, so that each
    fragment has its turn. A schedule by time has no such number: `updates` stays."""
    schedule = schedule_of(config.sync, config.inner)
    return schedule.behind(step) if isinstance(schedule, Schedule) else updates


def released(ledger: Ledger) -> Ledger:
    """Return the ledger with all leases free: their holders are of another run."""
    leased = tuple(part for _, ranges in (*ledger.leases, *ledger.lost) for part in ranges)
    return replace(ledger, free=normal(ledger.free + leased), leases=(), lost=())


def goes_on(
    old: Genesis, state: RunState, vectors: dict[str, Tensor], config: Config, founder: str, ledger: Ledger
) -> Genesis:
    """Build the genesis of a run that begins at a round of an old one, with this configuration; not signed yet."""
    head, updates = state.head, updates_at(config, state.step, state.updates)
    parent = Parent(
        old.digest, head.round, head.digest, vectors_digest(vectors), head.tokens, state.step, updates, ledger
    )  # fmt: skip
    return replace(old, protocol=PROTOCOL, config=shared_of(config), founder=founder, parent=parent)


def write_branch(home: Path, draft: Genesis, vectors: dict[str, Tensor], fragments: tuple[Ranges, ...]) -> Genesis:
    """Write a genesis, signed with the owner's key in `home`, and the first snapshot of a run without other records."""
    outer = home / OUTER
    outer.mkdir(parents=True)
    owner = Identity.load(home / OWNER_KEY)
    genesis = draft.signed(owner)
    write_genesis(outer, run_id_of(owner.public_key), genesis)
    begin = genesis.state()
    head, kept = begin.head, to_plain(SnapshotMeta(genesis.digest, begin, fragments))
    segment = SegmentWriter(outer)
    segment.write(Kind.HEADER, header_frame(Header(genesis.digest, head.digest, head.round)))
    segment.close()
    write_snapshot(outer, SnapshotContents(head.round, head.digest, (head.tokens, head.round), kept, vectors))
    return genesis


def branch_if_needed(folder: Path, part: Participant) -> str:
    """Found a run of one once more in the folder of an island alone, where its settings are others now. Return a note
    for the user; empty where nothing was done."""
    _put_in_force(folder)
    me = Identity.load(folder / "identity.key").peer_id
    holder = holder_name(me, int(time.time() * 1000))
    text = ""
    if has_log(folder):
        genesis = read_genesis(folder / OUTER)
        if genesis is not None and (change := genesis.first_change(part.config)):
            _branch_of_log(folder, part, genesis, holder)
            text = f"{change}: a new run of this island begins here, the log up to now is kept beside it"
    elif found := saves(folder):
        raise SaveError(
            f"{found[-1]} has no log beside it (diloco 0.1.0 wrote none): nothing can be resumed from it; `diloco "
            "export` reads it, --fresh starts over"
        )
    if text:
        _put_in_force(folder)
    return text


def _branch_of_log(folder: Path, part: Participant, old: Genesis, holder: str) -> None:
    outer = folder / OUTER
    run = RunContext(old.raw, old.digest, part.fragments, apply_record)
    own = restore(outer, Journal.read(outer), run, lambda what, text: None)
    if own is None:
        raise SaveError(f"{outer} holds no snapshot that can be read: diloco log --verify says what is damaged")
    state = own.state
    before = amended(old.configure({}), state.amendments)
    refuse_other_state(before, part.config, f"the state of round {state.head.round}")
    old.check(part.layout, part.samples, part.frozen)
    refuse_ended(part.config, state.step, f"round {state.head.round}")
    if is_over(old.configure({}), state):
        refuse_past(state, part.config, {})
    founder = holder.partition("#")[0]
    # what this island had leased it holds on to, under its new name
    mine = normal(lent for name, lease in state.ledger.leases if name.startswith(f"{founder}#") for lent in lease)
    ledger = released(state.ledger)
    leases = ((holder, mine),) if mine else ledger.leases
    ledger = replace(ledger, free=minus(ledger.free, mine), leases=leases)
    draft = goes_on(old, state, own.vectors, part.config, founder, ledger)
    marks = [[incarnation, fragment, mark] for (_, incarnation, fragment), mark in state.marks]
    versions = [state.version(fragment).digest for fragment in range(len(part.fragments))]
    _write_new(folder, draft, own.vectors, part, {"marks": marks, "versions": versions})


def refuse_ended(config: Config, step: int, where: str) -> None:
    """Raise SaveError if a state is past the configuration's last step."""
    if step > config.inner.steps:
        raise SaveError(f"{where} is past inner.steps={config.inner.steps}: raise inner.steps to go on")


def _write_new(
    folder: Path, draft: Genesis, vectors: dict[str, Tensor], part: Participant, contained: dict[str, Any]
) -> None:
    """Write a branch that is not in force yet. `contained`: what the parent's state contains of this island's progress,
    for whoever resumes from a save."""
    new = folder / NEW
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        write_branch(new, draft, vectors, part.fragments.ranges)
        (new / OUTER / CONTAINED).write_text(json.dumps(contained))
        (new / READY).touch()
        sync_path(new)
    except OSError as error:
        raise SaveError(f"{new} cannot be written ({error.strerror}): nothing was changed") from None


def _put_in_force(folder: Path) -> None:
    """Put a branch that is whole in place of the log, which is kept; after a crash, the next call finishes it."""
    new, outer, key = folder / NEW, folder / OUTER, folder / OWNER_KEY
    if not (new / READY).exists():
        return
    if (new / OUTER).exists():
        if outer.exists():
            if key.exists():
                shutil.copy2(key, outer / OWNER_KEY)
            outer.rename(numbered(outer))
        (new / OUTER).rename(outer)
    if (new / OWNER_KEY).exists():
        (new / OWNER_KEY).replace(key)
    sync_path(folder)
    shutil.rmtree(new)
