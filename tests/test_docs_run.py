"""The commands that README, getting started and the how-to guides show are run: real processes, with stand-ins for what
is a reader's own (a configuration, an address, a ticket), and shorter where they would train for minutes."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import GUIDES, ROOT, commands_in, words_of

pytestmark = pytest.mark.soak

CONFIG = """
run: NAME
model: {preset: tiny, blocks: 2, width: 32, heads: 2, feed_forward: 64}
data: {sequence: 32}
island: {batch: 8, device: cpu}
inner: {lr: 3e-3, warmup: 2, steps: 60}
sync: {every: 4, codec: int4}
evaluate: {samples: 16}
elastic: {min_islands: 2}
checkpoint: {snapshot_every: 5}
"""
FILES = {"run.yaml": CONFIG, "blocking.yaml": CONFIG, "streaming.yaml": CONFIG.replace("int4", "int4, fragments: 2")}
STAND_INS = {
    r"\bCONFIG\b": "run.yaml",
    r"\bADDRESS\b|192\.0\.2\.2": "127.0.0.1",
    r"\bTICKET\b|diloco1-\S+( …)?": "runs/NAME/ticket",
    r"s3://BUCKET/FOLDER": "file://{folder}/bucket",
    r"fsdp([= ])\d": r"fsdp\g<1>2",  # as many processes as this machine has cores
    r"island\.tp=2": "island.tp=1",
    r"--seeds 1000 --jobs 8": "--seeds 20 --jobs 2",
    r"virtual --islands 1000": "virtual --islands 50",
    r"restored 57": "restored 5",
    r"runs/…$": "runs/returned",
    r"…/runs": "runs",
}
SHORTER = {  # what else is set, by what a command begins with
    "diloco run examples/quickstart.yaml": {"inner.steps": 75, "evaluate.samples": 16},
    "diloco run examples/islands.yaml": {"inner.steps": 64, "evaluate.samples": 16},
    "diloco simulate examples/islands.yaml": {"inner.steps": 120, "evaluate.samples": 16},
}
BEFORE = {  # what a reader has done before, by the command that builds on it
    "diloco run run.yaml --resume": ["diloco run run.yaml"],
    "diloco run run.yaml --islands 4 --resume": ["diloco run run.yaml --islands 4"],
    "diloco restore": ["diloco run run.yaml --set checkpoint.remote=file://{folder}/bucket"],
}
NOT_RUN = {"diloco join runs/NAME/ticket --dir runs/restored": "its run has ended: test_checkpoint_remote.py joins so"}


class Reader:
    """Types one command after the other in one folder. A founder goes on in the background until somebody joined."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._founder: subprocess.Popen[str] | None = None
        for name, text in FILES.items():
            (folder / name).write_text(text)
        (folder / "examples").symlink_to(ROOT / "examples")

    def type(self, shown: str) -> None:
        command = shown
        for pattern, instead in STAND_INS.items():
            command = re.sub(pattern, instead, command)
        command = command.replace("{folder}", str(self.folder))
        if any(command.startswith(one) for one in NOT_RUN):
            return
        for start, earlier in BEFORE.items():
            if command.startswith(start):
                for one in earlier:
                    self._run(one.replace("{folder}", str(self.folder)))
        if " join " in command or " set " in command:
            self._need_a_founder(command)
        if "--islands 1 " in f"{command} " and " run " in command:
            self._found(command)
        else:
            self._run(command)
        if " join " in command:
            self.end_founder()

    def _need_a_founder(self, command: str) -> None:
        if self._founder is None:
            self._found(
                "diloco run run.yaml --islands 1" + (" --set elastic.min_islands=1" if " set " in command else "")
            )

    def _found(self, command: str) -> None:
        self.end_founder()
        self._founder = subprocess.Popen(
            self._words(command), cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self._founder.stdout is not None
        for line in self._founder.stdout:
            if "diloco join" in line:
                return
        raise AssertionError(f"{command}: printed no ticket")

    def end_founder(self) -> None:
        if self._founder is not None:
            founder, self._founder = self._founder, None
            founder.send_signal(signal.SIGINT)
            said, _ = founder.communicate(timeout=120)
            assert founder.returncode in (0, 130, -signal.SIGINT), said

    def _run(self, command: str) -> None:
        done = subprocess.run(
            self._words(command), cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=400, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"

    def _words(self, command: str) -> list[str]:
        program, *words = words_of(command)
        assert program == "diloco"
        fresh = words[0] == "run" and not {"--resume", "--fresh"} & set(words)
        more = [
            f"{key}={value}"
            for start, keys in SHORTER.items()
            if command.startswith(start)
            for key, value in keys.items()
        ]
        sets = [word for setting in more for word in ("--set", setting)]
        return [sys.executable, "-m", "diloco", *words, *sets, *(["--fresh"] if fresh else [])]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    one = Reader(tmp_path)
    yield one
    one.end_founder()


@pytest.mark.parametrize("guide", [page for page in GUIDES if commands_in(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_guide_work_one_after_the_other(reader: Reader, guide: Path) -> None:
    for command in commands_in(guide):
        reader.type(command)
