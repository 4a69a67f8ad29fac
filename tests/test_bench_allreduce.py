"""The all-reduce bench: real processes, real sockets, a small vector. What it measures depends on the machine."""

import pytest
import torch

from diloco.bench import allreduce
from diloco.bench.allreduce import Setting, measure
from diloco.bench.baselines import check_average
from diloco.comm.codec.noise import PAGE
from diloco.errors import ConfigError


@pytest.mark.slow
def test_every_check_is_there_and_bytes_are_few():
    report = measure(peers=3, count=30 * PAGE, codec="int4", link="100mbit,1ms", against="gloo")
    values = {check.name: check.value for check in report.checks}
    assert set(values) == {
        "allreduce.bytes_over_minimum", "allreduce.time_over_gloo_fp32", "allreduce.speedup_over_gloo_at_1gbit",
        "allreduce.time_over_link_limit",
    }  # fmt: skip
    assert 1.0 < values["allreduce.bytes_over_minimum"] < 1.03
    assert values["allreduce.time_over_link_limit"] > 0.9  # nothing goes faster than its link
    assert len(report.figures["unshaped"]["seconds_of_each"]) == Setting(3, 1, "int4").repeats
    assert report.figures["allreduce.round_s"] == report.figures["rounds"]["seconds"] > 0


def test_what_is_not_the_mean_is_an_error():
    with pytest.raises(ArithmeticError, match="not the average"):
        check_average(torch.zeros(3), torch.ones(3), 0.1)
    rows = [{"digest": digest, "seconds": 1.0, "cpu_s": 1.0, "bytes": 1} for digest in ("a", "b")]
    with pytest.raises(ArithmeticError, match="same bytes"):
        allreduce._one_repeat(rows)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"codec": "int3"}, "--codec int3: there are fp32"),
        ({"link": "fast"}, "--link fast"),
        ({"link": "100mbit,20"}, "the unit is missing"),
        ({"link": "100mbit,1h"}, "no delay of a network"),
        ({"against": "nccl"}, "--against nccl: there are hivemind, gloo"),
        ({"against": "none,gloo"}, "--against none"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(changes, complaint):
    options = {"peers": 2, "count": 1000, "codec": "int8", "link": "100mbit,20ms", "against": "none"}
    with pytest.raises(ConfigError, match=complaint):
        measure(**(options | changes))


def test_the_least_a_peer_can_send():
    assert Setting(peers=4, count=256, codec="int8").minimum_bytes == 1.5 * 260
