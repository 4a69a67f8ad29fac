"""The all-reduce between processes of this machine: against hivemind and gloo, and against what a link allows.

A time is that of the slowest peer from a common start until it holds the mean as fp32: encoding and decoding included.
A result that is not the mean, or not the same bytes on all peers, is an error, never a time. Whoever is done looks at
its result when all are: the others' time goes on, on the same cores.
"""

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median
from typing import Any

import torch
from torch import Tensor

from diloco.bench.baselines import average, check_average, contribution, gloo_seconds, hivemind_seconds
from diloco.bench.link import measure_goodput
from diloco.bench.peers import BenchPeer, run_peers
from diloco.bench.report import Check, Report
from diloco.comm.codec.dense import BLOCK
from diloco.comm.codec.noise import NoiseKey
from diloco.comm.codec.registry import CODECS
from diloco.comm.reduce.spans import ReducePlan, chunk_pages_for, spans_by_bandwidth
from diloco.comm.reduce.vector_reduce import VectorReduction
from diloco.comm.transport.direct import DirectTransport
from diloco.comm.transport.link import Link, Path, Paths
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.shaped import ShapedTransport
from diloco.comm.transport.transport import Transport
from diloco.errors import ConfigError
from diloco.units import parse_link

AGAINST = ("hivemind", "gloo")
FAST_LINK = 1e9  # bits per second, where four times fewer bytes must show against gloo


@dataclass(frozen=True)
class Setting:
    peers: int
    count: int
    codec: str
    bits_per_s: float | None = None  # up and down; None: as fast as the machine goes
    delay_s: float = 0.0
    repeats: int = 11

    @property
    def encoded_bytes(self) -> int:
        return CODECS[self.codec].size(self.count)

    @property
    def minimum_bytes(self) -> float:
        """What each peer must send, and receive."""
        return 2 * (self.peers - 1) / self.peers * self.encoded_bytes


@dataclass(frozen=True)
class Room:
    """The same memory in every repeat, as the others use: the vector they reduce in place, the tensors they keep."""

    contribution: Tensor
    result: Tensor
    mean: Tensor

    @classmethod
    def make(cls, setting: Setting) -> "Room":
        encoded = torch.zeros(setting.encoded_bytes, dtype=torch.uint8)
        return cls(encoded, encoded.clone(), torch.zeros(setting.count))


def measure(*, peers: int, count: int, codec: str, link: str, against: str) -> Report:
    others, (bits_per_s, delay_s) = _parse_against(against), _parse_link(link)
    if codec not in (names := [name for name, one in CODECS.items() if one.closed]):
        raise ConfigError(f"--codec {codec}: there are {', '.join(names)}")  # of the others the result is no mean
    setting = Setting(peers, count, codec)
    unshaped = run(setting)
    checks = [Check("allreduce.bytes_over_minimum", unshaped["bytes_over_minimum"], 1.03, "lower")]
    figures: dict[str, Any] = {"peers": peers, "values": count, "codec": codec, "unshaped": unshaped}
    for name, compare in (("gloo", _against_gloo), ("hivemind", _against_hivemind)):
        if name in others:
            more, figures[name] = compare(setting, unshaped["seconds"])
            checks += more
    more, figures[link] = _against_link(Setting(peers, count, codec, bits_per_s, delay_s, repeats=3))
    return Report([*checks, *more], figures)


def _parse_link(text: str) -> tuple[float, float]:
    try:
        return parse_link(text)
    except ValueError as error:
        raise ConfigError(f"--link {text}: {error}") from None


def _parse_against(text: str) -> list[str]:
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in AGAINST:
            raise ConfigError(f"--against {name}: there are {', '.join(AGAINST)}, or none")
    return names


def _against_hivemind(setting: Setting, seconds: float) -> tuple[list[Check], dict[str, Any]]:
    row = hivemind_seconds(setting.peers, setting.count)
    return [Check("allreduce.speedup_over_hivemind", row["seconds"] / seconds, 10, "higher")], row


def _against_gloo(setting: Setting, seconds: float) -> tuple[list[Check], dict[str, Any]]:
    """Unshaped, and over a link, which gloo cannot be put behind: there it gets all of the rate and no delay."""
    row = gloo_seconds(setting.peers, setting.count)
    fast = run(Setting(setting.peers, setting.count, setting.codec, FAST_LINK))
    gloo_limit_s = 2 * (setting.peers - 1) / setting.peers * 4 * setting.count / (FAST_LINK / 8)
    checks = [
        Check("allreduce.time_over_gloo_fp32", seconds / row["seconds"], 2, "lower"),
        Check("allreduce.speedup_over_gloo_at_1gbit", gloo_limit_s / fast["seconds"], 3.3, "higher"),
    ]
    return checks, row | {"limit_at_1gbit_s": gloo_limit_s, "ours_at_1gbit": fast}


