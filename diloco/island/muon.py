"""Muon: the momentum of every hidden matrix is made orthogonal before it is applied; AdamW does the rest.

After Keller Jordan, with the scale of "Muon is Scalable for LLM Training": the entries of an orthogonal matrix have
an RMS of 1/sqrt(max(rows, columns)), AdamW's updates one of about 0.2. Times 0.2 sqrt(max(rows, columns)) they are
alike, and AdamW's learning rate and weight decay carry over.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from diloco.island.parallel import fill, local, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Each group says which `rule` it follows, muon or adamw. A step with `found_inf` at 1 changes nothing."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, {"fused": True, **defaults})
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _fresh_state(group["rule"], parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["rule"] == "muon":
                self._muon(group, parameters)
            else:
                self._adamw(group, parameters)

    def _muon(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """On a mesh as many matrices at a time as there are processes, equally large ones together."""
        parameters.sort(key=Tensor.numel)
        together = dist.get_world_size() if parameters and isinstance(parameters[0], DTensor) else 1
        for start in range(0, len(parameters), together):
            some = parameters[start : start + together]
            updates = [self._nesterov(parameter, group["momentum"]) for parameter in some]
            orthogonalise(updates)
            for parameter, update in zip(some, updates, strict=True):
                lr = group["lr"] * self._kept(parameter.device)
                local(parameter).mul_(1 - lr * group["weight_decay"])
                local(parameter).sub_(local(update).mul_(lr * 0.2 * max(parameter.shape) ** 0.5))

    def _nesterov(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        assert parameter.grad is not None
        mean, kept = self.state[parameter]["momentum"], self._kept(parameter.device)
        gradient = torch.where(kept > 0, local(parameter.grad), 0.0)
        local(mean).lerp_(gradient, (1 - momentum) * kept)
        update = torch.empty_like(mean)
        local(update).copy_(gradient.lerp_(local(mean), momentum))
        return update

    def _kept(self, device: torch.device) -> Tensor:
        """1, or 0 in a step that is to change nothing: known to the device only."""
        return torch.ones((), device=device) if self.found_inf is None else 1 - self.found_inf

    def _adamw(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """On local parts, which may be of different meshes and may be skipped on the device."""
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters if parameter.grad is not None],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """The trainable matrices inside lists of blocks, embeddings excepted: a head stands outside of them."""
    blocks = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    owners = {id(owner): owner for block in blocks for owner in block.modules() if not isinstance(owner, nn.Embedding)}
    found = {id(p): p for owner in owners.values() for p in owner.parameters(recurse=False)}
    return [p for p in found.values() if p.ndim == 2 and p.requires_grad]


def orthogonalise(updates: Sequence[Tensor]) -> None:
    """Each in place. On a mesh there are at most as many as processes: each is gathered, one works it out for all."""
    if not isinstance(updates[0], DTensor):
        for update in updates:
            update.copy_(newton_schulz(_in_compute_type(update)))
        return
    mine = torch.empty(0)
    for owner, update in enumerate(updates):
        gathered = whole(_in_compute_type(update))
        if owner == dist.get_rank():
            mine = gathered
    # not any earlier: the others would wait for it before they have theirs
    mine = newton_schulz(mine).contiguous() if mine.numel() else mine
    for owner, update in enumerate(updates):
        result = mine if owner == dist.get_rank() else gathered.new_empty(update.shape)
        dist.broadcast(result, src=owner)
        fill(update, result)


def newton_schulz(matrix: Tensor) -> Tensor:
    """U V^T of the matrix U S V^T, roughly: singular values end between about 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / torch.linalg.vector_norm(x, dtype=torch.float32).clamp(min=1e-7).type_as(x)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def _in_compute_type(update: Tensor) -> Tensor:
    return update.bfloat16() if update.is_cuda else update


def _fresh_state(rule: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    names = ("momentum",) if rule == "muon" else ("exp_avg", "exp_avg_sq")
    state = {name: torch.zeros_like(parameter.detach()) for name in names}
    return state if rule == "muon" else {"step": torch.zeros((), device=parameter.device), **state}
