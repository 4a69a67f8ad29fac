"""A training loop of one's own in a run: alone, among others in one process, and as real programs."""

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import read_events
from own_loops import DATA, PLAIN, made, run_of, train, train_all, vector
from team import PATIENT, own_folder, own_loop_driver, side_by_side
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import diloco
from diloco.bench.team import Heard
from diloco.comm.transport.memory import MemoryNetwork
from diloco.config.file import parse_config
from diloco.elastic.protocol.messages import Send
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.record import holder_name
from diloco.errors import ConfigError, DataError, JoinRefused, LoopError, ModelError
from diloco.island.layout import Layout
from diloco.island.user_model import OwnModel
from diloco.report.events import Round, of_kind
from diloco.report.sinks import Events
from diloco.run.genesis import Genesis
from diloco.run.join import options_for
from diloco.train.rounds import Rounds
from diloco.train.user_loop import Run, indices

ROOT = Path(__file__).parent.parent


def alone(tmp_path, **sections):
    """The model, its losses and the outer parameters at the end."""
    model = made()
    where = run_of(tmp_path, **sections)
    with diloco.connect(where, model, "SGD", optimizer_options={"lr": 0.1}, alone=True, fresh=True) as run:
        losses = train_all(run, model)
        with run.outer_parameters():
            outer = vector(model)
    return model, losses, outer


def trained_plainly(steps: int) -> tuple[list[float], torch.Tensor]:
    """Losses and parameters without any of this."""
    model, losses = made(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        batch = [DATA[i] for i in indices(((4 * step, 4 * step + 4),), len(DATA), seed=0)]
        losses.append(train(model, optimizer, torch.utils.data.default_collate(batch)).item())
    return losses, vector(model)


def test_alone_with_a_round_at_every_step_it_is_plain_training(tmp_path):
    _, losses, outer = alone(tmp_path, sync={"every": 1, "codec": "fp32"}, outer=PLAIN, inner={"steps": 30})
    expected, weights = trained_plainly(30)
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(outer, weights, rtol=1e-6, atol=1e-7)


def test_what_a_round_makes_of_the_outer_state_comes_into_the_model(tmp_path):
    model, _, outer = alone(tmp_path, outer={"optimizer": "sgd", "lr": 0.5}, inner={"steps": 4})
    torch.testing.assert_close(outer, (vector(made()) + trained_plainly(4)[1]) / 2)
    assert torch.equal(outer, vector(model))


def test_between_rounds_the_outer_parameters_are_others_and_what_is_trained_is_put_back(tmp_path):
    model = made()
    where = run_of(tmp_path)
    with diloco.connect(where, model, "SGD", optimizer_options={"lr": 0.1}, alone=True) as run:
        for batch in run.batches(DATA, 4):
            train(model, run.optimizer, batch)
            run.step()
            if run.step_count == 3:
                break
        with run.outer_parameters():
            assert torch.equal(vector(model), vector(made()))
        torch.testing.assert_close(vector(model), trained_plainly(3)[1])


def test_what_happened_is_told_and_saved(tmp_path):
    alone(tmp_path)
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 13))
    rounds = [event for event in events if event["event"] == "round" and event["contributors"]]
    assert [(told["step"], told["tokens"]) for told in rounds] == [(4, 16), (8, 16), (12, 16)]
    assert [event["event"] for event in events[-2:]] == ["end", "agreed"] and events[-2]["finished"]
    assert (tmp_path / "run" / "save-00000012" / "facts.json").exists()


def test_a_run_may_be_described_in_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run: mine\ninner: {steps: 3}  # fewer than the default warm-up, which is not for us\n")
    with diloco.connect(str(path), made(), "SGD", alone=True, dir=tmp_path / "elsewhere") as run:
        assert (run.config.run, run.steps, run.folder) == ("mine", 3, tmp_path / "elsewhere")


@pytest.mark.parametrize("sync", [{"delay": 2}, {"apply": "eager"}], ids=str)
def test_overlapped_rounds_end_with_everything_in_the_outer_state(tmp_path, sync):
    """With plain averaging at lr 1, what one island has trained is what the outer state holds, sooner or later."""
    model, losses, outer = alone(tmp_path, sync={"every": 4, **sync}, outer=PLAIN)
    assert len(losses) == 12
    torch.testing.assert_close(outer, vector(model))


def test_frozen_parameters_are_left_out(tmp_path):
    model = made()
    model[0].weight.requires_grad_(False)
    frozen, before = model[0].weight.clone(), vector(model)
    assert OwnModel.of(model).layout.names == ("0.bias", "2.weight", "2.bias")
    with diloco.connect(run_of(tmp_path), model, "AdamW", alone=True) as run:
        train_all(run, model)
    assert torch.equal(model[0].weight, frozen) and not torch.equal(vector(model), before)


def test_a_loader_of_ones_own_needs_no_leases(tmp_path):
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(DATA, batch_size=4)
    with diloco.connect(run_of(tmp_path, inner={"steps": 6}), model, optimizer, alone=True) as run:
        going = [run.step(tokens=4, loss=train(model, optimizer, batch)) for batch in loader]
        assert run.finished and run.step_count == 6
    assert going == [True] * 5 + [False] * 5


