"""Measure the all-reduce between processes of this machine: against hivemind and gloo, and against what a link allows.

What is timed is what a round does to vectors: encode, the exchange that *begin* asks for, decode. A time is that of the
slowest peer from a common start until it holds the mean as fp32. A result that is not the mean, or not the same bytes
on all peers, is an error, never a time. A peer that is done checks its result only when all are done: until then the
others' time runs, on the same cores. A whole round through drivers is measured as well: agreement, digests and the
outer update are part of it, too.
"""

import resource
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from statistics import median
from typing import Any

import torch

from diloco.bench.bare import DIGEST, BareConfig
from diloco.bench.baselines import average, check_average, contribution, gloo_seconds, hivemind_seconds
from diloco.bench.link import Transfer, run_transfers
from diloco.bench.processes import UNSHAPED, BenchPeer, LinkRate, WorkerFunction, run_peers
from diloco.bench.report import Check, Report
from diloco.comm.codec.dense import BLOCK
from diloco.comm.codec.noise import NoiseKey
from diloco.comm.codec.registry import CODECS
from diloco.comm.reduce.pages import PageStore
from diloco.comm.transport.pooled import PooledTransport
from diloco.elastic.protocol.messages import Begin
from diloco.elastic.protocol.record import Ballot, Contribution, Key, Offer, Proposal, Settings
from diloco.elastic.runtime.driver import among_friends, open_island
from diloco.elastic.runtime.reducing import reduction_of
from diloco.elastic.runtime.session import Session
from diloco.elastic.runtime.work import StepsDone
from diloco.errors import ConfigError
from diloco.train.outer import decoded

AGAINST = ("hivemind", "gloo")
FAST_LINK = 1e9  # bits per second, where four times fewer bytes must show against gloo


@dataclass(frozen=True)
class AllReduceConfig:
    """Describe one measurement: peers, values in the vector, codec, link and repeats."""

    peers: int
    count: int
    codec: str
    line: LinkRate = UNSHAPED
    repeats: int = 11
    relayed: bool = False

    @property
    def minimum_bytes(self) -> float:
        """Return the bytes that each peer must send, and receive: 2 (n-1)/n of the encoded vector."""
        return 2 * (self.peers - 1) / self.peers * CODECS[self.codec].size(self.count)


def measure(
    *, peers: int, values: int, codec: str, link: str, line: tuple[float, float], against: Sequence[str],
    relay: bool = False,
) -> Report:  # fmt: skip
    """Run all comparisons that were asked for. `link` is how `line`, its rate and its delay, was written."""
    if codec not in (names := [name for name, one in CODECS.items() if one.closed]):
        raise ConfigError(f"--codec {codec}: there are {', '.join(names)}")  # of the others the result is no mean
    if unknown := [name for name in against if name not in AGAINST]:
        raise ConfigError(f"--against {unknown[0]}: there are {', '.join(AGAINST)}, or none")
    setting = AllReduceConfig(peers, values, codec)
    unshaped = run(setting)
    checks = [Check("allreduce.bytes_over_minimum", unshaped["bytes_over_minimum"], 1.03, "lower")]
    figures: dict[str, Any] = {"peers": peers, "values": values, "codec": codec, "unshaped": unshaped}
    figures["rounds"] = run(setting, _take_part_repeatedly)
    figures["allreduce.round_s"] = figures["rounds"]["seconds"]
    if relay:
        figures["relayed"] = run(replace(setting, relayed=True, repeats=3))
        figures["allreduce.relay_share"] = unshaped["seconds"] / figures["relayed"]["seconds"]
    if "gloo" in against:
        more, figures["gloo"] = _against_gloo(setting, unshaped["seconds"])
        checks += more
    if "hivemind" in against:
        figures["hivemind"] = hivemind_seconds(peers, values)
        speedup = figures["hivemind"]["seconds"] / unshaped["seconds"]
        checks.append(Check("allreduce.speedup_over_hivemind", speedup, 10, "higher"))
    last, figures[link] = _against_link(replace(setting, line=LinkRate(*line), repeats=3))
    return Report([*checks, last], figures)


def _against_gloo(setting: AllReduceConfig, seconds: float) -> tuple[list[Check], dict[str, Any]]:
    """Compare with gloo unshaped, and over a link.

    gloo cannot be put behind a shaped link: there it is credited with all of the rate and no delay.
    """
    row = gloo_seconds(setting.peers, setting.count)
    fast = run(replace(setting, line=LinkRate(FAST_LINK)))
    gloo_limit_s = 2 * (setting.peers - 1) / setting.peers * 4 * setting.count / (FAST_LINK / 8)
    checks = [
        Check("allreduce.time_over_gloo_fp32", seconds / row["seconds"], 2, "lower"),
        Check("allreduce.speedup_over_gloo_at_1gbit", gloo_limit_s / fast["seconds"], 3.3, "higher"),
    ]
    return checks, row | {"limit_at_1gbit_s": gloo_limit_s, "ours_at_1gbit": fast}


