"""The commands as a person runs them: real files, and real processes where signals, terminals and locks matter."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from conftest import SMALL, read_events, run_cli
from typer.testing import CliRunner

from diloco.cli.app import app
from diloco.errors import ConfigError
from diloco.run.folder import prepare_folder, release
from diloco.version import PROTOCOL, __version__

COMMANDS = [
    "demo", "init", "run", "join", "launch", "config", "tokenize", "export", "status", "why",
    "dashboard", "report", "ls", "stop", "bundle", "log", "restore", "rewind", "evict", "force-roster", "set",
    "sample", "plan", "doctor", "completion", "ticket", "key", "simulate", "bench",
]  # fmt: skip
BENCHES = [
    "overhead", "dashboard", "speed", "codec", "allreduce", "trust", "recover", "ranks", "memory", "sizes", "mesh",
    "join", "soak", "checkpoint", "virtual", "mutants", "overlap", "plan", "quality", "link",
]  # fmt: skip
TERMINAL = 78  # what help has in a terminal of 80 columns; the runner alone would give it 80


@pytest.fixture
def config_file(tmp_path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "checkpoint": {"dir": str(tmp_path / "run")}}))
    return path


def trained(command, *arguments: object) -> str:
    """In this process, which lets go of the folder as its end would."""
    said = command("run", *arguments)
    release(Path("run").absolute())
    assert said.code == 0, said.err
    return said.out


def help_of(*command: str) -> str:
    done = CliRunner().invoke(app, [*command, "--help"], terminal_width=TERMINAL)
    assert done.exit_code == 0
    return done.stdout


GROUPS = {
    "": COMMANDS, "simulate": ["islands", "protocol", "virtual"], "bench": BENCHES,
    "ticket": ["create", "key", "list", "revoke", "show"], "key": ["export", "import"],
}  # fmt: skip
ALL = [f"{group} {name}".strip() for group, names in GROUPS.items() for name in names if name not in GROUPS]


@pytest.mark.parametrize("command", ALL)
def test_every_command_has_help_with_an_example(command):
    written = command.replace("simulate islands", "simulate")
    assert f"Example: diloco {written}" in " ".join(help_of(*command.split()).split())


@pytest.mark.parametrize("group", GROUPS)
def test_every_command_is_listed_with_its_whole_summary(group):
    listed = help_of(*group.split()).partition("Commands:")[2].strip().splitlines()
    assert [line.split()[0] for line in listed] == GROUPS[group]
    assert not [line for line in listed if line.endswith("...")]


def test_the_version_names_the_protocol():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"diloco {__version__}, protocol {PROTOCOL}\n"


def test_run_trains_tells_and_says_what_next(config_file, tmp_path):
    done = run_cli("run", str(config_file))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "step    12/12  loss" in done.stdout
    assert "next:" in done.stdout
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event["event"] for event in (events[0], *events[-2:])] == ["start", "end", "agreed"]
    assert events[-2]["finished"]
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert written["inner"]["steps"] == 12


def test_an_earlier_run_is_never_trained_over_unasked(command, run, config_file, tmp_path):
    assert "note: the earlier run is kept as" in trained(command, config_file, "--fresh")
    assert "already holds a run, saved at step 12: add --resume" in command.refused("run", config_file)
    assert (tmp_path / "run.1" / "save-00000012").is_dir()


@pytest.mark.parametrize("option", [("--link", "10mbit,10ms"), ("--host", "10.0.0.1")])
def test_what_needs_others_is_refused_alone(command, config_file, option):
    complaint = f"{option[0]} is for a run that others can join, and this one is alone: add --islands 1\n"
    assert complaint in command.refused("run", config_file, *option)


def test_an_island_alone_does_not_train_among_islands(command, config_file, tmp_path):
    (tmp_path / "run" / "island-1" / "outer").mkdir(parents=True)
    (tmp_path / "run" / "island-1" / "outer" / "log-00000001.seg").touch()
    (tmp_path / "run" / "config.yaml").touch()
    assert "already holds a run of several islands: add --resume" in command.refused("run", config_file)


def start_long_run(
    config_file: Path, *options: str, launcher: Sequence[str] = (), stderr: int = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Until its third step; it leads a process group of its own."""
    command = [sys.executable, *launcher, "-m", "diloco", "run", str(config_file), "--set", "inner.steps=100000"]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert any(line.startswith("step     3/") for line in process.stdout), "it ended before its third step"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_resume(command, config_file, tmp_path, number):
    process = start_long_run(config_file)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "finishing this step, then saving" in err
    assert f"-m diloco run {config_file} --resume --set inner.steps=100000" in out
    stopped = next(e["step"] for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "end")
    two_more = (config_file, "--resume", "--set", f"inner.steps={stopped + 2}")
    resumed = trained(command, *two_more)
    assert f"resumed at step {stopped}" in resumed
    assert f"done: step {stopped + 2}, round" in resumed
    assert f"--resume --set inner.steps={2 * (stopped + 2)}\n" in resumed  # each key once
    assert f"already finished: step {stopped + 2}" in trained(command, *two_more)