def test_batches_without_steps_are_noticed(tmp_path):
    with diloco.connect(run_of(tmp_path), made(), alone=True) as run:
        with pytest.raises(LoopError, match=r"32 samples were drawn without a step: call run.step\(\)"):
            for _ in run.batches(DATA, 4):
                pass
        with pytest.raises(LoopError, match=r"tokens=1.* after 32 samples"):
            run.step(tokens=1)


def test_several_batches_may_make_up_a_step(tmp_path):
    with diloco.connect(run_of(tmp_path), made(), alone=True) as run:
        for number, _ in enumerate(run.batches(DATA, 4, per_step=3), start=1):
            if number % 3 == 0:
                run.step()
        assert run.step_count == 12 and number == 36
    rounds = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "round"]
    assert [told["tokens"] for told in rounds if told["contributors"]] == [48, 48, 48]  # others only lease


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own():
    first, second = indices(((0, 40),), 40, seed=7), indices(((40, 80),), 40, seed=7)
    assert sorted(first) == sorted(second) == list(range(40)) and first != second
    assert indices(((38, 42), (80, 81)), 40, seed=None) == [38, 39, 0, 1, 0]


@pytest.mark.parametrize(("name", "kind"), [("Adagrad", torch.optim.Adagrad), ("torch.optim.SGD", torch.optim.SGD)])
def test_optimizers_by_name(tmp_path, name, kind):
    where = run_of(tmp_path)
    with diloco.connect(where, made(), name, optimizer_options={"lr": 0.5}, alone=True) as run:
        assert isinstance(run.optimizer, kind) and run.optimizer.param_groups[0]["lr"] == 0.5


REFUSED = [
    (lambda model: model.requires_grad_(False), {}, ModelError, "nothing to train"),
    (lambda model: model.append(nn.Linear(1, 1, device="meta")), {}, ModelError, "lies on cpu and meta: .* one device"),
    (lambda model: model.bfloat16(), {}, ModelError, "0.weight is bfloat16: .* torch.autocast"),
    (lambda model: model.append(nn.BatchNorm1d(1)), {}, ModelError, "3.running_mean as a persistent float buffer"),
    (lambda model: model, {"sync": {"fragments": 3}}, ConfigError, "sync.fragments=3 needs .* nn.ModuleList"),
    (lambda model: model, {"sync": {"evry": 3}}, ConfigError, "did you mean sync.every"),
]


@pytest.mark.parametrize(("change", "sections", "error", "message"), REFUSED, ids=[case[-1][:20] for case in REFUSED])
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, change, sections, error, message):
    with pytest.raises(error, match=message), diloco.connect(run_of(tmp_path, **sections), change(made())):
        pass
    assert not (tmp_path / "run").exists()


def test_a_model_cut_over_one_process_is_whole(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = fully_shard(made(), mesh=init_device_mesh("cpu", (1,)))
        with diloco.connect(run_of(tmp_path), model, "SGD", optimizer_options={"lr": 0.1}, alone=True) as run:
            assert run.place.alone
            train_all(run, model)
        whole = torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()])
        torch.testing.assert_close(whole, alone(tmp_path / "plain")[2])
    finally:
        torch.distributed.destroy_process_group()


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    other = torch.optim.SGD(made().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="none of the model's"), diloco.connect(run_of(tmp_path), made(), other):
        pass


def test_data_without_positions_is_refused(tmp_path):
    with diloco.connect(run_of(tmp_path), made(), alone=True) as run:
        with pytest.raises(DataError, match="generator lacks one"):
            run.batches(item for item in DATA)
        with pytest.raises(DataError, match="empty"):
            run.batches([])


def test_blocks_are_the_longest_list_of_modules():
    model = nn.ModuleDict({
        "few": nn.ModuleList([nn.Linear(2, 2)]), "many": nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
    })  # fmt: skip
    fragments = OwnModel.of(model).fragments(parse_config({"sync": {"fragments": 3}}).sync)
    assert fragments.counts == (12, 12, 6)  # two blocks, two blocks, the rest


def test_another_model_is_refused_by_name():
    genesis = Genesis.of(parse_config({}), OwnModel.of(made()).layout, None, "founder")
    other = Layout.of(nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1)).named_parameters())
    with pytest.raises(JoinRefused, match=re.escape("the model differs: 0.weight [9, 3] here, 0.weight [8, 3] there")):
        genesis.check(other, None)
    genesis.check(OwnModel.of(made(1)).layout, None)
    with pytest.raises(JoinRefused, match="start that program with this ticket"):
        genesis.check(other, object())  # the built-in trainer has samples


