from dataclasses import replace

import pytest
import torch

from diloco.config.schema import ModelConfig
from diloco.errors import ConfigError
from diloco.model.decoder import PRESETS, Decoder, Shape, initial_parameters, rotary_table, rotate, shape_of

SMALL = Shape(blocks=2, heads=4, width=32, feed_forward=48, vocab=64)


def build(shape: Shape) -> Decoder:
    module = Decoder(shape)
    with torch.no_grad():
        for name, value in initial_parameters(module, seed=0):
            module.get_parameter(name).copy_(value)
    return module


@pytest.mark.parametrize(
    ("preset", "millions"), [("tiny", 1.0), ("35m", 35), ("90m", 90), ("150m", 150), ("1b", 1300), ("3b", 3040)]
)
def test_presets_have_the_size_of_their_name(preset, millions):
    shape = replace(PRESETS[preset], vocab=256 if preset == "tiny" else 32_000)
    with torch.device("meta"):
        count = sum(p.numel() for p in Decoder(shape).parameters())
    assert count == pytest.approx(millions * 1e6, rel=0.05)


def test_a_token_sees_only_what_came_before():
    module = build(SMALL)
    tokens = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10] += 1
    before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_positions_matter_only_by_their_distance():
    cos, sin = rotary_table(12, 8)
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 12, 1, 8)
    q, k = rotate(query, cos, sin)[0, :, 0], rotate(key, cos, sin)[0, :, 0]  # [S, E]
    torch.testing.assert_close(q[3] @ k[1], q[9] @ k[7])
    assert not torch.allclose(q[3] @ k[1], q[3] @ k[2])


def test_grouped_heads_equal_repeated_ones():
    grouped, full = build(replace(SMALL, kv_heads=2)), build(SMALL)
    with torch.no_grad():
        for name, parameter in grouped.named_parameters():
            if name.endswith(("k_proj.weight", "v_proj.weight")):
                heads = parameter.view(2, 8, 32).repeat_interleave(2, dim=0)
                full.get_parameter(name).copy_(heads.reshape(32, 32))
            else:
                full.get_parameter(name).copy_(parameter)
    tokens = torch.arange(16).view(1, 16)
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_tied_head_is_the_embedding():
    tied, untied = build(SMALL), build(replace(SMALL, tied=False))
    assert tied.head.weight is tied.embed.weight
    assert untied.head.weight is not untied.embed.weight


def test_initial_values_depend_on_seed_and_name_alone():
    first = dict(initial_parameters(Decoder(SMALL), seed=3))
    torch.rand(5)
    again = dict(initial_parameters(Decoder(replace(SMALL, blocks=1)), seed=3))
    name = "blocks.0.attn.q_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], dict(initial_parameters(Decoder(SMALL), seed=4))[name])
    assert first["embed.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_shape_follows_preset_overrides_and_data():
    shape = shape_of(ModelConfig(preset="tiny", heads=8, tied=False), data_vocab=1000, sequence=64)
    assert (shape.heads, shape.kv_heads, shape.vocab, shape.tied, shape.blocks) == (8, 0, 1000, False, 4)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ({"heads": 3}, "model.width=128 must be an even multiple of model.heads=3"),
        ({"kv_heads": 3}, "model.heads=4 must be a multiple of model.kv_heads=3"),
        ({"vocab": 100}, "model.vocab=100 is below the data's 256"),
    ],
)
def test_impossible_shapes_are_refused(model, complaint):
    with pytest.raises(ConfigError, match=complaint):
        shape_of(ModelConfig(preset="tiny", **model), data_vocab=256, sequence=64)
