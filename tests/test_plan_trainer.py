"""The planner of our own trainer: properties that any network has, and figures that can be counted."""

import json
import math
import re
import subprocess
import sys
from copy import deepcopy
from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.bench import plan as bench_plan
from diloco.bench.simulated import Seen
from diloco.bench.speed import measure
from diloco.comm.codec.noise import NoiseKey
from diloco.comm.codec.registry import CODECS, codec_named, result_codec_for
from diloco.comm.reduce.spans import spans_by_bandwidth
from diloco.config.file import parse_config
from diloco.config.schema import Config, SyncConfig
from diloco.elastic.runtime.work import KEEP_BYTES
from diloco.errors import ConfigError, DataError
from diloco.island.island import next_token_loss
from diloco.model.accelerators import ACCELERATORS, accelerator_named, called
from diloco.model.decoder import PRESETS, Decoder, shape_of
from diloco.plan import memory
from diloco.plan.plan import NO_LINE, Machine, advice, make_plan
from diloco.plan.predict import AGREE_HOPS, LINK_SHARE, LinkModel, Situation, data_parallel_utilisation, predict
from diloco.plan.profiles import Profile, read_profiles
from diloco.plan.search import EVERY, bandwidth_needed, cost, ladder, search, variants
from diloco.plan.workload import bytes_of, workload_of


def config_of(**sections) -> Config:
    return parse_config({"model": {"preset": "tiny"}, "data": {"sequence": 128}, "island": {"batch": 8}, **sections})


WORK = workload_of(config_of())
RUN_STEPS = 2000


def situation(bits_per_s=50e6, delay_s=0.02, step_s=0.1, islands=4) -> Situation:
    return Situation(WORK, islands, LinkModel(bits_per_s, bits_per_s, delay_s), step_s)


CPU = Machine("cpu", "fp32", Profile(), ACCELERATORS["cpu"])


def plan_of(config: Config, line: LinkModel):
    return make_plan(config, WORK, CPU, islands=4, line=line, targets=(0.9,))


# settings, rounds and memory


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("islands", [2, 3])
def test_bytes_are_those_of_real_payloads(name, islands):
    count, key = 100_000, NoiseKey(1, 0, "plan")
    codec, result = codec_named(name), codec_named(result_codec_for(name, islands))
    spans = spans_by_bandwidth(count, [1.0] * islands)
    values = [torch.randn(span.hi - span.lo) for span in spans]
    given_, mean = [len(codec.encode(v, key)) for v in values], [len(result.encode(v, key)) for v in values]
    sent = [sum(given_) - given_[i] + (islands - 1) * mean[i] for i in range(islands)]
    received = [(islands - 1) * given_[i] + sum(mean) - mean[i] for i in range(islands)]
    assert bytes_of(name, count, islands) == (max(sent), max(received))