def test_samples_that_are_asked_for_late_come_at_once():
    """Islands connect before they know what batches they want."""
    genesis = Genesis.of(parse_config({}), OwnModel.of(made()).layout, None, "A")
    node = Node("A", genesis.state(), replace(options_for(parse_config({})), want=0), now=0.0)
    node.tick(0.1)
    assert node.own.promise.coordinator == "A" and not node.state.ledger.leases
    for effect in node.request_samples(8, 0.2):
        if isinstance(effect, Send):  # its own "done": what it remembered is durable
            node.receive("A", effect.message, 0.2)
    assert node.state.ledger.lease_of(holder_name("A", 0)) == ((0, 8),)


class Islands:
    """Two loops in threads. `positions` has what each was given, `rounds` what A was told."""

    def __init__(self, tmp_path, **sections) -> None:
        where = run_of(tmp_path, elastic=PATIENT, **sections)
        self.config = parse_config(where | {"inner": {"steps": 24, "warmup": 0}})
        self.positions: dict[str, list[int]] = {"A": [], "B": []}

    def run(self) -> None:
        names, network = tuple(self.positions), MemoryNetwork()
        self.models = {name: OwnModel.of(made()) for name in names}
        self.drivers = {
            name: own_loop_driver(name, names, self.config, model, network) for name, model in self.models.items()
        }
        self.rounds = side_by_side(self.drivers, self._train)["A"]

    def _train(self, name) -> list[dict]:
        config, module, heard = own_folder(self.config, name), self.models[name].module, Heard()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        run = Run(config, self.models[name], optimizer, Events([heard]))
        run.join(Rounds(self.drivers[name], config, str))
        for places in run.batches(range(10_000), 4, shuffle=False):
            self.positions[name] += places.tolist()
            batch = torch.utils.data.default_collate([DATA[place % len(DATA)] for place in places.tolist()])
            run.step(loss=train(module, optimizer, batch))
        run.leave()
        return [event for event in of_kind(heard.events, Round) if event.contributors]


@pytest.mark.parametrize("sync", [{}, {"delay": 2}, {"apply": "eager"}], ids=str)
def test_islands_share_the_samples_and_end_in_one_state(tmp_path, sync):
    islands = Islands(tmp_path, sync={"every": 4, **sync})
    islands.run()
    mine, theirs = islands.positions["A"], islands.positions["B"]
    assert len(mine) == len(set(mine)) >= 24 * 4 and len(theirs) == len(set(theirs)) >= 24 * 4
    assert not set(mine) & set(theirs)
    assert all(set(event.contributors) == {"A", "B"} for event in islands.rounds)
    assert all(event.applied_at <= event.time for event in islands.rounds)
    assert len({driver.replica.digest() for driver in islands.drivers.values()}) == 1


# Real programs from here on.
@pytest.fixture
def start(tmp_path):
    """`examples/own_loop.py` as a person starts it; whatever happens, nothing of it stays."""
    with ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[str]:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(ROOT / "examples" / "own_loop.py"), *arguments]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            process = stack.enter_context(subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes))
            stack.callback(process.kill)
            return process

        yield start


def found(events: list, kind: str) -> list:
    return [event for event in events if event["event"] == kind]


@pytest.mark.slow
def test_two_programs_learn_together(tmp_path, start):
    founder = start("--islands", "2", "--steps", "200")
    ticket = tmp_path / "runs" / "own-loop" / "ticket"
    deadline = time.monotonic() + 60
    while not ticket.exists() and founder.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    joiner = start(str(ticket), "--name", "second", "--dir", "second")
    out, err = founder.communicate(timeout=120)
    other_out, other_err = joiner.communicate(timeout=300)
    assert (founder.returncode, joiner.returncode) == (0, 0), err + other_err
    assert "the ticket in runs/own-loop/ticket" in out
    for text in (out, other_out):
        assert float(re.search(r"steps here, .* accuracy ([\d.]+)%", text)[1]) > 90
    one, two = (read_events(tmp_path / place / "events.jsonl") for place in ("runs/own-loop", "second"))
    assert found(one, "agreed")[0]["state"] == found(two, "agreed")[0]["state"]
    rounds = [event for event in found(one, "round") if event["contributors"]]
    assert sum(set(event["contributors"]) == {"island-1", "second"} for event in rounds) > len(rounds) / 2


@pytest.mark.slow
def test_an_exception_leaves_at_once_and_another_model_is_refused(tmp_path):
    """Over the real directory, in one process. What the block raises is raised, and nothing is contributed."""
    where = run_of(tmp_path, inner={"steps": 100}, elastic={"min_islands": 2, "grace_s": 3600})
    model = made()
    with (
        pytest.raises(ZeroDivisionError),
        diloco.connect(where, model, "SGD", optimizer_options={"lr": 0.1}) as run,
    ):
        other = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))
        refused = pytest.raises(JoinRefused, match=re.escape("the model differs: 0.weight [9, 3] here"))
        with refused, diloco.connect(run.ticket, other, dir=tmp_path / "other"):
            pass
        for batch in run.batches(DATA, 4):
            train(model, run.optimizer, batch)
            run.step()
            assert 1 / 0
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert not found(events, "end") and not [event for event in found(events, "round") if event["contributors"]]
    with diloco.connect(where, made(), "SGD") as run:  # the folder is free again
        assert run.step_count == 0
