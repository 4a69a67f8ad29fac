"""`diloco export`: a run's outer parameters in Hugging Face's layout.

The built-in model is Qwen3's architecture (Llama's, with QK-norm) under shorter names, so only names change.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from diloco.atomic import appearing
from diloco.data.tokenizer import Tokenizer
from diloco.errors import ModelError, SaveError, first_line
from diloco.history.load import TrainedModel
from diloco.model.build import parameters_on_meta
from diloco.model.decoder import Decoder
from diloco.model.hf import hf_folder, load_transformers
from diloco.version import __version__

ABOUT = "diloco.json"  # by it an earlier export is known
SHARD = "5GB"
OUTSIDE_BLOCKS = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
IN_BLOCK = {
    "attn_norm": "input_layernorm", "attn": "self_attn", "mlp_norm": "post_attention_layernorm", "mlp": "mlp"
}  # fmt: skip


def refuse_target(out: Path, run: Path, *, force: bool) -> None:
    """Refuse a target inside the run, or with other files in it; an earlier export is replaced only with `force`. Only
    what does not exist, is empty, or was written by an earlier export is ever written to."""
    whole_run = run.parent if run.name.startswith("island-") else run
    if out.resolve().is_relative_to(whole_run.resolve()):
        raise SaveError(f"{out} is inside the run {whole_run}: name a folder somewhere else")
    if not out.exists():
        return
    if not out.is_dir():
        raise SaveError(f"{out} is a file: name a folder that does not exist yet")
    there, written = {path.name for path in out.iterdir()}, _written_by_export(out)
    if foreign := sorted(there - written):
        raise SaveError(f"{out} holds {foreign[0]}, which no export wrote: name a folder that does not exist yet")
    if there and not force:
        raise SaveError(f"{out} holds an earlier export: add --force to replace it, or name another folder")


def _written_by_export(out: Path) -> set[str]:
    try:
        return {ABOUT, *map(str, json.loads((out / ABOUT).read_text())["files"])}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def export(trained: TrainedModel, out: Path, tokenizer: Tokenizer | None, dtype: str = "float32") -> str:
    """Write the model, all of `out` or nothing, and return the architecture's name. `refuse_target` comes first.

    With another dtype than float32 the model in memory is rounded to it, too.
    """
    out = out.resolve()
    _round_to(trained, dtype)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with appearing(out) as part:
            part.mkdir()
            return _write(trained, part, tokenizer)
    except (OSError, SafetensorError) as error:
        raise SaveError(
            f"{out} could not be written ({first_line(error)}): free some space or name another folder"
        ) from None


def _round_to(trained: TrainedModel, dtype: str) -> None:
    """Round the parameters; raise ModelError where one that was finite would not be any more."""
    kind = getattr(torch, dtype)
    largest = torch.finfo(kind).max
    for name, parameter in trained.module.named_parameters():
        if bool((parameter.detach().abs() > largest).any()):
            raise ModelError(f"{name} has values beyond {largest:g}, the largest of {dtype}: use --dtype bfloat16")
        parameter.data = parameter.data.to(kind)


def _write(trained: TrainedModel, part: Path, tokenizer: Tokenizer | None) -> str:
    if isinstance(trained.module, Decoder):
        model = as_qwen3(trained.module, end=tokenizer.end if tokenizer else None)
    else:
        model = _as_it_came(trained)
    model.config.dtype = next(trained.module.parameters()).dtype
    model.save_pretrained(part, max_shard_size=SHARD)
    if trained.config.model.hf is not None:
        settings = hf_folder(trained.config.model.hf) / "generation_config.json"
        if settings.is_file():
            shutil.copyfile(settings, part / settings.name)
    if tokenizer is not None:
        tokenizer.save(part)
    _write_about(trained, part)
    for path in part.iterdir():  # safetensors makes files for their owner only
        path.chmod((part / ABOUT).stat().st_mode)
    return str(model.config.model_type)


def as_qwen3(module: Decoder, *, end: int | None = None) -> Any:
    """Return the same model as a `Qwen3ForCausalLM` that shares its memory; `end` is the token that ends a text."""
    transformers = load_transformers("diloco export")
    shape = module.shape
    config = transformers.Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.blocks, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads, head_dim=shape.head_width,
        max_position_embeddings=shape.context, rope_theta=10_000.0, rms_norm_eps=module.norm.eps,
        tie_word_embeddings=shape.tied, eos_token_id=end,
    )  # fmt: skip
    with parameters_on_meta():
        model = transformers.Qwen3ForCausalLM(config)
    model.load_state_dict({qwen3_name(name): value for name, value in module.state_dict().items()}, assign=True)
    model.tie_weights()
    return model.eval()


def qwen3_name(name: str) -> str:
    """Translate a parameter's name of the built-in model into Hugging Face's."""
    match name.split("."):
        case ["blocks", number, part, *rest]:
            return ".".join(["model.layers", number, IN_BLOCK[part], *rest])
        case [part, *rest]:
            return ".".join([OUTSIDE_BLOCKS[part], *rest])
    raise AssertionError(name)


def _as_it_came(trained: TrainedModel) -> Any:
    """Return a Hugging Face model with its own cache setting: training switched the key-value cache off."""
    transformers = load_transformers("diloco export")
    model: Any = trained.module
    own = transformers.AutoConfig.from_pretrained(
        hf_folder(str(trained.config.model.hf)), local_files_only=True, trust_remote_code=False
    )
    model.config.use_cache = getattr(own, "use_cache", True)
    return model


def _write_about(trained: TrainedModel, part: Path) -> None:
    about = {
        "diloco": __version__, "run": trained.config.run, "step": trained.step, "round": trained.round,
        "files": sorted(path.name for path in part.iterdir()),
    }  # fmt: skip
    (part / ABOUT).write_text(json.dumps(about, indent=1))
