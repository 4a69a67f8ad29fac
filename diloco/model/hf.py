"""Any Hugging Face causal LM as a network: from its config alone, or with weights, from a folder or from the hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from diloco.errors import ConfigError, MissingExtra, ModelError
from diloco.model.build import HF_LLAMA, Anatomy, Network, parameters_on_meta
from diloco.model.frozen import settings_of
from diloco.model.hub import SETTINGS, WEIGHTS, local_folder


def hf_network(path: str, *, weights: str, data_vocab: int, sequence: int, seed: int) -> Network:
    """Build a causal LM from a folder, a config.json or a name on the hub, with its safetensors weights or fresh ones.

    `weights`: `load`, `fresh`, or `auto`, which loads them where there are any.
    """
    transformers = load_transformers("model.hf")
    path = str(hf_folder(path, weights=weights))
    config = _read_config(transformers, path)
    _refuse_misfit(config, path, data_vocab, sequence)
    there = _holds(path, "*.safetensors")
    load = weights == "load" or (weights == "auto" and there)
    if not load and weights != "fresh" and _holds(path, "*.bin", "*.pt", "*.pth", "*.ckpt"):
        raise ModelError(
            f"{path} has weights, but not as safetensors: convert them, or set model.weights=fresh to ignore them"
        )
    if load and not there:
        raise ModelError(f"model.weights=load, but {path} holds no safetensors weights: set model.weights=fresh")
    module = _skeleton(transformers, config, path)

    def initial() -> Iterator[tuple[str, Tensor]]:
        whole = _loaded(transformers, path) if load else _fresh(transformers, config, seed)
        for name, parameter in whole.named_parameters():
            yield name, parameter.detach().float()

    name = f"{config.model_type} ({'weights loaded' if load else 'fresh'})"
    return Network(module, _anatomy(module), initial, name, settings_of(Path(path)))


def hf_folder(given: str, *, weights: str = "fresh") -> Path:
    """Return where a model's files lie here; those of a name on the hub are downloaded, its weights unless `fresh`."""
    files = SETTINGS if weights == "fresh" else (*SETTINGS, *WEIGHTS)
    return local_folder(given, files, "model.hf", ModelError)


def load_transformers(needed_for: str) -> Any:
    """Import transformers and silence it. Raise MissingExtra, which says what needs it, if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf", needed_for) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _read_config(transformers: Any, path: str) -> Any:
    if not Path(path).exists():
        raise ModelError(f"model.hf={path!r}: no such folder or config.json; a name on the hub is OWNER/NAME")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, _refused_field()) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ModelError(f"model.hf={path!r} cannot be used: {reason}") from None
    config.use_cache = False
    return config


def _refused_field() -> type[Exception]:
    """Return the error that newer libraries raise when a config's fields do not fit together."""
    from huggingface_hub import errors

    return getattr(errors, "StrictDataclassError", ValueError)


def _refuse_misfit(config: Any, path: str, data_vocab: int, sequence: int) -> None:
    if getattr(config, "vocab_size", None) is None or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"model.hf={path!r} is a {config.model_type}, which is not a plain causal LM")
    if config.vocab_size < data_vocab:
        raise ConfigError(f"model.hf={path!r} has a vocabulary of {config.vocab_size}, the data needs {data_vocab}")
    longest = getattr(config, "max_position_embeddings", None) or sequence
    if longest < sequence:
        raise ConfigError(f"data.sequence={sequence} is longer than the {longest} positions of model.hf={path!r}")


def _skeleton(transformers: Any, config: Any, path: str) -> nn.Module:
    try:
        with parameters_on_meta():
            module: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise ModelError(f"model.hf={path!r} cannot be built: {str(error).strip().splitlines()[0]}") from None
    return module.train()


def _holds(path: str, *patterns: str) -> bool:
    return Path(path).is_dir() and any(any(Path(path).glob(pattern)) for pattern in patterns)


def _fresh(transformers: Any, config: Any, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return module


def _loaded(transformers: Any, folder: str) -> nn.Module:
    try:
        module, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the weights in {folder} cannot be loaded: {str(error).strip().splitlines()[0]}") from None
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"the weights in {folder} lack {missing[0]} and {len(missing) - 1} more: model.weights=fresh ignores them"
        )
    return module


def _anatomy(module: nn.Module) -> Anatomy:
    """Use Llama's names where they fit; else the largest list of equal blocks, which FSDP can cut but tp cannot."""
    names = dict(module.named_modules())
    if HF_LLAMA.blocks in names:
        return HF_LLAMA
    lists = [(len(m), name) for name, m in names.items() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ModelError(f"{type(module).__name__} has no list of blocks to cut: it cannot be sharded")
    return Anatomy(embed="", blocks=max(lists)[1], attention="", feed_forward="", head="")
