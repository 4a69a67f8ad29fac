"""What is added in a file of its own and registered in one place is known everywhere."""

from pathlib import Path

import pytest

from diloco.bench import codec as codec_bench
from diloco.bench.quality import variants as quality_variants
from diloco.comm.codec.dense import Int8
from diloco.comm.codec.registry import CODECS, codec_named, result_codec_for
from diloco.config.file import load_config, render_config
from diloco.config.schema import SyncConfig
from diloco.errors import CodecError, ConfigError
from diloco.plan.predict import Line, Situation, predict
from diloco.plan.search import cost, variants
from diloco.plan.workload import workload_of

ARCHITECTURE = (Path(__file__).parent.parent / "ARCHITECTURE.md").read_text()


class ToyCodec(Int8):
    name, about = "toy", "eight bits by another name"
    loss_cost, cpu_ns, planned = 0.25, (1.0, 2.0), True


@pytest.fixture
def toy_codec():
    CODECS.register("toy", f"{__name__}:ToyCodec")
    yield codec_named("toy")
    CODECS.forget("toy")


def test_a_codec_is_known_wherever_codecs_are_named(toy_codec):
    assert load_config(None, ["sync.codec=toy"]).sync.codec == "toy"
    assert "lowrank, toy]" in render_config(load_config())
    assert result_codec_for("toy", 4) == "toy"
    assert quality_variants()["toy"] == {"codec": "toy"}
    report = codec_bench.measure(device="cpu", count=4096, repeats=1)
    assert report.figures["speed"]["toy"]["bits"] == toy_codec.bits_per_value == 8.125


def test_a_codec_is_planned_with_by_what_it_says_of_itself(toy_codec):
    given, work = SyncConfig(every=50, codec="toy"), workload_of(load_config())
    situation = Situation(work, 2, Line(1e8, 1e8), step_s=0.1)
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
