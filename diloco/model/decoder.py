"""The built-in model: a small modern decoder, written for reading.

Pre-norm blocks with RMSNorm, rotary positions, QK-norm, grouped key/value heads and SwiGLU; head tied or not.
It knows nothing of sharding: `diloco.island.parallel` cuts it along heads and feed-forward from outside, which is why
the attention derives its number of heads from the tensors it gets.
Shapes: B batch, S sequence, D width, H heads, E head width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from hashlib import sha256

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diloco.config.schema import ModelConfig
from diloco.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """Hold the sizes of a decoder. Heads that do not divide the width, or each other, are refused."""

    blocks: int
    heads: int
    width: int
    feed_forward: int
    vocab: int = 256
    context: int = 256  # the longest sequence
    kv_heads: int = 0  # 0: as many as heads
    tied: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads or self.head_width % 2:
            raise ConfigError(f"model.width={self.width} must be an even multiple of model.heads={self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(f"model.heads={self.heads} must be a multiple of model.kv_heads={self.kv_heads}")

    @property
    def head_width(self) -> int:
        """Return E, the width of one attention head."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Return the width of all key heads together, which is also that of the value heads."""
        return self.head_width * (self.kv_heads or self.heads)


# The papers' sizes (blocks, heads, width) with their vocabulary of 32k have two matrices in the feed-forward; SwiGLU
# has three, so its width is 2/3 of theirs, rounded to 64, and the parameter counts stay those of the names.
PRESETS = {
    "tiny": Shape(blocks=4, heads=4, width=128, feed_forward=448),
    "35m": Shape(blocks=6, heads=8, width=512, feed_forward=1344),
    "90m": Shape(blocks=9, heads=12, width=768, feed_forward=2048),
    "150m": Shape(blocks=12, heads=16, width=896, feed_forward=2368),
    "1b": Shape(blocks=24, heads=32, width=2048, feed_forward=5440),
    "3b": Shape(blocks=26, heads=24, width=3072, feed_forward=8192),  # of no paper: Llama's proportions
}


def shape_of(config: ModelConfig, data_vocab: int, sequence: int) -> Shape:
    """Combine the preset's sizes with those that the configuration sets. By default the vocabulary is the data's."""
    preset = PRESETS[config.preset or "tiny"]
    asked = {f.name: value for f in fields(Shape) if (value := getattr(config, f.name, None)) is not None}
    if "heads" in asked and "kv_heads" not in asked:
        asked["kv_heads"] = 0
    shape = replace(preset, **{"vocab": data_vocab, "context": sequence, **asked})
    if shape.vocab < data_vocab:
        raise ConfigError(f"model.vocab={shape.vocab} is below the data's {data_vocab}: raise it or leave it out")
    return shape


class RMSNorm(nn.Module):
    """Scale vectors to a root mean square of 1, computed in fp32, times a trained weight."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight.type_as(x)


def rotary_table(length: int, head_width: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine of each position's angles, fp32 [S, E/2]."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32) / head_width
    angles = torch.outer(torch.arange(length, dtype=torch.float32), base**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + E/2]) of [B, S, H, E] by its position's angle."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]  # [S, 1, E/2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Mix the positions of a sequence by causal attention, with QK-norm and grouped key/value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_width  # Hugging Face's name for it, which sharding looks for
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.q_norm = RMSNorm(shape.head_width)
        self.k_norm = RMSNorm(shape.head_width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return [B, S, D]. The number of heads follows from the tensors, which tensor parallelism may have split."""
        heads = (*x.shape[:2], -1, self.head_dim)  # [B, S, H, E]
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)  # [B, H, S, E]
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Transform each position by itself with SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Add attention and then a feed-forward to the residual stream, each behind its norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(shape.width)
        self.attn = Attention(shape)
        self.mlp_norm = RMSNorm(shape.width)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Predict the next token at every position, by an embedding, blocks and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        table = torch.empty(shape.vocab, shape.width)
        if not table.is_meta:  # there, values would only begin with an import of torch's compiler
            nn.init.normal_(table)
        self.embed = nn.Embedding.from_pretrained(table, freeze=False)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        # a table, not a formula in `forward`: compiled kernels would work the formula out anew for every element
        cos, sin = rotary_table(shape.context, shape.head_width)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, S, vocab] of the tokens that follow `tokens` [B, S]."""
        length = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = self.embed(tokens)  # [B, S, D]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # the residual stream too, as under FSDP
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def initial_parameters(module: Decoder, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield fresh fp32 values for every parameter, one at a time; each depends only on seed, name and shape.

    They are normal with deviation 0.02, the last matrix of each residual branch scaled by 1/sqrt(2 blocks); norms start
    at one.
    """
    residual = (2 * module.shape.blocks) ** -0.5
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            yield name, torch.ones(parameter.shape)
            continue
        digest = sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        scale = 0.02 * (residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
        yield name, torch.empty(parameter.shape).normal_(0.0, scale, generator=generator)
