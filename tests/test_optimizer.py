"""Inner optimizers in one process. What they do on a mesh is in test_mesh.py."""

import pytest
import torch
from alone import train
from torch import nn

from diloco.config.schema import InnerConfig
from diloco.data.batches import Batches, open_samples
from diloco.errors import ConfigError
from diloco.island.island import Island
from diloco.island.mesh import ProcessMesh
from diloco.island.optimizer import build_optimizer, hidden_matrices, named_optimizer, newton_schulz, step_if_finite
from diloco.model.build import build_network

ALONE = ProcessMesh(rank=0, world=1, device=torch.device("cpu"), mesh=None)
MUON = {"optimizer": "muon"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList([nn.ModuleDict({"wide": nn.Linear(6, 9), "table": nn.Embedding(3, 6)})])
        self.head = nn.Linear(6, 10, bias=False)


def toy(device: str = "cpu") -> Toy:
    torch.manual_seed(1)
    return Toy().to(device)


def set_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16), (1, 8)])
def test_an_orthogonalised_matrix_has_singular_values_near_one(shape):
    torch.manual_seed(0)
    rank = min(shape)
    left, right = (torch.linalg.qr(torch.randn(size, rank)).Q for size in shape)
    values = torch.linspace(0.02, 1.0, rank)
    result = newton_schulz(1e-3 * left * values @ right.T)
    singular = torch.linalg.svdvals(result)
    assert result.shape == shape
    assert singular.min() > 0.65
    assert singular.max() < 1.25
    assert torch.trace(left.T @ result @ right) == pytest.approx(singular.sum().item(), rel=1e-3)  # the same U and V


def test_no_gradient_is_no_update():
    assert torch.equal(newton_schulz(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_only_matrices_of_blocks_follow_muon():
    module = toy()
    assert [id(matrix) for matrix in hidden_matrices(module)] == [id(module.blocks[0]["wide"].weight)]
    module.blocks.requires_grad_(False)
    assert hidden_matrices(module) == []


@pytest.mark.parametrize("device", DEVICES)
def test_two_steps_equal_the_equations(device):
    config = InnerConfig(optimizer="muon", momentum=0.8, weight_decay=0.3, betas=(0.7, 0.9))
    module, expected = toy(device), toy()
    optimizer = build_optimizer(module, config)
    weight = expected.blocks[0]["wide"].weight
    rest = [p for p in expected.parameters() if p is not weight]
    groups = [
        {"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    momentum = torch.zeros(9, 6, dtype=torch.float64)
    for step, lr in enumerate((0.1, 0.05)):
        set_gradients(module, step)
        step_if_finite(optimizer, torch.tensor(1.0, device=device), lr)
        set_gradients(expected, step)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        momentum = 0.8 * momentum + weight.grad.double()
        update = orthogonal(weight.grad.double() + 0.8 * momentum)
        weight.data = ((1 - lr * 0.3) * weight - lr * 0.2 * 9**0.5 * update).float()
    for (name, ours), theirs in zip(module.named_parameters(), expected.parameters(), strict=True):
        atol = 2e-3 if device == "cuda" and theirs is weight else 1e-6  # bf16 there; a step changes it by some 0.02
        assert torch.allclose(ours.cpu(), theirs, rtol=1e-5, atol=atol), name


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix / matrix.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_with_infinite_gradients_changes_nothing(device):
    module = toy(device)
    optimizer = build_optimizer(module, InnerConfig(**MUON))
    set_gradients(module, 0)
    step_if_finite(optimizer, torch.tensor(1.0, device=device), 0.1)
    before = [p.clone() for p in module.parameters()]
    state = [value.clone() for p in module.parameters() for value in optimizer.state[p].values()]
    for parameter in module.parameters():
        parameter.grad.fill_(float("nan"))
    assert step_if_finite(optimizer, torch.tensor(float("inf"), device=device), 0.1) == 1
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    after = [value for p in module.parameters() for value in optimizer.state[p].values()]
    assert all(torch.equal(old, new) for old, new in zip(state, after, strict=True))
    set_gradients(module, 1)
    assert step_if_finite(optimizer, torch.tensor(1.0, device=device), 0.1) == 0
    assert not any(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_the_loss_falls(small):
    config = small(inner=MUON)
    island = Island(
        build_network(config.model, data_vocab=256, sequence=32, seed=0), ALONE, config.island, config.inner
    )
    reader = Batches(open_samples(config), config.island, ALONE)
    curve = [island.step(reader.read(((8 * n, 8 * n + 8),)), lr=3e-3).item() for n in range(40)]
    reader.close()
    assert curve[-1] < curve[0] - 1.0


@pytest.mark.parametrize("stop_at", [0, 7])
def test_a_resumed_run_equals_one_that_never_stopped(small, stop_at, tmp_path):
    settings = {"inner": MUON, "sync": {"codec": "fp32"}}
    whole = train(small(**settings, checkpoint={"dir": str(tmp_path / "whole")}))
    first = train(small(**settings), until=stop_at)
    second = train(small(**settings), resume=True)
    assert first.losses + second.losses == whole.losses
    ours, theirs = (life.trainer.island.state() for life in (second, whole))
    assert all(torch.equal(ours["model"][name], value) for name, value in theirs["model"].items())
    for name, state in theirs["optimizer"].items():
        assert all(torch.equal(ours["optimizer"][name][key], value) for key, value in state.items())


def test_settings_may_change_at_a_resume(small):
    train(small(inner=MUON), until=3)
    second = train(small(inner={**MUON, "momentum": 0.5, "weight_decay": 0.0}), resume=True)
    groups = second.trainer.island.optimizer.param_groups
    assert {group["rule"] for group in groups} == {"muon", "adamw"}
    assert {(group["momentum"], group["weight_decay"]) for group in groups} == {(0.5, 0.0)}


@pytest.mark.parametrize("name", ["Adagrad", "torch.optim.Adagrad"])
def test_any_optimizer_of_torch_by_name(name):
    optimizer = named_optimizer(name, [nn.Parameter(torch.zeros(2))], lr=0.5)
    assert type(optimizer) is torch.optim.Adagrad
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("Adagard", r"no optimizer 'Adagard': did you mean Adagrad\?"),
        ("torch.optim.adamw", r"did you mean AdamW\?"),
        ("Optimizer", "no optimizer 'Optimizer'"),
        ("os.system", "there are ASGD, Adadelta"),
        ("lr_scheduler.StepLR", "no optimizer"),
        ("SGD", "SGD refuses its options: .*betas"),
    ],
)
def test_what_torch_lacks_or_refuses_is_said(name, complaint):
    with pytest.raises(ConfigError, match=complaint):
        named_optimizer(name, [nn.Parameter(torch.zeros(2))], betas=(0.9, 0.99))
