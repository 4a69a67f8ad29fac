"""Changes of settings that a run's owner makes beside its log: by `diloco set`, or by resuming with other settings.

They are signed with the owner's key, which lies in the folder in which the run was founded, and wait there until the
island that trains there brings them to a round (`diloco.train.amend`).
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.comm.peers.identity import Identity
from diloco.config.file import flat
from diloco.config.schema import Config
from diloco.data.samples import OWN_LOOP
from diloco.elastic.protocol.record import Amendment
from diloco.elastic.protocol.state import RunState
from diloco.elastic.runtime.driver import Driver
from diloco.elastic.runtime.driver import check as check_driver
from diloco.errors import ConfigError
from diloco.report.events import Note
from diloco.report.sinks import Events
from diloco.run.folder import OWNER_KEY
from diloco.run.genesis import Genesis
from diloco.train.amend import FOLDER, amended, changed, check, in_words, reason_against, with_waiting, write_amendment
from diloco.train.schedule import schedule_of

LOOK_S = 0.2
LATE_S = 15.0  # that members may need to come to a run which they train on: each opens its model first


def amend(folder: Path, genesis: Genesis, state: RunState, overrides: Iterable[str]) -> Amendment | None:
    """Sign and write the amendment that follows those in force and those that still wait.

    None: another one has taken its number, so try again. At the run's end it has to prolong the run.
    """
    made = with_waiting(folder, state.amendments)
    refuse_stuck(genesis, state, made)
    config = amended(genesis.configure({}), made)
    changes = check(config, overrides, own_loop=genesis.data == OWN_LOOP)
    refuse_past(state, config, changes)
    return write_amendment(folder, Identity.load(folder / OWNER_KEY), len(made) + 1, changes)


def amend_on_resuming(folder: Path, genesis: Genesis, state: RunState | None, config: Config) -> Amendment | None:
    """Make an amendment of what a configuration sets otherwise than the run was founded with.

    What holds already is left out, and what an amendment has set before: a later one may have changed it again. Raise
    SaveError where that cannot change during a run, or where this island has no state of it yet.
    """
    wished, own_loop = genesis.changes(config), genesis.data == OWN_LOOP
    if state is None or not wished or any(reason_against(key, config, own_loop=own_loop) for key in wished):
        genesis.refuse_changes(config)
        return None
    while True:
        made = with_waiting(folder, state.amendments)
        now = amended(genesis.configure({}), made)
        holds, granted = flat(now.model_dump(mode="json")), [json.loads(each.changes) for each in made]
        changes = {
            key: value
            for key, value in wished.items()
            if holds[key] != value and not any(key in each and each[key] == value for each in granted)
        }
        if not changes:
            return None
        refuse_stuck(genesis, state, made)
        changed(now, changes)  # raises ConfigError where they do not go together
        refuse_past(state, now, changes)
        written = write_amendment(folder, Identity.load(folder / OWNER_KEY), len(made) + 1, changes)
        if written is not None:
            return written


def refuse_past(state: RunState, config: Config, changes: Mapping[str, Any]) -> None:
    """Raise ConfigError for an end that the run has passed, and at its end for changes that do not prolong it."""
    if changes.get("inner.steps", state.step + 1) <= state.step:
        raise ConfigError(f"inner.steps={changes['inner.steps']}: the run is at step {state.step} already")
    if state.step >= config.inner.steps and "inner.steps" not in changes:
        raise ConfigError(
            f"the run is at its end, step {state.step}: add inner.steps={2 * state.step} (or any more) to train on"
        )


def refuse_stuck(genesis: Genesis, state: RunState, made: Sequence[Amendment]) -> None:
    """Raise ConfigError where a change waits that came after the run's end: nothing after it could come into force."""
    config, waiting = genesis.configure({}), made[len(state.amendments) :]
    if not waiting or not is_over(config, state):
        return
    first = waiting[0]
    if is_over(config, replace(state, amendments=(*state.amendments, first))):
        raise ConfigError(
            f"change {first.number} of this run ({in_words(first)}) was made after its end and waits for ever: remove "
            f"its file in {FOLDER}/ of the run's folder, then try again, and make it once the run goes on"
        )


def is_over(config: Config, state: RunState) -> bool:
    """Tell whether the schedule of a run is complete in a state, with the amendments that this contains."""
    now = amended(config, state.amendments)
    return schedule_of(now.sync, now.inner).is_over(state.step, state.updates)


def wait_for_more(driver: Driver, config: Config, events: Events, asked_to_stop: Callable[[], bool]) -> bool:
    """Wait, in a run that is over, for a change by which its owner prolongs it; return whether one came into force.

    Members say within `elastic.silence_s` that they have one, or that the run goes on; who is not there yet has a
    while to come. Then it is waited for until a round contains it.
    """
    if not is_over(config, driver.applied):
        return False
    began, told, settled_at = time.monotonic(), False, None
    while is_over(config, driver.applied):
        coming, now = driver.prolonging, time.monotonic()
        if driver.is_behind:
            settled_at = None
        elif settled_at is None and (driver.hears_all or now > began + max(LATE_S, config.elastic.silence_s)):
            settled_at = now
        patient = settled_at is None or now < settled_at + config.elastic.silence_s
        if asked_to_stop() or (coming is None and not patient):
            return False
        if coming is not None and not told:
            told = True
            words = f"the run is at its end, and its owner trains on ({in_words(coming)})"
            events.emit(Note(text=f"{words}: waiting for the members to agree"))
        with driver.changed:
            driver.changed.wait(LOOK_S)
        check_driver(driver)
    return True