@pytest.mark.parametrize("preset", ["tiny", "35m"])
def test_memory_is_what_parameters_gradients_and_adam_take(preset):
    config = config_of(model={"preset": preset})
    with torch.device("meta"):
        model = Decoder(shape_of(config.model, 256, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    found = memory.memory_of(workload_of(config), config, "fp32", islands=2, step_s=0.1)
    assert found.parameters == found.gradients == sum(p.nbytes for p in model.parameters())
    assert found.optimizer == sum(state.nbytes for state in states)


def test_sharded_over_four_the_state_is_a_quarter():
    whole, sharded = config_of(), config_of(island={"batch": 8, "fsdp": 2, "tp": 2})
    one, four = (memory.memory_of(WORK, config, "fp32", islands=2, step_s=0.1) for config in (whole, sharded))
    assert four.parameters + four.gradients + four.optimizer == (one.parameters + one.gradients + one.optimizer) / 4


def test_activations_are_about_what_a_backward_pass_keeps():
    config = config_of()
    model = Decoder(shape_of(config.model, 256, 128))
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        next_token_loss(model, torch.zeros(8, 129, dtype=torch.long))
    counted = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)
    found = memory.memory_of(WORK, config, "fp32", islands=2, step_s=0.1)
    assert found.activations == pytest.approx(counted, rel=0.1)


def test_what_the_host_keeps_of_contributions_is_what_the_session_keeps():
    assert memory.KEPT_CONTRIBUTIONS_BYTES == KEEP_BYTES


def test_the_host_keeps_as_many_contributions_as_phases_fit_into_the_run():
    timed, counted = (config_of(sync={"every": every}) for every in ("60s", 600))
    by_time, by_steps = (memory.memory_of(WORK, config, "fp32", islands=2, step_s=0.1) for config in (timed, counted))
    assert by_time.host == by_steps.host
    assert memory.memory_of(WORK, timed, "fp32", islands=2, step_s=1.0).host > by_time.host


def test_a_blocking_round_is_waited_for_and_an_eager_one_hides():
    here = situation()
    blocking = predict(here, SyncConfig(every=20, codec="int8"))
    assert blocking.phase_s == pytest.approx(20 * 0.1 + blocking.round_s)
    (one,) = blocking.rounds
    transfer_s = 8 * one.sent / 50e6 / LINK_SHARE
    assert one.sent == bytes_of("int8", WORK.trained, 4)[0]
    assert blocking.round_s > transfer_s + (AGREE_HOPS + 1) * 0.02
    assert blocking.sent_a_day == pytest.approx(one.sent * 86400 / blocking.phase_s)
    assert predict(here, SyncConfig(every=20, codec="int8", apply="eager")).utilisation == 1
    slow = predict(situation(bits_per_s=1e6), SyncConfig(every=20, codec="int8", apply="eager"))
    assert slow.phase_s == pytest.approx(slow.round_s)


def test_a_delay_hides_as_much_as_it_lasts():
    waits = [predict(situation(), SyncConfig(every=20, delay=delay)).waited_s for delay in (0, 1, 2, 19)]
    assert waits[0] - waits[1] == pytest.approx(0.1) and waits[1] - waits[2] == pytest.approx(0.1)
    assert waits[3] == 0


def test_rounds_of_fragments_are_serial():
    found = predict(situation(bits_per_s=1e6), SyncConfig(every=10, fragments=3, delay=9))
    assert len(found.rounds) == 3
    assert found.phase_s == pytest.approx(sum(one.seconds for one in found.rounds))
    waited_for = predict(situation(bits_per_s=1e6), SyncConfig(every=10, fragments=3))
    assert waited_for.phase_s == pytest.approx(10 * 0.1 + found.phase_s)
    queued = predict(situation(bits_per_s=16e6, delay_s=0), SyncConfig(every=10, fragments=3, delay=4))
    late_s = queued.rounds[0].seconds - 4 * 0.1
    assert queued.waited_s == pytest.approx(2 * late_s) and late_s > 0  # the second round begins late, too


def test_an_island_alone_sends_nothing():
    found = predict(situation(islands=1), SyncConfig(every=20))
    assert found.sent_a_day == 0 and found.utilisation > 0.98


@settings(max_examples=60, deadline=None)
@given(
    rates=st.lists(st.floats(1e4, 1e11), min_size=2, max_size=6).map(sorted),
    sync=st.sampled_from(list(variants(SyncConfig(), WORK.blocks, RUN_STEPS))),
    delay_s=st.floats(0, 1),
    step_s=st.floats(1e-3, 10),
)
def test_more_bandwidth_never_lowers_our_utilisation(rates, sync, delay_s, step_s):
    found = [predict(situation(rate, delay_s, step_s), sync).utilisation for rate in rates]
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(found))
    assert 0 < found[-1] <= 1 + 1e-9


def test_the_rate_that_is_needed_is_the_least_one():
    here, sync = situation(), SyncConfig(every=100, codec="int4", delay=5)
    rate = bandwidth_needed(here, sync, 0.9)
    assert rate is not None
    assert predict(situation(rate), sync).utilisation >= 0.9 > predict(situation(0.99 * rate), sync).utilisation
    assert bandwidth_needed(situation(delay_s=1), SyncConfig(every=5), 0.9) is None


def test_the_mildest_setting_that_reaches_the_target_is_chosen():
    here, given_ = situation(bits_per_s=5e6), SyncConfig(every=10)
    chosen = search(here, given_, 0.95, run_steps=RUN_STEPS).chosen
    assert chosen is not None and chosen.utilisation >= 0.95
    others = [predict(here, sync) for sync in variants(given_, WORK.blocks, RUN_STEPS)]
    milder = [one for one in others if cost(one.sync, one.steps) < cost(chosen.sync, chosen.steps)]
    assert milder and all(one.utilisation < 0.95 for one in milder)


