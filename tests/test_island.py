"""The inner side in one process. What several processes do is in test_mesh.py."""

import pytest
import torch
from torch import nn

from diloco.batches import Batches, open_samples, validation_batches
from diloco.errors import ConfigError, ModelError
from diloco.island import Island, next_token_loss
from diloco.network import build_network, refuse_float_buffers
from diloco.outer import Layout
from diloco.place import Place

ALONE = Place(rank=0, world=1, device=torch.device("cpu"), mesh=None)


def make_island(config) -> Island:
    network = build_network(config.model, data_vocab=256, sequence=32, seed=config.seed)
    return Island(network, ALONE, config.island, config.inner)


def batches(config, count: int) -> list[list[torch.Tensor]]:
    reader = Batches(open_samples(config), config.island, ALONE)
    try:
        size = config.island.batch
        return [reader.read(((n * size, (n + 1) * size),)) for n in range(count)]
    finally:
        reader.close()


def losses(config, steps: int = 6) -> list[float]:
    island = make_island(config)
    return [island.step(batch, lr=3e-3).item() for batch in batches(config, steps)]


def test_the_loss_falls(small):
    curve = losses(small(), steps=40)
    assert curve[-1] < curve[0] - 1.0


def test_accumulated_micro_batches_equal_one_batch(small):
    assert losses(small(island={"accumulate": 4})) == pytest.approx(losses(small()), rel=1e-5)


def test_recomputing_activations_changes_nothing(small):
    assert losses(small(island={"activation_checkpointing": True})) == losses(small())


def test_bf16_computes_close_to_fp32_with_fp32_parameters(small):
    config = small(island={"dtype": "bf16"})
    assert losses(config) == pytest.approx(losses(small()), rel=2e-2)
    assert losses(config) != losses(small())
    assert {p.dtype for p in make_island(config).module.parameters()} == {torch.float32}


@pytest.mark.slow
def test_compiled_equals_eager(small):
    assert losses(small(island={"compile": True}), steps=3) == pytest.approx(losses(small(), steps=3), rel=1e-5)


def test_gradients_are_clipped_to_the_given_norm(small):
    config = small(inner={"clip": 0.01})
    island = make_island(config)
    seen = []
    island.optimizer.register_step_pre_hook(
        lambda *_: seen.append(nn.utils.get_total_norm([p.grad for p in island.parameters.values()]).item())
    )
    island.step(batches(config, 1)[0], lr=1e-3)
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_a_step_with_infinite_gradients_changes_nothing_and_is_counted(small):
    config = small()
    island = make_island(config)
    good = batches(config, 2)
    island.step(good[0], lr=1e-3)
    before = island.state()["model"]
    before = {name: tensor.clone() for name, tensor in before.items()}
    poison = island.parameters["norm.weight"].register_hook(lambda gradient: gradient * float("inf"))
    island.step(good[1], lr=1e-3)
    poison.remove()
    assert island.skipped.item() == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in island.state()["model"].items())
    island.step(good[1], lr=1e-3)
    assert island.skipped.item() == 1
    assert not torch.equal(before["norm.weight"], island.parameters["norm.weight"])


def test_frozen_parameters_stay_and_are_not_in_the_outer_state(small):
    config = small(model={"freeze": ["embed.*", "blocks.0.*"]})
    island = make_island(config)
    embed = island.module.get_parameter("embed.weight").clone()
    for batch in batches(config, 2):
        island.step(batch, lr=1e-2)
    assert torch.equal(embed, island.module.get_parameter("embed.weight"))
    assert not any(name.startswith(("embed", "blocks.0.", "head")) for name in island.layout.names)
    assert any(name.startswith("blocks.1.") for name in island.layout.names)


@pytest.mark.parametrize(
    ("patterns", "complaint"),
    [(["embd.*"], "matches no parameter: names look like embed.weight"), (["*"], "everything")],
)
def test_freezing_nothing_or_everything_is_refused(small, patterns, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_island(small(model={"freeze": patterns}))


def test_running_statistics_are_refused_by_name():
    with pytest.raises(ModelError, match=r"1\.running_mean"):
        refuse_float_buffers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_parameters_go_out_and_come_back(small):
    island = make_island(small())
    vector = torch.empty(island.layout.size)
    island.read(vector)
    views = dict(island.layout.views(vector))
    assert torch.equal(views["norm.weight"], island.parameters["norm.weight"])
    island.write(vector * 2)
    assert torch.equal(views["norm.weight"] * 2, island.parameters["norm.weight"])
    assert island.layout == Layout.of(island.parameters.items())


def test_evaluation_is_the_mean_loss_and_leaves_training_alone(small):
    config = small()
    island = make_island(config)
    rows = list(validation_batches(open_samples(config), config.island, ALONE, 16))
    expected = sum(next_token_loss(island.module, tokens).item() for tokens in rows) / len(rows)
    assert island.evaluate(rows) == pytest.approx(expected)
    assert island.module.training
    assert all(p.grad is None for p in island.parameters.values())
