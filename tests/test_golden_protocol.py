"""What islands send each other and write to disk, held to the byte.

Everything here is made of fixed values and compared with `tests/data/golden_protocol.json`. Where a difference is
wanted, because the protocol or a format has a new version, `python tests/test_golden_protocol.py --write` writes that
file again.
"""

import hashlib
import json
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from tape import ISLAND, Tape, key_file, load_key

from diloco.checkpoint.log.diskstore import DiskStore
from diloco.checkpoint.log.journal import Entry, Header, Journal
from diloco.checkpoint.log.replica import vectors_digest
from diloco.checkpoint.log.segments import scan
from diloco.checkpoint.log.snapshot import SnapshotContents, read_manifest, read_vectors, write_snapshot
from diloco.comm.peers import record as peer_record
from diloco.comm.peers.admission import Invite, Right, check_admission
from diloco.comm.peers.identity import public_key_of, run_id_of
from diloco.comm.peers.ticket import Ticket
from diloco.comm.transport.frame import HELLO
from diloco.comm.transport.transport import Frame, Stream, hear_channel, open_channel, refusal
from diloco.comm.transport.wire import Piece, WireCarrier
from diloco.config.file import parse_config
from diloco.elastic.protocol import messages
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.messages import Held, Memory, Vow
from diloco.elastic.protocol.record import (
    Amendment,
    Ballot,
    Contribution,
    Grant,
    Hole,
    Latch,
    LoggedRecord,
    Offer,
    Proposal,
    Record,
    Settings,
    canonical,
)
from diloco.elastic.protocol.state import RunState
from diloco.elastic.protocol.wire import decode, decode_message, encode, encode_message, from_plain, to_plain
from diloco.elastic.runtime.applier import SnapshotMeta
from diloco.elastic.runtime.fetching import StateManifest as StateManifest
from diloco.elastic.runtime.mailbox import CHANNEL, MESSAGE
from diloco.errors import StreamEnded
from diloco.island.layout import Layout
from diloco.run.genesis import Genesis, Parent, read_genesis, write_genesis

GOLDEN = Path(__file__).parent / "data" / "golden_protocol.json"
NOW = 1_750_000_000.0
RESULT = bytes(range(48))
VECTORS = {"momentum": torch.tensor([0.5, -0.25, 0.0]), "parameters": torch.tensor([1.0, -2.0, 2.0**-20])}


@dataclass(frozen=True)
class Golden:
    """One thing: its digest, its bytes, and what they are read back to."""

    raw: bytes
    value: object
    read: Callable[[bytes], object]
    digest: str = ""  # its own; where it has none, that of its bytes

    @property
    def told(self) -> dict[str, str]:
        readable = self.raw.isascii() and self.raw.decode("ascii").replace("\n", "").isprintable()
        form = {"text": self.raw.decode("ascii")} if readable else {"hex": self.raw.hex()}
        return {"digest": self.digest or hashlib.sha256(self.raw).hexdigest(), **form}


def golden_bytes(told: dict[str, str]) -> bytes:
    return told["text"].encode() if "text" in told else bytes.fromhex(told["hex"])


OWNER = load_key(key_file(1))
SECOND, THIRD = load_key(key_file(3)), load_key(key_file(4))
A, B, C = ISLAND.peer_id, SECOND.peer_id, THIRD.peer_id
SECRET = hashlib.sha256(b"an invite").digest()
OWNER_RUN = run_id_of(OWNER.public_key)
AMENDMENT = Amendment.sign(OWNER, 1, '{"inner.lr":0.0001}')


def genesis() -> Genesis:
    settings = {"run": "golden", "seed": 7, "model": {"preset": "tiny", "blocks": 1}}
    config = parse_config({**settings, "data": {"source": "text", "path": "text.txt", "sequence": 32}})
    layout = Layout(("embed.weight", "norm.weight"), ((2, 1), (1,)))
    founded = Genesis.of(config, layout, None, A, (("head.weight", hashlib.sha256(b"frozen").hexdigest()),))
    return replace(founded, data="text 4096 0123456789abcdef", samples=96).signed(OWNER)


