import re
from dataclasses import replace

import pytest
import yaml
from pydantic import ValidationError

from diloco.config.file import load_config, parse_config, render_config
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.island.layout import Layout
from diloco.run.genesis import Genesis

DESIGN_EXAMPLE = """
run: quickstart
model: {preset: tiny}
data: {source: stdlib, sequence: 256}
island: {batch: 16, fsdp: 1, tp: 1, dtype: bf16}
inner: {optimizer: adamw, lr: 4e-4, warmup: 100, schedule: cosine, steps: 2000}
outer: {optimizer: nesterov, lr: auto, momentum: 0.9}
sync: {every: 50, fragments: 1, delay: 0, apply: replace, codec: int8}
elastic: {min_islands: 1, silence_s: 5, straggler: 1.5, partition: merge}
checkpoint: {dir: runs/quickstart, snapshot_every: 20}
"""


def test_a_phase_is_a_number_of_steps_or_a_time():
    assert load_config(None, ["sync.every=2k"]).sync.every == 2000
    config = load_config(None, ["sync.every=5min", "sync.delay=60"])
    assert (config.sync.every, config.sync.every_s) == ("5min", 300.0)
    assert re.search("^  every: 5min +# inner steps between two rounds; or a time", render_config(config), re.MULTILINE)
    assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("written", ["on", "off", '"on"', "auto"])
def test_feedback_may_be_written_as_yaml_reads_it(tmp_path, written):
    file = tmp_path / "run.yaml"
    file.write_text(f"sync: {{feedback: {written}}}\n")
    assert load_config(file, []).sync.feedback == load_config(None, [f"sync.feedback={written}"]).sync.feedback
    assert load_config(file, []).sync.feedback == written.strip('"')


