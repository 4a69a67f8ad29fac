"""The overhead bench: what it counts. What it measures depends on the machine."""

import pytest

from diloco.bench.overhead import EVERY, STEPS_A_TURN, measure


@pytest.mark.slow
def test_with_rounds_every_block_has_one():
    report = measure(device="cpu", blocks=1, rounds=True)
    assert [check.name for check in report.checks] == ["overhead.with_rounds_ratio"]
    assert report.figures["rounds"] == 2  # the first block warms up
    assert EVERY % STEPS_A_TURN == 0
