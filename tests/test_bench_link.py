import json

import pytest
from conftest import run_cli

from diloco.bench.link import Received, Transfer, goodput, run_transfers
from diloco.cli.bench import LADDER, parse_rates
from diloco.comm.transport.frame import HEADER_BYTES
from diloco.comm.transport.socketwire import TlsWire


@pytest.mark.parametrize("rate", parse_rates(LADDER).values())
@pytest.mark.parametrize("streams", [1, 4])
def test_a_transfer_is_two_seconds_of_line_time_with_little_that_is_no_payload(rate: float, streams: int) -> None:
    transfer = Transfer(rate, 0.02, streams)
    payload = transfer.frame_bytes
    assert (transfer.frames - 1) * payload * streams * 8 / rate == pytest.approx(2.0, rel=0.1)
    on_the_line = TlsWire.bytes_for(object.__new__(TlsWire), HEADER_BYTES + payload)  # the rate counts it, goodput not
    assert payload < on_the_line < payload * 1.01


def test_goodput_is_what_came_after_the_first_frame() -> None:
    assert goodput([Received(1.0, 3.0, 1100)], frame_bytes=100) == 500
    assert goodput([Received(1.0, 4.0, 500), Received(2.0, 5.0, 500)], frame_bytes=200) == 200


def test_rates_may_be_repeated_or_joined() -> None:
    assert parse_rates(["1mbit, 20mbit", "1gbit"]) == {"1mbit": 1e6, "20mbit": 20e6, "1gbit": 1e9}


def test_two_processes_measure_a_link() -> None:
    transfers = [Transfer(400e6, 0.01, streams=2, seconds=0.2), Transfer(800e6, 0.0, seconds=0.1)]
    for transfer, row in zip(transfers, run_transfers(transfers), strict=True):
        assert set(row) == {"goodput_bytes_per_s", "round_trip_s", "send_cpu_s_per_gb", "receive_cpu_s_per_gb"}
        assert 0 < row["goodput_bytes_per_s"] * 8 < 2 * (transfer.bits_per_s or 0)
        assert row["round_trip_s"] >= 2 * transfer.delay_s - 0.001


@pytest.mark.soak
def test_the_command_reports_a_check_for_each_rate_and_what_goes_unshaped() -> None:
    done = run_cli("bench", "link", "--rate", "50mbit,200mbit", "--delay", "5ms", "--streams", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [check["name"] for check in report["checks"]] == ["link.rate_error.50mbit", "link.rate_error.200mbit"]
    assert {(check["limit"], check["better"]) for check in report["checks"]} == {(0.05, "lower")}
    assert report["unshaped single stream"]["goodput_bytes_per_s"] > 0
    assert report["unshaped 2 streams"]["goodput_bytes_per_s"] > 0
