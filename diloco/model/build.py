"""What is trained, before it has memory or a place: the skeleton, how it can be cut, where its values come from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from diloco.config.schema import ModelConfig
from diloco.errors import ConfigError, ModelError
from diloco.model.decoder import Decoder, initial_parameters, shape_of
from diloco.model.frozen import FrozenDigests


@dataclass(frozen=True)
class Anatomy:
    """Name the modules where a Llama-type decoder keeps its parts, for cutting it over a mesh or into fragments."""

    embed: str
    blocks: str
    attention: str
    feed_forward: str
    head: str


BUILT_IN = Anatomy(embed="embed", blocks="blocks", attention="attn", feed_forward="mlp", head="head")
HF_LLAMA = Anatomy("model.embed_tokens", "model.layers", "self_attn", "mlp", "lm_head")


@dataclass(frozen=True)
class Network:
    """Describe a model before it has memory or a place: its skeleton, its parts, and its first values."""

    module: nn.Module  # parameters on the meta device
    anatomy: Anatomy
    initial: Callable[[], Iterator[tuple[str, Tensor]]]  # every parameter's first value, fp32, one at a time
    name: str
    settings: FrozenDigests = ()  # digest of what else makes it this model and no other


def build_network(config: ModelConfig, *, data_vocab: int, sequence: int, seed: int) -> Network:
    """Build the configured model on the meta device, built-in or from Hugging Face, and freeze what is not trained."""
    if config.hf is not None:
        from diloco.model.hf import hf_network  # transformers is an extra

        network = hf_network(config.hf, weights=config.weights, data_vocab=data_vocab, sequence=sequence, seed=seed)
    else:
        with parameters_on_meta():
            decoder = Decoder(shape_of(config, data_vocab, sequence))
        network = Network(decoder, BUILT_IN, lambda: initial_parameters(decoder, seed), config.preset or "tiny")
    freeze(network.module, config.freeze)
    refuse_float_buffers(network.module)
    return network


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules built inside have parameters without memory, but real buffers (constructors make rotary tables)."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def freeze(module: nn.Module, patterns: tuple[str, ...]) -> None:
    """Exclude the parameters that match name patterns from training.

    A pattern that matches nothing is refused, and so is freezing everything.
    """
    names = [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise ConfigError(f"model.freeze={pattern!r} matches no parameter: names look like {names[0]}, {names[-1]}")
        for name in hits:
            module.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"model.freeze={list(patterns)} freezes everything: nothing is left to train")


def refuse_float_buffers(module: nn.Module) -> None:
    """Refuse persistent float buffers.

    They change in training but are in no gradient: islands would silently differ in them.
    """
    persistent = set(module.state_dict().keys()) - {name for name, _ in module.named_parameters(remove_duplicate=False)}
    floats = [name for name, buffer in module.named_buffers() if name in persistent and buffer.is_floating_point()]
    if floats:
        raise ModelError(
            f"the model keeps {floats[0]} as a persistent float buffer, which would drift apart between islands: "
            "make it a parameter, register it with persistent=False, or use a layer without running statistics"
        )
