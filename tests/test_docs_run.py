"""The commands that README, getting started and the how-to guides show are run: real processes, with stand-ins for what
is a reader's own (a configuration, an address, a ticket), and shorter where they would train for minutes."""

import os
import re
import signal
import subprocess
import sys
import time
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
STREAMING = CONFIG.replace("NAME", "OTHER").replace("int4", "int4, fragments: 2")
FILES = {"run.yaml": CONFIG, "blocking.yaml": CONFIG, "streaming.yaml": STREAMING}
STAND_INS = {
    r"\bCONFIG\b": "run.yaml",
    r"\bADDRESS\b|192\.0\.2\.2": "127.0.0.1",
    r"\bTICKET\b|diloco2-\S+( …)?": "runs/NAME/ticket",
    r"--for KEY": "--for 12D3KooW9vqpp6fbxbhXwxgybSRKRJprpbHvzHFcxpdUDTWXKZJV",
    r"s3://BUCKET/FOLDER": "file://{folder}/bucket",
    r"fsdp([= ])\d": r"fsdp\g<1>2",  # as many processes as this machine has cores
    r"island\.tp=2": "island.tp=1",
    r"--seeds 1000 --jobs 8": "--seeds 20 --jobs 2",
    r"virtual --islands 1000": "virtual --islands 50",
    r"restored 57": "restored 16 --set inner.steps=120",  # the last round that a run of sixty steps has
    r"runs/…$": "runs/returned",
    r"…/runs": "runs",
    r"evict RUN NAME": "evict NAME island-2",
    r"force-roster RUN": "force-roster NAME",
}
SHORTER = {  # what else is set, by what a command begins with
    "diloco run examples/quickstart.yaml": {"inner.steps": 75, "evaluate.samples": 16},
    "diloco run examples/islands.yaml": {"inner.steps": 64, "evaluate.samples": 16},
    "diloco simulate examples/islands.yaml": {"inner.steps": 120, "evaluate.samples": 16},
}
BEFORE = {  # what a reader has done before, by the command that builds on it
    "diloco run run.yaml --resume": ["diloco run run.yaml"],
    "diloco run run.yaml --islands 4 --resume": ["diloco run run.yaml --islands 4"],
    "diloco rewind NAME 12 --set inner.lr=1e-4": ["diloco run run.yaml"],
    "diloco evict NAME island-2": ["diloco run run.yaml --islands 3"],
}
NOT_RUN = (
    "diloco join runs/NAME/ticket --dir runs/restored",  # its run has ended, and no other test does it
    "diloco ticket revoke NAME ID",  # the id is chance
    "diloco launch",  # tests/test_launch.py and its like do
    "diloco run run.yaml --attach",  # tests/test_attach.py does
)


class Reader:
    """Types one command after the other in one folder. A founder goes on in the background until somebody joined."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._founder: subprocess.Popen[bytes] | None = None
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
        for earlier in BEFORE.get(command.partition(" #")[0].strip(), ()):
            self._run(earlier)
        kind = words_of(command)[1]
        if (kind in ("join", "set") or command.startswith("diloco doctor runs")) and self._founder is None:
            alone = " --set elastic.min_islands=1 --set inner.steps=100000" if kind != "join" else ""
            self._found("diloco run run.yaml --islands 1" + alone)
        if kind == "run" and "--islands 1 " in f"{command} ":
            self._found(command)
        elif kind == "join":
            self._leave(command, self._start(command, r"^round +\d|: witness from round"))
            self.end_founder()
        else:
            self._run(command)

    def _found(self, command: str) -> None:
        self.end_founder()
        self._founder = self._start(command, "diloco join")

    def end_founder(self) -> None:
        if self._founder is not None:
            founder, self._founder = self._founder, None
            self._leave("the founder", founder)

    def _start(self, command: str, until: str) -> subprocess.Popen[bytes]:
        """In the background, as soon as it has printed a line that says it is there."""
        said = self.folder / f"output-{len(list(self.folder.glob('output-*')))}"
        with said.open("wb") as out:
            process = subprocess.Popen(self._words(command), cwd=self.folder, stdout=out, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 240
        while re.search(until, said.read_text(), re.MULTILINE) is None:
            assert process.poll() is None and time.monotonic() < deadline, f"{command}\n{said.read_text()}"
            time.sleep(0.2)
        return process

    @staticmethod
    def _leave(what: str, process: subprocess.Popen[bytes]) -> None:
        """By Ctrl-C, or because its run has ended."""
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) in (0, 130, -signal.SIGINT), what

    def _run(self, command: str) -> None:
        done = subprocess.run(
            self._words(command), cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=400, input="y\n", env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}"

    def _words(self, command: str) -> list[str]:
        program, *words = words_of(command)
        assert program == "diloco"
        fresh = words[0] == "run" and not {"--resume", "--fresh"} & set(words)
        short = [keys for start, keys in SHORTER.items() if command.startswith(start) and "--islands 1 " not in command]
        sets = [word for keys in short for key, value in keys.items() for word in ("--set", f"{key}={value}")]
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
