"""Every schedule against a loop of a few lines that says what it is, with two islands over real rounds.

Of classic DiLoCo that loop is `examples/diloco_in_40_lines.py`.
"""

from pathlib import Path
from runpy import run_path

import pytest
import torch
from alone import train
from team import HERE, PATIENT, Team
from torch.nn.utils import parameters_to_vector

from diloco.bench.team import Heard
from diloco.island.island import Island
from diloco.model.build import build_network
from diloco.report.sinks import Events
from diloco.train.schedule import learning_rate
from diloco.train.trainer import Trainer

H, PASSES, LR, MOMENTUM = 4, 5, 0.7, 0.9
EXAMPLE = run_path(str(Path(__file__).parent.parent / "examples" / "diloco_in_40_lines.py"))
METHODS = {
    "streaming": {"fragments": 3},
    "streaming, mixed": {"fragments": 3, "delay": 1, "apply": "mix"},
    "sequential, far overlapped": {"fragments": 2, "pattern": "sequential", "delay": 3},
    "overlapped": {"delay": 3},
    "eager": {"apply": "eager"},
}


def island_for(config) -> Island:
    network = build_network(config.model, data_vocab=256, sequence=config.data.sequence, seed=config.seed)
    return Island(network, HERE, config.island, config.inner)


def classic(config, batches) -> list[torch.Tensor]:
    """The outer parameters after each round, by the example."""
    shared, *islands = (island_for(config) for _ in range(1 + len(batches)))

    def inner_step(number: int, step: int) -> None:
        islands[number].step(batches[number][step], learning_rate(config.inner, step + 1))

    replicas = [island.module for island in islands]
    rounds = EXAMPLE["diloco"](shared.module, replicas, inner_step, rounds=PASSES, every=H, lr=LR, momentum=MOMENTUM)
    return [parameters_to_vector(model.parameters()).detach() for model in rounds]


def reference(config, batches, fragments, method) -> list[torch.Tensor]:
    """The outer parameters after each update of a fragment, or of a round that others are not waited for."""
    islands = [island_for(config) for _ in batches]
    count, total = len(fragments), islands[0].shards.layout.size
    delay, alpha = method.get("delay", 0), 0.5 if method.get("apply") == "mix" else None
    where = [torch.cat([torch.arange(lo, hi) for lo, hi in ranges]) for ranges in fragments.ranges]
    theta, velocity = torch.empty(total), torch.zeros(total)
    islands[0].shards.read(theta)
    base, local = [theta.clone() for _ in islands], [theta.clone() for _ in islands]
    history, flying, launch_steps = [], [], [round(H * k / count) for k in range(1, PASSES * count + 1)]

    def outer_step(part, mean) -> None:
        velocity[part] = MOMENTUM * velocity[part] + mean
        theta[part] -= LR * (mean + MOMENTUM * velocity[part])
        history.append(theta.clone())

    for step in range(1, H * PASSES + delay + 1):
        for island, vector, read in zip(islands, local, batches, strict=True):
            island.shards.write(vector)
            island.step(read[step - 1], learning_rate(config.inner, step))
            island.shards.read(vector)
        if step in launch_steps:
            part = where[launch_steps.index(step) % count]
            own = [start[part] - vector[part] for start, vector in zip(base, local, strict=True)]
            if method.get("apply") == "eager":
                if flying:
                    outer_step(part, flying.pop()[2])
                for start, vector, mine in zip(base, local, own, strict=True):
                    guess = MOMENTUM * velocity + mine / len(own)
                    start[:] = vector[:] = theta - LR * (mine / len(own) + MOMENTUM * guess)
            at_launch = [vector[part].clone() for vector in local]
            flying.append((step + delay, part, sum(own) / len(own), at_launch))
        while flying and flying[0][0] == step and method.get("apply") != "eager":
            _, part, mean, at_launch = flying.pop(0)
            outer_step(part, mean)
            for start, vector, then in zip(base, local, at_launch, strict=True):
                here = vector[part]
                rebased = theta[part] - (then - here)
                vector[part] = rebased if alpha is None else alpha * here + (1 - alpha) * theta[part]
                start[part] = theta[part]
    return history


def trained_by(small, method) -> Team:
    config = small(
        sync={"every": H, "codec": "fp32", **method},
        outer={"lr": LR, "momentum": MOMENTUM},
        inner={"steps": H * (PASSES + 1), "schedule": "constant"},
        elastic=PATIENT,
        evaluate={"every": 0},
    )
    team = Team(config)
    team.run()
    return team


def assert_same_way(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=False):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    moved = (expected[-1] - expected[0]).norm() / expected[0].norm()
    assert moved > 1e-2  # far more than what is allowed


def test_the_trainer_does_what_the_example_does(small):
    team = trained_by(small, {})
    assert len(team.outer) >= PASSES
    assert_same_way(team.outer, classic(team.config, list(team.batches.values())))


@pytest.mark.parametrize("name", METHODS)
def test_the_trainer_does_what_a_plain_loop_says(small, name):
    team = trained_by(small, METHODS[name])
    fragments = team.trainers["A"].fragments
    expected = reference(team.config, list(team.batches.values()), fragments, METHODS[name])
    assert len(expected) >= (PASSES - 1) * len(fragments)
    assert_same_way(team.outer, expected)


def test_the_example_learns(capsys):
    losses = EXAMPLE["main"](rounds=6)
    assert len(capsys.readouterr().out.splitlines()) == len(losses) == 6
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("codec", ["sparse", "sign", "dct", "lowrank"])
def test_islands_that_send_little_agree_and_learn(small, codec):
    config = small(
        sync={"every": H, "codec": codec, "fragments": 2, "delay": 1},
        outer={"optimizer": "sgd", "lr": 0.5},
        inner={"steps": 6 * H},
        elastic=PATIENT,
    )
    team = Team(config)
    team.run()
    losses = team.trainers["A"].validation_losses
    assert losses[-1] < losses[0] - 0.1


def test_eager_with_one_island_is_classic(small, tmp_path):
    """Nothing is lost on the way: with one island the preview is the result."""
    runs = [
        train(small(sync={"apply": apply, "codec": "fp32"}, checkpoint={"dir": str(tmp_path / apply)}))
        for apply in ("eager", "rebase")
    ]
    eager, classic = (run.outer["parameters"] for run in runs)
    assert torch.equal(eager, classic)


def test_one_island_that_syncs_at_every_step_with_sgd_is_plain_training(small):
    sync = {"every": 1, "codec": "fp32"}
    config = small(sync=sync, outer={"optimizer": "sgd", "lr": 1.0}, inner={"steps": 50})
    losses = train(config).losses
    plain = Trainer(config, HERE, Events([Heard()]))
    for step, loss in enumerate(losses, start=1):
        batch = ((config.island.batch * (step - 1), config.island.batch * step),)
        found = plain.island.step(plain.batches.read(batch), learning_rate(config.inner, step)).item()
        assert loss == pytest.approx(found, rel=1e-5)


def test_what_is_left_at_the_end_is_contributed(small):
    """Streaming fragments end at different times: the last rounds bring the outer state to where the islands are."""
    sync = {"every": 6, "fragments": 3, "codec": "fp32"}
    life = train(small(sync=sync, outer={"optimizer": "sgd", "lr": 1.0}, inner={"steps": 12}))
    local = torch.empty(life.trainer.layout.size)
    life.trainer.island.shards.read(local)
    torch.testing.assert_close(life.outer["parameters"], local)
    assert life.trainer.step_count == 12 and life.trainer.sync.view.updates == 8
