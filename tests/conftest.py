import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are tiny: a second thread costs more than it brings
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job ignores Ctrl-C, and so would islands
    signal.signal(signal.SIGINT, signal.default_int_handler)

from diloco.config.file import parse_config
from diloco.config.schema import Config

# Files that take longest come first, so that nobody waits for one of them at the end.
LONG = (
    "test_elastic_simulator.py", "test_launcher.py", "test_attach.py", "test_supervision.py", "test_mesh.py",
    "test_own_mesh.py", "test_virtual.py", "test_status.py", "test_soak_islands.py", "test_launched_loop.py",
    "test_volunteer.py", "test_integrations.py", "test_simulate_real.py", "test_launch.py", "test_live.py",
    "test_cli.py", "test_attack_pickles.py", "test_elastic_kills.py", "test_bench_peers.py", "test_hub.py",
    "test_trainer.py", "test_elastic_driver.py", "test_fuzz.py", "test_comm_libp2p.py", "test_api.py",
    "test_streams.py", "test_outsiders.py", "test_peer.py", "test_transport_contract.py", "test_algorithms.py",
    "test_checkpoint_pause.py", "test_checkpoint_flips.py", "test_api_restart.py", "test_history.py", "test_prove.py",
    "test_errors.py", "test_packaging.py", "test_slurm.py", "test_habits.py", "test_tickets.py",
    "test_attack_secrets.py", "test_light_commands.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


def pytest_collection() -> None:
    gc.disable()  # torch and thousands of tests stay: no pass of the garbage collector has to look at them


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


hypothesis.settings.register_profile("diloco", deadline=None)  # how long a case takes says nothing on a busy machine
hypothesis.settings.load_profile("diloco")
SMALL: dict[str, Any] = {
    "model": {"preset": "tiny", "blocks": 2, "width": 32, "heads": 2, "feed_forward": 64},
    "data": {"sequence": 32},
    "island": {"batch": 8, "device": "cpu"},
    "inner": {"lr": 3e-3, "warmup": 2, "steps": 12},
    "sync": {"every": 5},
    "evaluate": {"samples": 16},
    "log": {"every": 1},
}


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Config]:
    """A configuration that trains in a second; `small(inner={"steps": 4})` changes single keys."""

    def make(**sections: Any) -> Config:
        tree = {**SMALL, "checkpoint": {"dir": str(tmp_path / "run")}}
        for section, keys in sections.items():
            tree[section] = {**tree.get(section, {}), **keys} if isinstance(keys, dict) else keys
        return parse_config(tree)

    return make


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was trained to its end, for all tests that only read one: copy it to change it."""
    from trained_run import train

    folder = tmp_path_factory.mktemp("once") / "run"
    train(parse_config({**SMALL, "checkpoint": {"dir": str(folder), "snapshot_every": 1}}))
    return folder


@pytest.fixture
def run(trained_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_once, tmp_path / "run"))


@pytest.fixture
def log(small: Callable[..., Config]) -> tuple[Path, list[str]]:
    """Of an island that has committed eight rounds, three of them with snapshots; and the digest of each state."""
    from logs import write_island_log

    return write_island_log(small(checkpoint={"snapshot_every": 3, "keep": 0}))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Two with their daemons, for all tests of a module: a test that ends a daemon starts its own."""
    from transports import started_directories

    with started_directories(tmp_path_factory.mktemp("identities")) as started:
        yield started


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and codecs use no compiled loop from then on."""

    def use_torch() -> None:
        for place in ("dense.dense_kernels", "chunks.chunk_kernels", "sparse.chunk_kernels"):
            monkeypatch.setattr(f"diloco.comm.codec.{place}", lambda device: None)

    return use_torch


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """`command("export", run, "out")` in this process and in a folder of its own."""
    from trained_run import Command

    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)


def run_cli(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real command in a real process."""
    command = [sys.executable, "-m", "diloco", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def read_events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def swarm() -> Iterator[Any]:
    from swarm import Swarm
    from team import wait_until

    threads = threading.active_count()
    with closing(Swarm()) as made:
        yield made
    wait_until(lambda: threading.active_count() <= threads)  # whatever happened, no thread is left