def _against_link(setting: Setting) -> tuple[list[Check], dict[str, Any]]:
    assert setting.bits_per_s is not None
    goodput = measure_goodput(setting.bits_per_s, setting.delay_s, streams=setting.peers - 1)
    row = run(setting)
    limit_s = setting.minimum_bytes / goodput
    ratio = (row["seconds"] - 2 * setting.delay_s) / limit_s
    return [Check("allreduce.time_over_link_limit", ratio, 1.10, "lower")], row | {
        "goodput_bytes_per_s": goodput,
        "limit_s": limit_s,
    }


def run(setting: Setting) -> dict[str, Any]:
    """Medians over repeats, after one to warm up."""
    by_peer = run_peers(setting.peers, _reduce_repeatedly, setting)
    repeats = [_one_repeat(repeat) for repeat in zip(*(rows for rows, _ in by_peer), strict=True)][1:]
    seconds = [repeat["seconds"] for repeat in repeats]
    return {
        "seconds": median(seconds),
        "seconds_of_each": seconds,
        "cpu_s_of_all": median(repeat["cpu_s"] for repeat in repeats),
        "bytes_over_minimum": max(repeat["bytes"] for repeat in repeats) / max(1, setting.minimum_bytes),
        "memory_growth_bytes": max(memory for _, memory in by_peer),
    }


def _one_repeat(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    if len({row["digest"] for row in rows}) != 1:
        raise ArithmeticError("the peers do not hold the same bytes")
    return {
        "seconds": max(row["seconds"] for row in rows),
        "cpu_s": sum(row["cpu_s"] for row in rows),
        "bytes": max(row["bytes"] for row in rows),
    }


def _reduce_repeatedly(peer: BenchPeer, setting: Setting) -> tuple[list[dict[str, Any]], int]:
    """And by how much the peak of memory rose after the first all-reduce: what later rounds pile up."""
    plain = DirectTransport(f"peer-{peer.index}", "127.0.0.1")
    addresses = peer.exchange(plain.address("127.0.0.1"))
    plain.allow(addresses)
    transport = PooledTransport(_shape(plain, setting))
    own, expected = contribution(peer.index, setting.count), average(peer.count, setting.count)
    room = Room.make(setting)
    limit, rows, before = _error_limit(setting), [], 0
    for number in range(setting.repeats + 1):
        peer.barrier()
        row = _reduce_once(transport, addresses, own, room, setting, number)
        peer.barrier()
        rows.append(row | {"digest": sha256(bytes(room.result.numpy())).hexdigest()})
        check_average(room.mean, expected, limit)
        before = before or _peak_memory()  # once everything is loaded, and the check has had its own share
    peer.barrier()  # nobody closes while others still read
    transport.close()
    return rows, _peak_memory() - before


def _shape(plain: DirectTransport, setting: Setting) -> Transport:
    if setting.bits_per_s is None:
        return plain
    link = Link(setting.bits_per_s, setting.bits_per_s)
    return ShapedTransport(plain, link, Paths(Path(delay_s=setting.delay_s)))


def _reduce_once(
    transport: Transport, addresses: list[Any], own: Tensor, room: Room, setting: Setting, number: int
) -> dict[str, Any]:
    members = tuple(address.identity for address in addresses)
    spans = spans_by_bandwidth(setting.count, [1.0] * setting.peers)
    weights, key = (1,) * setting.peers, NoiseKey(number, 0, "result")
    plan = ReducePlan(f"reduce/{number}", members, weights, spans, setting.codec, key, chunk_pages_for(spans))
    by_name, own_key = dict(zip(members, addresses, strict=True)), NoiseKey(number, 0, transport.identity)
    started, started_cpu = time.monotonic(), time.process_time()
    reduction = VectorReduction(
        plan, own, own_key, room.mean, transport, by_name, contribution=room.contribution, result=room.result
    )
    reduction.run()
    seconds, cpu_s = time.monotonic() - started, time.process_time() - started_cpu
    return {"seconds": seconds, "cpu_s": cpu_s, "bytes": reduction.bytes_sent}


def _error_limit(setting: Setting) -> float:
    """A contribution is off by its codec's bound at most, so their mean is; and the result by its own."""
    codec, sample = CODECS[setting.codec], contribution(0, min(max(setting.count, BLOCK), 1 << 20))
    rows = sample[: len(sample) // BLOCK * BLOCK].view(-1, BLOCK)
    return 3 * codec.bound(rows).max().item() + 1e-5


def _peak_memory() -> int:
    """Of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
