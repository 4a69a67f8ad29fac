"""What other benches count: real processes and real files, scaled down. What they measure depends on the machine."""

import pytest

from diloco.bench import checkpoint, join
from diloco.bench.overhead import EVERY, STEPS_A_TURN, measure

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_a_download_is_all_of_the_state_from_three_donors_and_a_return_the_rounds_since():
    report = join.downloads(1_000_000, 1, 200e6, pace_s=3.0)
    assert [check.name for check in report.checks] == ["join.time_over_link_limit", "join.replay_byte_saving"]
    (row,) = report.figures["downloads"].values()
    assert len(row["bytes_of_each"]) == 3 and sum(row["bytes_of_each"]) == report.figures["state_bytes"] == 8_000_000
    rounds, size = report.figures["return"]["rounds"], report.figures["return"]["bytes"]
    assert rounds is None or rounds * 500_000 < size < rounds * 600_000  # int4, and the records themselves


@pytest.mark.soak
def test_the_log_is_counted_by_its_files(tmp_path):
    figures = checkpoint._log_bytes(tmp_path, 200_000, rounds=6)
    assert figures["rounds"] >= 4
    assert figures["snapshots_bytes"] > figures["rounds"] * 1_600_000 > 10 * figures["log_bytes"]


@pytest.mark.soak
def test_with_rounds_every_block_of_the_overhead_has_one():
    report = measure(device="cpu", blocks=1, rounds=True)
    assert [check.name for check in report.checks] == ["overhead.with_rounds_ratio"]
    assert report.figures["rounds"] == 2  # the first block warms up
    assert EVERY % STEPS_A_TURN == 0
