"""Loops of one's own on several processes: FSDP2, tensor parallelism and copies, started by torchrun."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import read_events
from forked import run_ranks
from launched import wait_until
from own_loops import run_of
from team import PATIENT, Team

from diloco.config.schema import Config

pytestmark = pytest.mark.slow

WORKER = Path(__file__).parent / "own_mesh_worker.py"
EXAMPLES = WORKER.parent.parent / "examples"
ROUNDS, EVERY = 5, 4


def job_file(folder: Path, name: str, mesh: tuple[int, int], **job) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"mesh": mesh, "out": str(folder / f"{name}.out"), "name": name, **job}))
    return path


class Torchrun:
    """Islands as people start them; whatever happens, none of their processes stays."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack, self.folder = stack, folder

    def start(self, name: str, mesh: tuple[int, int], **job) -> subprocess.Popen[str]:
        path = job_file(self.folder, name, mesh, **job)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(mesh[0] * mesh[1])]
        command = [sys.executable, *torchrun, str(WORKER), str(path)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        process = self._stack.enter_context(
            subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
        )
        self._stack.callback(process.terminate)  # torchrun ends its processes
        return process

    @staticmethod
    def finish(*processes: subprocess.Popen[str]) -> None:
        """Wait for all; one that fails is told at once, as the others would wait for it."""
        assert wait_until(
            lambda: any(each.poll() for each in processes) or all(each.poll() == 0 for each in processes), 600
        )
        for process in processes:
            assert not process.poll(), process.stderr.read()[-4000:]


@pytest.fixture
def torchrun(tmp_path):
    with ExitStack() as stack:
        yield Torchrun(stack, tmp_path)


BOTH_KINDS = [((2, 1), (1, 2)), ((2, 2), (2, 2))]


@pytest.mark.cluster
@pytest.mark.parametrize(("one", "two"), BOTH_KINDS)
def test_two_islands_match_the_built_in_trainer(small, tmp_path, torchrun, one, two):
    """The same samples: outer parameters of five rounds, and what each process holds of them."""
    config: Config = small(
        inner={"steps": ROUNDS * EVERY, "clip": 0}, sync={"every": EVERY, "codec": "fp32"}, elastic=PATIENT,
        evaluate={"every": 0},
    )  # fmt: skip
    team = Team(config)
    team.run()
    tree = {**config.model_dump(mode="json"), "checkpoint": {"dir": str(tmp_path / "one")}}
    for name, batches in zip(("one", "two"), team.batches.values(), strict=True):
        torch.save([torch.cat(step) for step in batches], tmp_path / f"{name}.batches")
    job = {"loops": ["follow"], "config": tree}
    founder = torchrun.start("one", one, **job, batches=str(tmp_path / "one.batches"), dir=str(tmp_path / "one"))
    ticket = tmp_path / "one" / "ticket"
    assert wait_until(lambda: ticket.exists() or founder.poll() is not None)
    joiner = torchrun.start(
        "two", two, **job, batches=str(tmp_path / "two.batches"), dir=str(tmp_path / "two"), ticket=str(ticket)
    )
    torchrun.finish(founder, joiner)
    for name, mesh in (("one", one), ("two", two)):
        for rank in range(mesh[0] * mesh[1]):
            outer = torch.load(tmp_path / f"{name}.out.{rank}")
            assert [step for step, _ in outer] == [EVERY * number for number in range(1, ROUNDS + 1)]
            for (_, found), expected in zip(outer, team.outer, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    ends = [read_events(tmp_path / name / "events.jsonl")[-1] for name in ("one", "two")]
    assert ends[0]["event"] == "agreed" and len({(end["state"], end["chain"]) for end in ends}) == 1


@pytest.fixture(scope="module")
def found_by(tmp_path_factory) -> Callable[[tuple[int, int]], dict]:
    """What processes that were started once per mesh found: lives of an island, and what cannot work."""

    @cache
    def run(mesh: tuple[int, int]) -> dict:
        folder = tmp_path_factory.mktemp("mesh")
        config = run_of(folder, inner={"steps": 12}, elastic={"silence_s": 1})
        path = job_file(folder, "both", mesh, loops=["lives", "refusals"], config=config, dir=str(folder))
        run_ranks(WORKER, str(path), count=mesh[0] * mesh[1], log=folder / "output.log")
        return json.loads((folder / "both.out").read_text())

    return run


@pytest.mark.parametrize("mesh", [(2, 1), pytest.param((2, 2), marks=pytest.mark.soak)])
def test_an_island_that_is_started_again_equals_one_that_never_stopped(found_by, mesh):
    """Bit by bit, and each process with its own random numbers; of a model that is cut, and of copies."""
    found = found_by(mesh)["lives"]
    for kind in ("cut", "copied"):
        whole, before, after = (found[kind][name] for name in ("whole", "before", "after"))
        assert (whole["first"], before["first"], after["first"]) == (1, 1, 8)
        for rank, losses in enumerate(whole["losses"]):
            assert before["losses"][rank] + after["losses"][rank] == losses and len(losses) == 12
        assert whole["losses"][0] != whole["losses"][-1]
        assert after["outer"] == whole["outer"] and after["trained"] == whole["trained"]
        assert before["outer"] != before["trained"]  # it has stopped between two rounds
        assert before["seen"] != before["mine"]  # inside the context one sees the outer parameters, and only there
    first, last = (found["cut"][name] for name in ("before", "after"))
    assert first["losses"] != last["losses"]


def test_what_cannot_work_is_refused_on_every_process(found_by):
    both = {name: set(told) for name, told in found_by((2, 1))["refusals"].items()}
    assert 'run.batches(..., mesh=mesh["fsdp"])' in both["mesh"].pop()
    assert "batch_size=3 is to be a multiple of the mesh's 2 processes" in both["uneven"].pop()
    assert "different names or shapes" in both["stages"].pop()
    assert any("missing.yaml" in told for told in both["file"])
    assert not both["mesh"] and not both["uneven"] and not both["stages"]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_an_island_ends_when_one_of_its_processes_fails(tmp_path, torchrun, rank):
    process = torchrun.start("broken", (2, 1), loops=["broken"], config=run_of(tmp_path), breaks=rank)
    _, err = process.communicate(timeout=600)
    assert process.returncode != 0 and "this process has failed" in err
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert "end" not in {event["event"] for event in events}
    assert [event["step"] for event in events if event["event"] == "round" and event["contributors"]] == [4]


def example(name: str, processes: int, *words: str, cwd: Path, before: tuple[str, ...] = ()) -> str:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *torchrun, *before, str(EXAMPLES / name), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DILOCO_STEPS": "20"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_example_trains_on_a_mesh(tmp_path):
    path = EXAMPLES / "own_loop_mesh.py"
    out = run_ranks(path, "--tp", "2", "--steps", "30", count=2, log=tmp_path / "one.log")
    assert "the ticket in runs/own-loop-mesh/ticket" in out and "step 30: mean squared error 0.0" in out
    again = run_ranks(path, "--steps", "30", count=2, log=tmp_path / "other.log")  # cut in another way
    assert "resumes at step 30" in again


def test_torchtitan_takes_part_unmodified(tmp_path):
    for package in ("triton", "torchtitan"):  # not of `make install`: triton alone has 260 MB
        pytest.importorskip(package)
    out = example(
        "torchtitan_island.py", 2, "--parallelism.tensor_parallel_degree", "2", cwd=tmp_path,
        before=(str(WORKER.with_name("titan_on_cpu.py")),),
    )  # fmt: skip
    assert "the ticket in runs/torchtitan/ticket" in out
    events = read_events(tmp_path / "runs" / "torchtitan" / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "round" and event["contributors"]] == [10, 20]
    assert events[-1]["event"] == "agreed"
