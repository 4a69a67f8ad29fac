import os
import random

import pytest
import torch
from torch import nn

from diloco.bench.speed import Heard
from diloco.checkpoint.save import saves
from diloco.data.batches import Batches
from diloco.errors import SaveError, TrainingDiverged
from diloco.island.island import materialise, next_token_loss
from diloco.island.mesh import Place
from diloco.model.build import build_network
from diloco.report.events import Events
from diloco.train.schedule import learning_rate
from diloco.train.trainer import Trainer

ALONE = Place(rank=0, world=1, device=torch.device("cpu"), mesh=None)


def make_trainer(config) -> tuple[Trainer, Heard]:
    heard = Heard()
    return Trainer(config, ALONE, Events([heard])), heard


def curve(heard: Heard) -> list[float]:
    return [event["loss"] for event in heard.events if event["event"] == "step"]


def test_tells_the_story_of_a_run(small):
    trainer, heard = make_trainer(small())
    outcome = trainer.run()
    kinds = [event["event"] for event in heard.events if event["event"] != "step"]
    assert kinds == ["start", "validation", *["round", "validation"] * 3, "save", "end"]
    assert (outcome.step, outcome.round, outcome.finished) == (12, 3, True)
    assert [event["step"] for event in heard.events if event["event"] == "round"] == [5, 10, 12]
    assert outcome.validation_losses[-1] < outcome.validation_losses[0]
    assert [event["tokens"] for event in heard.events if event["event"] == "round"] == [1280, 1280, 512]


def test_a_slowed_island_sleeps_after_each_step(small, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("diloco.train.trainer.time.sleep", slept.append)
    trainer = Trainer(small(inner={"steps": 4}), ALONE, Events(), slowness=3.0)
    trainer.advance()
    assert len(slept) == 1 and slept[0] > 0


def test_island_and_outer_state_agree_after_a_round(small):
    trainer, _ = make_trainer(small(inner={"steps": 10}))
    trainer.run()
    local = torch.empty(trainer.island.layout.size)
    trainer.island.read(local)
    assert torch.equal(local, trainer.outer["parameters"])


def test_syncing_every_step_with_plain_sgd_is_plain_training(small):
    """M=1, H=1, outer SGD with lr 1: the outer round must be invisible."""
    config = small(sync={"every": 1}, outer={"optimizer": "sgd", "lr": 1.0}, inner={"steps": 50})
    trainer, heard = make_trainer(config)
    trainer.run()
    assert curve(heard) == pytest.approx(plain_training(config), rel=1e-6)


def plain_training(config) -> list[float]:
    network = build_network(config.model, data_vocab=256, sequence=32, seed=config.seed)
    module = network.module
    materialise(module, torch.device("cpu"))
    with torch.no_grad():
        for name, value in network.initial():
            module.get_parameter(name).copy_(value)
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.inner.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=config.inner.betas)
    samples = make_trainer(config)[0].samples
    losses = []
    for step in range(1, config.inner.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.inner, step)
        loss = next_token_loss(module, torch.from_numpy(samples.train((step - 1) * 8, 8)))
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), config.inner.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stop_at", [0, *random.Random(7).sample(range(1, 12), 2)])
def test_a_resumed_run_equals_one_that_never_stopped(small, stop_at, tmp_path):
    whole, heard = make_trainer(small(checkpoint={"dir": str(tmp_path / "whole")}))
    whole.run()
    first, heard_first = make_trainer(small())
    assert not first.run(lambda: first.step >= stop_at).finished
    second, heard_second = make_trainer(small())
    second.resume()
    second.run()
    assert curve(heard_first) + curve(heard_second) == curve(heard)
    assert torch.equal(second.outer["parameters"], whole.outer["parameters"])
    assert torch.equal(second.outer["momentum"], whole.outer["momentum"])


def test_settings_may_change_at_a_resume(small):
    first, _ = make_trainer(small())
    first.run(lambda: first.step >= 3)
    second, _ = make_trainer(small(inner={"weight_decay": 0.0, "betas": [0.5, 0.6]}))
    second.resume()
    groups = second.island.optimizer.param_groups
    assert {(group["betas"], group["weight_decay"]) for group in groups} == {((0.5, 0.6), 0.0)}


