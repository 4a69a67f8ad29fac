"""The all-reduce between processes of this machine: against hivemind and gloo, and against what a link allows.

What is timed is what a round does to vectors: encode, the exchange that *begin* asks for, decode. A time is that of the
slowest peer from a common start until it holds the mean as fp32. A result that is not the mean, or not the same bytes
on all peers, is an error, never a time. Whoever is done looks at its result when all are: the others' time goes on, on
the same cores. Beside it stands a whole round through drivers: agreement, digests and the outer update are in it, too.
"""

import resource
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from statistics import median
from typing import Any

import torch
from torch import Tensor

from diloco.bench.bare import DIGEST
from diloco.bench.bare import Setting as Bare
from diloco.bench.baselines import average, check_average, contribution, gloo_seconds, hivemind_seconds
from diloco.bench.link import measure_goodput
from diloco.bench.peers import UNSHAPED, BenchPeer, Line, run_peers
from diloco.bench.processes import Work
from diloco.bench.report import Check, Report, parse_option
from diloco.comm.codec.dense import BLOCK
from diloco.comm.codec.noise import NoiseKey
from diloco.comm.codec.registry import CODECS
from diloco.comm.transport.pooled import PooledTransport
from diloco.comm.transport.transport import PeerAddress, Transport
from diloco.elastic.protocol.messages import Begin
from diloco.elastic.protocol.record import Ballot, Contribution, Key, Offer, Proposal, Settings
from diloco.elastic.runtime.driver import among_friends, open_island
from diloco.elastic.runtime.reducing import reduction_of
from diloco.elastic.runtime.session import Session
from diloco.elastic.runtime.work import Trained
from diloco.errors import ConfigError
from diloco.train.outer import decoded
from diloco.units import parse_link

AGAINST = ("hivemind", "gloo")
FAST_LINK = 1e9  # bits per second, where four times fewer bytes must show against gloo


@dataclass(frozen=True)
class Setting:
    peers: int
    count: int
    codec: str
    line: Line = UNSHAPED
    repeats: int = 11

    @property
    def encoded_bytes(self) -> int:
        return CODECS[self.codec].size(self.count)

    @property
    def minimum_bytes(self) -> float:
        """What each peer must send, and receive."""
        return 2 * (self.peers - 1) / self.peers * self.encoded_bytes


def measure(*, peers: int, count: int, codec: str, link: str, against: str) -> Report:
    others, line = _parse_against(against), Line(*parse_option("--link", link, parse_link))
    if codec not in (names := [name for name, one in CODECS.items() if one.closed]):
        raise ConfigError(f"--codec {codec}: there are {', '.join(names)}")  # of the others the result is no mean
    setting = Setting(peers, count, codec)
    unshaped = run(setting)
    checks = [Check("allreduce.bytes_over_minimum", unshaped["bytes_over_minimum"], 1.03, "lower")]
    figures: dict[str, Any] = {"peers": peers, "values": count, "codec": codec, "unshaped": unshaped}
    figures["rounds"] = run(setting, _take_part_repeatedly)
    figures["allreduce.round_s"] = figures["rounds"]["seconds"]
    for name, compare in (("gloo", _against_gloo), ("hivemind", _against_hivemind)):
        if name in others:
            more, figures[name] = compare(setting, unshaped["seconds"])
            checks += more
    more, figures[link] = _against_link(Setting(peers, count, codec, line, repeats=3))
    return Report([*checks, *more], figures)


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
    fast = run(Setting(setting.peers, setting.count, setting.codec, Line(FAST_LINK)))
    gloo_limit_s = 2 * (setting.peers - 1) / setting.peers * 4 * setting.count / (FAST_LINK / 8)
    checks = [
        Check("allreduce.time_over_gloo_fp32", seconds / row["seconds"], 2, "lower"),
        Check("allreduce.speedup_over_gloo_at_1gbit", gloo_limit_s / fast["seconds"], 3.3, "higher"),
    ]
    return checks, row | {"limit_at_1gbit_s": gloo_limit_s, "ours_at_1gbit": fast}


def _against_link(setting: Setting) -> tuple[list[Check], dict[str, Any]]:
    assert setting.line.bits_per_s is not None
    goodput = measure_goodput(setting.line.bits_per_s, setting.line.delay_s, streams=setting.peers - 1)
    row = run(setting)
    limit_s = setting.minimum_bytes / goodput
    ratio = (row["seconds"] - 2 * setting.line.delay_s) / limit_s
    return [Check("allreduce.time_over_link_limit", ratio, 1.10, "lower")], row | {
        "goodput_bytes_per_s": goodput,
        "limit_s": limit_s,
    }


