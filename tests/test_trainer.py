import random
import shutil
from statistics import mean

import pytest
import torch
from alone import HERE, train
from torch import nn

from diloco.bench.team import Heard
from diloco.checkpoint.save.facts import saves
from diloco.comm.peers.identity import Identity
from diloco.data.batches import Batches, open_samples
from diloco.elastic.protocol.ranges import minus, normal, size
from diloco.errors import ConfigError, JoinRefused, SaveError, TrainingDiverged
from diloco.island.island import materialise, next_token_loss
from diloco.island.mesh import ProcessMesh
from diloco.model.build import build_network
from diloco.report.sinks import Events
from diloco.run.join import alone
from diloco.train.schedule import learning_rate
from diloco.train.trainer import Trainer


def test_tells_the_story_of_a_run(small):
    life = train(small())
    told = [event.plain() for event in life.heard.events if event.kind not in ("step", "wait")]
    told = [event for event in told if event.get("contributors") != ()]  # a record that only leases samples
    kinds = [event["event"] for event in told]
    assert kinds == ["start", "validation", *["round", "validation"] * 3, "save", "end", "agreed"]
    assert (life.outcome.step, life.outcome.finished) == (12, True)
    assert life.outcome.validation_losses[-1] < life.outcome.validation_losses[0]
    updates = [event for event in told if event["event"] == "round"]
    assert [event["step"] for event in updates] == [5, 10, 12]
    assert [event["tokens"] for event in updates] == [1280, 1280, 512]


def test_what_is_contributed_says_the_loss_of_its_steps(small):
    life = train(small())
    told = [part.offer.loss for each in life.trainer.rounds.session.records() for part in each.proposal.contributions]
    assert told == pytest.approx([mean(life.losses[:5]), mean(life.losses[5:10]), mean(life.losses[10:])], rel=1e-4)


def test_a_slowed_island_sleeps_after_each_step(small, monkeypatch):
    slept: list[float] = []
    trainer = Trainer(small(inner={"steps": 4}, evaluate={"every": 0}), HERE, Events(), slowness=3.0)
    with alone(trainer):
        trainer.sync.without_samples(8)
        monkeypatch.setattr("diloco.train.trainer.time.sleep", slept.append)
        while not slept:
            trainer.advance()
    assert slept[0] > 0


def test_island_and_outer_state_agree_after_a_round(small):
    life = train(small(inner={"steps": 10}))
    local = torch.empty(life.trainer.layout.size)
    life.trainer.island.shards.read(local)
    assert torch.equal(local, life.outer["parameters"])


def test_a_round_that_comes_while_it_leaves_is_told(small):
    heard = Heard()
    trainer = Trainer(small(sync={"every": 6}), HERE, Events([heard]))
    with alone(trainer):
        for _ in range(8):
            trainer.advance()
        trainer.leave()
    told = {kind: [event.round for event in heard.events if event.kind == kind] for kind in ("round", "agreed")}
    assert told["round"][-1:] == told["agreed"] and len(told["round"]) > 1


def test_alone_rounds_wait_for_nobody_however_many_islands_the_settings_ask_for(small):
    assert train(small(elastic={"min_islands": 3})).outcome.finished


def test_syncing_every_step_with_plain_sgd_is_plain_training(small):
    """M=1, H=1, outer SGD with lr 1, nothing lost in between: the outer round must be invisible."""
    sync = {"every": 1, "codec": "fp32"}
    config = small(sync=sync, outer={"optimizer": "sgd", "lr": 1.0}, inner={"steps": 50})
    assert train(config).losses == pytest.approx(plain_training(config), rel=1e-5)


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
    samples = open_samples(config)
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


@pytest.mark.parametrize("codec", ["fp32", "int4"])
@pytest.mark.parametrize("stop_at", [0, *random.Random(7).sample(range(1, 12), 2)])
def test_a_resumed_run_equals_one_that_never_stopped(small, stop_at, codec, tmp_path, monkeypatch):
    monkeypatch.setattr("diloco.run.join.new_incarnation", lambda me, state: 7)  # rounding follows who and when
    Identity.load(tmp_path / "run" / "identity.key")
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    sync = {"codec": codec}
    whole = train(small(sync=sync, checkpoint={"dir": str(tmp_path / "whole")}))
    first = train(small(sync=sync), until=stop_at)
    assert first.outcome.paused and not first.outcome.finished
    second = train(small(sync=sync), resume=True)
    assert first.losses + second.losses == whole.losses
    for name, vector in whole.outer.items():
        assert torch.equal(second.outer[name], vector)


def test_settings_may_change_at_a_resume(small):
    """Then a run of one is founded anew at that step, with the same samples, parameters and optimizer."""
    first = train(small(), until=3)
    second = train(small(inner={"weight_decay": 0.0, "betas": [0.5, 0.6]}), resume=True)
    groups = second.trainer.island.optimizer.param_groups
    assert {(group["betas"], group["weight_decay"]) for group in groups} == {((0.5, 0.6), 0.0)}
    assert [event["step"] for event in first.events("step") + second.events("step")] == list(range(1, 13))
    assert any("inner.betas" in event["text"] for event in second.events("note"))
    assert second.events("round")[-1]["samples"][-1][-1][1] == 12 * 8  # none left out, none twice


