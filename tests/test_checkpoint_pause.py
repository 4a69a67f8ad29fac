"""Islands that stop together and go on: bit for bit as if they had never stopped, whatever was in flight."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import train
from conftest import SMALL
from launched import ONE, TWO, events_of, islands, last_agreed, rounds_with, wait_until
from lives import Life, live
from team import PATIENT

from diloco.checkpoint.save.facts import read_facts, saves
from diloco.comm.transport.memory import MemoryNetwork
from diloco.config.file import load_config, parse_config
from diloco.config.schema import Config
from diloco.elastic.runtime.session import BEATS_WHILE_SAVING
from diloco.report.events import Step, of_kind
from diloco.train.resume import TAKEN
from diloco.train.schedule import learning_rate

H, STEPS = 4, 16
SCHEDULES = {
    "classic": {},
    "streaming": {"fragments": 3, "delay": 1, "apply": "mix"},
    "eager": {"apply": "eager"},
    "overlapped": {"delay": 3},
    "overlapped streaming": {"fragments": 2, "delay": 3},
}
CASES = [
    ("classic", "fp32"), ("streaming", "int4"), ("eager", "dct"), ("overlapped", "sparse"),
    ("overlapped streaming", "fp4"),
]  # fmt: skip
MORE_CASES = [
    ("classic", "sparse"), ("streaming", "sparse"), ("eager", "fp4"), ("eager", "sparse"), ("overlapped", "int8"),
    ("overlapped", "bf16"), ("streaming", "sign"), ("overlapped", "lowrank"),
]  # fmt: skip


@pytest.fixture
def paired(small, tmp_path):
    def make(folder: str, **sync: object) -> Config:
        checkpoint = {"dir": str(tmp_path / folder)}
        sync, inner = {"every": H, **sync}, {"steps": STEPS}
        return small(sync=sync, inner=inner, elastic=PATIENT, evaluate={"every": 0}, checkpoint=checkpoint)

    return make


def held_by(life: Life) -> torch.Tensor:
    """The island's own parameters."""
    local = torch.empty(life.trainer.island.layout.size)
    life.trainer.island.shards.read(local)
    return local


def found_at_the_end(lives: dict[str, Life]) -> list[object]:
    """Everything that should be equal: the chain, the outer state, what each island holds and has done."""
    found: list[object] = []
    for life in lives.values():
        found += [life.driver.applied.head, life.driver.replica.digest(), held_by(life).tolist()]
        found += [life.trainer.sync.policy.steps, life.losses[STEPS]]
    return found


def newest(config: Config) -> list[Path]:
    return [saves(Path(config.dir) / name)[-1] for name in ("A", "B")]


@pytest.mark.parametrize(
    ("schedule", "codec"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE_CASES)]
)
def test_a_run_that_was_paused_ends_as_if_it_had_not_been(paired, schedule, codec):
    method = {**SCHEDULES[schedule], "codec": codec}
    expected = found_at_the_end(live(paired("whole", **method)))
    config = paired("paused", **method)
    earlier = live(config, 7)
    live(config, 8)
    assert any(read_facts(save)["exchange"]["in_flight"] for save in newest(config))
    lives = live(config)
    assert all(life.driver.node.incarnation == 1 for life in lives.values())
    for name, life in lives.items():  # others ignore heartbeats of an incarnation that are numbered below its last one
        assert life.driver.node.own.sequence > earlier[name].driver.node.own.sequence + BEATS_WHILE_SAVING
    assert found_at_the_end(lives) == expected


def adam_steps(life: Life) -> int:
    """The optimizer's own count: it says whose moments it holds."""
    state = next(iter(life.trainer.island.optimizer.state.values()))
    return int(state["step"].item())


@pytest.mark.parametrize("how", ["died", "left"])
def test_who_died_or_left_comes_back_with_its_optimizer_as_a_new_incarnation(paired, how):
    """After it went on from its last save, or has contributed what it had: nothing of that may be offered again."""
    config = paired("run")
    before = live(config, 6, pause=how == "died")
    if how == "died":
        for save in newest(config):
            (save / TAKEN).touch()
    after = live(config)
    for name, life in after.items():
        assert life.driver.node.incarnation > 1
        assert min(life.losses) > H  # all agree on the first phase
        earlier_steps = before[name].trainer.sync.policy.steps
        assert adam_steps(life) == earlier_steps + len(life.losses)
        first = of_kind(life.heard.events, Step)[0]
        assert first.lr == learning_rate(config.inner, first.step)
    assert len({life.driver.replica.digest() for life in after.values()}) == 1
    assert {life.driver.applied.step for life in after.values()} == {STEPS}


