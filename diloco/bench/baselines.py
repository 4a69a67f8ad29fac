"""Measure what we are compared with, on the same vectors and machine: hivemind's averager and gloo's all-reduce.

Each peer is a process with one thread for tensors. A result that is not the average is never a time: it is an error,
or hivemind's, which happens, is counted and tried again.
"""

import multiprocessing
import os
import time
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from diloco.bench.processes import BenchPeer, run_peers

# hivemind's default is 5 s and 3 s; a group that is complete starts at once either way. Its rule is that a request
# must time out before matchmaking does.
MATCHMAKING_S = 2.0
REQUEST_S = 1.0
STEP_TIMEOUT_S = 100.0
STAGE_LOOK_S = 0.002
# of standard normal values: fp16 is off by 0.006 at most, without one of 16 peers the average is off by 0.2
FP16_ERROR_LIMIT = 0.02
FP32_ERROR_LIMIT = 1e-5
MOST_WRONG = 4  # averages of hivemind's, one after the other


def hivemind_seconds(peers: int, count: int, *, repeats: int = 3) -> dict[str, Any]:
    """Time hivemind until the slowest peer has the average: with matchmaking, and the all-reduce alone."""
    with TemporaryDirectory() as folder:
        rounds = run_peers(peers, _average_by_hivemind, count, repeats, folder)
    return {
        "seconds": median(_slowest(rounds, "seconds")),
        "allreduce_seconds": median(_slowest(rounds, "allreduce_seconds")),
        "seconds_of_each": _slowest(rounds, "seconds"),
        "max_error": max(_slowest(rounds, "error")),
        "wrong_results": sum(_slowest(rounds, "wrong")),
        "compression": "fp16",
    }


def gloo_seconds(peers: int, count: int, *, repeats: int = 11) -> dict[str, Any]:
    """Time an fp32 all-reduce over loopback on the slowest peer, after one to warm up."""
    rounds = run_peers(peers, _reduce_by_gloo, count, repeats + 1)
    seconds = _slowest(rounds, "seconds")[1:]
    return {"seconds": median(seconds), "seconds_of_each": seconds, "max_error": max(_slowest(rounds, "error"))}


def _slowest(rounds: list[list[dict[str, float]]], name: str) -> list[float]:
    """Return the largest figure of each repeat; `rounds` is by peer and repeat."""
    return [max(one[name] for one in repeat) for repeat in zip(*rounds, strict=True)]


def contribution(index: int, count: int) -> Tensor:
    """Draw a peer's vector of standard normal values, the same in every process: its index is the seed."""
    return torch.randn(count, generator=torch.Generator().manual_seed(index))


def average(peers: int, count: int) -> Tensor:
    """Compute the true mean of all peers' vectors in fp32, to check results against."""
    total = contribution(0, count)
    for index in range(1, peers):
        total += contribution(index, count)
    return total.div_(peers)


def check_average(result: Tensor, expected: Tensor, limit: float) -> float:
    """Return the largest error of a result; raise ArithmeticError if it is more than rounding, or NaN."""
    error = (result - expected).abs().max().item()
    if not error <= limit:  # NaN included
        raise ArithmeticError(f"this is not the average: off by up to {error:g}, at most {limit:g} is rounding")
    return error


def _reduce_by_gloo(peer: BenchPeer, count: int, repeats: int) -> list[dict[str, float]]:
    """Run and check gloo's all-reduce over the loopback device, in one worker."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=_gloo_store(peer), rank=peer.index, world_size=peer.count)
    own, expected = contribution(peer.index, count), average(peer.count, count)
    rows = []
    for _ in range(repeats):
        vector = own.clone()
        with peer.timed() as row:
            dist.all_reduce(vector)
        rows.append(row | {"error": check_average(vector.div_(peer.count), expected, FP32_ERROR_LIMIT)})
    peer.barrier()
    dist.destroy_process_group()
    return rows


def _gloo_store(peer: BenchPeer) -> Any:
    """Open the store at which gloo's processes meet; the first peer serves it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if peer.index == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        peer.exchange(store.port)
        return store
    return TCPStore("127.0.0.1", peer.exchange(None)[0], is_master=False)


