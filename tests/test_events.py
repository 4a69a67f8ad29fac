"""Events are typed: what is written is read back, old lines and new fields are borne, and words are explained."""

import ast
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from conftest import read_events
from events import told

from diloco.report.events import KINDS, NEWS, Event, IslandNews, Round, Step, of_kind, read_event
from diloco.report.sinks import Events, JsonLines
from diloco.report.watching import Tail

ROOT = Path(__file__).parent.parent
NOTING = ("note", "report", "_report", "Note", "IslandNews")  # functions whose first text is a word of NEWS
NO_NEWS = {"note", "report", "begin", "commit", "dies", "fetched", "hello"}  # diloco/bench/crew.py speaks to itself


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_back_as_the_same_type(tmp_path, kind):
    event = told(kind, 12.5)
    events = Events([JsonLines(tmp_path / "events.jsonl")])
    events.emit(event)
    events.close()
    (line,) = read_events(tmp_path / "events.jsonl")
    assert line["event"] == kind and line["v"] == event.version
    assert Tail(tmp_path / "events.jsonl").read() == [event]


def test_a_line_of_an_earlier_version_and_one_with_a_new_field_are_read():
    old = {"event": "step", "time": 1.0, "step": 3, "loss": None, "tokens_per_s": 10.0}
    assert read_event(old) == Step(time=1.0, step=3, loss=None, tokens_per_s=10.0)
    assert read_event({**old, "v": 1, "temperature": 40}) == read_event(old)


@pytest.mark.parametrize(
    "line",
    [
        7, [], {}, {"event": "dance", "time": 1.0}, {"event": ["step"]},
        {"event": "step", "time": 1.0}, {"event": "wait", "v": 2, "time": 1.0, "seconds": 1.0},
        {"event": "wait", "v": "1", "time": 1.0, "seconds": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_event_or_of_a_later_version_is_passed_over(line):
    assert read_event(line) is None


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "data").glob("0.2.0/**/events.jsonl")), ids=str)
def test_the_events_of_earlier_versions_can_be_read(path):
    found = Tail(path).read()
    assert len(found) == len(path.read_text().splitlines())
    assert of_kind(found, Round)


def test_lists_become_tuples_so_that_events_can_be_compared():
    line = json.loads(json.dumps(told("round", contributors=("a", "b"), samples=(((0, 8),),)).plain()))
    event = read_event(line)
    assert isinstance(event, Round) and event.contributors == ("a", "b")


def test_every_field_of_every_event_is_explained():
    for kind in KINDS.values():
        assert issubclass(kind, Event) and kind.__doc__
        hints = {name: hint for each in kind.__mro__ for name, hint in getattr(each, "__annotations__", {}).items()}
        for each in fields(kind):
            assert hints[each.name].__metadata__[0].endswith((".", "…")), f"{kind.__name__}.{each.name}"


def words_noted() -> set[str]:
    """The words by which the product reports what happens to islands, found in its calls."""
    rooms = ("elastic", "checkpoint", "comm", "diloco/run", "diloco/train")
    found = set()
    for file in (file for room in rooms for file in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in NOTING:
                first = node.args[0] if node.args else None
                found |= {each.value for each in ast.walk(first) if isinstance(each, ast.Constant)} if first else set()
    return {word for word in found if isinstance(word, str) and word.replace(" ", "").isalpha()}


def test_every_word_for_what_happens_to_an_island_is_explained():
    assert len(words_noted()) > 20
    assert words_noted() - NO_NEWS <= NEWS.keys() | {"elastic"}
    assert IslandNews.kind == "elastic"


def test_part_of_a_line_that_a_full_disk_took_leaves_no_hole(tmp_path):
    """In a process of its own: a limit on the size of files is that of a disk, and writes part of a line."""
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from diloco.report.events import Note\n"
        "from diloco.report.sinks import JsonLines\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "path = Path(sys.argv[1]); path.write_text('of an earlier run'); file = JsonLines(path)\n"
        "file.emit(Note(time=1.0, text='first')); size = path.stat().st_size\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))\n"
        "file.emit(Note(time=2.0, text='second')); assert path.stat().st_size == size\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "file.emit(Note(time=3.0, text='third'))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "events.jsonl")], check=True)
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(each["event"], each.get("text", each.get("events"))) for each in told] == [
        ("note", "first"), ("lost", 1), ("note", "third"),
    ]  # fmt: skip
