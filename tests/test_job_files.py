"""Job files and what they are made from; no scheduler is needed. `test_slurm.py` runs them on a real one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import SMALL
from launched import wait_until

from diloco.config.file import load_config
from diloco.config.schema import Config
from diloco.errors import ConfigError, LaunchError
from diloco.launch.backend import TEMPLATES, Launch, fill, torchrun_of
from diloco.launch.launching import plan_join, plan_launch
from diloco.launch.slurm import Slurm
from diloco.run.secret import parse_places

MACHINE = TEMPLATES / "machine.sh"


def config_of(tmp_path: Path, options: dict[str, object] | None = None, **island: int) -> Config:
    path = tmp_path / "run.yaml"
    own = {"run": "big", "island": {**SMALL["island"], **island}, "launch": options or {}}
    path.write_text(yaml.safe_dump({**SMALL, **own, "checkpoint": {"dir": str(tmp_path / "run folder")}}))
    return load_config(path)


def launch_of(tmp_path: Path, options: dict[str, object] | None = None, nodes: int = 1, gpus: int = 0) -> Launch:
    return plan_launch(config_of(tmp_path, options), "slurm", islands=3, nodes=nodes, gpus=gpus)


def test_a_job_file_has_what_the_configuration_asks_for_and_is_a_script(tmp_path):
    options = {
        "partition": "gpu", "account": "us", "time": "2-00:00:00", "grace_s": 90, "extra": ["--mem=64G"],
        "modules": ["cuda/12"], "environment": {"A": "it's"}, "setup": ["source venv"], "interface": "ib0",
    }  # fmt: skip
    launch = launch_of(tmp_path, options, nodes=2, gpus=4)
    files = Slurm(launch).render(launch.islands)
    assert list(files) == ["slurm-0.sh", "machine.sh"]
    asked = [line.removeprefix("#SBATCH ") for line in files["slurm-0.sh"].splitlines() if line.startswith("#SBATCH")]
    assert asked == [
        "--job-name=diloco-big", "--array=0,1,2", "--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append",
        f'--output="{launch.here}/logs/island-%a.log"', "--signal=B:TERM@90", "--partition=gpu", "--account=us",
        "--time=2-00:00:00", "--gpus-per-node=4", "--mem=64G",
    ]  # fmt: skip
    for line in ("module load cuda/12", """export A='it'"'"'s'""", "source venv", "    local interface=ib0"):
        assert line in files["slurm-0.sh"].splitlines()
    assert "--set island.fsdp=8 &" in files["slurm-0.sh"] and "{{" not in files["slurm-0.sh"]
    for text in files.values():
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_islands_that_are_added_with_other_nodes_have_a_mesh_and_a_job_of_their_own(tmp_path):
    launch, added = plan_join(launch_of(tmp_path), islands=1, nodes=2, gpus=1)
    assert (added[0].name, added[0].nodes, added[0].processes, added[0].fsdp) == ("island-3", 2, 1, 2)
    files = Slurm(launch).render(launch.islands)
    assert list(files) == ["slurm-0.sh", "slurm-3.sh", "machine.sh"]


def test_islands_that_are_added_are_like_the_first_unless_asked_otherwise(tmp_path):
    launch, added = plan_join(launch_of(tmp_path, nodes=2, gpus=4), islands=2)
    assert [(each.nodes, each.gpus, each.fsdp) for each in added] == [(2, 4, 8)] * 2
    launch, added = plan_join(launch, islands=1, nodes=1)
    assert (added[0].nodes, added[0].gpus, added[0].fsdp) == (1, 4, 4)


def test_a_container_sees_the_runs_folder_and_what_is_named(tmp_path):
    launch = launch_of(tmp_path, {"container": "us/diloco:1", "mounts": ["/data", "/home/ann/src:/src"]})
    job, folder = Slurm(launch).render(launch.islands)["slurm-0.sh"], tmp_path / "run folder"
    assert f"--container-mounts={folder}:{folder},/data:/data,/home/ann/src:/src" in job


def test_the_batch_of_a_program_of_somebodys_own_is_its_own(tmp_path):
    launch = plan_launch(config_of(tmp_path, {"script": "python p.py"}), "slurm", islands=1, nodes=2, gpus=8)
    assert launch.islands[0].processes == 8


def test_a_mesh_that_does_not_fit_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"--nodes-per-island 1 with --gpus-per-node 8 asks for 8 .* product is 8"):
        plan_launch(config_of(tmp_path, fsdp=2), "slurm", islands=1, nodes=1, gpus=8)
    with pytest.raises(
        ConfigError,
        match=r"island\.batch=8: 16 processes .* it must be a multiple of 16",
    ):
        plan_launch(config_of(tmp_path), "slurm", islands=1, nodes=2, gpus=8)


def test_an_option_that_is_none_and_a_machine_without_slurm_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no sbatch here"):
        Slurm(launch_of(tmp_path)).check([])
    (tmp_path / "sbatch").touch(mode=0o755)
    with pytest.raises(ConfigError, match=r"launch\.extra='mem=64G'"):
        Slurm(launch_of(tmp_path, {"extra": ["mem=64G"]})).check([])


def test_paths_that_sbatch_misreads_are_escaped_or_refused(tmp_path, monkeypatch):
    (tmp_path / "100% of it").mkdir()
    launch = launch_of(tmp_path / "100% of it")
    assert f'--output="{tmp_path}/100%% of it/run folder/launch/logs/island-%a.log"' in Slurm(launch)._job(
        launch.islands
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sbatch").touch(mode=0o755)
    Slurm(launch).check(launch.islands)
    for name in ('a "b"', "a\\b"):
        (tmp_path / name).mkdir()
        with pytest.raises(ConfigError, match=r"checkpoint\.dir=.* rename it"):
            Slurm(launch_of(tmp_path / name)).check([])


@pytest.mark.parametrize(("given", "read"), [("12:00:00", "12:00:00"), ("90", "0:01:30"), ("1-00:00:00", "1-00:00:00")])
def test_a_time_limit_is_read_with_and_without_quotes(tmp_path, given, read):
    config_of(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(f"launch: {{time: {given}}}\n")
    assert load_config(path).launch.time == read


def test_torchrun_is_the_one_beside_diloco():
    assert torchrun_of("/venv/bin/python -m diloco") == "/venv/bin/python -m torch.distributed.run"
    assert torchrun_of("/venv/bin/diloco") == "/venv/bin/torchrun" and torchrun_of("diloco") == "torchrun"


def test_a_line_of_a_template_that_holds_one_name_gets_all_lines_of_its_value(tmp_path):
    (tmp_path / "some.yaml").write_text("a:\n  {{lines}}\n{{none}}\nb: {{word}}\n")
    assert fill("some.yaml", {"lines": "x\ny\n", "none": "", "word": 7}, str(tmp_path)) == "a:\n  x\n  y\nb: 7\n"


def test_what_a_value_holds_in_double_braces_stays_as_it_is(tmp_path):
    (tmp_path / "some.yaml").write_text("{{lines}}\nb: {{word}}\n")
    filled = fill("some.yaml", {"lines": "docker ps --format '{{word}} {{ID}}'", "word": "{{lines}}"}, str(tmp_path))
    assert filled == "docker ps --format '{{word}} {{ID}}'\nb: {{lines}}\n"


def test_an_interpreter_in_a_folder_with_spaces_is_called_as_one_word(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/home/ann/my project/bin/python")
    launch = launch_of(tmp_path)
    text = Slurm(launch).render(launch.islands)["slurm-0.sh"]
    assert "'/home/ann/my project/bin/python' -m diloco run " in text
    assert "'/home/ann/my project/bin/python' -m torch.distributed.run -- " in text


def test_addresses_are_read_from_a_folder_as_often_as_they_are_asked_for(tmp_path):
    assert parse_places(str(tmp_path)) == {}
    (tmp_path / "island-0").write_text("10.0.0.1:31337\n")
    (tmp_path / "island-1").write_text("10.0.0.2:31")
    (tmp_path / "island-2").write_text("")  # it is being written
    (tmp_path / ".island-3").write_text("10.0.0.3:31343")
    assert parse_places(str(tmp_path)) == {"island-0": "10.0.0.1:31337", "island-1": "10.0.0.2:31"}


@pytest.mark.parametrize(("ends", "code", "noted"), [("exit 0", 0, True), ("exit 75", 75, False), ("exit 3", 3, False)])
def test_a_machine_ends_as_its_part_of_the_island_does(tmp_path, ends, code, noted):
    finished = tmp_path / "finished"
    words = ["bash", MACHINE, "1", "host", "1", "1", "torchrun", "--", "bash", "-c", ends]
    done = subprocess.run(words, env={**os.environ, "DILOCO_FINISHED": str(finished)}, timeout=60)
    assert (done.returncode, finished.exists()) == (code, noted)


@pytest.mark.parametrize(("nodes", "starting_s"), [("1", 0), ("2", 0), ("2", 3)])
def test_a_machine_passes_on_a_signal_and_waits_however_long_leaving_takes(tmp_path, nodes, starting_s):
    """torchrun is a stand-in that starts one rank; `test_slurm.py` has the real one. While a rank imports what it needs
    it does not hear the signal."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/bash\nwhile [ "$1" != --no-python ]; do shift; done; shift\n"$@"\nsleep 60\n')
    torchrun.chmod(0o755)
    leave = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(75)))"
    steps = [leave, "pathlib.Path('up').touch()"] if not starting_s else ["pathlib.Path('up').touch()", leave]
    rank = f"import pathlib, signal, sys, time; {f'; time.sleep({starting_s}); '.join(steps)}; time.sleep(600)"
    words = ["bash", MACHINE, nodes, "host", "1", "1", torchrun, "--", sys.executable, "-c", rank]
    machine = subprocess.Popen(words, cwd=tmp_path)
    assert wait_until(lambda: (tmp_path / "up").exists(), 60)
    machine.send_signal(signal.SIGTERM)
    assert machine.wait(60) == 75


