import json

import pytest
import torch

from diloco.config.schema import ModelConfig
from diloco.errors import ConfigError, ModelError
from diloco.island.island import Island
from diloco.island.mesh import ProcessMesh
from diloco.model.build import Network, build_network
from diloco.model.flops import flops_per_token

transformers = pytest.importorskip("transformers")
ALONE = ProcessMesh(rank=0, world=1, device=torch.device("cpu"), mesh=None)


def llama_config(**changes):
    size = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return transformers.LlamaConfig(**{**size, "num_attention_heads": 4, "num_key_value_heads": 2, **changes})


@pytest.fixture
def saved(tmp_path):
    """A small Llama with bf16 weights on disk."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(llama_config(), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    return tmp_path, model


def network(path, **keys) -> Network:
    return build_network(ModelConfig(hf=str(path), **keys), data_vocab=256, sequence=32, seed=0)


def island(path, small, **keys) -> Island:
    config = small()
    return Island(network(path, **keys), ALONE, config.island, config.inner)


def test_weights_are_loaded_and_cast_to_fp32(saved, small):
    folder, theirs = saved
    ours = island(folder, small).module
    tokens = torch.arange(40).view(2, 20)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    ours.eval()
    torch.testing.assert_close(ours(tokens).logits, theirs.float().eval()(tokens).logits)


def test_rotary_tables_survive_building_without_memory(saved, small):
    """They are non-persistent buffers, made in the constructor and in no weights file."""
    buffers = dict(island(saved[0], small).module.named_buffers())
    assert buffers and all(torch.isfinite(buffer).all() and buffer.abs().sum() > 0 for buffer in buffers.values())


def test_config_alone_starts_fresh_from_the_seed(saved):
    fresh = dict(network(saved[0], weights="fresh").initial())
    again = dict(network(saved[0], weights="fresh").initial())
    loaded = dict(network(saved[0]).initial())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(fresh[name], again[name])
    assert not torch.equal(fresh[name], loaded[name])


def test_a_folder_with_only_a_config_starts_fresh_unless_weights_are_asked_for(tmp_path):
    llama_config().save_pretrained(tmp_path)
    assert dict(network(tmp_path).initial())
    with pytest.raises(ModelError, match="holds no safetensors weights"):
        network(tmp_path, weights="load")


def test_incomplete_weights_are_refused_by_name(saved):
    from safetensors.torch import load_file, save_file

    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.norm\.weight"):
        list(network(folder).initial())


def test_damaged_weights_are_refused(saved):
    folder, _ = saved
    (folder / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ModelError, match="cannot be loaded"):
        list(network(folder).initial())


def test_a_vocabulary_too_small_for_the_data_is_refused(tmp_path):
    llama_config(vocab_size=100).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="vocabulary of 100, the data needs 256"):
        network(tmp_path)


def test_weights_in_another_format_are_not_silently_ignored(tmp_path):
    llama_config().save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(ModelError, match="not as safetensors"):
        network(tmp_path)
    assert network(tmp_path, weights="fresh").name == "llama (fresh)"


def test_what_cannot_work_is_refused(tmp_path):
    transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=16).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.sequence=32 is longer than the 16 positions"):
        network(tmp_path)
    transformers.T5Config(vocab_size=256, d_model=32, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not a plain causal LM"):
        network(tmp_path)
    llama_config().save_pretrained(tmp_path)
    damaged = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": 33}
    (tmp_path / "config.json").write_text(json.dumps(damaged))
    with pytest.raises(ModelError, match="cannot be"):
        network(tmp_path)


def test_other_architectures_train_too(tmp_path, small):
    transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=64).save_pretrained(tmp_path)
    gpt2 = island(tmp_path, small)
    loss = gpt2.step([torch.randint(0, 256, (2, 33))], lr=1e-3)
    assert torch.isfinite(loss)


def test_flops_count_matrices_and_attention(tmp_path):
    llama_config(tie_word_embeddings=False).save_pretrained(tmp_path)
    untied = network(tmp_path)
    matrices = sum(p.numel() for p in untied.module.parameters() if p.ndim >= 2) - 256 * 32
    assert flops_per_token(untied, sequence=64) == 6 * matrices + 12 * 2 * 32 * 64
