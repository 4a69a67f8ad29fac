"""What is not trained is the same on every island, wherever it lies: the run's first record has its digests."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from alone import HERE, train
from conftest import SMALL
from safetensors.torch import load_file, save_file
from torch import nn

from diloco.config.file import parse_config
from diloco.config.schema import Config
from diloco.errors import JoinRefused, SaveError
from diloco.island.user_model import OwnModel
from diloco.model.frozen import frozen_of, tensor_digest
from diloco.report.sinks import Events
from diloco.run.genesis import Genesis, own_sections, read_genesis
from diloco.train.trainer import Trainer

transformers = pytest.importorskip("transformers")
FROZEN = "model.embed_tokens.weight"
LLAMA = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "llama"
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    return folder


@pytest.fixture
def on(tmp_path: Path) -> Callable[[Path], Config]:
    """A run of the base model in that folder, whose embeddings are frozen."""

    def make(folder: Path, **keys: object) -> Config:
        model = {"hf": str(folder), "freeze": "model.embed_tokens*", **keys}
        return parse_config({**SMALL, "model": model, "checkpoint": {"dir": str(tmp_path / "run")}})

    return make


def changed_settings(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def changed_weight(folder: Path, name: str) -> None:
    """By one bit of one value."""
    weights = load_file(folder / "model.safetensors")
    weights[name].view(-1).view(torch.int32)[7] ^= 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_the_same_base_is_known_wherever_it_lies_and_another_one_is_refused_by_name(base, on, tmp_path):
    train(on(base), until=4)
    genesis = read_genesis(tmp_path / "run" / "outer")
    assert [name for name, _ in genesis.frozen] == ["config.json", FROZEN]
    copy = Path(shutil.copytree(base, tmp_path / "elsewhere" / "copy"))
    changed_settings(copy, _name_or_path="whatever", transformers_version="0.0.0")
    train(on(copy), until=8, resume=True)
    changed_weight(copy, FROZEN)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    for other in (on(copy), on(copy).model_copy(update={"outer": on(copy).outer.model_copy(update={"lr": 0.1})})):
        with pytest.raises(JoinRefused, match=re.escape(f"differs: {FROZEN} is not that of the run; set model.hf to")):
            train(other, resume=True)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_a_trained_weight_is_not_part_of_it_but_settings_that_no_shape_shows_are(base, on, tmp_path):
    genesis = genesis_of(on(base))
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    changed_weight(copy, "model.norm.weight")
    check(genesis, on(copy))
    changed_settings(copy, rms_norm_eps=0.1)
    with pytest.raises(JoinRefused, match=r"what is not trained differs: config\.json is not that of the run"):
        check(genesis, on(copy))


def test_freezing_something_else_is_refused(base, on):
    genesis = genesis_of(on(base))
    with pytest.raises(JoinRefused, match="the model differs"):
        check(genesis, on(base, freeze="lm_head*"))


def genesis_of(config: Config) -> Genesis:
    part = Trainer(config, HERE, Events())
    part.batches.close()
    return Genesis.of(config, part.layout, part.samples, "founder", part.frozen)


def check(genesis: Genesis, config: Config) -> None:
    part = Trainer(config, HERE, Events())
    part.batches.close()
    genesis.check(part.layout, part.samples, part.frozen)


def test_a_joiner_says_where_its_base_model_lies_and_nothing_else_about_it(base, on):
    genesis = genesis_of(on(base))
    assert genesis.configure({"model": {"hf": "/there"}}).model.hf == "/there"
    assert own_sections(on(Path("/there")))["model"] == {"hf": "/there"}
    assert genesis.first_change(on(Path("/there"))) == ""
    for own in ({"freeze": "x"}, {"hf": None}, {"hf": "/there", "weights": "fresh"}):
        with pytest.raises(JoinRefused, match="model is the run's own setting"):
            genesis.configure({"model": own})
    built_in = genesis_of(parse_config(SMALL))
    assert built_in.frozen == ()
    with pytest.raises(JoinRefused, match="model is the run's own setting"):
        built_in.configure({"model": {"hf": "/there"}})
    with pytest.raises(SaveError, match=r"the run was founded with model\."):
        built_in.refuse_changes(on(base))


def adapted(seed: int) -> nn.Module:
    """A base that is frozen, with an adapter that is trained, and a table that every island needs."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8, dtype=torch.bfloat16), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    model.register_buffer("places", torch.arange(4))
    model.register_buffer("angles", torch.rand(4), persistent=False)  # computed, and in no digest
    return model


def test_a_loop_of_ones_own_is_told_which_frozen_parameter_differs():
    own, same, other = (OwnModel.of(adapted(seed)) for seed in (1, 1, 2))
    genesis = Genesis.of(parse_config({}), own.layout, None, "founder", frozen_of(own.module))
    assert Genesis.parse(genesis.raw).frozen == genesis.frozen
    assert [name for name, _ in genesis.frozen] == ["0.weight", "0.bias", "places"]
    genesis.check(same.layout, None, frozen_of(same.module))
    with pytest.raises(JoinRefused, match=r"differs: 0\.weight is not that of the run; load the same weights"):
        genesis.check(other.layout, None, frozen_of(other.module))
    same.module.get_buffer("places")[0] = 9
    with pytest.raises(JoinRefused, match="differs: places is not that"):
        genesis.check(same.layout, None, frozen_of(same.module))


def test_a_digest_is_of_type_shape_and_bytes_however_they_lie(monkeypatch):
    monkeypatch.setattr("diloco.model.frozen.PIECE", 5)
    values = torch.arange(12.0)
    digests = [values, values.view(3, 4), values.bfloat16(), values.view(3, 4).T, torch.tensor(1.0), values[:0]]
    assert len({tensor_digest(one) for one in digests}) == 6
    assert tensor_digest(values.view(3, 4).T) == tensor_digest(values.view(3, 4).T.contiguous())
