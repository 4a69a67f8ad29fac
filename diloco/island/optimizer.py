"""Inner optimizers: torch's AdamW, Muon, and for users' own loops any that torch has."""

import difflib
import inspect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from diloco.checkpoint.save.inner import is_cut
from diloco.config.schema import InnerConfig
from diloco.errors import ConfigError
from diloco.island.parallel import fill, local, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def build_optimizer(module: nn.Module, config: InnerConfig) -> "Muon | LocalAdamW":
    """Create the inner optimizer with its parameter groups. Matrices decay, norms and biases do not; fused kernels
    refuse to mix meshes, so each mesh has groups of its own."""
    hidden = {id(matrix) for matrix in hidden_matrices(module)} if config.optimizer == "muon" else set()
    groups: dict[tuple[str, bool, object], list[nn.Parameter]] = defaultdict(list)
    for parameter in module.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if is_cut(parameter) else None
            groups["muon" if id(parameter) in hidden else "adamw", parameter.ndim >= 2, mesh].append(parameter)
    made: list[dict[str, Any]] = [
        {"params": parameters, "rule": rule, "weight_decay": config.weight_decay if decays else 0.0}
        for (rule, decays, _), parameters in groups.items()
    ]
    shared: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.optimizer == "muon":
        return Muon(made, momentum=config.momentum, **shared)
    return LocalAdamW(made, **shared)


def named_optimizer(name: str, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """Create any optimizer of torch.optim, by its class: `Adagrad` or `torch.optim.Adagrad`.

    Nothing else is looked up or imported.
    """
    base = torch.optim.Optimizer
    classes = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, base)]
    kinds = {kind.__name__: kind for kind in classes if kind is not base}
    short = name.removeprefix("torch.optim.")
    if short not in kinds:
        cases = {kind.lower(): kind for kind in kinds}
        close = difflib.get_close_matches(short.lower(), cases, n=1)
        hint = f"did you mean {cases[close[0]]}?" if close else f"there are {', '.join(sorted(kinds))}"
        raise ConfigError(f"torch.optim has no optimizer {name!r}: {hint}")
    try:
        return kinds[short](parameters, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"torch.optim.{short} refuses its options: {error}") from None


def set_weight_decay(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Set the decay of matrices, as `build_optimizer` has grouped them; norms and biases do not decay."""
    for group in optimizer.param_groups:
        group["weight_decay"] = decay if group["params"][0].ndim >= 2 else 0.0


def step_if_finite(optimizer: "Muon | LocalAdamW", norm: Tensor, lr: float) -> Tensor:
    """Step unless the gradient norm is infinite or NaN.

    Return 1 if the step was skipped, else 0, as a tensor that is not read from the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.found_inf = (~torch.isfinite(norm)).float()  # the step then leaves everything as it was
    optimizer.step()
    return optimizer.found_inf


class Uncompiled(torch.optim.Optimizer):
    """Call methods as they are, without the wrapper that keeps them from being compiled: to do so, it imports torch's
    compiler, half a second of each start. Nobody compiles these optimizers."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class LocalAdamW(Uncompiled, torch.optim.AdamW):
    """Update the parts of parameters that this process holds by torch's fused AdamW, without DTensors' dispatch.

    A step with `found_inf` at 1 changes nothing.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, fused=True, **defaults)
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _fresh_state("adamw", parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients. `closure` is ignored."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            update_by_adamw(self, group, parameters, self.found_inf)


class Muon(Uncompiled):
    """Make the momentum of every hidden matrix orthogonal before it is applied; AdamW does the rest.

    After Keller Jordan, with the scale of "Muon is Scalable for LLM Training": the entries of an orthogonal matrix have
    an RMS of 1/sqrt(max(rows, columns)), AdamW's updates one of about 0.2. Times 0.2 sqrt(max(rows, columns)) they are
    alike, and AdamW's learning rate and weight decay carry over.

    Each group says which `rule` it follows, muon or adamw. A step with `found_inf` at 1 changes nothing.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, {"fused": True, **defaults})
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _fresh_state(group["rule"], parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients, each group by its rule. `closure` is ignored."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["rule"] == "muon":
                self._muon(group, parameters)
            else:
                update_by_adamw(self, group, parameters, self.found_inf)

    def _muon(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Update matrices by Muon. On a mesh as many at a time as there are processes, equally large ones together."""
        parameters.sort(key=Tensor.numel)
        together = dist.get_world_size() if parameters and is_cut(parameters[0]) else 1
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
        """Return 1, or 0 in a step that is to change nothing; which of them, only the device knows."""
        return torch.ones((), device=device) if self.found_inf is None else 1 - self.found_inf


def update_by_adamw(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[nn.Parameter], found_inf: Tensor | None
) -> None:
    """Update local parts by AdamW; they may be of different meshes, and the step may be skipped on the device."""
    states = [optimizer.state[parameter] for parameter in parameters]
    adamw(
        [local(parameter) for parameter in parameters],
        [local(parameter.grad) for parameter in parameters if parameter.grad is not None],
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        fused=True,
        found_inf=found_inf,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable matrices inside lists of blocks, except embeddings; a head stands outside of them."""
    blocks = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    owners = {id(owner): owner for block in blocks for owner in block.modules() if not isinstance(owner, nn.Embedding)}
    found = {id(p): p for owner in owners.values() for p in owner.parameters(recurse=False)}
    return [p for p in found.values() if p.ndim == 2 and p.requires_grad]


def orthogonalise(updates: Sequence[Tensor]) -> None:
    """Make each update orthogonal in place. On a mesh there are at most as many as processes: each is gathered, and one
    process computes it for all."""
    if not is_cut(updates[0]):
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
    """Compute U V^T of the matrix U S V^T, roughly: singular values end between about 0.7 and 1.2."""
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
