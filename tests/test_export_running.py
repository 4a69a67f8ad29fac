"""A model of a run that is under way, and runs that start from it: real processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from conftest import SMALL
from launched import events_of, islands, wait_until
from safetensors.torch import load_file
from trained_run import train

from diloco.checkpoint.save.facts import saves
from diloco.checkpoint.save.saver import read_outer
from diloco.history.export import export, qwen3_name
from diloco.history.find import find_logs, saves_of
from diloco.history.load import load_trained
from diloco.history.log import furthest, headers, state_of
from diloco.run.folder import OUTER
from diloco.run.genesis import read_genesis
from diloco.run.local import Connection
from diloco.run.start import run as train_in

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def exported(run: Path, out: Path) -> int:
    """Its round."""
    export(load_trained(run), out, None)
    return json.loads((out / "diloco.json").read_text())["round"]


def tensors_at(log: Path, number: int) -> dict[str, torch.Tensor]:
    """The parameters of a round, by name, as the log says."""
    genesis = read_genesis(log)
    parts = state_of(log, number)[1]["parameters"].split([torch.Size(shape).numel() for shape in genesis.shapes])
    return {name: part.view(shape) for name, part, shape in zip(genesis.names, parts, genesis.shapes, strict=True)}


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def rounds_of(tmp_path: Path) -> int:
    return len([event for event in events_of(tmp_path, "island-1") if event["event"] == "round"])


@pytest.mark.soak
def test_islands_train_on_while_a_round_of_theirs_is_exported_and_others_start_from_it(tmp_path):
    changes = ("inner.steps=100000", "checkpoint.snapshot_every=1", "checkpoint.keep=0", "evaluate.every=0")
    with islands(tmp_path, *changes) as process:
        assert wait_until(lambda: saves_of(tmp_path / "run"), 150)
        number = exported(tmp_path / "run", tmp_path / "out")
        before = rounds_of(tmp_path)
        assert wait_until(lambda: rounds_of(tmp_path) > before + 2, 150)
        process.send_signal(signal.SIGINT)
        process.wait(120)
    given = load_file(tmp_path / "out" / "model.safetensors")
    then = tensors_at(furthest(find_logs(str(tmp_path / "run"))), number)
    assert number > 0 and same({qwen3_name(name): tensor for name, tensor in then.items()}, given)

    (tmp_path / "two").mkdir()
    with islands(tmp_path / "two", f"model={{hf: {tmp_path / 'out'}}}", "checkpoint.keep=0") as process:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    log = furthest(find_logs(str(tmp_path / "two" / "run")))
    assert same(tensors_at(log, 0), given) and not same(tensors_at(log, headers(log)[-1].round), given)


def test_a_run_with_others_starts_from_a_hugging_face_folder(small, tmp_path):
    torch.manual_seed(5)
    size = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    llama = transformers.LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=2)
    transformers.AutoModelForCausalLM.from_config(llama).save_pretrained(tmp_path / "llama")
    model = dict.fromkeys(small().model.model_fields_set) | {"hf": str(tmp_path / "llama")}
    config = small(model=model, checkpoint={"keep": 0}, elastic={"silence_s": 1})
    train_in(config, Connection("127.0.0.1", name="island-1"))
    assert same(tensors_at(Path(config.dir) / OUTER, 0), load_file(tmp_path / "llama" / "model.safetensors"))


@pytest.mark.soak
def test_an_island_alone_is_exported_while_it_trains_and_does_not_feel_it(small, tmp_path):
    steps = {"inner": {**SMALL["inner"], "steps": 400}, "evaluate": {"every": 0}, "checkpoint": {"snapshot_every": 5}}
    steps |= {"sync": {**SMALL["sync"], "codec": "fp32"}}  # rounding follows an island's key
    folder, path = tmp_path / "watched", tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **steps, "checkpoint": {"dir": str(folder), "snapshot_every": 5}}))
    command = [sys.executable, "-m", "diloco", "run", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as process:
        assert wait_until(lambda: saves(folder), 150)
        number = exported(folder, tmp_path / "out")
        assert process.poll() is None and 0 < number < 80
        assert process.wait(300) == 0, process.stderr.read()
    train(small(**steps))
    watched, alone = (read_outer(saves(run)[-1]) for run in (folder, tmp_path / "run"))
    assert same(watched, alone)