@pytest.fixture
def commands(tmp_path, monkeypatch) -> Path:
    """A folder of stand-ins for Slurm's commands, which all succeed and note what they are asked for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("sbatch", "squeue", "scancel", "scontrol", "srun", "sleep"):
        stand_in(folder, name, "")
    return folder


def stand_in(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"{folder}/calls"\n{body}\n')
    (folder / name).chmod(0o755)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_the_number_of_a_job_is_found_among_what_a_site_prints(tmp_path, commands):
    launch = launch_of(tmp_path)
    launch.here.mkdir(parents=True)
    stand_in(commands, "sbatch", "echo 'Welcome to Big Iron 7!'; echo '4711;big'; echo 'You have 12 hours left'")
    assert Slurm(launch).submit(launch.islands)["island-2"] == "4711_2"
    stand_in(commands, "sbatch", "echo Submitted")
    with pytest.raises(LaunchError, match="sbatch has printed no job's number but 'Submitted'"):
        Slurm(launch).submit(launch.islands)


def test_islands_of_which_some_cannot_be_submitted_leave_no_job_that_nobody_knows_of(tmp_path, commands):
    launch, _ = plan_join(launch_of(tmp_path), islands=1, nodes=2, gpus=1)
    launch.here.mkdir(parents=True)
    stand_in(commands, "sbatch", 'case $* in *slurm-3.sh) echo "QOSMaxSubmitJobPerUserLimit" >&2; exit 1; esac; echo 7')
    with pytest.raises(LaunchError, match="sbatch: QOSMaxSubmitJobPerUserLimit"):
        Slurm(launch).submit(launch.islands)
    assert calls(commands)[-1] == "scancel 7_0 7_1 7_2"


def run_job(tmp_path: Path, commands: Path) -> subprocess.CompletedProcess[str]:
    launch = launch_of(tmp_path)
    launch.here.mkdir(parents=True, exist_ok=True)
    task = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "1"}
    where = {"SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    words = ["bash", "-c", Slurm(launch).render(launch.islands)["slurm-0.sh"]]
    return subprocess.run(words, env={**os.environ, **task, **where}, capture_output=True, text=True, timeout=60)


NODE = "case $1 in show) echo NodeAddr=10.0.0.1 ;; requeue) %s ;; esac"


def test_an_island_that_leaves_while_slurm_is_busy_is_queued_again_when_it_answers(tmp_path, commands):
    stand_in(commands, "srun", "exit 75")
    stand_in(commands, "squeue", "echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1")
    stand_in(commands, "scontrol", NODE % f'[ "$(grep -c requeue {commands}/calls)" = 2 ]')
    assert run_job(tmp_path, commands).returncode == 0
    assert [call for call in calls(commands) if "requeue" in call] == ["scontrol requeue 7_1"] * 2


@pytest.mark.parametrize(
    ("then", "code", "last"), [("RUNNING", 0, "scontrol requeue 7_1"), ("COMPLETING", 3, "squeue")]
)
def test_an_island_that_is_asked_to_leave_in_the_pause_before_a_restart(tmp_path, commands, then, code, last):
    """It is queued again, unless its job was cancelled."""
    stand_in(commands, "srun", "exit 3")
    stand_in(commands, "squeue", f'[ "$(grep -c squeue {commands}/calls)" = 1 ] && echo RUNNING || echo {then}')
    stand_in(commands, "sleep", "[ $1 != 10 ] || kill -TERM $PPID")
    stand_in(commands, "scontrol", NODE % "exit 0")
    assert run_job(tmp_path, commands).returncode == code
    called = [call.split()[0] for call in calls(commands)]
    assert called.count("srun") == 1 and calls(commands)[-1].startswith(last)


def test_an_island_that_cannot_be_queued_again_says_what_to_do(tmp_path, commands):
    stand_in(commands, "srun", "exit 75")
    stand_in(commands, "squeue", "echo RUNNING")
    stand_in(commands, "scontrol", NODE % "echo 'Access/permission denied' >&2; exit 1")
    done = run_job(tmp_path, commands)
    assert done.returncode == 75 and "start it with the same `diloco launch` command" in done.stderr


def test_an_island_whose_job_is_cancelled_is_not_queued_again(tmp_path, commands):
    stand_in(commands, "srun", "exit 75")
    stand_in(commands, "squeue", "echo COMPLETING")
    stand_in(commands, "scontrol", NODE % "exit 0")
    assert run_job(tmp_path, commands).returncode == 75
    assert not any("requeue" in call for call in calls(commands))