def _average_by_hivemind(peer: BenchPeer, count: int, repeats: int, folder: str) -> list[dict[str, float]]:
    """Run and check hivemind's averager, in one worker."""
    from hivemind.p2p import P2P

    multiprocessing.set_start_method("fork", force=True)  # hivemind's averager cannot be pickled
    P2P._UNIX_SOCKET_PREFIX = f"/unix{folder}/hivemind-"  # it leaves some behind, and that in /tmp
    os.environ["TMPDIR"] = folder
    own, expected = contribution(peer.index, count), average(peer.count, count)
    dht = _join_dht(peer)
    averager = _start_averager(peer, dht, own.clone())
    try:
        return [_average_right(peer, averager, own, expected) for _ in range(repeats)]
    finally:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hivemind ends its own processes with tracebacks
        averager.shutdown()
        dht.shutdown()


def _join_dht(peer: BenchPeer) -> Any:
    """Open a node of hivemind's DHT on loopback; the others join that of the first peer."""
    from hivemind import DHT

    local = ["/ip4/127.0.0.1/tcp/0"]
    if peer.index == 0:
        dht = DHT(host_maddrs=local, start=True)
        peer.exchange([str(address) for address in dht.get_visible_maddrs()])
    else:
        dht = DHT(initial_peers=peer.exchange(None)[0], host_maddrs=local, start=True)
    return dht


def _start_averager(peer: BenchPeer, dht: Any, vector: Tensor) -> Any:
    """Start an averager that sends fp16 and wants all peers in its group."""
    from hivemind import DecentralizedAverager
    from hivemind.compression import Float16Compression

    return DecentralizedAverager(
        [vector], dht, start=True, prefix="bench", target_group_size=peer.count, min_group_size=peer.count,
        min_matchmaking_time=MATCHMAKING_S, request_timeout=REQUEST_S, compression=Float16Compression(),
    )  # fmt: skip


def _average_right(peer: BenchPeer, averager: Any, own: Tensor, expected: Tensor) -> dict[str, float]:
    """Average until all peers have the average: hivemind now and then gives one of them something else."""
    for wrong in range(MOST_WRONG):
        row = _step_once(peer, averager, own, expected)
        if max(peer.exchange(row["error"])) <= FP16_ERROR_LIMIT:
            return row | {"wrong": wrong}
    raise ArithmeticError(f"hivemind: {MOST_WRONG} results in a row are not the average")


def _step_once(peer: BenchPeer, averager: Any, own: Tensor, expected: Tensor) -> dict[str, float]:
    """Average once, from the same vector as before; raise RuntimeError if a peer was left out."""
    with averager.get_tensors() as (vector,):
        vector.copy_(own)
    with peer.timed() as row:
        step = averager.step(timeout=STEP_TIMEOUT_S, wait=False)
        reducing_at = _watch_for_allreduce(step)
        group = step.result(timeout=STEP_TIMEOUT_S)
        row["allreduce_seconds"] = time.monotonic() - reducing_at
        if group is None or len(group) != peer.count:
            raise RuntimeError(f"hivemind averaged {len(group or ())} peers instead of {peer.count}")
    with averager.get_tensors() as (vector,):
        return row | {"error": (vector - expected).abs().max().nan_to_num(torch.inf).item()}


def _watch_for_allreduce(step: Any) -> float:
    """Return when its last attempt began to exchange tensors; hivemind tries again by itself."""
    from hivemind.averaging.control import AveragingStage

    began = time.monotonic()
    reducing = False
    while not step.done():
        was, reducing = reducing, step.stage == AveragingStage.RUNNING_ALLREDUCE
        if reducing and not was:
            began = time.monotonic()
        time.sleep(STAGE_LOOK_S)
    return began
