"""Whether an emulated link is what it says: goodput against the rate, round trips against the delay.

Two processes, TCP with mutual TLS, both ends shaped. Goodput counts payload bytes. The rate counts what the network
would carry, headers and TLS records included, so goodput stays below it by the overhead: less than 1 %.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

from diloco.bench.peers import BenchPeer, Line, run_peers
from diloco.bench.report import Check, Report, parse_option
from diloco.comm.transport.link import Link
from diloco.comm.transport.transport import PeerAddress, Stream, Transport
from diloco.errors import ConfigError
from diloco.units import parse_delay, parse_rate

LADDER = ["1mbit", "10mbit", "100mbit", "1gbit", "2gbit"]
LIMIT = 0.05
SECONDS = 2.0
UNSHAPED_BYTES = 512 * 1024 * 1024
PINGS = 5
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Transfer:
    """What is to be measured; without a rate, nothing is shaped."""

    bits_per_s: float | None
    delay_s: float = 0.0
    streams: int = 1
    seconds: float = SECONDS

    @property
    def frame_bytes(self) -> int:
        """One piece of the link: then no stream has half a frame through when the first one is complete."""
        return Link(self.bits_per_s, self.bits_per_s).piece_bytes

    @property
    def frames(self) -> int:
        """For each stream. One more than the time needs: the first one starts the clock."""
        total = UNSHAPED_BYTES if self.bits_per_s is None else self.bits_per_s / 8 * self.seconds
        return 1 + max(1, round(total / self.frame_bytes / self.streams))


@dataclass(frozen=True)
class Received:
    """At one stream's end: when its first and its last frame were complete, and the payload bytes in all."""

    first_at: float
    last_at: float
    payload_bytes: int


def measure(*, rates: Sequence[str], delay: str, streams: int) -> Report:
    named, delay_s = parse_rates(rates), parse_option("--delay", delay, parse_delay)
    transfers = [Transfer(bits_per_s, delay_s, streams) for bits_per_s in named.values()]
    *shaped, single, many = run_transfers([*transfers, Transfer(None), Transfer(None, streams=streams)])
    rows = {name: _row(bits_per_s, row) for (name, bits_per_s), row in zip(named.items(), shaped, strict=True)}
    checks = [Check(f"link.rate_error.{name}", row["rate_error"], LIMIT, "lower") for name, row in rows.items()]
    unshaped = {"unshaped single stream": single, f"unshaped {streams} streams": many}
    return Report(checks, {"delay_s": delay_s, "streams": streams, **rows, **unshaped})


def measure_goodput(bits_per_s: float, delay_s: float, *, streams: int = 1) -> float:
    """Payload bytes per second of a link of this rate between two processes of this machine."""
    (row,) = run_transfers([Transfer(bits_per_s, delay_s, streams)])
    return row["goodput_bytes_per_s"]


def parse_rates(texts: Sequence[str]) -> dict[str, float]:
    """`["1mbit,10mbit", "1gbit"]`: bits per second of each, by what was written."""
    rates = {}
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        rates[text] = parse_option("--rate", text, parse_rate)
        if not rates[text]:
            raise ConfigError(f"--rate {text}: a link without any rate carries nothing")
    return rates


def _row(bits_per_s: float, row: dict[str, float]) -> dict[str, float]:
    return {"rate_error": abs(row["goodput_bytes_per_s"] * 8 / bits_per_s - 1), **row}


def run_transfers(transfers: Sequence[Transfer]) -> list[dict[str, float]]:
    """One after the other, between the same two processes."""
    sent, received = run_peers(2, _transfer_all, transfers)
    return [{**one, **other} for one, other in zip(received, sent, strict=True)]


def _transfer_all(peer: BenchPeer, transfers: Sequence[Transfer]) -> list[dict[str, float]]:
    return [_transfer(peer, transfer) for transfer in transfers]


def _transfer(peer: BenchPeer, transfer: Transfer) -> dict[str, float]:
    transport, addresses = peer.connect(Line(transfer.bits_per_s, transfer.delay_s))
    streams = _open(peer, transport, addresses["peer-1"], transfer.streams)
    figures = (_send_side if peer.index == 0 else _receive_side)(peer, streams, transfer)
    peer.barrier()  # nobody closes while the other still reads
    transport.close()
    return figures


def _open(peer: BenchPeer, transport: Transport, receiver: PeerAddress, count: int) -> list[Stream]:
    channels = [f"bench-{number}" for number in range(count)]
    if peer.index == 0:
        return [transport.connect(receiver, channel, timeout_s=TIMEOUT_S) for channel in channels]
    return [transport.accept(channel, timeout_s=TIMEOUT_S) for channel in channels]


def _send_side(peer: BenchPeer, streams: list[Stream], transfer: Transfer) -> dict[str, float]:
    round_trip_s = median(_ping(streams[0]) for _ in range(PINGS))
    peer.barrier()
    started_cpu_s = time.process_time()
    _on_each(streams, _send_frames, transfer)
    cpu_s = time.process_time() - started_cpu_s
    return {"round_trip_s": round_trip_s, "send_cpu_s_per_gb": cpu_s / _total_bytes(transfer) * 1e9}


def _receive_side(peer: BenchPeer, streams: list[Stream], transfer: Transfer) -> dict[str, float]:
    for _ in range(PINGS):
        streams[0].receive(timeout_s=TIMEOUT_S)
        streams[0].send(1)
    peer.barrier()
    started_cpu_s = time.process_time()
    received = _on_each(streams, _receive_frames, transfer)
    cpu_s = time.process_time() - started_cpu_s
    return {
        "goodput_bytes_per_s": goodput(received, transfer.frame_bytes),
        "receive_cpu_s_per_gb": cpu_s / _total_bytes(transfer) * 1e9,
    }


def goodput(received: Sequence[Received], frame_bytes: int) -> float:
    """The clock starts when the first frame of all is complete, so that frame does not count."""
    elapsed_s = max(one.last_at for one in received) - min(one.first_at for one in received)
    return (sum(one.payload_bytes for one in received) - frame_bytes) / elapsed_s


def _on_each(streams: list[Stream], work: Any, transfer: Transfer) -> list[Any]:
    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(lambda stream: work(stream, transfer), streams))


def _ping(stream: Stream) -> float:
    started = time.monotonic()
    stream.send(1)
    stream.receive(timeout_s=TIMEOUT_S)
    return time.monotonic() - started


def _send_frames(stream: Stream, transfer: Transfer) -> None:
    payload = bytes(transfer.frame_bytes)
    for _ in range(transfer.frames):
        stream.send(1, payload=payload, timeout_s=TIMEOUT_S)


def _receive_frames(stream: Stream, transfer: Transfer) -> Received:
    room = memoryview(bytearray(transfer.frame_bytes))
    times, total = [], 0
    for _ in range(transfer.frames):
        total += len(stream.receive(lambda kind, head, length: room[:length], timeout_s=TIMEOUT_S).payload)
        times.append(time.monotonic())
    return Received(times[0], times[-1], total)


def _total_bytes(transfer: Transfer) -> int:
    return transfer.frames * transfer.frame_bytes * transfer.streams