def rewound() -> Genesis:
    leases, lost = ((f"{B}#1", ((70, 80),)),), ((f"{A}#0", ((60, 64),)),)
    ledger = Ledger(epoch=96, limit=None, next=80, free=((3, 5),), leases=leases, lost=lost, overlaps=((1, 2),))
    parent = Parent(
        genesis=genesis().digest, round=4, chain="a" * 64, vectors="b" * 64, tokens=2048, step=40, updates=3,
        ledger=ledger,
    )  # fmt: skip
    return replace(genesis(), parent=parent).signed(OWNER)


def latch() -> Latch:
    return Latch.sign(OWNER, genesis().state().head)


def record() -> Record:
    """The first one of the run: it contributes, leases, returns, changes a setting, and demands a quorum."""
    first = Offer(
        fragment=0, lo=0, hi=10, tokens=1024, samples=((0, 16),), norm=0.75, incarnation=1, late=False, steps=10,
        step_ms=20,
    )  # fmt: skip
    late = replace(first, hi=5, tokens=512, samples=((16, 24),), norm=0.125, late=True, steps=5, step_ms=21)
    settings = Settings(
        lr=0.7, momentum=0.9, codec="int8", result="union:64n", optimizer="adam", beta2=0.99, eps=1e-08,
        beta1_correction=0.1, beta2_correction=0.01,
    )  # fmt: skip
    proposal = Proposal(
        key=genesis().state().key,
        fragment=0,
        contributions=(
            Contribution(island=A, offer=first, weight=1024),
            Contribution(island=B, offer=late, weight=512),
        ),
        roster=(A, B, C),
        releases=(f"{B}#0",),
        grants=(
            Grant(holder=f"{A}#1", samples=((24, 56),)),
            Grant(holder=f"{B}#1", samples=((56, 64),)),
        ),
        settings=settings,
        step=10,
        amendment=AMENDMENT,
        answered=(A,),
        witnesses=(C,),
        latch=latch(),
        hole=Hole(island=B, pages=((2, 3),)),
        admissions=tuple((each.peer_id, invited().admission(each.public_key).pack().hex()) for each in (SECOND, THIRD)),
    )
    return Record(proposal=proposal, payload=hashlib.sha256(RESULT).hexdigest())


def state() -> RunState:
    return genesis().state().after(record())


def all_messages() -> list[messages.Message]:
    """One of each kind, every field filled."""
    head, key, ballot = state().head, state().key, Ballot(term=3, coordinator=A, attempt=2)
    held, offers = Held(ballot=ballot, record=record()), tuple(each.offer for each in record().proposal.contributions)
    return [
        messages.Heartbeat(
            head=head, promise=ballot, incarnation=4, sequence=17, leading=True, running=True, moving=True,
            roster_of=head.digest, hears=(0, 1), linked=(1,), follows=A, behind_s=2.5, rank=1,
            latch=latch(), amendment=AMENDMENT, state_digest="c" * 64, missed=(1, 5),
        ),
        messages.Collect(head=head, term=3),
        messages.Promise(
            key=key, term=3, incarnation=4, want=32, held=held, amendment=AMENDMENT, witness=True, admission="ad0f"
        ),
        messages.Nack(key=key, promise=ballot),
        messages.Follows(key=key, term=3, leader=B),
        messages.Ready(key=key, term=3, offers=offers, bytes_per_s=1_250_000),
        messages.Begin(
            key=key, ballot=ballot, proposal=record().proposal, members=(A, B), bytes_per_s=(1_250_000, 0),
            adopted="d" * 64, holder=B, first=((A, 1_250_000), (B, 0)), owners=((2, 4, 0),),
        ),
        messages.Begun(key=key, ballot=ballot),
        messages.Done(key=key, ballot=ballot, payload=record().payload),
        messages.Halt(key=key, ballot=ballot),
        messages.Failed(
            key=key, ballot=ballot, blamed=B, reason="it is gone", refused=True, amendment=False, local=True,
            kept=(messages.Received(peer=B, pages=((4, 8),), means=((4, 6),), whole=True),),
        ),
        messages.Commit(key=genesis().state().key, head=head, stored_by=(A, B)),
        messages.Goodbye(reason="its owner asked it to leave"),
    ]  # fmt: skip


