"""A process that keeps a log and snapshots of a made-up run for as long as it lives, and says what is durable.

All of the run follows from the number of a round, so that whoever looks at it afterwards knows what it must be.
"""

import hashlib
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.replica import vectors_digest
from diloco.checkpoint.log.segments import segment_paths
from diloco.comm.codec.noise import NoiseKey
from diloco.comm.codec.registry import CODECS
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.messages import Held, Memory, Vow
from diloco.elastic.protocol.record import Ballot, Contribution, Head, LoggedRecord, Offer, Proposal, Record, Settings
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import encode
from diloco.elastic.runtime.applier import Applier, RunContext
from diloco.elastic.runtime.fragments import Fragments
from diloco.elastic.runtime.restoring import restore
from diloco.train.outer import apply_record

COUNT = 3000
GENESIS = b"a run for a writer that is killed"
DIGEST = hashlib.sha256(GENESIS).hexdigest()
EVERY = 4  # rounds between two snapshots
SEGMENT_BYTES = 40_000
SETTINGS = Settings(lr=0.7, momentum=0.9, codec="fp32")
DEADLY = ("write", "fsync", "fdatasync", "rename", "replace", "unlink", "mkdir", "rmdir", "open", "ftruncate")


def run() -> RunContext:
    return RunContext(GENESIS, DIGEST, Fragments.whole(COUNT), apply_record, EVERY)


def beginning() -> tuple[RunState, dict[str, Tensor]]:
    state = RunState(Head(0, 0, DIGEST), ("A",), Ledger(epoch=1 << 40))
    return state, {"parameters": torch.zeros(COUNT), "momentum": torch.zeros(COUNT)}


def following(state: RunState, count: int = COUNT) -> tuple[Record, Tensor]:
    """The next record, and the bytes of its result."""
    number = state.head.round + 1
    noise = torch.randn(count, generator=torch.Generator().manual_seed(number))
    payload = CODECS["fp32"].encode(noise, NoiseKey(number, 0, "result"))
    offer = Offer(0, state.mark("A", 1, 0), number, 100, (), incarnation=1)
    proposal = Proposal(state.key, 0, (Contribution("A", offer, 100),), ("A",), (), (), SETTINGS, number)
    return Record(proposal, hashlib.sha256(payload.numpy()).hexdigest()), payload


class Reference:
    """What the state of each round must be."""

    def __init__(self) -> None:
        self._state, self._vectors = beginning()
        self._digests = [vectors_digest(self._vectors)]

    def digest(self, number: int) -> str:
        while len(self._digests) <= number:
            record, payload = following(self._state)
            apply_record(self._vectors, record, payload, run().fragments)
            self._state = self._state.after(record)
            self._digests.append(vectors_digest(self._vectors))
        return self._digests[number]


def die_at(calls: int) -> None:
    """With the so manieth call that changes the disk."""
    lock, left = threading.Lock(), [calls]

    def deadly(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **options: object) -> object:
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return wrapped

    for name in DEADLY:
        setattr(os, name, deadly(getattr(os, name)))


def work(folder: Path, pipe: Connection, calls: int) -> None:
    """Until it is killed."""
    lock = threading.Lock()

    def say(*message: object) -> None:
        with lock:
            pipe.send(message)

    def say_durable() -> None:
        newest = segment_paths(folder)[-1]
        say("durable", store.durable, newest.name, newest.stat().st_size)

    if calls:
        die_at(calls)
    told: list[tuple[str, str]] = []
    store = DiskStore(folder, lambda what, text: told.append((what, text)), keep=2, segment_bytes=SEGMENT_BYTES)
    restored = restore(folder, store.journal, run(), store.report)
    state, vectors = (restored.state, restored.vectors) if restored else beginning()
    say("opened", state.head.round, vectors_digest(vectors), told)
    store.report = lambda what, text: say("told", what, text)
    store.begin(DIGEST, state.head.digest, state.head.round, known=restored is not None)
    applier = Applier(run(), state, vectors, store, lambda state, digest: None)
    threading.Thread(target=applier.apply_all, daemon=True).start()
    while True:
        record, payload = following(state)
        applier.hold(record.payload, payload)
        ballot = Ballot(state.head.round + 1, "A", 0)
        store.remember(encode(Memory((Vow(state.head, ballot, Held(ballot, record)),), ballot.term)))
        applier.append(LoggedRecord(record, ("A",)))
        state = state.after(record)
        written = threading.Event()
        store.then(say_durable)
        store.then(written.set)
        written.wait()