def test_two_processes_cannot_train_in_one_folder(command, config_file):
    first = start_long_run(config_file)
    try:
        assert "another process is training in" in command.refused("run", config_file, "--fresh")
    finally:
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=300)


@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_goes_on_or_starts_again_is_locked_too(tmp_path, fresh):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    prepare_folder(folder, resume=not fresh, fresh=fresh)
    with (folder / ".lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


SIGNALLED = """
import signal, sys, time
from diloco.run.signals import REPEAT_S, TRAINER_STOPS, Stop, stop_on_signal
stop = Stop()
with stop_on_signal(stop, TRAINER_STOPS):
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)   # a launcher passing it on
    print("still here", stop.asked, flush=True)
    time.sleep(REPEAT_S * 1.2)
    signal.raise_signal(signal.SIGINT)
    print("not reached")
"""


def test_a_later_signal_leaves_at_once_but_not_an_echo_of_the_first():
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stdout == "still here True\n"
    assert done.stderr.count("finishing this step") == 1


@pytest.mark.soak
def test_a_mesh_saves_when_everybody_is_signalled(config_file, tmp_path):
    """As a job scheduler does: launcher and workers get SIGTERM, and the launcher passes it on."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start_long_run(config_file, "--set", "island.fsdp=2", launcher=torchrun, stderr=subprocess.DEVNULL)
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert "torchrun --nproc-per-node 2 -m diloco run" in out
    assert list((tmp_path / "run").glob("save-*/facts.json"))


@pytest.mark.slow
def test_a_mesh_that_starts_its_own_processes_passes_a_signal_on_and_leaves_none(config_file, tmp_path):
    process = start_long_run(config_file, "--set", "island.fsdp=2")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-2:]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "-m diloco run" in out and "torchrun" not in out  # how to go on
    assert list((tmp_path / "run").glob("save-*/facts.json"))
    assert len(children) == 2 and not any(Path(f"/proc/{child}").exists() for child in children)


def test_fresh_moves_only_what_is_a_run(command, config_file, tmp_path):
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("years of work")
    assert "is not a diloco run" in command.refused("run", config_file, "--fresh", "--set", f"checkpoint.dir={other}")
    command.refused("run", config_file, "--set", f"checkpoint.dir={other}")
    assert [path.name for path in other.iterdir()] == ["chapter.tex"]
    assert "use one of them" in command.refused("run", config_file, "--fresh", "--resume")


def test_a_refused_start_leaves_the_earlier_run_alone(command, run, config_file, tmp_path):
    before = (tmp_path / "run" / "config.yaml").read_text()
    command.refused("run", config_file, "--fresh", "--set", "data.sequence=100M")
    command.refused("run", config_file, "--resume", "--set", "model.width=64")
    assert (tmp_path / "run" / "config.yaml").read_text() == before
    assert not (tmp_path / "run.1").exists()


def bad_input(folder: Path) -> dict[str, tuple[list[str], str]]:
    missing, damaged = folder / "no-such-file", folder / "damaged.tokens"
    return {
        "no config": ([str(missing)], "no such file"),
        "no data": (["--set", "data.source=text", "--set", f"data.path={missing}"], str(missing)),
        "no tokens": (["--set", "data.source=tokens", "--set", f"data.path={missing}"], str(missing)),
        "damaged tokens": (["--set", "data.source=tokens", "--set", f"data.path={damaged}"], "damaged.tokens"),
        "mesh too large": (["--set", "island.fsdp=2", "--set", "island.tp=2"], "needs 4 processes and there is 1"),
        "batch": (["--set", "island.batch=3", "--set", "island.accumulate=2"], "use a multiple of 2"),
        "no gpu": (["--set", "island.device=cuda"], "torch sees no CUDA device"),
        "no model": (["--set", f"model={{hf: {missing}}}"], "model.hf"),
        "short data": (["--set", "data.sequence=100M"], "use more data or a shorter sequence"),
        "unwritable": (["--set", f"checkpoint.dir={damaged}/x"], "cannot be written"),
        "batch too large": (["--set", "island.batch=1e9"], "training samples"),
        "past the end": (["--set", "outer.lr=.inf"], "write `auto` or a number above 0"),
        "unknown key": (["--set", "sync.evry=1"], "did you mean sync.every?"),
    }


@pytest.mark.parametrize("case", bad_input(Path()))
def test_bad_input_is_one_clear_line(command, monkeypatch, config_file, tmp_path, case):
    (tmp_path / "damaged.tokens").write_bytes(b"these are not tokens" * 20)
    arguments, complaint = bad_input(tmp_path)[case]
    path = [] if case == "no config" else [str(config_file)]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)  # as torchrun says it; without, a mesh starts its own processes
    assert complaint in command.refused("run", *path, *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is what it needs")
def test_bench_mesh_is_refused_in_one_line_without_a_gpu(command):
    assert "bench mesh needs an NVIDIA GPU" in command.refused("bench", "mesh")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("allreduce --codec int3", "--codec int3: there are fp32"),
        ("allreduce --link fast", "--link fast: "),
        ("allreduce --link 100mbit,20", "the unit is missing"),
        ("allreduce --link 100mbit,1h", "no delay of a network"),
        ("allreduce --against nccl", "--against nccl: there are hivemind, gloo"),
        ("allreduce --against none,gloo", "--against none: "),
        ("link --rate 5foo", "--rate 5foo: "),
        ("link --rate 20", "--rate 20: "),
        ("link --rate 0mbit", "--rate 0mbit: "),
        ("link --rate 1mbit,,2mbit", "--rate : "),
        ("link --delay far", "--delay far: "),
        ("join --rate 0mbit", "--rate 0mbit: must be above 0"),
    ],
)
def test_bad_options_of_a_bench_are_refused_before_anything_runs(options, complaint):
    done = CliRunner().invoke(app, ["bench", *options.split()])
    assert isinstance(done.exception, ConfigError) and complaint in str(done.exception)


def test_tokenize_then_train_on_the_result(command, config_file, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("to be or not to be, that is the question\n" * 400)
    out = tmp_path / "a.tokens"
    made = command("tokenize", text, "--out", out)
    assert made.code == 0 and "use it with: data: {source: tokens" in made.out
    changes = ("--set", "data.source=tokens", "--set", f"data.path={out}")
    assert "done: step 12, round" in trained(command, config_file, *changes)


def test_doctor_speaks_json_too(command):
    names = {finding["name"] for finding in json.loads(command("doctor", "--json").out)}
    assert {"python", "torch", "p2pd", "disk"} <= names


@pytest.mark.soak
def test_benchmarks_have_one_form():
    done = run_cli("bench", "overhead", "--json", "--device", "cpu", "--blocks", "1")
    report = json.loads(done.stdout)
    (check,) = report["checks"]
    assert set(check) == {"name", "value", "limit", "better"}
    assert check["name"] == "overhead.step_ratio" and check["better"] == "lower"
    assert 0.2 < check["value"] < 5