def invited() -> Ticket:
    """A ticket for two islands, whoever has it."""
    key = public_key_of(SECRET)
    invite = Invite(OWNER.public_key, key, bound=False, right=Right.CONTRIBUTE, islands=2, expires_at=int(NOW) + 3600)
    return Ticket(invite.signed(OWNER), ticket().addresses, SECRET, (7, bytes(range(32))))


def ticket() -> Ticket:
    addresses = [f"/ip4/10.0.0.7/tcp/31337/p2p/{A}", f"/ip6/2001:db8::7/tcp/31337/p2p/{A}"]
    return Ticket.issue(OWNER, addresses, now=NOW, lifetime_s=3600, peer=ISLAND.public_key)


def peer() -> peer_record.PeerRecord:
    return peer_record.PeerRecord(
        run_id=OWNER_RUN,
        public_key=ISLAND.public_key,
        control=(f"/ip4/10.0.0.7/tcp/31337/p2p/{A}",),
        bulk=(("10.0.0.7", 31338), ("::1", 31339)),
        certificate=b"not a certificate, but bytes",
        name="island-1",
        devices="2x H200",
        mesh="fsdp 2",
        up_bits_per_s=10_000_000,
        down_bits_per_s=50_000_000,
        round=1,
        chain_digest=bytes.fromhex(record().digest),
        admission=ticket().admission(ISLAND.public_key).pack(),
        sequence=5,
        expires_ms=int(NOW * 1000) + 60_000,
    )


def recorded(send: Callable[[WireCarrier], object], tape: Tape) -> bytes:
    send(WireCarrier(tape))
    return bytes(tape.written)


def frames_of(raw: bytes, *, secure: bool = False) -> list[Frame | str]:
    stream, found = Stream(WireCarrier(Tape(raw, secure=secure))), []
    while stream.carrier.wire.left:
        try:
            found.append(stream.receive())
        except StreamEnded:
            found.append("end")
    return found


def frames() -> dict[str, Golden]:
    payload = memoryview(b"a payload in two pieces")

    def send_two(carrier: WireCarrier) -> None:
        carrier.send(Piece(7, b"head", payload[:9], rest=14, stamp_ns=123_456_789), None)
        carrier.send(Piece(7, b"", payload[9:], continues=True), None)

    def send_message(carrier: WireCarrier) -> None:
        Stream(carrier).send(MESSAGE, b"", encode_message(all_messages()[-1]))

    whole, said = Frame(7, b"head", payload), memoryview(encode_message(all_messages()[-1]))
    accepted = recorded(lambda carrier: Stream(carrier).send_reserved(HELLO), Tape())
    return {
        "frame in two pieces": Golden(recorded(send_two, Tape()), [whole], frames_of),
        "frame inside TLS": Golden(
            recorded(send_message, Tape(secure=True)),
            [Frame(MESSAGE, b"", said)],
            lambda raw: frames_of(raw, secure=True),
        ),
        "opening": Golden(
            recorded(lambda carrier: open_channel(Stream(carrier), CHANNEL, 1.0), Tape(accepted)),
            CHANNEL,
            lambda raw: hear_channel(Stream(WireCarrier(Tape(raw))), 1.0),
        ),
        "refusal": Golden(refusal("not admitted"), [Frame(HELLO, b"not admitted", memoryview(b""))], frames_of),
    }


