"""Text from a run: the model's own choice, whole characters, and plain words where it cannot be."""

import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from trained_run import TEXT, byte_pairs, train

from diloco.data.tokenizer import load_tokenizer
from diloco.errors import ModelError
from diloco.history.export import as_qwen3
from diloco.history.load import load_trained
from diloco.history.sample import Sampling, choose, continued, spoken
from diloco.report.tables import harmless

transformers = pytest.importorskip("transformers")
GREEDY = Sampling(temperature=0)
BYTES = load_tokenizer("bytes")
NOTE = "note: the model of step 12, round 4\n"


def test_the_likeliest_tokens_are_those_that_transformers_finds(run):
    module = load_trained(run).module
    ours = continued(module, list(b"def main"), context=32, vocab=256, choice=GREEDY)
    theirs = as_qwen3(module).generate(
        torch.tensor([list(b"def main")]), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert list(islice(ours, 20)) == theirs[0, 8:].tolist()


def test_a_seed_is_a_text(command, run):
    first = command("sample", run, "def ", "--tokens", 20)
    assert (first.code, first.err) == (0, NOTE)
    assert first.out.startswith("def ") and first.out.endswith("\n")
    assert command("sample", run, "def ", "--tokens", 20).out == first.out
    assert command("sample", run, "def ", "--tokens", 20, "--seed", 1).out != first.out
    likeliest = command("sample", run, "def ", "--tokens", 20, "--temperature", 0).out
    assert command("sample", run, "def ", "--tokens", 20, "--top-k", 1, "--seed", 7).out == likeliest


def test_a_long_prompt_is_cut_from_the_left_and_says_so(command, run):
    prompt, how = "x" * 100 + "import os\nimport sys\nfrom pathlib ", ("--temperature", 0, "--tokens", 40)
    long = command("sample", run, prompt, *how)
    assert "of the prompt's 134 tokens the model sees the last 32" in long.err
    short = command("sample", run, prompt[-32:], *how)
    assert short.err == NOTE
    assert long.out == prompt[:-32] + short.out


def test_what_cannot_be_is_one_clear_line(command, run):
    assert "no such run" in command.refused("sample", "nobody", "def ")
    assert "the prompt is empty" in command.refused("sample", run, "")
    assert "--temperature inf" in command.refused("sample", run, "def ", "--temperature", "inf")
    assert "there is no device 'tpu'" in command.refused("sample", run, "def ", "--device", "tpu")
    assert "neither 'bytes' nor a local folder" in command.refused("sample", run, "def ", "--tokenizer", "gone")
    Path("young").mkdir()
    assert "holds no save yet" in command.refused("sample", "young", "def ")


def test_a_token_file_s_tokenizer_must_be_named(command, small, tmp_path):
    byte_pairs().save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text(TEXT * 200)
    command("tokenize", "a.txt", "--out", "a.tokens", "--tokenizer", "words.json")
    train(small(data={"source": "tokens", "path": str(tmp_path / "a.tokens")}))
    assert "by --tokenizer" in command.refused("sample", "run", "the cat")
    said = command("sample", "run", "the cat", "--tokenizer", "words.json", "--tokens", 9)
    assert (said.code, said.err) == (0, NOTE)
    assert said.out.startswith("the cat")
    assert command("sample", "run", "", "--tokenizer", "words.json").code == 0  # after an end, a text begins


def test_a_tokenizer_larger_than_the_model_is_refused(command, run, tmp_path):
    byte_pairs().save(str(tmp_path / "words.json"))
    assert "has 272 tokens, the model 256" in command.refused("sample", run, "the", "--tokenizer", "words.json")


def test_hugging_face_models_speak_too(command, small, tmp_path):
    gpt2 = transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=40)
    gpt2.save_pretrained(tmp_path / "gpt2")
    keys = dict.fromkeys(("preset", "blocks", "width", "heads", "feed_forward"))
    train(small(model={**keys, "hf": str(tmp_path / "gpt2")}))
    said = command("sample", "run", "def ", "--tokens", 60, "--temperature", 0)
    assert (said.code, said.err) == (0, NOTE)
    command("export", "run", "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("out").generate(
        torch.tensor([list(b"def ")]), max_new_tokens=30, do_sample=False, eos_token_id=0, pad_token_id=0
    )
    assert said.out.startswith(BYTES.decode(theirs[0].tolist()).rstrip("\x00\ufffd"))
    shutil.rmtree("gpt2")
    assert "no such folder" in command.refused("sample", "run", "def ")


