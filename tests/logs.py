"""Logs and snapshots on disk, as islands write them: of made-up records, and of a run."""

import hashlib
import threading
from pathlib import Path

import torch
from alone import HERE
from checkpoint_writer import following

from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.journal import Entry
from diloco.checkpoint.log.replica import vectors_digest
from diloco.checkpoint.log.snapshot import SnapshotContents
from diloco.comm.peers.identity import run_id_of
from diloco.config.schema import Config
from diloco.elastic.protocol.record import LoggedRecord
from diloco.elastic.runtime.applier import Applier, RunContext
from diloco.report.sinks import Events
from diloco.run.folder import OUTER
from diloco.run.genesis import Genesis, write_genesis
from diloco.run.join import run_of
from diloco.simulate.virtual.world import owner
from diloco.train.trainer import Trainer

BASE = "base"
ROUNDS = 8


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry(number: int, parent: str, payload: bytes = b"") -> Entry:
    header = f"record {number} after {parent} with {digest(payload)}".encode()
    return Entry(number, digest(header), parent, header, digest(payload))


def chain(count: int, word: str = "payload") -> list[tuple[Entry, bytes]]:
    found, parent = [], BASE
    for number in range(1, count + 1):
        payload = f"{word} {number} ".encode() * 20
        found.append((entry(number, parent, payload), payload))
        parent = found[-1][0].digest
    return found


def opened(
    folder: Path, head: str = BASE, number: int = 0, **options: object
) -> tuple[DiskStore, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    store = DiskStore(folder, lambda what, text: told.append((what, text)), **options)  # type: ignore[arg-type]
    store.begin("genesis", head, number, known=True)
    return store, told


def write(store: DiskStore, records: list[tuple[Entry, bytes]], **options: bool) -> None:
    for record, payload in records:
        store.put(record.payload, payload)
        store.append(record, **options)


def frozen(
    number: int = 20, version: str = "c" * 64, order: tuple[int, ...] | None = None, count: int = 50
) -> SnapshotContents:
    noise = torch.Generator().manual_seed(number)
    vectors = {name: torch.randn(count, generator=noise) for name in ("parameters", "momentum")}
    return SnapshotContents(number, version, order or (number,), {"who": ["A", "B"], "clock": number}, vectors)


def take_snapshot(store: DiskStore, number: int, version: str, order: tuple[int, ...] | None = None) -> None:
    """And wait until it is there."""
    store.snapshot(frozen(number, version, order))
    written(store)


def written(store: DiskStore) -> None:
    with store._changed:
        while store._contents is not None or store._writing_snapshot:
            store._changed.wait(0.01)


def settle(store: DiskStore) -> None:
    """Until all that was handed in is written."""
    with store._changed:
        while store._jobs or store._busy:
            store._changed.wait(0.01)


def write_log(
    folder: Path, genesis: Genesis, run: RunContext, vectors: dict[str, torch.Tensor], rounds: int
) -> list[str]:
    """The digest of each state, that before the first round included."""
    store = DiskStore(folder, lambda what, text: None, keep=0)
    write_genesis(folder, run_id_of(owner().public_key), genesis)
    state = genesis.state()
    store.begin(genesis.digest, state.head.digest, 0, known=False)
    applier = Applier(run, state, vectors, store, lambda state, digest: None)
    thread = threading.Thread(target=applier.apply_all)
    thread.start()
    digests = [vectors_digest(vectors)]
    for _ in range(rounds):
        record, payload = following(state, run.fragments.count)
        applier.hold(record.payload, payload)
        applier.append(LoggedRecord(record, ("A",)))
        state = state.after(record)
        with applier.changed:
            applier.changed.wait_for(lambda state=state: applier.applied == state)
        digests.append(applier.replica.digest())
        store.record_digest(state.head.digest, digests[-1])
        written(store)  # a snapshot that waits would make way for the next one
    applier.stop()
    thread.join()
    store.close()
    return digests


def write_island_log(config: Config) -> tuple[Path, list[str]]:
    """The log of an island that has committed eight rounds, and the digest of each state."""
    trainer, folder = Trainer(config, HERE, Events()), Path(config.dir) / OUTER
    genesis = Genesis.of(config, trainer.island.layout, trainer.samples, "A").signed(owner())
    run = run_of(genesis, config, trainer.fragments)
    return folder, write_log(folder, genesis, run, trainer.initial_vectors(), ROUNDS)
