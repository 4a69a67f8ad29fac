"""Training on after a run's end: what the owner's changes become when an island resumes, and for whom it waits."""

import json
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from islands import SMALL, TestIsland, introduce
from launched import wait_until

from diloco.comm.peers.identity import Identity
from diloco.comm.transport.memory import MemoryNetwork
from diloco.config.schema import Config
from diloco.elastic.protocol.state import RunState
from diloco.errors import ConfigError
from diloco.report.sinks import Events
from diloco.run import amending
from diloco.run.amending import amend, amend_on_resuming, wait_for_more
from diloco.run.folder import OWNER_KEY
from diloco.run.genesis import Genesis, shared_of
from diloco.train.amend import REVOKE, amendment_files, read_amendment, write_amendment
from diloco.version import PROTOCOL

STEPS = 40


def founded(config: Config) -> Genesis:
    return Genesis(PROTOCOL, shared_of(config), (), (), "data", 1000, "founder")


def at_step(step: int, folder: Path) -> RunState:
    """A state at a step, in which all changes of a folder are in force."""
    made = tuple(map(read_amendment, amendment_files(folder)))
    return replace(SMALL.beginning(("A",)).state, step=step, updates=step, amendments=made)


def test_who_resumes_by_the_same_command_undoes_no_later_change(small, tmp_path):
    genesis = founded(small(inner={"steps": STEPS}))
    asked = small(inner={"steps": 2 * STEPS})
    first = amend_on_resuming(tmp_path, genesis, at_step(STEPS, tmp_path), asked)
    assert first is not None and json.loads(first.changes) == {"inner.steps": 2 * STEPS}
    later = amend(tmp_path, genesis, at_step(STEPS + 1, tmp_path), [f"inner.steps={3 * STEPS}"])
    assert later is not None and later.number == 2
    for step in (STEPS + 2, 2 * STEPS + 1):  # also beyond what it once asked for
        assert amend_on_resuming(tmp_path, genesis, at_step(step, tmp_path), asked) is None


def test_a_change_that_came_after_the_end_is_named_before_one_is_made_behind_it(small, tmp_path):
    genesis, owner = founded(small(inner={"steps": STEPS})), Identity.load(tmp_path / OWNER_KEY)
    over = at_step(STEPS, tmp_path)
    write_amendment(tmp_path, owner, 1, {REVOKE: ["ab" * 32]})
    with pytest.raises(
        ConfigError, match=r"change 1 .*the ticket abababab is revoked.* waits for ever: remove its file"
    ):
        amend(tmp_path, genesis, over, [f"inner.steps={2 * STEPS}"])
    with pytest.raises(ConfigError, match="change 1"):
        amend_on_resuming(tmp_path, genesis, over, small(inner={"steps": 2 * STEPS}))
    assert amend(tmp_path, genesis, at_step(STEPS - 1, tmp_path), [f"inner.steps={2 * STEPS}"]) is not None


def test_who_is_not_there_yet_is_given_time_to_bring_a_longer_end(small, monkeypatch):
    """A founder opens its model before it says that it trains on; the others are there at once."""
    monkeypatch.setattr(amending, "LATE_S", 600.0)
    config = small(inner={"steps": 1, "warmup": 0}, sync={"every": 1}, elastic={"silence_s": 0.2})
    setting = replace(SMALL, partition="quorum")  # neither goes on without the other
    network, origin = MemoryNetwork(), setting.beginning(("A", "B"))
    over = replace(origin, state=replace(origin.state, step=1, updates=1))
    with ExitStack() as stack:
        early = TestIsland(network.transport("A"), over, setting)  # whose trainers never begin
        stack.callback(early.driver.close)
        answers: list[bool] = []
        waits = threading.Thread(target=lambda: answers.append(wait_for_more(early.driver, config, Events([]), bool)))
        waits.start()
        assert not wait_until(lambda: answers, 2.0), "nobody else has been heard"
        late = TestIsland(network.transport("B"), over, setting)
        stack.callback(late.driver.close)
        introduce([early, late])
        assert wait_until(lambda: answers == [False], 60), "all are there, and none brings anything"
        waits.join()
