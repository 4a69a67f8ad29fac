"""Run folders that earlier versions have written: continued, or refused in one line where the protocol was another.

`tests/write_fixtures.py` wrote them.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import read_events, run_cli
from trained_run import Command

from diloco.checkpoint.log.replica import vectors_digest
from diloco.checkpoint.save.facts import read_facts, saves
from diloco.history.log import headers, newest_state, state_of
from diloco.version import PROTOCOL

DATA = Path(__file__).parent / "data"
VERSIONS = ["0.2.0"]  # that this one continues
REFUSED = {"0.1.0": 4}  # and those of another protocol
MORE_STEPS = 13


def copied(version: str, place: Path) -> Path:
    """A copy of all that a version wrote. Git keeps no modes, and keys that others can read are refused."""
    folder = Path(shutil.copytree(DATA / version, place / version))
    for key in folder.rglob("*.key"):
        key.chmod(0o600)
    return folder


@pytest.fixture(params=VERSIONS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return copied(request.param, tmp_path)


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def train(folder: Path, *arguments: str) -> str:
    done = run_cli("run", *arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def succeed(command: Command, old: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A command that does not train, in the old folder and without a process of its own."""
    monkeypatch.chdir(old)

    def run(*arguments: str) -> str:
        said = command(*arguments)
        assert said.code == 0 and re.fullmatch(r"(note: the model of step \d+, round \d+\n)?", said.err), said
        return said.out

    return run


def verify(succeed: Callable[..., str]) -> dict[str, dict[str, object]]:
    """What `diloco log --verify` found in each island's log."""
    found = json.loads(succeed("log", "pair", "--verify", "--json"))
    assert [log["problems"] for log in found.values()] == [[], []]
    return {Path(name).parent.name: log for name, log in found.items()}


def chain(folder: Path, name: str = "island-1") -> dict[int, str]:
    """Digests of an island's records, by round."""
    return {row.round: row.digest for row in headers(folder / "pair" / name / "outer")}


def test_there_is_a_folder_of_every_released_version():
    assert sorted(path.parent.name for path in DATA.glob("*/digests.json")) == sorted([*VERSIONS, *REFUSED])


COMMANDS = [
    "log pair",
    "log pair --verify",
    "log pair/island-1 --checkout 3 out",
    "export pair out",
    "sample pair Hello --tokens 2 --device cpu",
    "rewind pair 3 out",
    "set pair inner.lr=0.001",
    "run pair.yaml --resume",
    "run pair.yaml --islands 2 --resume",
    "run pair.yaml --islands 1 --resume --set checkpoint.dir=pair/island-1",
    "join TICKET --dir pair/island-2",
]


@pytest.mark.parametrize("version", REFUSED)
@pytest.mark.parametrize("asked", COMMANDS)
def test_a_folder_of_another_protocol_is_refused_in_one_line_before_anything_is_written(
    asked: str, version: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(version, tmp_path)
    monkeypatch.chdir(folder)
    before = contents(folder)
    said = command(*asked.replace("TICKET", Path("pair/ticket").read_text().strip()).split())
    assert said.code == 2 and said.out == ""
    (line,) = said.err.strip().splitlines()
    if asked.startswith("join"):  # its ticket says so already
        assert "of diloco with protocol 6 or before" in line
    else:
        assert "pair/island-" in line and f"speaks protocol {REFUSED[version]}, this diloco {PROTOCOL}" in line
        assert line.endswith(f"diloco {version} reads it")
    assert contents(folder) == before


def test_what_an_island_alone_saved_without_a_log_is_still_exported(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
):
    """0.1.0 kept no log of it: there are only saves, and these have no protocol."""
    monkeypatch.chdir(copied("0.1.0", tmp_path))
    assert command("export", "alone", "model").code == 0
    assert (Path("model") / "model.safetensors").exists()


@pytest.mark.soak
def test_an_island_alone_trains_on_to_its_end(old: Path, succeed: Callable[..., str]):
    before = read_facts(saves(old / "alone")[-1])
    assert before["step"] % 5, "it was stopped in the middle of a phase"
    end = before["step"] + MORE_STEPS
    out = train(old, "alone.yaml", "--resume", "--set", f"inner.steps={end}")
    assert f"step {end:5}/{end}" in out
    after = read_facts(saves(old / "alone")[-1])
    assert (after["step"], after["outer_step"]) == (end, end) and after["round"] > before["round"]
    events = read_events(old / "alone" / "events.jsonl")
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == [*range(1, end + 1)]  # none lost, none twice
    told = {event["event"]: event for event in events}
    assert told["end"]["finished"]
    assert "whole: " in succeed("log", "alone", "--verify")


@pytest.mark.parametrize("run", ["alone", "pair"])
def test_a_run_is_exported_and_sampled(old: Path, succeed: Callable[..., str], run: str):
    succeed("export", run, "model")
    assert json.loads((old / "model" / "config.json").read_text())["hidden_size"] == 16
    assert (old / "model" / "model.safetensors").stat().st_size > 16 * 256
    text = succeed("sample", run, "Licensed under", "--tokens", "8", "--seed", "1", "--device", "cpu")
    assert text.startswith("Licensed under") and len(text) > len("Licensed under")


def test_a_log_is_whole_and_leads_to_the_digests_of_then(old: Path, succeed: Callable[..., str]):
    known = json.loads((old / "digests.json").read_text())["pair"]
    found = verify(succeed)
    assert {name: log["last"] for name, log in found.items()} == {name: then["round"] for name, then in known.items()}
    assert all(log["digests"] > 0 and log["snapshots"] > 1 for log in found.values())
    for name, then in known.items():
        log = old / "pair" / name / "outer"
        head = newest_state(log).head
        vectors = vectors_digest(state_of(log, head.round)[1])
        assert {"round": head.round, "chain": head.digest, "vectors": vectors} == then
        assert chain(old, name)[head.round] == head.digest


@pytest.mark.soak
def test_two_islands_go_on_to_their_end_with_equal_digests(old: Path, succeed: Callable[..., str]):
    before = chain(old)
    out = train(old, "pair.yaml", "--islands", "2", "--resume")
    assert "digests equal on island-1, island-2" in out
    events = {name: read_events(old / "pair" / name / "events.jsonl") for name in ("island-1", "island-2")}
    agreed = [[event for event in told if event["event"] == "agreed"][-1] for told in events.values()]
    assert len({(event["round"], event["chain"], event["state"]) for event in agreed}) == 1
    assert agreed[0]["round"] > max(before)
    assert {round: digest for round, digest in chain(old).items() if round in before} == before
    assert {log["last"] for log in verify(succeed).values()} == {agreed[0]["round"]}
    assert all([event["finished"] for event in told if event["event"] == "end"][-1] for told in events.values())