def logged() -> LoggedRecord:
    return LoggedRecord(record=record(), stored_by=(A, B), time_ms=int(NOW * 1000))


def entry() -> Entry:
    made = record()
    parent = made.proposal.key.parent
    return Entry(round=1, digest=made.digest, parent=parent, header=encode(logged()), payload=made.payload)


def memory() -> Memory:
    held = Held(ballot=Ballot(term=2, coordinator=B, attempt=1), record=record())
    before = Vow(head=genesis().state().head, promise=Ballot(term=2, coordinator=B, attempt=1), held=held)
    vows = before, Vow(head=state().head, promise=Ballot(term=3, coordinator=A, attempt=2))
    return Memory(vows=vows, term=3, latch=latch())


def write_segment() -> bytes:
    """As an island does at the end of a round."""
    with TemporaryDirectory() as folder:
        store = DiskStore(Path(folder), lambda what, text: None)
        store.begin(genesis().digest, genesis().digest, 0, known=True)
        store.remember(encode(memory()))
        store.put(record().payload, RESULT)
        store.append(entry())
        store.record_digest(record().digest, vectors_digest(VECTORS))
        store.close()
        return (Path(folder) / "log-00000001.seg").read_bytes()


def read_segment(raw: bytes) -> tuple[object, ...]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log-00000001.seg"
        path.write_bytes(raw)
        journal, frames = Journal.read(Path(folder)), scan(path).frames
        kept = list(journal.headers.values()), decode(Memory, journal.memory), journal.payload(record().payload)
        return [frame.kind for frame in frames], *kept, journal.entries, journal.states, journal.troubles


def in_segment() -> tuple[object, ...]:
    header = Header(genesis=genesis().digest, base=genesis().digest, round=0)
    states = {record().digest: vectors_digest(VECTORS)}
    return [1, 2, 3, 4, 5], [header], memory(), RESULT, {record().digest: entry()}, states, []


def frozen() -> SnapshotContents:
    head, kept = state().head, SnapshotMeta(genesis=genesis().digest, state=state(), fragments=(((0, 3),),))
    order = head.tokens, head.round
    return SnapshotContents(round=head.round, version=head.digest, order=order, meta=to_plain(kept), vectors=VECTORS)


def write_files() -> dict[str, bytes]:
    """Those of a snapshot, by their names in its parent folder."""
    with TemporaryDirectory() as folder:
        snapshot = write_snapshot(Path(folder), frozen(), shard_values=2)
        return {f"{snapshot.name}/{path.name}": path.read_bytes() for path in sorted(snapshot.iterdir())}


def read_manifest_file(raw: bytes) -> tuple[object, ...]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "manifest.json").write_bytes(raw)
        manifest = read_manifest(Path(folder))
        return manifest.round, manifest.version, manifest.order, from_plain(SnapshotMeta, manifest.meta), manifest.state


def in_manifest() -> tuple[object, ...]:
    made = frozen()
    return made.round, made.version, made.order, from_plain(SnapshotMeta, made.meta), vectors_digest(VECTORS)


def genesis_file(made: Genesis) -> bytes:
    with TemporaryDirectory() as folder:
        write_genesis(Path(folder), OWNER_RUN, made)
        return (Path(folder) / "genesis.json").read_bytes()


def read_genesis_file(raw: bytes) -> Genesis | None:
    with TemporaryDirectory() as folder:
        (Path(folder) / "genesis.json").write_bytes(raw)
        return read_genesis(Path(folder), OWNER_RUN)


