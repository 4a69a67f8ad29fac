"""What several islands tell, put together: lines, a table, an account at the end."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from events import a_round, told

from diloco.report.board import ECHO_S, HOLD_S, Board, Row, account
from diloco.report.events import End, Event, Wait
from diloco.report.live import open_islands_view
from diloco.report.terminal import sentence
from diloco.report.watching import IslandsView, Tail
from diloco.train.rounds import roster_events

ONE, TWO = "island-1", "island-2"


def validation(number: int, step: int, loss: float, **more: object) -> Event:
    return told("validation", round=number, step=step, validation_loss=loss, **more)


def agreed(state: str, round: int = 3) -> Event:
    return told("agreed", round=round, chain="c" * 64, state=state * 64)


@pytest.fixture
def board() -> Board:
    made = Board.of([ONE, TWO])
    made.hear(ONE, told("start", steps=40, every=10))
    return made


def test_a_row_follows_its_island_and_steps_make_no_lines(board):
    assert board.hear(ONE, told("step", step=6, loss=None, tokens_per_s=1500.0)) == []
    assert board.hear(ONE, told("step", step=7, loss=2.5, tokens_per_s=1500.0)) == []
    board.hear(ONE, a_round(3, ONE, at=1, step=10))
    assert [row.state for row in board.rows.values()] == ["training", "starting"]


def test_a_round_is_one_line_whoever_tells_it(board):
    lines = board.hear(ONE, a_round(2, ONE, TWO, at=10, step=10))
    lines += board.hear(TWO, a_round(2, ONE, TWO, at=10, step=10))
    lines += board.hear(ONE, validation(2, 10, 4.25))
    lines += board.hear(TWO, a_round(3, ONE, at=12, step=20))
    lines += board.hear(ONE, a_round(4, ONE, TWO, at=17, step=30))
    assert lines == [
        "round   2  step    10  island-1, island-2  validation loss 4.2500",
        "round   3  step    20  island-1  5.0 steps/s",
    ]
    assert board.flush() == ["round   4  step    30  island-1, island-2  2.0 steps/s"]


def test_the_pace_of_fragments_is_that_of_a_whole_phase(board):
    """They are committed one soon after the other: between two of them is no time that says anything."""
    for number, step, at in ((2, 5, 10.0), (3, 10, 20.0), (4, 15, 20.1), (5, 15, 20.2), (6, 20, 25.0)):
        lines = board.hear(ONE, a_round(number, ONE, at=at, step=step))
        assert all("steps/s" not in line or number > 4 for line in lines)
    assert lines == ["round   5  step    15  island-1  1.0 steps/s"]
    assert board.flush() == ["round   6  step    20  island-1  2.0 steps/s"]


def test_a_phase_that_is_a_time_has_a_pace_too(board):
    board.hear(TWO, told("start", steps=40, every="60s"))
    board.hear(ONE, a_round(2, ONE, at=10.0, step=10))
    board.hear(ONE, a_round(3, ONE, at=12.0, step=14))
    assert board.flush() == ["round   3  step    14  island-1  2.0 steps/s"]


def test_a_run_that_its_owner_prolongs_is_not_finished_where_it_would_have_been(board):
    longer = told("amended", number=1, text="inner.steps=80", steps=80)
    assert board.hear(ONE, longer) == ["by the run's owner: inner.steps=80"]
    assert board.hear(TWO, longer) == []
    board.hear(ONE, a_round(2, ONE, at=10.0, step=40))
    assert not board.finished
    board.hear(ONE, a_round(3, ONE, at=20.0, step=80))
    assert board.finished


def test_a_round_waits_for_its_validation_but_not_for_ever(board):
    board.hear(ONE, a_round(2, ONE, at=10, step=10))
    assert board.tick(10 + HOLD_S) == []
    assert board.tick(10.1 + HOLD_S) == ["round   2  step    10  island-1"]
    assert board.tick(20 + HOLD_S) == []


def test_the_same_round_on_another_branch_is_told(board):
    board.hear(ONE, a_round(2, ONE, at=10, step=10, digest="one side"))
    assert board.hear(TWO, a_round(2, TWO, at=11, step=10, digest="the other")) == ["round   2  step    10  island-1"]


def test_a_round_that_only_hands_out_samples_is_nobodys(board):
    board.hear(ONE, a_round(2, ONE, at=10, step=10))
    assert board.hear(ONE, a_round(3, at=19, step=10)) == ["round   2  step    10  island-1"]
    assert board.hear(ONE, a_round(4, ONE, at=20, step=20)) == []
    assert board.flush() == ["round   4  step    20  island-1  1.0 steps/s"]
    assert "  island-1 contributed to 2 of 2 rounds" in account(board)


def test_a_loss_that_everybody_notices_is_told_once(board):
    lost = told("elastic", 100.0, what="lost", island="island-3", text="round 7 goes on without it")
    assert board.hear(ONE, lost) == ["island-3 lost: round 7 goes on without it"]
    assert board.hear(TWO, replace(lost, time=101.0)) == []
    assert board.hear(TWO, replace(lost, time=101.0 + ECHO_S)) == ["island-3 lost: round 7 goes on without it"]


def test_goodbyes_at_the_end_are_no_news(board):
    goodbye = told("elastic", 100.0, what="left", island=TWO, text="leaves")
    assert board.hear(ONE, goodbye) == ["island-2 left"]
    board.hear(ONE, a_round(9, ONE, at=200, step=40))
    assert board.hear(ONE, replace(goodbye, time=201.0)) == []


def test_who_joins_from_elsewhere_is_told_and_who_is_watched_here_tells_it_itself(board):
    guest = told("elastic", 100.0, what="joined", island="guest", text="3 in the roster")
    assert board.hear(ONE, guest) == ["guest joined: 3 in the roster"] and board.hear(TWO, guest) == []
    own = replace(guest, island=TWO)
    assert board.hear(ONE, own) == [] and board.hear(TWO, own) == ["island-2 joined: 3 in the roster"]


def finish(board: Board, one: str, two: str) -> None:
    board.hear(ONE, validation(1, 0, 5.5))
    board.hear(ONE, a_round(2, ONE, at=10, step=20))
    board.hear(TWO, a_round(3, ONE, TWO, "guest", at=11, step=40))
    board.hear(ONE, validation(3, 40, 2.25))
    for name, state in ((ONE, one), (TWO, two)):
        board.hear(name, told("end", step=40, finished=True))
        board.hear(name, agreed(state))


def test_the_account_names_rounds_shares_restarts_and_equal_digests(board):
    board.again(TWO)
    finish(board, "a", "a")
    assert board.finished and board.agree
    assert account(board) == [
        "done: step 40, round 3, validation loss 5.500 -> 2.250",
        "  island-1 contributed to 2 of 2 rounds",
        "  island-2 contributed to 1 of 2 rounds, started again 1 time",
        "  guest contributed to 1 of 2 rounds",
        "digests equal on island-1, island-2: round 3, chain cccccccccccc, state aaaaaaaaaaaa",
    ]


def test_the_account_of_a_run_that_is_resumed_covers_earlier_starts(board):
    for event in (validation(1, 0, 5.5), a_round(2, ONE, at=10, step=20), a_round(2, ONE, at=10, step=20)):
        board.remember(event)
    assert board.flush() == [] and not board.finished
    board.paused = True
    assert account(board)[0] == "paused: step 20, round 2"
    board.hear(ONE, a_round(3, ONE, at=500, step=40))
    assert board.hear(ONE, validation(3, 40, 2.25)) == ["round   3  step    40  island-1  validation loss 2.2500"]
    assert account(board)[:2] == [
        "done: step 40, round 3, validation loss 5.500 -> 2.250",
        "  island-1 contributed to 2 of 2 rounds",
    ]


def test_islands_that_differ_are_named(board):
    finish(board, "a", "b")
    assert not board.agree
    differing = "digests DIFFER: island-1 round 3 state aaaaaaaaaaaa; island-2 round 3 state bbbbbbbbbbbb"
    assert account(board)[-1] == differing


def test_islands_that_end_at_different_rounds_do_not_differ(board):
    finish(board, "a", "a")
    board.hear(TWO, agreed("b", round=4))
    assert board.agree
    assert account(board)[-1] == "digests: no two islands ended at the same round, so there is nothing to compare"


def test_who_left_before_the_end_is_not_compared(board):
    finish(board, "a", "b")
    board.rows[TWO].finished = False
    assert board.agree
    assert account(board)[-1].startswith("digests: only island-1 saw the end, so there is nothing to compare: round 3")


def test_a_run_without_an_end_has_no_agreement(board):
    assert not board.finished and not board.agree
    assert account(board)[0] == "stopped: step 0, round 0"
    assert account(board)[-1] == "digests: compared when the run has ended"


def test_an_island_that_starts_again_has_nothing_to_show_from_its_last_life(board):
    board.again(ONE)
    assert board.rows[ONE] == Row(ONE, "starting", restarts=1)
    assert board.rows[ONE].restarts == 1


def test_an_island_by_itself_tells_of_the_others_too():
    assert sentence(told("ticket", file="runs/a/ticket")) == "others join with: diloco join runs/a/ticket"
    lost = told("elastic", what="lost", island=TWO, text="round 7 goes on without it")
    assert sentence(lost) == "island-2 lost: round 7 goes on without it"
    assert sentence(a_round(3, ONE, step=20, islands=1)) is None
    assert sentence(a_round(3, TWO, step=20, islands=2)) == "round   3  step    20  island-2"
    assert sentence(a_round(3, ONE, TWO, step=20, islands=2)) == "round   3  step    20  island-1, island-2"
    assert str(sentence(a_round(3, *"abcdefg", step=20, islands=7))).endswith("7 islands")


def test_a_round_that_is_validated_here_is_told_once():
    assert sentence(a_round(3, ONE, TWO, step=20, islands=2, validated=True)) is None
    loss = "round   3  step    20  island-1, island-2  validation loss 2.2500"
    assert sentence(validation(3, 20, 2.25, contributed=(ONE, TWO), islands=2)) == loss
    assert sentence(validation(3, 20, 2.25, contributed=(ONE,), islands=1)) == loss.replace("island-1, island-2  ", "")


def test_members_that_come_and_go_are_told_by_name_unless_that_was_noted():
    views = {name: SimpleNamespace(left=name == "said goodbye") for name in ("me", "stays", "silent", "said goodbye")}
    driver = SimpleNamespace(node=SimpleNamespace(me="me", peers=SimpleNamespace(views=views)))
    changes = roster_events(driver, ("stays", "silent", "said goodbye"), ("me", "stays", "new"), str.upper)
    assert [(change.what, change.island) for change in changes] == [("joined", "NEW"), ("gone", "SILENT")]
    assert sentence(changes[0]) == "NEW joined: 3 in the roster"


def test_a_tail_waits_for_whole_lines_and_skips_what_a_killed_writer_left(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    wait, end = Wait(time=1.0, seconds=2.5), End(time=2.0, step=7)
    first, second = (json.dumps(event.plain()) for event in (wait, end))
    path.write_text(f"{first}\n{second[:9]}")
    assert tail.read() == [wait]
    with path.open("a") as file:
        file.write(f"{second[9:]}\n{{half\n{first}\n")
    assert tail.read() == [end, wait]
    assert tail.read() == []


def test_without_a_terminal_there_is_no_table(board):
    out = io.StringIO()
    view = open_islands_view(lambda: None, stream=out)
    assert isinstance(view, IslandsView)
    view.show(board.rows.values())
    view.say("island-2 joined [red]")
    assert out.getvalue() == "island-2 joined [red]\n"
