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


def test_a_mesh_that_does_not_fit_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"--nodes-per-island 1 with --gpus-per-node 8 asks for 8 .* product is 8"):
        plan_launch(config_of(tmp_path, fsdp=2), "slurm", islands=1, nodes=1, gpus=8)
    with pytest.raises(ConfigError, match=r"island\.batch=8 must be a multiple of 16"):
        plan_launch(config_of(tmp_path), "slurm", islands=1, nodes=2, gpus=8)


def test_an_option_that_is_none_and_a_machine_without_slurm_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no sbatch here"):
        Slurm(launch_of(tmp_path)).check()
    (tmp_path / "sbatch").touch(mode=0o755)
    with pytest.raises(ConfigError, match=r"launch\.extra='mem=64G'"):
        Slurm(launch_of(tmp_path, {"extra": ["mem=64G"]})).check()


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


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_machine_passes_on_a_signal_and_waits_however_long_leaving_takes(tmp_path, nodes):
    """torchrun is a stand-in that starts one rank; `test_slurm.py` has the real one."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/bash\nwhile [ "$1" != --no-python ]; do shift; done; shift\n"$@"\nsleep 60\n')
    torchrun.chmod(0o755)
    leave = "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(75)))"
    rank = f"{leave}; pathlib.Path('up').touch(); time.sleep(600)"
    words = ["bash", MACHINE, nodes, "host", "1", "1", torchrun, "--", sys.executable, "-c", rank]
    machine = subprocess.Popen(words, cwd=tmp_path)
    assert wait_until(lambda: (tmp_path / "up").exists(), 60)
    machine.send_signal(signal.SIGTERM)
    assert machine.wait(60) == 75