def test_the_documented_example_loads(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(DESIGN_EXAMPLE)
    config = load_config(path, ["sync.every=100", "inner.lr=1e-3", "inner.steps=25k", "elastic.silence_s=500ms"])
    assert (config.sync.every, config.inner.lr, config.inner.steps) == (100, 1e-3, 25_000)
    assert config.elastic.silence_s == 0.5


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["sync.evry=5"], "sync.evry=5: there is no such key; did you mean sync.every?"),
        (["lr=1"], "lr=1: there is no such key; did you mean inner.lr or outer.lr?"),
        (
            ["inner.schedule=cosin"],
            "inner.schedule='cosin': must be one of cosine, wsd, constant; did you mean 'cosine'?",
        ),
        (["inner.lr=fast"], "inner.lr='fast': write a number such as 0.1 or 4e-4"),
        (["outer.lr=-1"], "outer.lr=-1: write `auto` or a number above 0"),
        (["inner.warmup=true"], "inner.warmup=True: write a whole number"),
        (["elastic.silence_s=20mbit"], "unknown unit 'mbit'; write a duration such as 80ms"),
        (
            ["island.batch=3", "island.fsdp=2"],
            "island.batch=3 cannot be divided by island.fsdp=2 x island.accumulate=1",
        ),
        (["inner.warmup=9", "inner.steps=9"], "inner.warmup=9 must be below inner.steps=9"),
        (["sync.fragments=60"], "sync.fragments=60: sync.every=50 steps are too few for them"),
        (["sync.delay=50"], "sync.delay=50 must be below sync.every=50"),
        (["sync.every=0"], "sync.every=0: write a number of inner steps, 1 or more, or a time such as 60s or 5min"),
        (["sync.every=0s"], "sync.every='0s': write a number of inner steps"),
        (["sync.every=3 weeks"], "sync.every='3 weeks': write a number of inner steps"),
        (["sync.every=60s", "sync.fragments=2"], "sync.every=60s with sync.fragments=2: fragments take turns by"),
        (["sync.every=60s", "sync.growth=1"], "sync.every=60s fixes their time"),
        (["sync.every=60s", "elastic.adaptive=true"], "sync.every=60s gives every island the same time already"),
        (["outer.optimizer=adam"], "give outer.lr a number (1e-3 is a start); auto is for nesterov and sgd"),
        (["outer.momentum=1"], "outer.momentum=1: write `auto` or a number from 0 to below 1"),
        (["sync.delay=1", "sync.apply=replace"], "would throw away what is trained meanwhile: use rebase or mix"),
        (["sync.apply=eager", "sync.fragments=2"], "eager overlaps whole phases: leave sync.delay at 0"),
        (["elastic.adaptive=true", "sync.delay=2"], "elastic.adaptive ends an island's phase early"),
        (
            ["elastic.adaptive=true", "sync.growth=0.004"],
            "sync.growth=0.004 makes phases longer, elastic.adaptive ends",
        ),
        (["sync=4"], "sync=4: this is a section"),
        (["model.preset=tiny", "model.hf=x"], "both set: keep one (null unsets a key)"),
        (["model.hf=x", "model.width=64"], "model.width belongs to a preset"),
        (["data.source=text"], "data.source='text' needs data.path"),
        (["data.path=x"], "data.path='x' is not used"),
        (["data.validation=0"], "data.validation=0: raise data.validation or set evaluate.every=0"),
        (["data.source=text", "data.path="], "data.path"),
        (["inner.schedule=wsd", "inner.warmup=50", "inner.steps=100", "inner.decay=0.9"], "overlap: lower one"),
        (["outer.lr=.inf"], "write `auto` or a number above 0"),
        (["seed=1e30"], "seed"),
        (["run=../../etc"], "run='../../etc'"),
        (["inner.steps"], "write --set section.key=value"),
        (["inner.betas=[0.9]"], "inner.betas"),
    ],
)
def test_a_mistake_names_key_value_and_remedy(overrides, complaint):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_know_home_and_one_name_is_a_list(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(None, ["checkpoint.dir=~/runs", "model.freeze=embed.*", "seed=9007199254740993"])
    assert (config.dir, config.model.freeze, config.seed) == ("/home/me/runs", ("embed.*",), 2**53 + 1)


def test_several_mistakes_are_told_together():
    with pytest.raises(ConfigError) as caught:
        parse_config({"sync": {"evry": 1}, "inner": {"lr": "x"}})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sync: [", "line 1: not valid YAML"),
        ("- 1", "not list"),
        ("run: a\nrun: b", "run: written twice, in lines 1 and 2"),
    ],
)
def test_broken_files_are_named(tmp_path, text, complaint):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_config(path)


def test_configuration_cannot_change_under_us():
    with pytest.raises(ValidationError):
        Config().sync.every = 3  # type: ignore[misc]


def test_the_printout_explains_every_field_and_is_itself_a_configuration():
    config = load_config(None, ["sync.every=100"])
    printed = render_config(config)
    assert parse_config(yaml.safe_load(printed)) == config
    assert all("# " in line for line in printed.splitlines() if line)


def test_the_command_prints_overrides(command):
    assert "every: 77" in command("config", "--set", "sync.every=77").out


def test_a_genesis_without_a_key_is_read_as_if_it_had_it():
    """So a new key never makes an old folder unreadable."""
    config = parse_config({"outer": {"optimizer": "adam", "lr": 1e-3, "beta2": 0.5}, "run": "x"})
    founded = Genesis.of(config, Layout(("a",), ((1,),)), None, "founder")
    assert founded.config["outer"]["beta2"] == 0.5 and "second" not in founded.config["outer"]
    assert founded.configure({}).outer == config.outer and founded.first_change(config) == ""
    older = replace(founded, config={**founded.config, "elastic": {}})
    assert older.first_change(config) == "" and older.configure({}).elastic == config.elastic
    longer = parse_config({**config.model_dump(), "elastic": {"silence_s": 99.0}})
    assert "elastic.silence_s" in older.first_change(longer)
