"""`diloco bench sizes`: what it makes of an island's events. Its real runs want a GPU, or take a minute."""

import pytest

from diloco.bench import sizes
from diloco.bench.memory import Peak
from diloco.report.events import End, Round, Saved, Start, Step


def config_of(case="kill", outer="device"):
    return sizes.config_of("1b", outer, case, steps=60, batch=1, sequence=16, snapshots=4, device="cpu")


def rounds(*waited: float, contributors=("a", "b")) -> list[Round]:
    return [
        Round(time=float(number), round=number, contributors=contributors, step=number, digest="", round_s=seconds)
        for number, seconds in enumerate(waited, start=1)
    ]


def started(parameters: int) -> Start:
    told = dict.fromkeys(("run", "dir", "model", "data", "device", "dtype", "mesh"), "")
    counts = {"parameters": parameters, "trained_parameters": parameters, "data_tokens": None, "tokens_per_step": None}
    return Start(time=0.0, steps=60, every=10, **told, **counts)


def test_a_round_takes_what_the_last_one_to_come_has_waited():
    events = {"a": rounds(9.0, 5.0, 1.0, 0.5), "b": rounds(9.0, 0.5, 4.0, 6.0)}
    assert sizes.round_seconds(events) == [0.5, 1.0, 0.5]  # without the first
    assert sizes.round_seconds({"a": events["a"], "b": events["b"][:2]}) == [0.5]  # both have to have seen it
    assert sizes.round_seconds({"a": events["a"], "b": rounds(9.0, 0.5, contributors=("a",))}) == []


def test_the_rate_of_a_window_is_compared_with_the_steps_before_it():
    launch = 6 * sizes.WINDOW  # the second one: kernels are compiled in the first
    times = [
        0.1 * step + (0.05 * (step - launch) if launch < step <= launch + sizes.WINDOW else 0.0) for step in range(141)
    ]
    steps = [Step(time=time, step=step, loss=1.0, tokens_per_s=1.0) for step, time in enumerate(times)]
    assert sizes.window_rates(steps[: launch + sizes.WINDOW]) == []  # it did not end
    assert sizes.window_rates(steps[: launch + sizes.WINDOW + 1]) == [pytest.approx(0.1 / 0.15)]


@pytest.mark.parametrize(
    ("outer", "case", "host", "gpu"),
    [
        ("host", "kill", 10.1, 0),
        ("host", "window", 14.1, 0),
        ("device", "kill", 2.1, 12),
        ("device", "window", 2.1, 12),
    ],
)
def test_the_budget_is_that_of_the_table(outer, case, host, gpu):
    budget = sizes.budget_of(1_000_000_000, config_of(case, outer), on_gpu=True)
    assert (budget.host - sizes.RUNTIME) / 1e9 == pytest.approx(host, abs=0.05)
    assert (budget.accelerator - sizes.SPARE) / 1e9 == gpu


def test_the_largest_of_all_lives_is_held_to_the_budget():
    budget = sizes.budget_of(10**9, config_of(), on_gpu=True)
    step = Step(time=1.0, step=10, loss=1.0, tokens_per_s=8.0)
    saved, end = Saved(time=2.0, step=10, path="", seconds=3.0), End(time=3.0, step=60, accelerator_bytes=16 * 10**9)
    events = {"a": [started(10**9), step, *rounds(9.0, 0.7, 0.9), saved, end], "b": [*rounds(9.0, 0.8, 0.8), step]}
    peaks = {"a": [10**9], "b": [10**9, 2 * 10**9 + budget.host]}
    row, checks = sizes.row_of(
        config_of(), "kill", events, peaks, Peak(2 * 10**9, 16 * 10**9 - budget.accelerator // 2)
    )
    assert {check.name: check.value for check in checks} == {
        "sizes.over_budget_host": 1.0, "sizes.over_budget_gpu": pytest.approx(0.5),
        "sizes.round_s_1b_device": pytest.approx(0.75),
    }  # fmt: skip
    assert (row["step_s"], row["save_s"]) == (2.0, [3.0])


@pytest.mark.slow
@pytest.mark.soak
def test_a_killed_island_comes_back_and_every_round_has_both(tmp_path):
    report = sizes.measure(
        presets=("tiny",), outers=("host",), cases=("kill",), steps=60, batch=2, sequence=16, snapshots=4, device="cpu",
        folder=tmp_path,
    )  # fmt: skip
    (row,) = report.figures["rows"].values()
    assert [len(lives) for lives in row["peak_gb_of_lives"].values()] == [1, 2]
    assert len(row["round_s"]) == 60 // sizes.EVERY - sizes.WARM_UP
    assert {check.name for check in report.checks} == {"sizes.over_budget_host"}
