"""Islands on one machine with several GPUs: each sees its own. No GPU is needed: a variable says which there are."""

from pathlib import Path

import pytest
import yaml
from conftest import SMALL
from launched import ONE, TWO, islands, pids, wait_until
from rich.console import Console

from diloco.config.file import load_config
from diloco.errors import DeviceError
from diloco.launch.devices import VISIBLE, devices_of, share_devices, visible_devices
from diloco.launch.fleet import Plan, open_run
from diloco.launch.hosts import Local
from diloco.launch.launching import plan_join, plan_launch
from diloco.report.watching import IslandsView

EIGHT = [str(number) for number in range(8)]


def test_four_islands_on_eight_gpus_get_two_each_by_their_mesh():
    assert share_devices(EIGHT, 4, 2) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
    assert share_devices(EIGHT, 2, 4) == [EIGHT[:4], EIGHT[4:]]
    assert share_devices(EIGHT, 4, 1) == [["0"], ["1"], ["2"], ["3"]]  # a process uses one, however many there are


def test_islands_of_one_process_share_gpus_in_turn_where_there_are_too_few():
    assert share_devices(["5", "7"], 3, 1) == [["5"], ["7"], ["5"]]


def test_a_mesh_without_a_gpu_for_each_process_is_refused():
    with pytest.raises(
        DeviceError, match=r"4 islands of 4 processes need 16 GPUs and this machine has 8: start at most 2"
    ):
        share_devices(EIGHT, 4, 4)


def test_the_variable_says_which_gpus_there_are():
    assert visible_devices({VISIBLE: "3, GPU-5a,1"}) == ["3", "GPU-5a", "1"]
    assert visible_devices({VISIBLE: "2,-1,0"}) == ["2"]  # as CUDA reads it
    assert visible_devices({VISIBLE: ""}) == []


def plan_of(tmp_path: Path, number: int, **island: object) -> Plan:
    path = tmp_path / "run.yaml"
    own = {**SMALL["island"], **island}
    path.write_text(yaml.safe_dump({**SMALL, "island": own, "checkpoint": {"dir": str(tmp_path / "run")}}))
    return Plan(load_config(path), path, (), number)


def test_each_island_of_a_plan_has_gpus_of_its_own_unless_it_trains_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv(VISIBLE, ",".join(EIGHT))
    plan = plan_of(tmp_path, 4, device="auto", fsdp=2)
    assert [plan.devices(name) for name in plan.names] == [{VISIBLE: pair} for pair in ("0,1", "2,3", "4,5", "6,7")]
    assert devices_of(0, 4, plan.config.island.model_copy(update={"device": "cpu"})) == {}
    monkeypatch.setenv(VISIBLE, "-1")
    assert plan.devices(ONE) == {}


def test_too_few_gpus_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv(VISIBLE, "0,1")
    plan = plan_of(tmp_path, 2, device="auto", fsdp=2)
    with pytest.raises(DeviceError, match="start at most 1 here"):
        open_run(plan, IslandsView(Console()), fresh=False)
    assert not plan.folder.exists()


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads the variables of a process in /proc")
def test_real_islands_see_their_own_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv(VISIBLE, "4,7")
    with islands(tmp_path, "island.device=auto"):
        assert wait_until(lambda: set(pids(tmp_path)) == {ONE, TWO})
        seen = {name: environment_of(pid)[VISIBLE] for name, pid in pids(tmp_path).items()}
    assert seen == {ONE: "4", TWO: "7"}


def test_islands_that_are_launched_on_this_machine_have_gpus_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv(VISIBLE, "0,1,2,3")
    config = plan_of(tmp_path, 2, device="auto", fsdp=2).config
    launch = plan_launch(config, "local", islands=2, nodes=1, gpus=0)
    assert [Local(launch).environment(island)[VISIBLE] for island in launch.islands] == ["0,1", "2,3"]


def test_gpus_that_are_asked_for_at_launch_and_those_of_islands_that_are_added_are_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv(VISIBLE, "0,1,2,GPU-3,4,5,6,7")
    config = plan_of(tmp_path, 2, device="auto").config  # its mesh is not configured: it follows --gpus-per-node
    launch = plan_launch(config, "local", islands=2, nodes=1, gpus=2)
    assert [Local(launch).environment(island)[VISIBLE] for island in launch.islands] == ["0,1", "2,GPU-3"]
    larger, added = plan_join(launch, islands=1, nodes=1, gpus=4)
    assert [Local(larger).environment(island)[VISIBLE] for island in larger.islands] == ["0,1", "2,GPU-3", "4,5,6,7"]
    beyond, added = plan_join(larger, islands=1, nodes=1, gpus=2)
    with pytest.raises(DeviceError, match=r"needs GPUs 8 to 9, .* this machine has 8"):
        Local(beyond).environment(added[0])
