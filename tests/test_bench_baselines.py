import pytest
from test_bench_peers import eventually, processes_with
from test_bench_peers import mark as mark

from diloco.bench.baselines import (
    FP16_ERROR_LIMIT,
    average,
    check_average,
    contribution,
    gloo_seconds,
    hivemind_seconds,
)
from diloco.bench.processes import WorkerFailed

COUNT = 20_000


def test_rounding_passes_for_the_average() -> None:
    exact = average(4, COUNT)
    assert 0 < check_average(exact.half().float(), exact, FP16_ERROR_LIMIT) < 0.01


@pytest.mark.parametrize("peers", [2, 4, 16])
def test_an_average_that_lacks_one_peer_does_not_pass(peers: int) -> None:
    exact = average(peers, COUNT)
    without_last = (exact * peers - contribution(peers - 1, COUNT)) / (peers - 1)
    with pytest.raises(ArithmeticError, match="not the average"):
        check_average(without_last, exact, FP16_ERROR_LIMIT)


def test_not_a_number_does_not_pass() -> None:
    exact = average(2, COUNT)
    with pytest.raises(ArithmeticError, match="not the average"):
        check_average(exact * float("nan"), exact, FP16_ERROR_LIMIT)


def test_gloo_averages_and_its_warm_up_does_not_count() -> None:
    figures = gloo_seconds(2, COUNT, repeats=3)
    assert len(figures["seconds_of_each"]) == 3
    assert figures["seconds"] == sorted(figures["seconds_of_each"])[1]
    assert figures["max_error"] < 1e-6


@pytest.mark.slow
def test_hivemind_averages_in_fp16_and_leaves_no_daemon(mark: str) -> None:
    try:
        figures = hivemind_seconds(2, COUNT, repeats=1)
    except WorkerFailed:  # on a busy machine its peers give each other up: said, as it must be, and tried once more
        figures = hivemind_seconds(2, COUNT, repeats=1)
    assert 0 < figures["allreduce_seconds"] < figures["seconds"]
    assert 1e-5 < figures["max_error"] < FP16_ERROR_LIMIT
    assert eventually(lambda: processes_with(mark) == [])