def _against_link(setting: AllReduceConfig) -> tuple[Check, dict[str, Any]]:
    """Compare the time, less two delays, with the least bytes at the goodput that the link really has."""
    (alone,) = run_transfers([Transfer(setting.line.bits_per_s, setting.line.delay_s, setting.peers - 1)])
    row, goodput = run(setting), alone["goodput_bytes_per_s"]
    limit_s = setting.minimum_bytes / goodput
    ratio = (row["seconds"] - 2 * setting.line.delay_s) / limit_s
    check = Check("allreduce.time_over_link_limit", ratio, 1.10, "lower")
    return check, row | {"goodput_bytes_per_s": goodput, "limit_s": limit_s}


def run(setting: AllReduceConfig, work: WorkerFunction | None = None) -> dict[str, Any]:
    """Return medians over repeats, after one to warm up: of an all-reduce by itself, unless other work is given."""
    by_peer = run_peers(setting.peers, work or _reduce_repeatedly, setting)
    repeats = [_one_repeat(repeat) for repeat in zip(*by_peer, strict=True)][1:]
    seconds = [repeat["seconds"] for repeat in repeats]
    return {
        "seconds": median(seconds),
        "seconds_of_each": seconds,
        "cpu_s_of_all": median(repeat["cpu_s"] for repeat in repeats),
        "bytes_over_minimum": max(repeat["bytes"] for repeat in repeats) / max(1, setting.minimum_bytes),
        "memory_growth_bytes": max(rows[-1]["memory"] - rows[0]["memory"] for rows in by_peer),  # what rounds pile up
    }


def _one_repeat(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Combine what the peers measured in one repeat, and require that all hold the same bytes."""
    if len({row["digest"] for row in rows}) != 1:
        raise ArithmeticError("the peers do not hold the same bytes")
    return {
        "seconds": max(row["seconds"] for row in rows),
        "cpu_s": sum(row["cpu_s"] for row in rows),
        "bytes": max(row["bytes"] for row in rows),
    }


def _reduce_repeatedly(peer: BenchPeer, setting: AllReduceConfig) -> list[dict[str, Any]]:
    """Run the all-reduce alone, again and again, in one worker; check each result against the true mean."""
    codec, (plain, addresses) = CODECS[setting.codec], peer.connect(setting.line, relayed=setting.relayed)
    own, expected = contribution(peer.index, setting.count), average(peer.count, setting.count)
    mean = torch.zeros(setting.count)  # the same memory in every repeat, as theirs who reduce in place
    limit, rows, pages = _error_limit(setting), [], PageStore()
    with closing(PooledTransport(plain)) as transport:
        for number in range(setting.repeats + 1):
            begin = _begin(tuple(addresses), setting, number)
            with peer.timed() as row:
                pages.clear()
                payload = codec.encode(own, NoiseKey(number, 0, transport.identity))
                reduction = reduction_of(begin, payload, setting.count, transport, addresses, pages)
                result = reduction.run()
                for start, part in decoded(result, setting.count, codec):
                    mean[start : start + len(part)] = part
            row |= {"bytes": reduction.bytes_sent, "digest": sha256(bytes(result.numpy())).hexdigest()}
            check_average(mean, expected, limit)
            rows.append(row | {"memory": _peak_memory()})  # the check has had its own share of it by now
        peer.barrier()  # nobody closes while others still read
    return rows


def _begin(members: tuple[str, ...], setting: AllReduceConfig, number: int) -> Begin:
    """Make what a coordinator sends when each member has an offer, and none has measured its link."""
    key, norm = Key(number, DIGEST), float(setting.count)  # at most: values are about 1
    contributions = tuple(Contribution(member, Offer(0, number, number + 1, 1, (), norm), 1) for member in members)
    proposal = Proposal(key, 0, contributions, members, (), (), Settings(codec=setting.codec), number)
    return Begin(key, Ballot(1, members[0], 0), proposal, members, (0,) * len(members))


def _take_part_repeatedly(peer: BenchPeer, setting: AllReduceConfig) -> list[dict[str, Any]]:
    """Take part in whole rounds as an island without a model, each from its launch until it is applied."""
    plain, addresses = peer.connect(setting.line)
    own, base = contribution(peer.index, setting.count), torch.empty(setting.count)
    bare = BareConfig(setting.count, codec=setting.codec, samples=0)
    options, origin = replace(bare.options, min_islands=peer.count, straggler=100.0), bare.beginning(tuple(addresses))
    rows = []
    with closing(plain), open_island(bare.run, origin, options, among_friends(plain)) as driver:
        session = Session(driver, bare.run.fragments, setting.codec)
        driver.know(addresses)
        for _ in range(setting.repeats + 1):
            sent = driver.bytes_sent
            with peer.timed() as row:
                session.start(0, own, StepsDone(1, ()))
                session.finish(0)
            session.apply_result(0, base)
            if len(session.last_round()) != peer.count:
                raise ArithmeticError("a round lacks islands")
            row |= {"bytes": driver.bytes_sent - sent, "digest": driver.replica.digest()}
            rows.append(row | {"memory": _peak_memory()})
        peer.barrier()  # nobody closes while others still read
    return rows


def _error_limit(setting: AllReduceConfig) -> float:
    """Return how far a correct result may be off.

    A contribution is off by its codec's bound at most, so their mean is; and the result is off by its own.
    """
    codec, sample = CODECS[setting.codec], contribution(0, min(max(setting.count, BLOCK), 1 << 20))
    rows = sample[: len(sample) // BLOCK * BLOCK].view(-1, BLOCK)
    return 3 * codec.bound(rows).max().item() + 1e-5


def _peak_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
