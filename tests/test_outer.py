from hashlib import sha256

import pytest
import torch

from diloco.alone import Alone
from diloco.outer import CHUNK, Layout, OuterState, Update, apply, outer_lr


def update(round: int, mean: torch.Tensor, *, lr: float = 0.7, momentum: float = 0.9) -> Update:
    return Update(round, 0, round * 10, mean, lr, momentum, ("a",), tokens=1)


def state_of(parameters: torch.Tensor) -> OuterState:
    layout = Layout(("w",), (tuple(parameters.shape),))
    return OuterState(layout, parameters.clone(), torch.zeros_like(parameters))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equals_torchs_nesterov(momentum):
    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.randn(1000))
    ours = state_of(theirs.detach())
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for round in range(1, 6):
        theirs.grad = torch.randn(1000)
        apply(ours, update(round, theirs.grad, momentum=momentum))
        sgd.step()
    torch.testing.assert_close(ours.parameters, theirs.detach())
    assert (ours.round, ours.step) == (5, 50)


def test_bits_are_the_same_on_every_platform():
    """The golden digest: integer arithmetic makes the input, so that nothing but `apply` is under test."""
    indices = torch.arange(CHUNK + 3, dtype=torch.int64)
    state = state_of(((indices * 2654435761) % 65536).float() / 65536 - 0.5)
    for round in range(1, 21):
        mean = ((indices * 40503 + round * 977) % 65536).float() / 65536 - 0.5
        apply(state, update(round, mean))
    digest = sha256(state.parameters.numpy().tobytes() + state.momentum.numpy().tobytes()).hexdigest()
    assert digest == "1532ff83980ef0c28c7f00975e08a2752d1c300f293bfbe1c75ff21fb3129fe0"


def test_vanishing_momentum_becomes_zero():
    state = state_of(torch.zeros(2))
    apply(state, update(1, torch.tensor([2.0**-101, 2.0**-99])))
    assert state.momentum.tolist() == [0.0, 2.0**-99]


def test_rounds_apply_in_order():
    state = state_of(torch.zeros(2))
    with pytest.raises(ValueError, match="round 3 cannot follow round 0"):
        apply(state, update(3, torch.ones(2)))
    assert state.parameters.tolist() == [0.0, 0.0]


def test_views_cover_the_vector_in_order():
    layout = Layout(("a", "b"), ((2, 3), (4,)))
    vector = torch.arange(10.0)
    views = dict(layout.views(vector))
    assert views["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    views["b"].zero_()
    assert vector[6:].tolist() == [0, 0, 0, 0]
    assert layout.size == 10


def test_outer_lr_follows_the_published_optimum():
    assert [round(outer_lr("auto", islands), 3) for islands in (1, 2, 3, 4, 6, 8, 100)] == [
        0.4,
        0.6,
        0.6,
        0.6,
        0.7,
        0.8,
        0.8,
    ]
    assert outer_lr(0.55, 3) == 0.55


def test_alone_the_contribution_is_the_mean():
    outer = OuterState.zeros(Layout(("all",), ((3,),)))
    alone = Alone("me", outer, lr=0.4, momentum=0.0)
    alone.start(0, torch.ones(3), tokens=10, samples=(), step=50, step_ms=0)
    assert alone.poll()
    change = alone.take()
    assert change.contained and not alone.poll()
    assert (change.told[0]["round"], change.told[0]["tokens"], alone.step) == (1, 10, 50)
    assert outer.parameters.tolist() == pytest.approx([-0.4] * 3)
