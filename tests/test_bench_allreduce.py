"""The all-reduce bench: real processes, real sockets, a small vector. What it measures depends on the machine."""

import pytest
import torch

from diloco.bench import allreduce
from diloco.bench.allreduce import AllReduceConfig, measure
from diloco.bench.baselines import FP16_ERROR_LIMIT, average, check_average, contribution
from diloco.comm.codec.noise import PAGE

COUNT = 20_000


@pytest.mark.soak
def test_every_check_is_there_and_bytes_are_few():
    report = measure(peers=3, values=30 * PAGE, codec="int4", link="slow", line=(1e8, 0.001), against=["gloo"])
    values = {check.name: check.value for check in report.checks}
    assert set(values) == {
        "allreduce.bytes_over_minimum", "allreduce.time_over_gloo_fp32", "allreduce.speedup_over_gloo_at_1gbit",
        "allreduce.time_over_link_limit",
    }  # fmt: skip
    assert 1.0 < values["allreduce.bytes_over_minimum"] < 1.03
    assert values["allreduce.time_over_link_limit"] > 0.9  # nothing goes faster than its link
    assert len(report.figures["unshaped"]["seconds_of_each"]) == AllReduceConfig(3, 1, "int4").repeats
    assert report.figures["allreduce.round_s"] == report.figures["rounds"]["seconds"] > 0
    assert report.figures["slow"]["limit_s"] > 0


def test_results_that_differ_are_an_error():
    rows = [{"digest": digest, "seconds": 1.0, "cpu_s": 1.0, "bytes": 1} for digest in ("a", "b")]
    with pytest.raises(ArithmeticError, match="same bytes"):
        allreduce._one_repeat(rows)


def test_the_least_a_peer_can_send():
    assert AllReduceConfig(peers=4, count=256, codec="int8").minimum_bytes == 1.5 * 260


def test_rounding_passes_for_the_average() -> None:
    exact = average(4, COUNT)
    assert 0 < check_average(exact.half().float(), exact, FP16_ERROR_LIMIT) < 0.01


def lacks_the_last(exact: torch.Tensor, peers: int) -> torch.Tensor:
    return (exact * peers - contribution(peers - 1, COUNT)) / (peers - 1)


@pytest.mark.parametrize("peers", [2, 4, 16])
@pytest.mark.parametrize("wrong", [lacks_the_last, lambda exact, peers: exact * float("nan")], ids=["lacks one", "nan"])
def test_what_is_not_the_average_is_an_error(wrong, peers: int) -> None:
    exact = average(peers, COUNT)
    with pytest.raises(ArithmeticError, match="not the average"):
        check_average(wrong(exact, peers), exact, FP16_ERROR_LIMIT)