def run(setting: Setting, work: Work | None = None) -> dict[str, Any]:
    """Return medians over repeats, after one to warm up; of an all-reduce by itself, unless other work is given."""
    by_peer = run_peers(setting.peers, work or _reduce_repeatedly, setting)
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
    plain, addresses = peer.connect(setting.line)
    own, expected = contribution(peer.index, setting.count), average(peer.count, setting.count)
    mean = torch.zeros(
        setting.count
    )  # the same memory in every repeat, as the others' vector that they reduce in place
    limit, rows, before = _error_limit(setting), [], 0
    with closing(PooledTransport(plain)) as transport:
        for number in range(setting.repeats + 1):
            peer.barrier()
            row, result = _reduce_once(transport, addresses, own, mean, setting, number)
            peer.barrier()
            rows.append(row | {"digest": sha256(bytes(result.numpy())).hexdigest()})
            check_average(mean, expected, limit)
            before = before or _peak_memory()  # once everything is loaded, and the check has had its own share
        peer.barrier()  # nobody closes while others still read
    return rows, _peak_memory() - before


def _reduce_once(
    transport: Transport, addresses: dict[str, PeerAddress], own: Tensor, mean: Tensor, setting: Setting, number: int
) -> tuple[dict[str, Any], Tensor]:
    codec, begin = CODECS[setting.codec], _begin(tuple(addresses), setting, number)
    started, started_cpu = time.monotonic(), time.process_time()
    payload = codec.encode(own, NoiseKey(number, 0, transport.identity))
    reduction = reduction_of(begin, payload, setting.count, transport, addresses)
    result = reduction.run()
    for start, part in decoded(result, setting.count, codec):
        mean[start : start + len(part)] = part
    seconds, cpu_s = time.monotonic() - started, time.process_time() - started_cpu
    return {"seconds": seconds, "cpu_s": cpu_s, "bytes": reduction.bytes_sent}, result


def _begin(members: tuple[str, ...], setting: Setting, number: int) -> Begin:
    """What a coordinator sends when each of them has an offer, and none has measured its link."""
    key = Key(number, DIGEST)
    contributions = tuple(Contribution(member, Offer(0, number, number + 1, 1, ()), 1) for member in members)
    proposal = Proposal(key, 0, contributions, members, (), (), Settings(codec=setting.codec), number)
    return Begin(key, Ballot(1, members[0], 0), proposal, members, (0,) * len(members))


def _take_part_repeatedly(peer: BenchPeer, setting: Setting) -> tuple[list[dict[str, Any]], int]:
    """Take part in whole rounds as an island without a model: each from its launch until its update is applied."""
    plain, addresses = peer.connect(setting.line)
    own, base = contribution(peer.index, setting.count), torch.empty(setting.count)
    bare = Bare(setting.count, codec=setting.codec, samples=0)
    options, origin = replace(bare.options, min_islands=peer.count, straggler=100.0), bare.beginning(tuple(addresses))
    rows: list[dict[str, Any]] = []
    before = 0
    with closing(plain), open_island(bare.run, origin, options, among_friends(plain)) as driver:
        session = Session(driver, bare.run.fragments, setting.codec)
        driver.know(addresses)
        for _ in range(setting.repeats + 1):
            peer.barrier()
            started, started_cpu, sent = time.monotonic(), time.process_time(), driver.bytes_sent
            session.start(0, own, Trained(1, ()))
            session.finish(0)
            seconds, cpu_s = time.monotonic() - started, time.process_time() - started_cpu
            peer.barrier()
            session.take(0, base)
            if len(session.last_round()) != peer.count:
                raise ArithmeticError("a round lacks islands")
            digest = driver.replica.digest()
            rows.append({"seconds": seconds, "cpu_s": cpu_s, "bytes": driver.bytes_sent - sent, "digest": digest})
            before = before or _peak_memory()
        peer.barrier()  # nobody closes while others still read
    return rows, _peak_memory() - before


def _error_limit(setting: Setting) -> float:
    """A contribution is off by its codec's bound at most, so their mean is; and the result by its own."""
    codec, sample = CODECS[setting.codec], contribution(0, min(max(setting.count, BLOCK), 1 << 20))
    rows = sample[: len(sample) // BLOCK * BLOCK].view(-1, BLOCK)
    return 3 * codec.bound(rows).max().item() + 1e-5


def _peak_memory() -> int:
    """Of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
