"""A run as a Hugging Face model: the same outputs, the same text, and nothing that was there before is lost."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from alone import train as train_alone
from conftest import SMALL
from trained_run import TEXT, byte_pairs, train

from diloco.checkpoint.save.facts import saves
from diloco.config.file import parse_config
from diloco.errors import ModelError, SaveError
from diloco.history import export as exporting
from diloco.history import load as loading
from diloco.history.export import as_qwen3
from diloco.history.load import load_trained
from diloco.model.decoder import Decoder, Shape

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(60).view(2, 30) * 4 % 256


def load(folder: Path):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def logits(module) -> torch.Tensor:
    with torch.no_grad():
        output = module(TOKENS)
    return output if isinstance(output, torch.Tensor) else output.logits


SHAPES = {
    "tied": Shape(blocks=2, heads=2, width=32, feed_forward=64),
    "untied": Shape(blocks=2, heads=2, width=32, feed_forward=64, tied=False),
    "grouped heads, odd vocabulary": Shape(blocks=3, heads=4, width=48, feed_forward=80, kv_heads=2, vocab=301),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_built_in_model_is_a_qwen3(tmp_path, shape):
    torch.manual_seed(1)
    module = Decoder(shape).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1)
    as_qwen3(module).save_pretrained(tmp_path)
    theirs = load(tmp_path)
    assert logits(module).std() > 0.1
    torch.testing.assert_close(logits(theirs), logits(module), atol=1e-5, rtol=1e-5)
    assert theirs.config.tie_word_embeddings == shape.tied


def test_a_run_goes_out_and_comes_back(command, small, tmp_path):
    losses = train(small())
    said = command("export", tmp_path / "run", "out")
    assert said.code == 0 and said.err == ""
    assert "parameters of step 12, round 4, as qwen3" in said.out
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(load_trained(tmp_path / "run").module))
    model = dict.fromkeys(small().model.model_fields_set) | {"hf": "out"}
    again = train(small(model=model, checkpoint={"dir": str(tmp_path / "again")}, inner={"steps": 3}))
    assert again[0] == pytest.approx(losses[-1], abs=1e-4)
    assert abs(losses[-1] - losses[0]) > 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_can_be_written_in_half_the_bytes(command, run, dtype):
    assert command("export", run, "whole").code == 0
    said = command("export", run, "half", "--dtype", dtype)
    assert said.code == 0 and said.out.splitlines()[0].endswith(f"as qwen3 in {dtype}")
    sizes = [(Path(folder) / "model.safetensors").stat().st_size for folder in ("whole", "half")]
    assert sizes[1] < 0.55 * sizes[0]
    half = transformers.AutoModelForCausalLM.from_pretrained("half", dtype="auto").eval()
    assert half.dtype == getattr(torch, dtype)
    torch.testing.assert_close(logits(half).float(), logits(load(Path("whole"))), atol=0.05, rtol=0.05)
    assert "--dtype" in command("export", run, "other", "--dtype", "int8").err


def test_what_a_dtype_cannot_hold_is_not_written_as_infinity(small, tmp_path):
    train(small())
    trained = load_trained(tmp_path / "run")
    next(trained.module.parameters()).data[0, 0] = 1e6
    with pytest.raises(ModelError, match=r"embed.* beyond 65504, the largest of float16: use --dtype bfloat16"):
        exporting.export(trained, tmp_path / "out", None, "float16")
    assert not (tmp_path / "out").exists()


def test_bytes_have_a_tokenizer_too(command, run):
    command("export", run, "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    text = "Ā def f(x):\n\treturn  'é' . \x00\x7f\u00a0 日本 🎉 <|endoftext|>\r\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def text_run(small, tmp_path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT * 200)
    train(small(data={"source": "text", "path": str(tmp_path / "a.txt"), "tokenizer": str(tokenizer)}))


@pytest.mark.parametrize("kind", ["tokenizer.json", "folder"])
def test_the_run_s_tokenizer_goes_with_it_and_its_data_need_not_be_there(command, small, tmp_path, kind):
    path = tmp_path / "words"
    path.mkdir()
    if kind == "folder":
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_pairs(), eos_token="<|endoftext|>")
        fast.save_pretrained(path)
    else:
        byte_pairs().save(str(path / kind))
    text_run(small, tmp_path, path)
    (tmp_path / "a.txt").unlink()
    shutil.rmtree(tmp_path / "cache")
    said = command("export", "run", "out")
    assert (said.code, said.err) == (0, "")
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    assert tokenizer.encode(TEXT) == byte_pairs().encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eos_token_id == load(tmp_path / "out").config.eos_token_id == 271


def test_weights_are_written_without_a_tokenizer_that_is_gone(command, small, tmp_path):
    byte_pairs().save(str(tmp_path / "words.json"))
    text_run(small, tmp_path, tmp_path / "words.json")
    (tmp_path / "words.json").rename(tmp_path / "moved.json")
    said = command("export", "run", "out")
    assert said.code == 0
    assert said.err.startswith("note: no tokenizer is written: ") and len(said.err.splitlines()) == 1
    load(tmp_path / "out")
    assert "tokenizer" in command.refused("export", "run", "other", "--tokenizer", "words.json")
    assert command("export", "run", "out", "--force", "--tokenizer", "moved.json").err == ""
    assert transformers.AutoTokenizer.from_pretrained("out").encode(TEXT) == byte_pairs().encode(TEXT).ids


def test_a_hugging_face_model_keeps_its_config_names_and_frozen_parts(command, small, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rope_theta=5000.0, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    before = transformers.LlamaForCausalLM(config)
    before.generation_config.temperature, before.generation_config.do_sample = 0.3, True
    before.save_pretrained(tmp_path / "llama")
    keys = dict.fromkeys(("preset", "blocks", "width", "heads", "feed_forward"))
    train(small(model={**keys, "hf": str(tmp_path / "llama"), "freeze": "model.embed_tokens*"}))
    said = command("export", "run", "out")
    assert (said.code, said.err) == (0, "")
    assert "as llama" in said.out
    after = load(tmp_path / "out")
    was, now = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("llama", "out"))
    assert was == now
    assert after.generation_config.temperature == 0.3
    assert torch.equal(after.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)


def test_frozen_embeddings_of_the_built_in_model_are_exported(command, small, tmp_path):
    train(small(model={"freeze": "embed.*", "tied": False}))
    command("export", "run", "out")
    module = load_trained(tmp_path / "run").module
    assert module.get_parameter("embed.weight").std() > 0.01
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(module), atol=1e-5, rtol=1e-5)


def test_large_weights_are_cut_into_shards(command, run, monkeypatch):
    monkeypatch.setattr(exporting, "SHARD", "30KB")
    command("export", run, "out")
    assert len(list(Path("out").glob("model-*.safetensors"))) > 1
    assert Path("out/model.safetensors.index.json").is_file()
    torch.testing.assert_close(logits(load(Path("out"))), logits(load_trained(run).module), atol=1e-5, rtol=1e-5)


def test_only_an_earlier_export_is_replaced_and_only_if_asked(command, run):
    Path("out").mkdir()
    assert command("export", run, "out").code == 0  # an empty folder is free
    Path("out/config.json").write_text("stale")
    assert "add --force" in command.refused("export", run, "out")
    assert command("export", run, "out", "--force").code == 0
    load(Path("out"))
    Path("out/thesis.tex").touch()
    assert "thesis.tex, which no export wrote" in command.refused("export", run, "out", "--force")
    assert Path("out/thesis.tex").exists()
    Path("file").touch()
    assert "is a file" in command.refused("export", run, "file", "--force")
    assert sorted(path.name for path in Path().iterdir()) == ["file", "out", "run"]


def test_nothing_is_written_inside_a_run(command, run):
    assert "inside the run" in command.refused("export", run, run / "hf")
    shutil.copytree(run, "many/island-1")
    assert "inside the run" in command.refused("export", "many/island-1", "many/hf")


def test_a_failure_in_the_middle_leaves_everything_as_it_was(command, run, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(exporting, "_write_about", full)
        assert "No space left" in command.refused("export", run, "out")
        assert [path.name for path in Path().iterdir()] == ["run"]
    command("export", run, "out")
    monkeypatch.setattr(exporting, "_write_about", full)
    command.refused("export", run, "out", "--force")
    load(Path("out"))
    assert sorted(path.name for path in Path().iterdir()) == ["out", "run"]


def test_what_a_killed_export_left_is_cleared_away(command, run):
    Path(".out.part").mkdir()
    Path(".out.part/model.safetensors").touch()
    assert command("export", run, "out").code == 0
    assert sorted(path.name for path in Path().iterdir()) == ["out", "run"]


def test_runs_are_found_by_name_and_misses_are_explained(command, run):
    assert "no such run" in command.refused("export", "mine", "out")
    run.rename("elsewhere")
    Path("runs").mkdir()
    Path("elsewhere").rename("runs/mine")
    assert command("export", "mine", "out").code == 0
    assert "there are mine" in command.refused("export", "main", "out")
    Path("runs/young").mkdir()
    assert "holds no save yet" in command.refused("export", "young", "out2")
    assert "there are mine" in command.refused("export", "main", "out")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("short") / "run"
    inner = {**SMALL["inner"], "steps": 6}
    train(parse_config({**SMALL, "inner": inner, "checkpoint": {"dir": str(folder), "snapshot_every": 1}}))
    return folder


@pytest.fixture
def islands(trained_once, short_run, tmp_path) -> Path:
    """Three islands' folders; the second has the newest save."""
    for number, whole in enumerate((short_run, trained_once, short_run), start=1):
        shutil.copytree(whole, tmp_path / "many" / f"island-{number}")
    return tmp_path / "many"