@pytest.mark.parametrize(
    "sync", [{}, {"delay": 3}, {"fragments": 2, "every": 6, "delay": 2}, {"apply": "eager"}], ids=str
)
def test_a_run_may_be_trained_longer(small, sync, tmp_path):
    """Also one that has come to its end, and one with rounds in flight."""
    schedule = {"schedule": "constant"}
    first = train(small(sync=sync, inner=schedule), until=7)
    longer = train(small(sync=sync, inner={**schedule, "steps": 20}), resume=True)
    assert longer.outcome.finished and longer.outcome.step == 20
    ledger = longer.trainer.rounds.session.state.ledger
    rounds = first.events("round") + longer.events("round")
    named = [(lo, hi) for seen in rounds for one in seen["samples"] for lo, hi in one]
    assert size(normal(named)) == sum(hi - lo for lo, hi in named) >= 20 * 8, "none of them twice"
    assert ledger.overlaps == () and minus(((0, ledger.next),), normal(named)) == ledger.unconsumed
    ended = train(small(sync=sync, inner={**schedule, "steps": 26}), resume=True)
    assert ended.outcome.step == 26 and ended.outcome.trained
    assert sorted(path.name for path in (tmp_path / "run").glob("outer*")) == ["outer", "outer.1", "outer.2"]


def test_a_run_at_its_end_is_not_founded_anew_to_train_nothing(small, tmp_path):
    train(small())
    with pytest.raises(ConfigError, match=r"the run is at its end, step 12: add inner\.steps=24"):
        train(small(sync={"every": 4}), resume=True)
    assert [path.name for path in (tmp_path / "run").glob("outer*")] == ["outer"]
    assert train(small(sync={"every": 4}, inner={"steps": 14}), resume=True).outcome.step == 14


def test_other_data_or_fewer_steps_are_refused_at_a_resume(small, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words " * 1000)
    config = small(data={"source": "text", "path": str(text)})
    train(config, until=6)
    with pytest.raises(SaveError, match=r"past inner\.steps=2"):
        train(small(data={"source": "text", "path": str(text)}, inner={"steps": 2, "warmup": 1}), resume=True)
    text.write_text("Some words " * 1000)
    with pytest.raises(JoinRefused, match="the data differs"):
        train(config, resume=True)


def test_a_disk_that_is_full_is_said_and_leaves_earlier_saves_whole(small, tmp_path):
    train(small(), until=2)
    blocked = tmp_path / "run" / "save-00000012.part"
    blocked.write_text("in the way")
    with pytest.raises(SaveError, match="save-00000012 could not be written"):
        train(small(), resume=True)
    assert [path.name for path in saves(tmp_path / "run")] == ["save-00000002"]


def test_only_the_last_two_saves_are_kept_and_none_is_half_written(small, tmp_path):
    train(small(inner={"steps": 20}, checkpoint={"snapshot_every": 1}))
    assert sorted(path.name for path in (tmp_path / "run").glob("save-*")) == ["save-00000015", "save-00000020"]


def test_a_run_of_another_model_is_refused(small):
    train(small(), until=2)
    with pytest.raises(ConfigError, match=r"model\.width cannot change"):
        train(small(model={"width": 64}), resume=True)
    with pytest.raises(SaveError, match="holds no save"):
        train(small(checkpoint={"dir": "/nonexistent"}), resume=True)


@pytest.mark.parametrize("damaged", ["outer.safetensors", "inner/rank-00000.json", "inner/rank-00000.safetensors"])
def test_a_damaged_save_is_named(small, tmp_path, damaged):
    train(small(), until=2)
    (tmp_path / "run" / "save-00000002" / damaged).write_bytes(b"rubbish")
    with pytest.raises(SaveError, match="save-00000002"):
        train(small(), resume=True)


def poison(trainer: Trainer) -> None:
    trainer.island.parameters["norm.weight"].register_hook(lambda gradient: gradient * float("nan"))


def test_a_phase_without_a_finite_gradient_ends_the_run(small):
    with pytest.raises(TrainingDiverged, match=r"all 5 steps up to step 5 .* lower inner\.lr"):
        train(small(), prepare=poison)


def test_the_same_across_a_resume(small):
    train(small(), until=3, prepare=poison)
    with pytest.raises(TrainingDiverged, match=r"all 5 steps up to step 5 .* --resume"):
        train(small(), resume=True, prepare=poison)


def test_every_mesh_position_reads_its_own_rows(small):
    """Two data ranks together see exactly the rows that one alone sees, micro-batch by micro-batch."""
    config = small(island={"accumulate": 2})
    samples = open_samples(config)
    batch = ((0, config.island.batch),)
    alone = Batches(samples, config.island, HERE).read(batch)

    class Half(ProcessMesh):
        data_ranks = property(lambda self: 2)  # type: ignore[assignment]
        data_rank = property(lambda self: self.rank)  # type: ignore[assignment]

    places = [Half(rank, 2, torch.device("cpu"), None) for rank in (0, 1)]
    halves = [Batches(samples, config.island, place).read(batch) for place in places]
    for number, micro_batch in enumerate(alone):
        assert torch.equal(torch.cat([half[number] for half in halves]), micro_batch)


def test_norms_of_gradients_and_contributions_are_in_the_events(small):
    """The outer update moves by what was contributed: from where the run began to where it ended."""
    seen, began = list[float](), list[torch.Tensor]()

    def watch(trainer):
        began.append(trainer.initial_vectors()["parameters"])
        parameters = trainer.island.parameters.values()
        trainer.island.optimizer.register_step_pre_hook(
            lambda *_: seen.append(nn.utils.get_total_norm([p.grad for p in parameters]).item())
        )

    plain = {"optimizer": "sgd", "lr": 1.0, "momentum": 0.0}
    life = train(
        small(inner={"steps": 4, "clip": 0}, sync={"every": 4, "codec": "fp32"}, outer=plain, log={"every": 2}),
        prepare=watch,
    )
    assert [event["gradient_norm"] for event in life.events("step")] == pytest.approx([seen[1], seen[3]])
    (norm,) = [event["pseudo_gradient_norm"] for event in life.events("round") if event["contributors"]]
    assert norm == pytest.approx((began[0] - life.outer["parameters"]).norm().item(), rel=1e-4)