def test_a_save_that_the_log_does_not_lead_to_is_left_alone(paired):
    """An older one that it leads to counts."""
    config = paired("run")
    live(config, 6)
    older = newest(config)[0]
    live(config, 10)
    save = newest(config)[0]
    facts = json.loads((save / "facts.json").read_text())
    facts["together"]["head"] = "f" * 64
    (save / "facts.json").write_text(json.dumps(facts))
    life = Life("A", ("A", "B"), config, MemoryNetwork())
    life.trainer.join(life.together, life.earlier)
    life.driver.close()
    life.store.close()
    assert life.earlier.path == older and life.earlier.incarnation is None  # it has been gone on from
    assert torch.equal(held_by(life), life.together.outer()["parameters"])
    assert life.trainer.sync.policy.steps == read_facts(older)["exchange"]["steps"] > 0


@pytest.mark.soak
def test_the_inner_state_goes_on_on_other_meshes(tmp_path):
    """fsdp 2, then tp 2, then one process, each in the middle of a phase with a round in flight."""

    def case(stop_at: int, folder: str = "run", **island: int) -> dict[str, object]:
        tree = {
            **SMALL, "inner": {**SMALL["inner"], "steps": 20}, "sync": {"every": 5, "delay": 3, "codec": "fp32"},
            "island": {**SMALL["island"], **island}, "checkpoint": {"dir": str(tmp_path / folder)},
        }  # fmt: skip
        return {"config": tree, "stop_at": stop_at}

    whole = train(parse_config(case(0, "alone")["config"]))
    expected = {event["step"]: event["loss"] for event in whole.events("step")}

    (tmp_path / "cases.json").write_text(json.dumps([case(6, fsdp=2), case(11, tp=2)]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("pause_worker.py")), str(tmp_path / "cases.json"), str(tmp_path / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = {int(step): loss for step, loss in json.loads((tmp_path / "out").read_text()).items()}
    assert sorted(losses) == list(range(1, 12))

    last = Life("A", ("A",), parse_config(case(0)["config"]), MemoryNetwork())
    last.train(lambda step: False, lambda: False)
    last.driver.close()
    last.store.close()
    assert min(last.losses) == 12 and last.driver.node.incarnation == 1
    assert (losses | last.losses) == pytest.approx(expected, abs=1e-4)


def since_start(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    """What an island has told since it was last started."""
    events = events_of(tmp_path, name)
    last = max(number for number, event in enumerate(events) if event["event"] == "start")
    return events[last:]


@pytest.mark.soak
def test_islands_that_were_stopped_by_their_launcher_go_on_and_finish(tmp_path):
    sets = ("inner.steps=100", "inner.warmup=10")
    with islands(tmp_path, *sets) as process:
        assert wait_until(lambda: len(rounds_with(tmp_path, ONE, TWO)) > 2, timeout_s=200)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "paused: step" in out, out + err
    told = [event for name in (ONE, TWO) for event in events_of(tmp_path, name)]
    last = max(event["round"] for event in told if event["event"] == "round")
    with islands(tmp_path, *sets, options=("--resume",)) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    for name in (ONE, TWO):
        told = since_start(tmp_path, name)
        resumed = next(event for event in told if event["event"] == "resume")
        steps = [event for event in told if event["event"] == "step"]
        assert steps[0]["step"] == resumed["step"] + 1
        inner = load_config(tmp_path / "run.yaml", list(sets)).inner
        assert [step["lr"] for step in steps] == [learning_rate(inner, step["step"]) for step in steps]  # no ramp
        rounds = [event for event in told if event["event"] == "round" and event["round"] > last]
        assert rounds and all(set(event["contributors"]) == {ONE, TWO} for event in rounds)
    ended = last_agreed(tmp_path, ONE)
    assert ended == last_agreed(tmp_path, TWO)
    with islands(tmp_path, *sets, options=("--resume",)) as process:
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and f"already finished: step 100, round {ended[0]}" in out
    assert last_agreed(tmp_path, ONE) == ended and since_start(tmp_path, ONE)[-1]["event"] == "agreed"