@cache
def everything() -> dict[str, Golden]:
    said = {type(message).__name__: message for message in all_messages()}
    sizes = (("momentum", 3), ("parameters", 3))
    manifest = StateManifest(state=state(), sizes=sizes, genesis=genesis().digest)
    return {
        "identity": Golden(key_file(2), ISLAND.public_key, lambda raw: load_key(raw).public_key, ISLAND.peer_id),
        "genesis": Golden(genesis().raw, genesis(), lambda raw: Genesis.given(raw, OWNER_RUN), genesis().digest),
        "genesis, rewound": Golden(
            rewound().raw, rewound(), lambda raw: Genesis.given(raw, OWNER_RUN), rewound().digest
        ),
        "genesis.json": Golden(genesis_file(genesis()), genesis(), read_genesis_file),
        "latch": Golden(encode(latch()), latch(), lambda raw: decode(Latch, raw)),
        "logged record": Golden(encode(logged()), logged(), lambda raw: decode(LoggedRecord, raw)),
        "amendment": Golden(encode(AMENDMENT), AMENDMENT, lambda raw: decode(Amendment, raw)),
        "record": Golden(encode(record()), record(), lambda raw: decode(Record, raw), record().digest),
        "proposal, canonical": Golden(
            canonical(record().proposal), json.loads(canonical(record().proposal)), json.loads, record().proposal.digest
        ),
        "state": Golden(encode(state()), state(), lambda raw: decode(RunState, raw)),
        "state's manifest": Golden(encode(manifest), manifest, lambda raw: decode(StateManifest, raw)),
        **{f"message {name}": Golden(encode_message(told), told, decode_message) for name, told in said.items()},
        "ticket": Golden(ticket().render().encode(), ticket(), lambda raw: Ticket.parse(raw.decode(), NOW)),
        "ticket for anybody": Golden(
            invited().render().encode(), invited(), lambda raw: Ticket.parse(raw.decode(), NOW)
        ),
        "admission": Golden(
            invited().admission(SECOND.public_key).pack(),
            invited().admission(SECOND.public_key),
            lambda raw: check_admission(raw, OWNER_RUN, SECOND.public_key),
        ),
        "peer record": Golden(
            peer_record.encode(peer(), ISLAND), peer(), lambda raw: peer_record.decode(raw, NOW)
        ),
        **frames(),
        "segment": Golden(write_segment(), in_segment(), read_segment),
        **{
            name: Golden(raw, in_manifest(), read_manifest_file)
            if name.endswith("manifest.json")
            else Golden(raw, raw, bytes)
            for name, raw in write_files().items()
        },
    }  # fmt: skip


def kept() -> dict[str, dict[str, str]]:
    return json.loads(GOLDEN.read_text())


def test_nothing_is_missing():
    assert {*everything()} == {*kept()}
    assert {type(message) for message in all_messages()} == {*typing.get_args(messages.Message)}


@pytest.mark.parametrize("name", kept() if GOLDEN.exists() else [])
def test_it_is_written_as_ever(name: str):
    assert everything()[name].told == kept()[name]


@pytest.mark.parametrize("name", kept() if GOLDEN.exists() else [])
def test_what_was_written_is_read_back(name: str):
    golden = everything()[name]
    assert golden.read(golden_bytes(kept()[name])) == golden.value


def test_signatures_of_old_hold_and_forged_ones_do_not():
    old = Genesis.parse(golden_bytes(kept()["genesis"]))
    assert old.is_of(OWNER_RUN) and decode(Amendment, golden_bytes(kept()["amendment"])).is_by(old.owner)
    assert decode(Latch, golden_bytes(kept()["latch"])).is_by(old.owner)
    assert not replace(old, samples=old.samples + 1).is_of(OWNER_RUN)
    assert not old.is_of(run_id_of(ISLAND.public_key))


def test_a_snapshot_of_old_gives_its_vectors(tmp_path: Path):
    files = {name: told for name, told in kept().items() if name.startswith("snapshot-")}
    for name, told in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(golden_bytes(told))
    (folder,) = tmp_path.iterdir()
    vectors = read_vectors(folder, read_manifest(folder))
    assert vectors.keys() == VECTORS.keys()
    assert all(torch.equal(vectors[name], VECTORS[name]) for name in VECTORS)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    told = {name: golden.told for name, golden in everything().items()}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{len(told)} entries are in {GOLDEN}")
