"""Measure whether an emulated link is what it claims: goodput against the rate, round trips against the delay.

Two processes, TCP with mutual TLS, both ends shaped. Goodput counts payload bytes. The rate counts what the network
would carry, headers and TLS records included, so goodput stays below it by the overhead: less than 1 %.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

from diloco.bench.processes import BenchPeer, LinkRate, run_peers
from diloco.bench.report import Check, Report
from diloco.comm.transport.link import Link
from diloco.comm.transport.transport import Stream

LIMIT = 0.05
SECONDS = 2.0
UNSHAPED_BYTES = 512 * 1024 * 1024
PINGS = 5
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Transfer:
    """Describe one measurement; without a rate, nothing is shaped."""

    bits_per_s: float | None
    delay_s: float = 0.0
    streams: int = 1
    seconds: float = SECONDS

    @property
    def frame_bytes(self) -> int:
        """Return one piece of the link as the size of a frame.

        So no stream has half a frame through when the first frame of all is complete.
        """
        return Link(self.bits_per_s, self.bits_per_s).piece_bytes

    @property
    def frames(self) -> int:
        """Return the frames of each stream: one more than the time needs, since the first one starts the clock."""
        total = UNSHAPED_BYTES if self.bits_per_s is None else self.bits_per_s / 8 * self.seconds
        return 1 + max(1, round(total / self.frame_bytes / self.streams))


@dataclass(frozen=True)
class Received:
    """Record at one stream's end when its first and last frame were complete, and the payload bytes in all."""

    first_at: float
    last_at: float
    payload_bytes: int


def measure(*, rates: Mapping[str, float], delay_s: float, streams: int) -> Report:
    """Measure at each rate, and unshaped; `rates` are bits per second, by what was written."""
    transfers = [Transfer(bits_per_s, delay_s, streams) for bits_per_s in rates.values()]
    *shaped, single, many = run_transfers([*transfers, Transfer(None), Transfer(None, streams=streams)])
    rows = {
        name: {"rate_error": abs(row["goodput_bytes_per_s"] * 8 / bits_per_s - 1), **row}
        for (name, bits_per_s), row in zip(rates.items(), shaped, strict=True)
    }
    checks = [Check(f"link.rate_error.{name}", row["rate_error"], LIMIT, "lower") for name, row in rows.items()]
    unshaped = {"unshaped single stream": single, f"unshaped {streams} streams": many}
    return Report(checks, {"delay_s": delay_s, "streams": streams, **rows, **unshaped})


def run_transfers(transfers: Sequence[Transfer]) -> list[dict[str, float]]:
    """Run transfers one after the other, between the same two processes, and return the figures of each."""
    sent, received = run_peers(2, _transfer_all, transfers)
    return [{**one, **other} for one, other in zip(received, sent, strict=True)]


def _transfer_all(peer: BenchPeer, transfers: Sequence[Transfer]) -> list[dict[str, float]]:
    return [_transfer(peer, transfer) for transfer in transfers]


def _transfer(peer: BenchPeer, transfer: Transfer) -> dict[str, float]:
    """Run one transfer at either end: pings, then frames on all streams at once."""
    transport, addresses = peer.connect(LinkRate(transfer.bits_per_s, transfer.delay_s))
    channels = [f"bench-{number}" for number in range(transfer.streams)]
    with closing(transport):
        if peer.index == 0:
            streams = [transport.connect(addresses["peer-1"], channel, timeout_s=TIMEOUT_S) for channel in channels]
            figures = {"round_trip_s": median(_ping(streams[0]) for _ in range(PINGS))}
            _, figures["send_cpu_s_per_gb"] = _on_each(peer, streams, _send_frames, transfer)
        else:
            streams = [transport.accept(channel, timeout_s=TIMEOUT_S) for channel in channels]
            for _ in range(PINGS):
                streams[0].receive(timeout_s=TIMEOUT_S)
                streams[0].send(1)
            received, cpu_s_per_gb = _on_each(peer, streams, _receive_frames, transfer)
            figures = {"goodput_bytes_per_s": goodput(received, transfer.frame_bytes)}
            figures["receive_cpu_s_per_gb"] = cpu_s_per_gb
        peer.barrier()  # nobody closes while the other still reads
    return figures


def _on_each(
    peer: BenchPeer, streams: list[Stream], work: Callable[[Stream, Transfer], Any], transfer: Transfer
) -> tuple[list[Any], float]:
    """Return what came of each stream, and the seconds of CPU per gigabyte."""
    peer.barrier()
    started_cpu_s = time.process_time()
    with ThreadPoolExecutor(len(streams)) as pool:
        found = list(pool.map(lambda stream: work(stream, transfer), streams))
    total_bytes = transfer.frames * transfer.frame_bytes * transfer.streams
    return found, (time.process_time() - started_cpu_s) / total_bytes * 1e9


def goodput(received: Sequence[Received], frame_bytes: int) -> float:
    """Return the payload bytes per second of all streams together.

    The clock starts when the first frame of all is complete, so that frame does not count.
    """
    elapsed_s = max(one.last_at for one in received) - min(one.first_at for one in received)
    return (sum(one.payload_bytes for one in received) - frame_bytes) / elapsed_s


def _ping(stream: Stream) -> float:
    """Return the seconds of one round trip."""
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
