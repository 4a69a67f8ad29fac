"""Islands on a real Slurm: arrays, requeues, signals, lost nodes and GPUs. `make cluster` runs all of it."""

from collections.abc import Iterator
from random import Random

import pytest
from slurm_cluster import SlurmRun, devices, slurm

REQUEUES = 10


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=8, gpus=2) as environment:
        yield environment


@pytest.mark.cluster
def test_islands_on_slurm_are_queued_again_and_end_with_equal_states(cluster, tmp_path):
    run = SlurmRun(cluster, tmp_path, "short")
    asked = ("launch", "run.yaml", "--on", "slurm", "--islands", "2", "--gpus-per-node", "1")
    assert "--array=0,1" in run.diloco(*asked, "--dry-run")
    assert not run.dir.exists() and run.jobs == {}
    run.diloco(*asked)
    assert run.contributes(0, after=0) and run.contributes(1, after=0), run.logs()
    assert len({(node, gpus) for node, _, gpus in devices(run)}) == 2  # neither shares a GPU with the other
    listed = run.diloco("launch", "--list", "runs/short").splitlines()
    assert [line.split()[:2] for line in listed] == [["island-0", "running"], ["island-1", "running"]]
    assert all("round " in line and run.task(number) in line for number, line in enumerate(listed))
    assert "nothing: all islands" in run.diloco(*asked) and len(run.jobs) == 2
    run.comes_back(0, "scontrol", "requeue", run.task(0))  # the founder's
    run.finish()
    assert run.ends(), run.logs()
    assert set(run.jobs.values()) == {"COMPLETED"}, run.logs()
    assert run.outcome(2) == (1, 0)


@pytest.mark.slow
def test_an_island_on_slurm_that_is_cancelled_saves_and_stays_away(cluster, tmp_path):
    folder = tmp_path / "it's 100%job"  # a path that sbatch has to be told of with care
    folder.mkdir()
    run = SlurmRun(cluster, folder, "cancelled")
    run.diloco("launch", "run.yaml", "--on", "slurm")
    assert run.contributes(0, after=0), run.logs()
    run.diloco("launch", "--cancel", "runs/cancelled", "island-0")
    assert run.ends() and list(run.jobs.values()) == ["CANCELLED"]
    assert "saved step" in run.logs()
    assert "nothing" in run.diloco("launch", "run.yaml", "--on", "slurm")


@pytest.mark.cluster
@pytest.mark.timeout(5400)
def test_a_run_on_slurm_survives_requeues_signals_and_a_lost_node(cluster, tmp_path):
    """Three islands, a fourth of two nodes, two more; ten requeues, a signal and a lost node among that."""
    chance, run = Random(7), SlurmRun(cluster, tmp_path, "long")
    run.diloco("launch", "run.yaml", "--on", "slurm", "--islands", "3", "--gpus-per-node", "1")
    assert all(run.contributes(number, after=0) for number in range(3)), run.logs()
    run.diloco("launch", "--join", "runs/long", "--nodes-per-island", "2", "--gpus-per-node", "1")
    assert run.contributes(3, after=0), run.logs()
    seen = devices(run)
    assert {island for _, island, _ in seen} == {f"island-{number}" for number in range(4)}
    assert len({(node, gpus) for node, _, gpus in seen}) == len(seen) == 5  # each process has a GPU of its own
    for number in [0, *(chance.randrange(4) for _ in range(REQUEUES - 1))]:
        run.comes_back(number, "scontrol", "requeue", run.task(number))
    run.comes_back(1, "scancel", "--signal=TERM", run.task(1))
    run.diloco("launch", "--join", "runs/long", "--islands", "2", "--gpus-per-node", "1")
    assert run.contributes(4, after=0) and run.contributes(5, after=0), run.logs()
    lost = next(node for node, island, _ in devices(run) if island == "island-2")
    run.comes_back(2, "scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    run.call("scontrol", "update", f"nodename={lost}", "state=idle")
    run.finish()
    assert run.ends(), run.logs()
    assert set(run.jobs.values()) == {"COMPLETED"}, run.logs()
    assert run.outcome(6) == (1, 0)
    assert len([*run.launch.splitlines(), *run.commands]) <= 10  # what a person has written for the cluster
    run.diloco("log", "runs/long", "--verify")  # and its exit code is 0