def test_what_is_good_enough_and_no_worse_is_kept():
    here, given_ = situation(bits_per_s=1e9), SyncConfig(every=25)
    found = search(here, given_, 0.9, run_steps=RUN_STEPS)
    assert predict(here, SyncConfig(every=30)).utilisation > predict(here, given_).utilisation >= 0.9
    assert found.chosen is not None and found.chosen.sync == given_
    assert given_ not in [one.sync for one in found.others]


def test_a_fast_link_asks_for_nothing_and_a_hopeless_one_is_told():
    config = config_of(sync={"every": 30, "codec": "int8"})
    slow, fast = (plan_of(config, LinkModel(rate, rate, 0.001)) for rate in (1e3, 1e9))
    assert advice(fast).startswith("keep it: ")
    assert advice(slow).startswith("none of ") and "comes nearest with" in advice(slow)
    assert fast.data_parallel > slow.data_parallel > 0


@pytest.mark.parametrize("run_steps", [1, 2, 3, 10, 59, 200, 10**6])
def test_what_is_proposed_synchronises_twice_in_a_run(run_steps):
    given_ = SyncConfig(every=500)
    proposed = [*variants(given_, WORK.blocks, run_steps)][1:] + ladder(given_, WORK.blocks, run_steps)
    assert proposed and all(sync.every <= max(1, run_steps // 2) for sync in proposed)
    assert (EVERY[-1] in {sync.every for sync in proposed}) == (run_steps >= 2 * EVERY[-1])


@pytest.mark.parametrize("line", [LinkModel(1e5, 1e5, 0.08), LinkModel(1e9, 1e9, 0.001), NO_LINE])
@pytest.mark.parametrize("every", [500, "1d"])
def test_a_phase_longer_than_the_run_is_told_and_never_chosen(line, every):
    inner = {"steps": 200, "warmup": 10}
    longer = plan_of(config_of(inner=inner, sync={"every": every, "codec": "int4"}), line)
    assert longer.never_synchronises and longer.given.prediction.sync.every == every
    assert longer.chosen is None or longer.chosen.prediction.steps <= 100
    assert re.search(
        r"; yours never synchronises: its phase of \d+ steps is longer than the run of 200$", advice(longer)
    )
    whole = plan_of(config_of(inner=inner, sync={"every": 200}), line)
    assert "never synchronises" not in advice(whole)


def test_longer_phases_are_proposed_only_where_the_run_has_room_for_them():
    far = LinkModel(1e9, 1e9, 9.0)
    short, long = (plan_of(config_of(inner={"steps": steps}, sync={"every": 30}), far) for steps in (200, 2000))
    assert "a run of 200 steps is too short for longer phases" in advice(short)
    assert long.chosen.prediction.steps > short.chosen.prediction.steps == 100


def test_data_parallel_is_far_below_on_a_slow_link():
    assert data_parallel_utilisation(situation()) < predict(situation(), SyncConfig(every=30)).utilisation / 2


def test_a_phase_given_as_a_time_has_as_many_steps_as_fit():
    assert predict(situation(step_s=0.1), SyncConfig(every="60s")).steps == 600


# what is read


SPEED = {"device": "cpu (2 threads)", "tokens_per_s": 4096.0, "flops_per_token": WORK.flops_per_token}
CODEC = {"device": "cpu (2 threads)", "values": 1000, "speed": {"int8": {"encode_s": 1e-3, "decode_s": 2e-3}}}


def test_a_measured_step_is_taken_as_it_was_measured(tmp_path):
    for name, figures in (("speed", SPEED), ("codec", CODEC)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"checks": [], **figures}))
    machine = Machine("cpu", "fp32", read_profiles([tmp_path / "speed.json", tmp_path / "codec.json"]))
    plan = make_plan(config_of(), WORK, machine, islands=2, line=LinkModel(1e9, 1e9), targets=(0.9,))
    assert plan.situation.step_s == pytest.approx(8 * 128 / 4096)
    assert plan.situation.host.codec_ns["int8"] == pytest.approx((1000.0, 2000.0))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1]", "must hold one JSON object"),
        ("{", "cannot be read"),
        ('{"tokens_per_s": 1' + 400 * "0" + "}", "figures are missing or damaged"),
        ('{"tokens_per_s": 1' + 5000 * "0" + "}", "cannot be read"),
        ('{"tokens_per_s": 1}', "figures are missing or damaged"),
        ('{"checks": []}', "neither of bench speed nor of bench codec"),
        ('{"device": "NVIDIA H200", "values": 1, "speed": {}}', "islands encode on the CPU"),
    ],
)
def test_a_profile_of_something_else_is_refused(tmp_path, text, complaint):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_profiles([path])


