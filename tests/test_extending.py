"""What is added in a file of its own and registered in one place is known everywhere."""

from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

from diloco.bench import codec as codec_bench
from diloco.bench.quality import variants as quality_variants
from diloco.comm.codec.dense import Int8
from diloco.comm.codec.registry import CODECS, codec_named, result_codec_for
from diloco.config.file import load_config, render_config
from diloco.config.schema import OUTER_OPTIMIZERS, SINKS, SOURCES, Config, SyncConfig
from diloco.data.batches import open_samples
from diloco.data.source import ByteFiles, SourceKind
from diloco.elastic.runtime.fragments import Fragments
from diloco.errors import CodecError, ConfigError
from diloco.plan.memory import memory_of
from diloco.plan.predict import LinkModel, Situation, predict
from diloco.plan.search import cost, variants
from diloco.plan.workload import workload_of
from diloco.report.events import Event, Note
from diloco.report.sinks import Events
from diloco.run.folder import open_folder, release
from diloco.train.optimizers import OuterOptimizer, optimizer_named
from diloco.train.outer import apply, outer_settings, outer_vectors

ARCHITECTURE = (Path(__file__).parent.parent / "ARCHITECTURE.md").read_text()


class ToyCodec(Int8):
    name, about = "toy", "eight bits by another name"
    loss_cost, cpu_ns, planned = 0.25, (1.0, 2.0), True


@pytest.fixture
def toy_codec(monkeypatch):
    monkeypatch.setitem(CODECS.classes, "toy", f"{__name__}:ToyCodec")
    return codec_named("toy")


def test_a_codec_is_known_wherever_codecs_are_named(toy_codec):
    assert load_config(None, ["sync.codec=toy"]).sync.codec == "toy"
    assert "lowrank, toy]" in render_config(load_config())
    assert result_codec_for("toy", 4) == "toy"
    assert quality_variants()["toy"] == {"codec": "toy"}
    report = codec_bench.measure(device="cpu", values=4096, repeats=1)
    assert report.figures["speed"]["toy"]["bits"] == toy_codec.bits_per_value == 8.125


def test_a_codec_is_planned_with_by_what_it_says_of_itself(toy_codec):
    given, work = SyncConfig(every=50, codec="toy"), workload_of(load_config())
    situation = Situation(work, 2, LinkModel(1e8, 1e8), step_s=0.1)
    ours, int8 = predict(situation, given), predict(situation, SyncConfig(every=50, codec="int8"))
    assert ours.rounds[0].sent == int8.rounds[0].sent
    assert ours.rounds[0].host_s - int8.rounds[0].host_s == pytest.approx(1.9e-9 * work.trained)
    assert cost(given, 30) == 0.25
    assert "toy" in {sync.codec for sync in variants(SyncConfig(), work.blocks, 1000)}


def test_a_codec_that_nobody_registered_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"must be one of fp32, bf16, .*, lowrank"):
        load_config(None, ["sync.codec=toy"])
    with pytest.raises(CodecError, match=r"there is no codec 'toy': there are fp32, bf16, .*, lowrank"):
        codec_named("toy")


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_says_everything_about_itself(name):
    codec = CODECS[name]
    assert codec.name == name and codec.about and len(codec.cpu_ns) == 2
    assert f"| `{name}` | {codec.bits_per_value:.4g} | {codec.about} |" in ARCHITECTURE
    assert codec.needs_feedback <= (not codec.closed)
    load_config(None, [f"sync.codec={name}", *(f"outer.{key}={value}" for key, value in codec.outer.items())])


class ToyOptimizer(OuterOptimizer):
    vectors = ("parameters", "previous")

    def step(self, vectors, gradient, settings):
        vectors["previous"].copy_(vectors["parameters"])
        vectors["parameters"].sub_(gradient.sign() * settings.lr)


def test_an_outer_optimizer_is_known_to_config_planner_and_training(monkeypatch, small):
    monkeypatch.setitem(OUTER_OPTIMIZERS, "toy", f"{__name__}:ToyOptimizer")
    config = small(outer={"optimizer": "toy", "lr": 0.5}, evaluate={"every": 0})
    state, settings = outer_vectors(config.outer, torch.ones(3)), outer_settings(config, islands=2, number=1)
    apply(state, Fragments.whole(3), 0, torch.tensor([3.0, -2.0, 0.0]), settings)
    assert state["parameters"].tolist() == [0.5, 1.5, 1.0] and state["previous"].tolist() == [1.0, 1.0, 1.0]
    assert host_bytes(config) == host_bytes(small(outer={"optimizer": "sgd"}, evaluate={"every": 0}))


def host_bytes(config: Config) -> float:
    return memory_of(workload_of(config), config, "fp32", islands=2, step_s=0.1).host


def test_an_outer_optimizer_that_nobody_registered_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="must be one of nesterov, sgd, adam"):
        load_config(None, ["outer.optimizer=lion"])
    with pytest.raises(ConfigError, match="there is no outer optimizer 'lion': there are nesterov, sgd, adam"):
        optimizer_named("lion")


class ToySource(SourceKind):
    def open(self, config, cache_dir, progress):
        return ByteFiles([Path(config.path)], "a toy")


def test_a_data_source_is_known_to_config_planner_and_training(monkeypatch, tmp_path, small):
    monkeypatch.setitem(SOURCES, "toy", f"{__name__}:ToySource")
    (tmp_path / "toy").write_bytes(b"one toy after the other " * 1000)
    config = small(data={"source": "toy", "path": str(tmp_path / "toy")})
    assert open_samples(config).source.name == "a toy"
    assert workload_of(config).vocab == 256
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="must be one of stdlib, text, tokens, hf"):
        load_config(None, ["data.source=toy"])


class ToySink:
    def __init__(self, config: Config) -> None:
        self._path = Path(config.dir) / "toy.txt"

    def emit(self, event: Event) -> None:
        self._path.write_text(event.kind)

    def close(self) -> None:
        self._path.write_text("closed")


def test_a_sink_is_opened_by_name_and_told_what_happens(monkeypatch, small):
    monkeypatch.setitem(SINKS, "toy", f"{__name__}:ToySink")
    config, events = small(log={"sinks": "toy"}), Events()
    open_folder(config, events, resume=False, fresh=False)
    events.emit(Note(text="hello"))
    assert (Path(config.dir) / "toy.txt").read_text() == "note"
    events.close()
    release(Path(config.dir))
    assert (Path(config.dir) / "toy.txt").read_text() == "closed"
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"log.sinks.0='toy': must be one of tensorboard, wandb"):
        load_config(None, ["log.sinks=[toy]"])


def test_trackers_have_keys_of_their_own_too(small):
    assert small(log={"tensorboard": True, "sinks": ["wandb", "tensorboard"]}).log.wanted == ["tensorboard", "wandb"]


@pytest.mark.parametrize("place", [*SOURCES.values(), *OUTER_OPTIMIZERS.values(), *SINKS.values()])
def test_every_place_in_a_table_leads_to_a_class(place):
    assert isinstance(resolve_name(place), type)
