"""The headers of all rounds stay, whatever is pruned, torn or resumed; and `diloco log` shows them to people."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from alone import train
from logs import ROUNDS

from diloco.checkpoint.log.history import (
    HISTORY,
    ContributionHeader,
    HistoryFile,
    Line,
    Move,
    RoundHeader,
    chain_of,
    headers_in,
    read_headers,
    read_history,
)
from diloco.cli.history import show
from diloco.history.rounds import history_of
from diloco.report.tables import aligned
from diloco.run.names import Names


def digest(number: int, branch: str = "a") -> str:
    return f"{branch}{number}".rjust(64, "0")


def header(number: int, branch: str = "a", parent: str | None = None) -> RoundHeader:
    part = ContributionHeader("island", 10, 2, 10, loss=float(number))
    return RoundHeader(
        digest(number, branch), digest(number - 1, branch) if parent is None else parent, number, 1000 * number,
        number, 0, 10, 10 * number, 100, (part,), 1,
    )  # fmt: skip


def rounds(found: list[RoundHeader]) -> list[int]:
    return [each.round for each in found]


def test_what_is_written_is_read_back_and_nothing_is_there_twice(tmp_path):
    file = HistoryFile(tmp_path)
    for number in (1, 2, 2):
        file.append([header(number)])
    again = HistoryFile(tmp_path)
    assert not again.lacks(digest(2)) and again.lacks(digest(3))
    again.append([header(2)])
    again.append([header(3)])
    again.sync()
    assert read_headers(tmp_path) == [header(1), header(2), header(3)]


def test_a_torn_line_is_cut_off_and_garbage_is_passed_over(tmp_path):
    HistoryFile(tmp_path).append([header(1)])
    with (tmp_path / HISTORY).open("ab") as file:
        file.write(b"\0" * 100 + b"\n" + header(2).line()[:-20])
    assert rounds(read_headers(tmp_path)) == [1]
    file = HistoryFile(tmp_path)
    file.append([header(2)])
    assert rounds(read_headers(tmp_path)) == [1, 2]


def test_a_disk_that_refuses_loses_no_header_once_it_takes_them_again(tmp_path):
    file = HistoryFile(tmp_path)
    (tmp_path / HISTORY).mkdir()  # no file can be written there, not even by root
    file.append([header(1)])
    with pytest.raises(OSError, match="1 headers could not be written"):
        file.sync()
    (tmp_path / HISTORY).rmdir()
    file.append([header(2)])
    assert rounds(read_headers(tmp_path)) == [1, 2]


HOSTILE = {
    "a loss of 400 digits": {"contributions": [{**asdict(header(1).contributions[0]), "loss": 10**400}]},
    "tokens of 400 digits": {"tokens": 10**400},
    "a loss that is no number": {"contributions": [{**asdict(header(1).contributions[0]), "loss": float("nan")}]},
    "a loss without end": {"contributions": [{**asdict(header(1).contributions[0]), "loss": float("inf")}]},
    "committed in a year that no calendar has": {"time_ms": 2**63 - 1},
    "committed before there were people": {"time_ms": -(2**62)},
    "a name that no terminal can be sent": {"joined": ["\ud800"]},
    "no list of contributions": {"contributions": 7},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_header_that_a_peer_has_made_up_is_passed_over(what, tmp_path):
    """Whoever joins takes headers from a member, and everybody may look at them for ever after."""
    lines = header(1).line() + json.dumps({**asdict(header(2)), **HOSTILE[what]}).encode() + b"\n" + header(3).line()
    assert headers_in(lines) == [header(1), header(3)]
    (tmp_path / HISTORY).write_bytes(lines)
    assert len(show(history_of([tmp_path]), tmp_path, "run")) > 2


def test_lines_that_nest_without_end_are_passed_over():
    assert headers_in(b"[" * 100_000 + b"\n" + header(1).line()) == [header(1)]


def test_the_largest_figures_that_are_taken_can_be_shown(tmp_path):
    most, part = 2**63 - 1, replace(header(1).contributions[0], tokens=2**63 - 1, weight=2**63 - 1, loss=9e18)
    large = replace(
        header(1), time_ms=2**47 - 1, tokens=most, total_tokens=most, size=most, step=most, contributions=(part,) * 9
    )
    assert headers_in(large.line()) == [large]
    (tmp_path / HISTORY).write_bytes(large.line())
    found = history_of([tmp_path])
    assert len(show(found, tmp_path, "run")) > 2 and json.dumps(found.plain(), allow_nan=False)


@pytest.mark.parametrize("block", [7, 100, 1000, 1 << 20])
def test_of_a_long_history_only_the_end_is_read_back(tmp_path, monkeypatch, block):
    """As far as the log reaches, and no further; blocks that end anywhere in a line lose nothing."""
    HistoryFile(tmp_path).append([header(number) for number in range(1, 31)])
    with (tmp_path / HISTORY).open("ab") as file:
        file.write(header(31).line()[:-9])
    monkeypatch.setattr("diloco.checkpoint.log.history.BLOCK", block)
    again = HistoryFile(tmp_path, logged={digest(number) for number in range(25, 31)})
    assert not any(again.lacks(digest(number)) for number in range(25, 31))
    assert again.lacks(digest(1)) == (block < 1 << 20) and again.lacks(digest(31))
    again.append([header(31)])
    assert read_history(tmp_path) == [header(number) for number in range(1, 32)]


def test_what_is_kept_in_mind_does_not_grow_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco.checkpoint.log.history.KNOWN", 10)
    file = HistoryFile(tmp_path)
    for number in range(1, 31):
        file.append([header(number)])
    assert [file.lacks(digest(number)) for number in (1, 20, 21, 30)] == [True, True, False, False]
    assert rounds(read_headers(tmp_path)) == list(range(1, 31))


def test_a_line_that_was_torn_and_written_over_does_not_count(tmp_path):
    (tmp_path / HISTORY).write_bytes(header(1).line() + header(2).line()[:-30] + b"\n")
    file = HistoryFile(tmp_path)
    assert file.lacks(digest(2))
    file.append([header(2), header(3)])
    assert rounds(chain_of(read_history(tmp_path))) == [1, 2, 3]


def test_a_disk_that_fills_up_leaves_no_half_line_and_is_told_once(tmp_path):
    """In a process of its own: a limit on the size of files is that of a disk, and writes part of a line."""
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from test_history import HistoryFile, header, read_headers\n"
        "folder = Path(sys.argv[1]); file = HistoryFile(folder); file.append([header(1)])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3 * len(header(1).line()) // 2, resource.RLIM_INFINITY))\n"
        "for number in (2, 3, 4): file.append([header(number)])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "file.append([header(5)]); print(*[each.round for each in read_headers(folder)])"
    )
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=os.path.dirname(__file__))
    assert done.stdout.split() == ["1", "2", "3", "4", "5"], done.stderr
    assert done.stderr.count("cannot be written now") == 1


def test_the_chain_is_that_of_the_last_header():
    one, other = [header(number) for number in (1, 2, 3)], [header(2, "b", digest(1)), header(3, "b")]
    assert chain_of([*one, *other]) == [one[0], *other]


def branched(tmp_path, *more: RoundHeader) -> list[Line]:
    """Rounds 1 to 10, five of a branch that is undone, and the whole state of round 25 of another one."""
    file = HistoryFile(tmp_path)
    file.append([header(number) for number in range(1, 11)])
    file.append([header(11, "b", digest(10)), *(header(number, "b") for number in range(12, 16))])
    file.move(Move(digest(25), 25))
    file.append(more)
    return read_history(tmp_path)


def test_rounds_that_a_branch_has_undone_are_not_shown_as_the_chain(tmp_path):
    found = branched(tmp_path, header(26), header(27))
    assert rounds(chain_of(found)) == [26, 27]
    others = [header(number) for number in range(11, 26)]
    assert chain_of(found, others) == [header(number) for number in range(1, 28)]


def test_a_move_that_is_the_last_that_happened_ends_the_chain(tmp_path):
    found = branched(tmp_path)
    assert chain_of(found) == [] and rounds(chain_of(found, [header(25)])) == [25]


def test_headers_that_are_given_afterwards_fill_the_gap_and_end_nothing(tmp_path):
    found = branched(tmp_path, header(26), *(replace(header(number), added=True) for number in range(11, 26)))
    assert rounds(chain_of(found)) == list(range(1, 27))
    again = HistoryFile(tmp_path)
    again.append([header(27)])
    assert rounds(chain_of(read_history(tmp_path))) == list(range(1, 28))
    assert sum(isinstance(line, Move) for line in read_history(tmp_path)) == 1


def test_a_move_that_a_crash_has_cost_is_seen_by_the_parent_of_the_next_round(tmp_path):
    HistoryFile(tmp_path).append([header(1), header(2)])
    HistoryFile(tmp_path).append([header(6, "b")])
    assert rounds(chain_of(read_history(tmp_path))) == [6]


def test_going_back_to_an_own_record_undoes_what_came_after_it(tmp_path):
    file = HistoryFile(tmp_path)
    file.append([header(number) for number in (1, 2, 3)])
    file.move(Move(digest(2), 2))
    assert rounds(chain_of(read_history(tmp_path))) == [1, 2]


def test_a_gap_is_never_bridged_to_a_round_with_more_tokens():
    heavy = replace(header(2), total_tokens=1000)
    assert rounds(chain_of([header(1), heavy, header(6), header(7)])) == [1, 6, 7]


def test_a_gap_is_filled_by_others_or_stays_one():
    own, others = [header(1), header(2), header(6), header(7)], [header(number) for number in range(3, 7)]
    assert rounds(chain_of(own)) == [1, 2, 6, 7]
    assert rounds(chain_of(own, others)) == [1, 2, 3, 4, 5, 6, 7]
    assert chain_of([]) == []


def test_headers_stay_when_states_go_and_a_resume_adds_to_them(small, tmp_path, command):
    config = small(checkpoint={"keep": 1, "snapshot_every": 1}, sync={"every": 2})
    train(config, until=8)
    train(config, resume=True)
    log = tmp_path / "run" / "outer"
    last = read_headers(log)[-1].round
    found = history_of([log])
    assert rounds(found.rounds) == list(range(1, last + 1))
    assert found.states is not None and found.states[0] > 1 and found.states[1] == last
    assert all(part.tokens for each in found.rounds for part in each.contributions)
    text = command("log", tmp_path / "run").out
    assert "run" in text and f"states of rounds {found.states[0]} to {last} can be had" in text
    assert "earlier ones were removed (checkpoint.keep)" in text
    listed = json.loads(command("log", tmp_path / "run", "--json").out)
    assert [row["state"] for row in listed] == [row["round"] >= found.states[0] for row in listed]
    assert {name for row in listed for name in row["contributors"]} == {"run"}


def test_what_a_crash_has_cost_is_added_again_from_the_log(small, tmp_path):
    config = small(sync={"every": 2})
    train(config, until=8)
    path = tmp_path / "run" / "outer" / HISTORY
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]) + lines[-2][:40])
    train(config, resume=True)
    found = read_headers(path.parent)
    assert rounds(chain_of(found)) == list(range(1, found[-1].round + 1))
    assert len({each.digest for each in found}) == len(found)
    assert found[len(lines) - 2].total_tokens == json.loads(lines[-2])["total_tokens"]


def test_a_pipe_wraps_no_line_and_nothing_heavy_is_imported(log):
    folder, _ = log
    program = (
        "import sys; from diloco.cli import main; sys.argv = ['diloco', *sys.argv[1:]]\n"
        "try: main()\nfinally: print('imported:', *[n for n in ('torch', 'hivemind') if n in sys.modules])"
    )
    environment = {**os.environ, "COLUMNS": "40"}
    done = subprocess.run(
        [sys.executable, "-c", program, "log", str(folder.parent)], capture_output=True, text=True, env=environment
    )
    head, *rows, states, imported = done.stdout.splitlines()
    assert len(rows) == ROUNDS and len({len(row.split()) for row in rows}) == 1 and max(map(len, rows)) > 60
    assert head.split()[0] == "round" and states.startswith("states of rounds 0 to 8") and imported == "imported:"


def test_a_folder_of_an_earlier_version_has_the_rounds_that_its_log_still_has(log):
    folder, _ = log
    (folder / HISTORY).unlink()
    assert rounds(history_of([folder]).rounds) == list(range(1, ROUNDS + 1))


def test_where_two_share_a_name_the_key_stands_beside_it():
    names = Names({"12D3KooWabcdefgh": "one", "12D3KooWijklmnop": "one", "12D3KooWqrstuvwx": "two"})
    assert names.of("12D3KooWabcdefgh") == "one (abcdefgh)" and names.of("12D3KooWqrstuvwx") == "two"
    assert names.of("12D3KooWunknown0") == "unknown0"
    assert names.in_text("for 12D3KooWqrstuvwx and 12D3KooWijklmnop") == "for two and one (ijklmnop)"


def test_names_in_tables_do_not_move_the_cursor():
    assert aligned(("a", "name"), [(1, "evil\x1b[2J\n")]) == ["a  name", "1  evil\ufffd[2J\ufffd"]