@pytest.mark.parametrize("figure", [0, -1.0, math.nan, math.inf, 1e300, 1e-300])
@pytest.mark.parametrize(
    ("figures", "key"),
    [(SPEED, "tokens_per_s"), (SPEED, "flops_per_token"), (CODEC, "values")]
    + [(CODEC, f"speed.int8.{way}_s") for way in ("encode", "decode")],
)
def test_a_figure_that_nothing_can_have_is_refused_with_file_and_key(tmp_path, figures, key, figure):
    path, changed = tmp_path / "profile.json", deepcopy(figures)
    *outer, last = key.split(".")
    reduce(dict.__getitem__, outer, changed)[last] = figure
    path.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=re.escape(f"--profile {path}: {key} is {figure:g}: it must lie between")):
        read_profiles([path])


def test_the_speed_bench_writes_what_a_profile_needs(tmp_path):
    report = measure(preset="tiny", batch=1, sequence=16, vocab=256, steps=5, compile=False, device="cpu")
    path = tmp_path / "speed.json"
    path.write_text(json.dumps(report.figures))
    profile = read_profiles([path])
    assert profile.device.startswith("cpu") and profile.flops is not None and profile.flops > 1e6


def test_accelerators_are_known_by_name_and_by_what_drivers_call_them():
    assert all(called(f"NVIDIA {one.called}") is one for name, one in ACCELERATORS.items())
    assert accelerator_named("H100") is called("NVIDIA H100 80GB HBM3")
    assert called("NVIDIA GH200 480GB") is ACCELERATORS["h200"]
    assert [called(f"NVIDIA {name}") for name in ("L40S", "L4")] == [ACCELERATORS["l40s"], ACCELERATORS["l4"]]
    assert called("a toaster") is None


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_their_parameters_and_fragments(preset):
    config = config_of(model={"preset": preset, "vocab": 32768})
    work = workload_of(config)
    with torch.device("meta"):
        model = Decoder(shape_of(config.model, 256, 128))
    assert work.parameters == work.trained == sum(p.numel() for p in model.parameters())
    assert (work.blocks, work.width, work.vocab) == (len(model.blocks), model.shape.width, 32768)
    assert work.feed_forward == pytest.approx(model.shape.feed_forward, abs=1)
    assert sum(work.fragments(3, "strided")) == work.trained


def test_a_hugging_face_config_is_enough(tmp_path):
    pytest.importorskip("transformers")
    shape = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000,
        "max_position_embeddings": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    work = workload_of(config_of(model={"hf": str(tmp_path)}))
    assert work.trained == 2 * 1000 * 64 + 3 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 64
    assert (work.blocks, work.width, work.feed_forward, work.vocab) == (3, 64, 128, 1000)


def test_data_that_is_elsewhere_needs_its_vocabulary_told(tmp_path):
    data = {"source": "tokens", "path": str(tmp_path / "far.tokens"), "sequence": 128}
    with pytest.raises(DataError, match=r"to plan without it, .* --set model.vocab=32768"):
        workload_of(config_of(data=data))
    assert workload_of(config_of(data=data, model={"preset": "tiny", "vocab": 500})).vocab == 500


def test_planning_is_pure():
    names = ("utilisation", "predict", "memory", "search", "plan", "profiles")
    modules = ["sys", "diloco.model.accelerators", *(f"diloco.plan.{name}" for name in names)]
    code = "; ".join([*(f"import {module}" for module in modules), "print('torch' in sys.modules)"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


# against real islands: what `diloco bench plan` makes of what it sees


def test_the_settings_against_real_islands_are_those_that_were_asked_for():
    settings, seen = bench_plan.SETTINGS, Seen(step_s=0.15, round_s=1.0, utilisation=1.0, parameters=1)
    kinds = {(setting.codec, setting.overlapped) for setting in settings}
    assert len(settings) == 6 and len({setting.line for setting in settings}) == 2
    assert kinds == {("int8", False), ("int8", True), ("int4", False), ("int4", True)}
    waits = [bench_plan.planned(setting, seen) for setting in settings if not setting.overlapped]
    assert all(utilisation < 0.95 and round_s > 0.2 for round_s, utilisation in waits)
