"""Whether an island fits into its machine's memory: what is counted, what is free, and what is said."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from alone import HERE

from diloco.bench.team import Heard
from diloco.config.file import load_config, parse_config
from diloco.errors import DataError
from diloco.launch.fleet import Plan
from diloco.launch.mesh_processes import LIVES
from diloco.model.accelerators import ACCELERATORS
from diloco.plan.fit import RUNTIME, Need, least_need, shortage, shortage_here
from diloco.plan.memory import memory_of
from diloco.plan.plan import NO_LINE, Machine, make_plan
from diloco.plan.profiles import Profile
from diloco.plan.workload import workload_of
from diloco.report.sinks import Events
from diloco.run.folder import release
from diloco.run.machine import TOGETHER, available_memory
from diloco.run.start import RunEntry
from diloco.train.trainer import Trainer

GIB = 2.0**30
EXAMPLES = Path(__file__).parent.parent / "examples"
ENDLESS = {"preset": "1b", "blocks": 96, "width": 16384, "heads": 128, "feed_forward": 65536}  # 412 billion parameters


def config_of(**island):
    tree = {"model": {"preset": "1b", "vocab": 32768}, "data": {"sequence": 1024}, "island": {"batch": 32, **island}}
    return parse_config(tree)


WORK = workload_of(config_of())


def said(config, *, on_cpu=False, host=1e15, gpu=1e15, islands=(1, 1)) -> str:
    need = least_need(WORK, config, "fp32" if on_cpu else "bf16", on_cpu=on_cpu, processes=1)
    return shortage(need, config, host=host, accelerator=None if on_cpu else gpu, islands=islands)


def test_what_a_machine_gives_is_what_the_planner_counts_and_each_process_runtime():
    config = config_of(fsdp=2)
    memory = memory_of(WORK, config, "fp32", islands=2, step_s=1.0)
    on_gpu = least_need(WORK, config, "fp32", on_cpu=False, processes=2)
    on_cpu = least_need(WORK, config, "fp32", on_cpu=True, processes=2)
    assert on_gpu == Need(memory.host + 2 * RUNTIME["cuda"], memory.accelerator)
    assert on_cpu == Need(memory.host + 2 * (RUNTIME["cpu"] + memory.accelerator), None)


def test_an_outer_state_on_the_device_is_counted_there():
    host, device = (
        least_need(WORK, config_of(outer=outer), "bf16", on_cpu=False, processes=1) for outer in ("host", "device")
    )
    assert host.host - device.host == device.accelerator - host.accelerator == 8 * WORK.trained


def test_nothing_is_said_where_it_fits():
    need = least_need(WORK, config_of(), "bf16", on_cpu=False, processes=1)
    assert said(config_of(), host=need.host, gpu=need.accelerator) == ""
    assert said(config_of(), host=None) == ""  # not known on this system


@pytest.mark.parametrize(
    ("island", "free", "remedy"),
    [
        ({}, {"gpu": 20 * GIB}, "set island.accumulate=auto or set island.activation_checkpointing=true or raise"),
        ({"accumulate": "auto"}, {"gpu": 10 * GIB}, "set island.activation_checkpointing=true or raise island.fsdp"),
        ({"outer": "device"}, {"gpu": 30 * GIB}, "set island.outer=host"),
        ({}, {"gpu": 100 * GIB, "islands": (4, 2)}, "are free: start fewer islands here"),
        ({}, {"host": 12 * GIB}, "set island.outer=device"),
        ({"outer": "device"}, {"host": 4 * GIB}, "take a smaller model"),
        ({}, {"host": 20 * GIB, "islands": (2, 1)}, "2 islands take about .* start fewer islands here"),
        ({}, {"on_cpu": True, "host": 60 * GIB}, "raise island.accumulate, up to 32"),
        ({"accumulate": 32}, {"on_cpu": True, "host": 30 * GIB}, "take a smaller model"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line_with_what_to_change(island, free, remedy):
    text = said(config_of(**island), **free)
    assert "\n" not in text and text.startswith("memory: ")
    assert remedy.split(" .* ")[0] in text and remedy.split(" .* ")[-1] in text


def test_with_auto_only_one_sample_at_a_time_has_to_fit():
    least = least_need(WORK, config_of(accumulate=32), "bf16", on_cpu=False, processes=1)
    assert said(config_of(accumulate="auto"), gpu=least.accelerator) == ""
    assert said(config_of(), gpu=least.accelerator) != ""


def test_a_plan_takes_as_few_micro_batches_as_fit():
    def planned(accumulate, accelerator):
        machine = Machine("some", "bf16", Profile(), accelerator)
        return make_plan(config_of(accumulate=accumulate), WORK, machine, islands=2, line=NO_LINE, targets=(0.9,))

    h200 = ACCELERATORS["h200"]
    need = planned(8, h200).memory.accelerator
    assert planned("auto", replace(h200, memory_bytes=need)).memory == planned(8, h200).memory
    assert planned("auto", replace(h200, memory_bytes=1.01 * need)).memory == planned(8, h200).memory
    assert planned("auto", replace(h200, memory_bytes=1e15)).memory == planned(1, h200).memory
    assert planned("auto", replace(h200, memory_bytes=1.0)).memory == planned(32, h200).memory


# what is free


def machine(folder: Path, cgroup: str, files: dict[str, str]) -> int | None:
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text("MemTotal:  16000000 kB\nMemAvailable:  8000000 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        file = folder / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return available_memory(folder / "proc", folder / "groups")


MIB = 1 << 20
V2 = {"memory.max": str(1000 * MIB), "memory.current": str(700 * MIB), "memory.stat": f"anon 1\ninactive_file {MIB}\n"}


@pytest.mark.parametrize(
    ("cgroup", "files", "available"),
    [
        ("", {}, 8_000_000 * 1024),
        ("0::/\n", V2, 301 * MIB),  # a container sees its own group as the root
        ("0::/a/b\n", {f"a/{name}": text for name, text in V2.items()}, 301 * MIB),  # a limit of the group around it
        ("0::/a\n", {f"a/{name}": text for name, text in {**V2, "memory.max": "max"}.items()}, 8_000_000 * 1024),
        ("0::/a\n", {f"b/{name}": text for name, text in V2.items()}, 8_000_000 * 1024),
        (
            "5:cpu,memory:/x\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": str(500 * MIB), "memory/x/memory.usage_in_bytes": str(600 * MIB),
                "memory/x/memory.stat": "total_inactive_file 0\n",
            },
            0,
        ),
    ],
)  # fmt: skip
def test_free_memory_is_what_the_kernel_and_every_group_around_leave(tmp_path, cgroup, files, available):
    assert machine(tmp_path, cgroup, files) == available


def test_where_there_is_no_proc_nothing_is_known(tmp_path):
    assert available_memory(tmp_path, tmp_path) is None


# before the first step


@pytest.mark.parametrize("name", ["quickstart.yaml"])
def test_no_alarm_for_the_quickstart_on_a_laptop(name, monkeypatch):
    config = load_config(EXAMPLES / name, [])
    need = least_need(workload_of(config), config, "fp32", on_cpu=True, processes=1)
    assert shortage(need, config, host=4 * GIB, accelerator=None, islands=(4, 4)) == ""
    assert shortage_here(config, HERE) == ""


def test_a_model_that_fits_nowhere_is_said_by_the_one_island_that_looks_for_all(small, monkeypatch):
    config = small(model=ENDLESS)
    assert "an island takes about" in shortage_here(config, HERE)
    monkeypatch.setenv(TOGETHER, "3 3")
    assert "3 islands take about" in shortage_here(config, HERE)
    monkeypatch.setenv(LIVES, "1")
    assert shortage_here(config, HERE) == ""
    monkeypatch.delenv(LIVES)
    monkeypatch.setenv(TOGETHER, "0 0")
    assert shortage_here(config, HERE) == ""


def test_what_cannot_be_opened_is_said_by_whoever_opens_it(small, tmp_path):
    config = small(data={"source": "text", "path": str(tmp_path / "none")})
    assert shortage_here(config, HERE) == ""
    with pytest.raises(DataError):
        Trainer(config, HERE, Events())


@pytest.mark.parametrize("together", [False, True])
def test_the_warning_comes_before_the_model_or_where_all_islands_are_shown(small, together, monkeypatch, capsys):
    config, heard, seen = small(), Heard(), list[str]()
    if together:
        monkeypatch.setenv(TOGETHER, "2 2")
    with ExitStack() as stack:
        stack.callback(release, Path(config.dir))
        events = Events([heard])

        def build(config):
            seen.append(capsys.readouterr().err)
            return Trainer(config, HERE, events)

        entry = RunEntry(HERE, events, stack, None, build, view=False, check=lambda *_: "memory: too little")
        entry.found(config, fresh=False)
    notes = [event.plain()["text"] for event in heard.events if event.kind == "note"]
    assert seen == ["" if together else "memory: too little\n"]
    assert notes == (["memory: too little"] if together else [])


def test_the_founder_looks_for_all_islands_that_are_started_together(tmp_path, monkeypatch):
    plan = Plan(parse_config({"checkpoint": {"dir": str(tmp_path)}}), tmp_path / "run.yaml", (), 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert plan.together == "3 3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert plan.together == "3 2"  # the first and the third on one of two
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert plan.together == "3 1"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_its_free_memory_is_compared(small):
    config = small(model=ENDLESS, island={"device": "cuda"})
    assert "this GPU's memory" in shortage_here(config, replace(HERE, device=torch.device("cuda", 0)))
