"""Where a decoder keeps its parts: what cutting it over a mesh or into fragments needs to know."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Anatomy:
    """Where a Llama-type decoder keeps its parts, by module name."""

    embed: str
    blocks: str
    attention: str
    feed_forward: str
    head: str


BUILT_IN = Anatomy(embed="embed", blocks="blocks", attention="attn", feed_forward="mlp", head="head")
HF_LLAMA = Anatomy("model.embed_tokens", "model.layers", "self_attn", "mlp", "lm_head")