def test_of_several_islands_the_newest_save_counts(islands):
    assert load_trained(islands).step == 12
    assert load_trained(islands).save.parent.name == "island-2"
    assert load_trained(islands / "island-1").step == 6


def test_after_an_island_alone_was_resumed_with_other_settings_the_later_save_counts(command, small, tmp_path):
    train(small(inner={"steps": 4}, sync={"every": 1}))
    train_alone(small(inner={"steps": 7}, sync={"every": 1}), resume=True)
    trained = load_trained(tmp_path / "run")
    assert (trained.step, trained.round) == (7, 3)  # where the first part ended: step 4, round 5
    assert "of step 7, round 3," in command("export", "run", "out").out
    assert command("sample", "run", "def ", "--tokens", 1).err == "note: the model of step 7, round 3\n"


def test_a_save_that_is_pruned_while_it_is_read_is_passed_over(islands, monkeypatch):
    read, newest = loading.read_outer, saves(islands / "island-2")[-1]

    def pruned(save: Path):
        if save == newest:
            shutil.rmtree(save, ignore_errors=True)
        return read(save)

    monkeypatch.setattr(loading, "read_outer", pruned)
    trained = load_trained(islands / "island-2")
    assert trained.step == 10 and trained.passed == ()


def test_a_damaged_save_is_named_and_passed_over(islands):
    newest = saves(islands / "island-2")[-1]
    (newest / "outer.safetensors").write_bytes(b"rubbish")
    trained = load_trained(islands / "island-2")
    assert trained.step == 10
    assert len(trained.passed) == 1 and str(newest) in trained.passed[0]
    for save in saves(islands / "island-2"):
        (save / "facts.json").write_text("{}")
    with pytest.raises(SaveError, match=r"facts\.json cannot be used"):
        load_trained(islands / "island-2")


def test_the_command_itself(command, run, tmp_path):
    done = command("export", run, tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert load(tmp_path / "out").config.max_position_embeddings == 32