def test_a_terminal_is_not_given_orders():
    assert harmless("\x1b[2J\x0e\x9bé\t\n\udc80", lines=True) == "\ufffd[2J\ufffd\ufffdé\t\n\ufffd"


class Counting(nn.Module):
    """Expects the number after the last one."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.seen = nn.Parameter(torch.zeros(vocab)), 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen = max(self.seen, tokens.shape[1])
        return nn.functional.one_hot((tokens + 1) % len(self.vocab), len(self.vocab)) * 9.0


def test_the_window_slides_and_the_end_ends():
    model = Counting(300)
    tokens = continued(model, [3], context=4, vocab=300, choice=GREEDY)
    assert list(islice(tokens, 8)) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert model.seen == 4
    assert list(continued(model, [3], context=4, vocab=300, choice=GREEDY, end=7)) == [4, 5, 6]
    assert all(token < 20 for token in islice(continued(model, [17], context=4, vocab=20, choice=Sampling()), 50))


def test_chances_follow_the_logits():
    dice, logits = torch.Generator().manual_seed(0), torch.tensor([0.0, 1.0, 2.0, -9.0])

    def shares(choice: Sampling) -> torch.Tensor:
        drawn = torch.tensor([choose(logits, choice, dice) for _ in range(4000)])
        return torch.bincount(drawn, minlength=4) / 4000

    torch.testing.assert_close(shares(Sampling(1.0, 0)), logits.softmax(0), atol=0.03, rtol=0)
    torch.testing.assert_close(shares(Sampling(0.5, 0)), (logits * 2).softmax(0), atol=0.03, rtol=0)
    assert shares(Sampling(1.0, 2))[0] == 0
    assert choose(logits * 1e30, Sampling(1e-30), dice) == 2
    with pytest.raises(ModelError, match="not finite"):
        choose(torch.tensor([0.0, float("nan")]), Sampling(), dice)


def pieces(stream: bytes, before: bytes = b"x") -> list[str]:
    return list(spoken(iter(stream), list(before), BYTES.decode))


def test_characters_come_out_whole():
    text = "a é 日本 🎉 b"
    assert "".join(pieces(text.encode())) == text
    assert not any("\ufffd" in piece for piece in pieces(text.encode()))
    assert pieces(b"ab\xff\xfec") == ["a", "b", "\ufffd\ufffdc", ""]
    assert pieces("é".encode()[:1]) == ["\ufffd"]
    assert "".join(pieces(b"ok", before="é".encode()[1:])) == "ok"


def test_pairs_of_bytes_come_out_whole(tmp_path):
    byte_pairs().save(str(tmp_path / "words.json"))
    tokenizer = load_tokenizer(str(tmp_path / "words.json"))
    row = byte_pairs().encode("the cat 日本 🎉 sat on").ids
    said = list(spoken(iter(row[1:]), row[:1], tokenizer.decode))
    assert tokenizer.decode(row[:1]) + "".join(said) == "the cat 日本 🎉 sat on"
    assert not any("\ufffd" in piece for piece in said)


def test_the_command_itself(run):
    command = f"{sys.executable} -m diloco sample {run} 'class ' --tokens 3000 --device cpu | head -c 9"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, timeout=300)
    assert (done.returncode, done.stderr.decode()) == (0, NOTE)
    assert done.stdout.startswith(b"class ") and len(done.stdout) == 9
