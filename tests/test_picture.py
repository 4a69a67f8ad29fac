"""The picture of a run in a terminal: what is in it, at every width and height."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from diloco.report.picture import RunPicture, chosen, drawn, with_starting
from diloco.report.status import IslandStatus, RunStatus

NOW = 1_000_000.0
ONE = IslandStatus(
    "id-1", "island-1", "training", told_by="island-1", member=True, leads=True, round=69, step=1320, loss=2.4135,
    tokens_per_s=2070.0, share=1 / 3, bytes_sent=2_840_000, bytes_received=2_830_000,
)  # fmt: skip
TWO = replace(
    ONE, island="id-2", name="island-2", state="waiting", cause="round", waiting_for=("island-3",), since=NOW - 12,
    leads=False,
)  # fmt: skip
THREE = replace(ONE, island="id-3", name="island-3", state="lost", since=NOW - 40, text="it is silent", leads=False)
RUN = RunStatus(
    "islands", "id-1", NOW, round=69, step=1320, steps=4000, phase="collecting", phase_since=NOW - 2.0, round_s=3.7,
    eta_s=155.0, loss=2.391, islands=(ONE, TWO, THREE),
)  # fmt: skip


def lines_of(status: RunStatus, width: int = 140, height: int = 40) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    console.print(*drawn(status, now=NOW, width=width, height=height), sep="\n")
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def test_it_says_how_far_the_run_is_and_what_each_island_does():
    bar, next_round, head, one, two, three = lines_of(RUN)
    assert bar.startswith("step 1320/4000") and "ETA 2:35 min  loss 2.3910  4.14k tokens/s" in bar and "━" in bar
    assert next_round == "round 70: collecting for 2.0 s, next round in about 1.7 s"
    assert head.split() == ["island", "state", "for", "round", "step", "loss", "tokens/s", "share", "sent", "received"]
    assert one.split()[:4] == ["island-1", "training", "69", "1320"] and one.endswith("leads")
    assert "33%  2.71 MiB   2.7 MiB" in one
    assert two.startswith("island-2  waiting for island-3  12 s")
    assert three.startswith("island-3  lost                  40 s") and three.endswith("it is silent")


def test_a_round_that_is_late_says_by_how_much():
    late = replace(RUN, phase_since=NOW - 10.0)
    assert lines_of(late)[1] == "round 70: collecting for 10 s, 6.3 s longer than usual"
    assert lines_of(replace(late, phase="exchanging"))[1] == "round 70: exchanging for 10 s"


@pytest.mark.parametrize("width", [20, 28, 40, 60, 80, 100, 140, 200])
def test_at_every_width_no_line_is_wrapped(width):
    lines = lines_of(RUN, width)
    assert len(lines) == 6 and all(len(line) <= width for line in lines)
    assert all(line.startswith("island") for line in lines[-3:])
    assert "loss" in lines[2] or width < 80


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "x" * 300, "島" * 40, "[bold]"])
def test_a_name_of_ill_will_breaks_no_line(name):
    lines = lines_of(replace(RUN, islands=(ONE, replace(TWO, name=name), THREE)), 60)
    assert len(lines) == 6 and "\x1b" not in "".join(lines)


def test_of_many_islands_those_in_trouble_are_shown_and_the_others_counted():
    many = [replace(ONE, island=f"id-{n}", name=f"island-{n:02}") for n in range(40)]
    many[33] = replace(THREE, island="id-33", name="island-33")
    shown, left = chosen(many, "id-7", 3)
    assert [each.name for each in shown] == ["island-07", "island-33"] and left == "and 38 more islands: 38 training"
    lines = lines_of(replace(RUN, islands=tuple(many)), height=12)
    assert len(lines) == 12 and lines[-1] == "… and 32 more islands: 32 training"


def test_islands_that_have_not_said_anything_yet_are_starting():
    found = with_starting(None, "r", ["island-1"], NOW)
    assert found is not None and [each.state for each in found.islands] == ["starting"]
    ended = replace(RUN, islands=(ONE, replace(TWO, state="ended")))
    found = with_starting(ended, "r", ["island-2", "island-4"], NOW)
    assert found is not None
    assert [(each.name, each.state) for each in found.islands] == [
        ("island-1", "training"), ("island-2", "starting"), ("island-4", "starting"),
    ]  # fmt: skip


def test_a_run_that_is_over_promises_no_next_round():
    over = replace(RUN, finished=True, islands=tuple(replace(each, state="ended") for each in RUN.islands))
    assert lines_of(over)[1].startswith("round 69, finished; last heard") and "ETA" not in lines_of(over)[0]


def test_the_answer_to_ctrl_c_is_below_all_else():
    console = Console(file=io.StringIO(), width=80, highlight=False)
    picture = RunPicture(lambda: RUN, notice=lambda: "finishing this step")
    console.print(picture)
    assert console.file.getvalue().splitlines()[-1].strip() == "finishing this step"
