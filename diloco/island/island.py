"""The inner side: one model on one mesh, doing ordinary optimizer steps.

An island gives its parameters out and takes new ones in as parts of a flat fp32 vector in canonical order (`shards`).
Only the leader process sees that vector.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diloco.checkpoint.save.inner import is_cut
from diloco.config.schema import InnerConfig, IslandConfig
from diloco.errors import DeviceError
from diloco.island.flat import Shards
from diloco.island.mesh import ProcessMesh
from diloco.island.optimizer import build_optimizer, set_weight_decay, step_if_finite
from diloco.island.parallel import (
    blocks_of,
    gather_gradients,
    gradient_norm,
    local,
    norms_of,
    reshard,
    retie,
    shard,
    tied_names,
    whole,
)
from diloco.model.build import Network
from diloco.model.frozen import FrozenDigests, buffers_of, tensor_digest


class Island:
    """Train one model on one mesh by ordinary optimizer steps."""

    def __init__(self, network: Network, place: ProcessMesh, island: IslandConfig, inner: InnerConfig) -> None:
        self.place = place
        self.compute_dtype = compute_dtype(island.dtype, place.device)
        if self.compute_dtype == torch.bfloat16:
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without bf16 is slow, not wrong
        self.module = network.module
        # asked once: a part of a mesh is found by reading tensors
        self._splits_vocabulary = place.mesh is not None and place.mesh["tp"].size() > 1
        if place.mesh is not None:
            shard(self.module, network.anatomy, place, self.compute_dtype)
        materialise(self.module, place.device)
        if island.activation_checkpointing:
            for block in blocks_of(self.module, network.anatomy):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        self._loss_of: Callable[[nn.Module, Tensor], Tensor] = next_token_loss
        if island.compile:
            _refuse_missing_compiler(place.device)
            self._compile([*blocks_of(self.module, network.anatomy), *norms_of(self.module, network.anatomy)])
        self.optimizer = build_optimizer(self.module, inner)
        self.parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.shards = Shards(self.parameters, place)
        self.layout = self.shards.layout
        self.tune(inner)
        self.skipped = torch.zeros((), device=place.device)  # steps whose gradient was not finite
        self.gradient_norm = torch.zeros((), device=place.device)  # of the last step, before clipping
        filled = self._fill_everything(network.initial)
        # the leader alone has seen the values; all processes refuse a run together
        self.frozen: FrozenDigests = place.share((*network.settings, *filled, *buffers_of(self.module)))

    def step(self, micro_batches: Sequence[Tensor], lr: float) -> Tensor:
        """Do one inner step on this process' part of the batch, each micro-batch [rows, sequence + 1]. Return its mean
        loss, not yet read from the device."""
        loss = torch.zeros((), device=self.place.device)
        for number, tokens in enumerate(micro_batches, start=1):
            if self.place.mesh is not None:
                gather_gradients(self.module, number == len(micro_batches))
            with self._computing():
                part = self._loss_of(self.module, tokens) / len(micro_batches)
                part.backward()
            loss += whole(part.detach())
        self._update(lr)
        return loss

    def tune(self, inner: InnerConfig) -> None:
        """Set gradient clipping and weight decay, which may change between steps; the learning rate comes with each."""
        self._clip = inner.clip
        set_weight_decay(self.optimizer, inner.weight_decay)

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = self.gradient_norm = gradient_norm(gradients)
        if self._clip:
            torch._foreach_mul_(
                [local(gradient) for gradient in gradients], (self._clip / (norm + 1e-6)).clamp(max=1.0)
            )
        self.shards.settle()
        self.skipped += step_if_finite(self.optimizer, norm, lr)
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Tensor]) -> float:
        """Return the mean loss of the parameters held now. Each process brings its own batches, all equally many."""
        self.module.eval()
        losses = []
        for tokens in batches:
            self.place.activity.count()
            with self._computing():
                losses.append(whole(self._loss_of(self.module, tokens)))
        reshard(self.module)  # what was gathered stays without a backward pass: old values, after a write
        self.module.train()
        return self.place.mean(torch.stack(losses).mean())

    def state(self) -> dict[str, Any]:
        """Return everything of this island that the next step depends on, tensors by the names of parameters.

        The optimizer's settings are not in it: those come from the configuration, so that they may change at a resume.
        """
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}
        moments = {names[parameter]: dict(state) for parameter, state in self.optimizer.state.items()}
        state: dict[str, Any] = {"model": self.module.state_dict(), "optimizer": moments}
        state[f"rng.{self.place.rank}.cpu"] = torch.get_rng_state()
        if self.place.device.type == "cuda":
            state[f"rng.{self.place.rank}.cuda"] = torch.cuda.get_rng_state(self.place.device)
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned. Random numbers' states are loaded where they are in it: a save from another mesh
        or device has those of other processes."""
        self.module.load_state_dict(state["model"])
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                local(value).copy_(local(state["optimizer"][name][key]))
        # what is there: a save from another mesh or device has the state of other processes
        if (cpu := state.get(f"rng.{self.place.rank}.cpu")) is not None:
            torch.set_rng_state(cpu)
        if (cuda := state.get(f"rng.{self.place.rank}.cuda")) is not None:
            torch.cuda.set_rng_state(cuda, self.place.device)

    def _fill_everything(self, initial: Callable[[], Iterator[tuple[str, Tensor]]]) -> FrozenDigests:
        """Set the first values of every parameter, frozen ones too; return the digests of those, on the leader."""
        values: list[Iterator[tuple[str, Tensor]]] = []

        def open_values() -> None:
            source = initial()
            values.append(chain([next(source)], source))  # the first one loads the files, and may fail

        self.place.leader_first(open_values)
        frozen = []
        for name, parameter in self.module.named_parameters():
            vector = None
            if values:
                given, value = next(values[0])
                assert given == name, f"{given} came where {name} was due"
                vector = value.flatten()
                if not parameter.requires_grad:
                    frozen.append((name, tensor_digest(value)))
            Shards({name: parameter}, self.place).write(vector)
        return tuple(frozen)

    def _computing(self) -> AbstractContextManager[Any]:
        """Set the compute type where FSDP does not, and the loss over a vocabulary split by tensor parallelism."""
        stack = ExitStack()
        if self.place.mesh is None and self.compute_dtype != torch.float32:
            stack.enter_context(torch.autocast(self.place.device.type, dtype=self.compute_dtype))
        if self._splits_vocabulary:
            from torch.distributed.tensor.parallel import loss_parallel

            stack.enter_context(loss_parallel())
        return stack

    def _compile(self, parts: list[nn.Module]) -> None:
        """Compile the whole computation with its loss on one process; on a mesh, each part between FSDP's hooks, and
        the loss, whose logits are large (not with tensor parallelism, which splits the vocabulary)."""
        if self.place.mesh is None:
            self._loss_of = torch.compile(next_token_loss)
            return
        for part in parts:
            part.compile()
        if not self._splits_vocabulary:
            self._loss_of = partial(next_token_loss, loss=torch.compile(cross_entropy))