def test_other_data_or_fewer_steps_are_refused_at_a_resume(small, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words " * 1000)
    config = small(data={"source": "text", "path": str(text)})
    first, _ = make_trainer(config)
    first.run(lambda: first.step >= 3)
    with pytest.raises(SaveError, match=r"past inner\.steps=2"):
        make_trainer(small(data={"source": "text", "path": str(text)}, inner={"steps": 2, "warmup": 1}))[0].resume()
    text.write_text("Some words " * 1000)
    with pytest.raises(SaveError, match="has changed since"):
        make_trainer(config)[0].resume()


def test_a_disk_that_is_full_is_said_and_leaves_earlier_saves_whole(small, tmp_path):
    trainer, _ = make_trainer(small())
    trainer.run(lambda: trainer.step >= 2)
    again, _ = make_trainer(small())
    again.resume()
    (tmp_path / "run").chmod(0o555)
    blocked = tmp_path / "run" / "save-00000012.part"
    try:
        if os.access(tmp_path / "run", os.W_OK):  # root ignores permissions: put a file in the way instead
            blocked.write_text("in the way")
        with pytest.raises(SaveError, match="save-00000012 could not be written"):
            again.run()
    finally:
        (tmp_path / "run").chmod(0o755)
    assert [path.name for path in saves(tmp_path / "run")] == ["save-00000002"]


def test_only_the_last_two_saves_are_kept_and_none_is_half_written(small, tmp_path):
    config = small(inner={"steps": 20}, checkpoint={"snapshot_every": 1})
    make_trainer(config)[0].run()
    assert sorted(path.name for path in (tmp_path / "run").glob("save-*")) == ["save-00000015", "save-00000020"]


def test_a_save_of_another_model_is_refused(small):
    trainer, _ = make_trainer(small())
    trainer.run(lambda: trainer.step >= 2)
    other, _ = make_trainer(small(model={"width": 64}))
    with pytest.raises(SaveError, match=r"was made with model\.width=32, now it is 64"):
        other.resume()
    nothing, _ = make_trainer(small(checkpoint={"dir": "/nonexistent"}))
    with pytest.raises(SaveError, match="holds no save"):
        nothing.resume()


@pytest.mark.parametrize("damaged", ["facts.json", "outer.safetensors", "inner/.metadata"])
def test_a_damaged_save_is_named(small, tmp_path, damaged):
    trainer, _ = make_trainer(small())
    trainer.run(lambda: trainer.step >= 2)
    (tmp_path / "run" / "save-00000002" / damaged).write_bytes(b"rubbish")
    again, _ = make_trainer(small())
    with pytest.raises(SaveError, match="save-00000002"):
        again.resume()


def poisoned(config) -> Trainer:
    trainer, _ = make_trainer(config)
    trainer.island.parameters["norm.weight"].register_hook(lambda gradient: gradient * float("nan"))
    return trainer


def test_a_phase_without_a_finite_gradient_ends_the_run(small):
    with pytest.raises(TrainingDiverged, match=r"all 5 steps up to step 5 .* lower inner\.lr$"):
        poisoned(small()).run()


def test_the_same_across_a_resume(small):
    first = poisoned(small())
    first.run(lambda: first.step >= 3)
    second = poisoned(small())
    second.resume()
    with pytest.raises(TrainingDiverged, match=r"all 5 steps up to step 5 .* --resume"):
        second.run()


def test_every_mesh_position_reads_its_own_rows(small):
    """Two data ranks together see exactly the rows that one alone sees, micro-batch by micro-batch."""
    config = small(island={"accumulate": 2})
    samples = make_trainer(config)[0].samples
    batch = ((0, config.island.batch),)
    alone = Batches(samples, config.island, ALONE).read(batch)

    class Half(Place):
        data_ranks = property(lambda self: 2)  # type: ignore[assignment]
        data_rank = property(lambda self: self.rank)  # type: ignore[assignment]

    places = [Half(rank, 2, torch.device("cpu"), None) for rank in (0, 1)]
    halves = [Batches(samples, config.island, place).read(batch) for place in places]
    for number, micro_batch in enumerate(alone):
        assert torch.equal(torch.cat([half[number] for half in halves]), micro_batch)
