"""Islands with secrets, as `diloco run --attach` starts them: real processes, which can be killed and started again."""

import json
import os
import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import yaml
from conftest import SMALL, read_events
from forked import ForkedCommand
from launched import wait_until

from diloco.comm.peers.addressbook import free_port
from diloco.run.genesis import FILE
from diloco.run.secret import make_secrets

TINY = {
    **SMALL,
    "model": {"preset": "tiny", "blocks": 1, "width": 32, "heads": 2, "feed_forward": 64},
    "inner": {"lr": 3e-3, "warmup": 2, "steps": 20},
    "sync": {"every": 5},
    "evaluate": {"every": 0},
    "elastic": {"silence_s": 3, "start_s": 1800},
}


def free_ports(islands: int) -> int:
    """A port from which on two for each island are free now."""
    while True:
        first = free_port("127.0.0.1")
        with suppress(OSError, OverflowError):
            for port in range(first, first + 2 * islands):
                free_port("127.0.0.1", port)
            return first


class Attached:
    """The islands of one run, each with a folder and a secret; all processes end with the block."""

    def __init__(self, folder: Path, islands: int, **sections: dict[str, object]) -> None:
        self.folder, self._stack = folder, ExitStack()
        self.names = [f"island-{number}" for number in range(islands)]
        first = free_ports(islands)
        self.addresses = {name: f"127.0.0.1:{first + 2 * number}" for number, name in enumerate(self.names)}
        tree = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {**TINY, **sections}}
        self.config = folder / "run.yaml"
        self.config.write_text(yaml.safe_dump({**tree, "checkpoint": {"dir": str(folder / "run")}}))
        (folder / "secrets").mkdir(mode=0o700)
        for secret in make_secrets(self.names, self.addresses):
            secret.write(self.secret(secret.island))

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def secret(self, name: str) -> Path:
        return self.folder / "secrets" / name

    def island(self, name: str) -> Path:
        return self.folder / "run" / name

    def output(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def start(self, name: str, *options: str) -> ForkedCommand:
        words = ("run", str(self.config), "--attach", str(self.secret(name)), *options)
        process = ForkedCommand(*words, log=self.folder / f"{name}.log")
        self.ends(process)
        return process

    def ends(self, process: "subprocess.Popen[bytes] | ForkedCommand") -> None:
        """Kill a process at the end of the block."""
        self._stack.callback(kill, process)

    def events(self, name: str, kind: str) -> list[dict[str, object]]:
        file = self.island(name) / "events.jsonl"
        return [event for event in read_events(file) if event["event"] == kind] if file.exists() else []

    def rounds(self, name: str) -> list[list[str]]:
        """Who contributed to each round of which this island has heard."""
        return [event["contributors"] for event in self.events(name, "round")]  # type: ignore[misc]

    def is_training(self, name: str, rounds: int = 1) -> bool:
        return len([who for who in self.rounds(name) if who]) >= rounds

    def check_one_run(self) -> None:
        """One genesis with one founder, everybody contributed, nobody ever alone, and equal digests at the end."""
        records = {(self.island(name) / "outer" / FILE).read_bytes() for name in self.names}
        assert len(records) == 1
        genesis = json.loads(next(iter(records)).split(b"\n")[0])
        assert genesis["founder"] == json.loads(self.secret(self.names[0]).read_text())["islands"][self.names[0]]
        rounds = [who for name in self.names for who in self.rounds(name) if who]
        assert {each for who in rounds for each in who} == set(self.names)
        assert min(map(len, rounds)) > 1
        ends = {
            (event["round"], event["chain"], event["state"])
            for name in self.names
            for event in self.events(name, "agreed")[-1:]
        }
        assert len(ends) == 1


def kill(process: ForkedCommand) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for_end(*processes: ForkedCommand, timeout_s: float = 600.0) -> list[int | None]:
    wait_until(lambda: all(process.poll() is not None for process in processes), timeout_s)
    return [process.poll() for process in processes]