def compute_dtype(asked: str, device: torch.device) -> torch.dtype:
    """Return the torch type that is asked for; `auto` is bf16 on CUDA and fp32 elsewhere."""
    if asked == "auto":
        asked = "bf16" if device.type == "cuda" else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[asked]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in fp32, of logits [B, S, vocab] for targets [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def next_token_loss(
    module: nn.Module, tokens: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
) -> Tensor:
    """Return the mean loss of every token [B, S + 1] given those before it."""
    output = module(tokens[:, :-1])
    logits = output if isinstance(output, Tensor) else output.logits  # [B, S, vocab]
    return loss(logits, tokens[:, 1:])


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give a module built on the meta device memory, keeping its ties and the contents of its buffers."""
    ties = tied_names(module)
    buffers = dict(module.named_buffers())

    def empty(tensor: Tensor) -> Tensor:
        if is_cut(tensor):
            return torch.empty_like(tensor, device=device)
        # of a tensor on the meta device, `empty_like` begins with an import of sympy, half a second
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    module._apply(empty)  # what `to_empty` does
    retie(module, ties)
    for name, buffer in buffers.items():
        module.get_buffer(name).copy_(buffer)


def _refuse_missing_compiler(device: torch.device) -> None:
    """Raise DeviceError where torch.compile would need a C++ compiler and finds none."""
    if device.type == "cpu" and not any(
        shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")
    ):
        raise DeviceError(
            "island.compile=true needs a C++ compiler on a CPU, and none is here: install g++ or set it to false"
        )
