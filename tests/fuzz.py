"""Every decoder of outside bytes against mutated input: our own errors or a sound value, in little time and memory.

    python tests/fuzz.py [--inputs N] [--jobs N] [--only NAME] [--json]

Each decoder gets N inputs. Mutations are of bytes, and of the numbers, texts and lists of JSON; where a checksum, a
digest or a compression would hide what lies behind it, it is made anew. A decoder whose packages are not installed is
left out by name. `tests/test_fuzz.py` runs a few inputs through the same.
"""

import argparse
import hashlib
import json
import lzma
import re
import resource
import signal
import sys
import time
import tracemalloc
import types
import typing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

NOW = 1_800_000_000.0
TELLING = (0, 1, 0x7F, 0x80, 0xFF)
NUMBERS = (
    b"0", b"-1", b"1e999", b"-1e999", b"1e308", b"1e-400", b"NaN", b"Infinity", b"9007199254740992",
    b"9007199254740993", b"4611686018427387904", b"18446744073709551616", b"9" * 400, b"0.5", b"null", b"true",
    b'""', b"[]", b"{}", b"[[]]", b'"x"', b"1000000", b"-0.0", b"2",
)  # fmt: skip
TOKEN = re.compile(rb'-?\d+(?:\.\d+)?(?:e-?\d+)?|"[^"]{0,80}"|\[|\]|,')
MAX_PAYLOAD = 64 * 1024
WATCHED = 2000  # inputs of which memory is measured: measuring is slow
MOST_S = 2.0  # for one input
HANGS_S = 20.0
MOST_GROWTH = 512 << 20  # of a process, in bytes, over all its inputs


def mutate(raw: bytes, chance: Random) -> bytes:
    """Change a few bytes: most inputs stay near to one that is taken."""
    mutated = bytearray(raw)
    for _ in range(chance.choice([1, 1, 2, 8])):
        place, length = chance.randrange(len(mutated) + 1), chance.randrange(1, 40)
        match chance.randrange(6):
            case 0:
                mutated[place : place + 1] = chance.randbytes(1)
            case 1:
                mutated[place : place + chance.choice([1, 2, 4, 8])] = bytes([chance.choice(TELLING)]) * 4
            case 2:
                del mutated[place : place + length]
            case 3:
                mutated[place:place] = chance.randbytes(length)
            case 4:
                mutated[place:place] = mutated[place : place + length]
            case _:
                del mutated[place:]
    return bytes(mutated)


def mutate_json(raw: bytes, chance: Random) -> bytes:
    """Change a few numbers, texts or lists, and now and then bytes."""
    if not chance.randrange(4):
        return mutate(raw, chance)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        if not (tokens := [found.span() for found in TOKEN.finditer(raw)]):
            break
        lo, hi = chance.choice(tokens)
        new = chance.choice(NUMBERS) if chance.randrange(3) else raw[slice(*chance.choice(tokens))]
        if not chance.randrange(40):
            new = b"[" * chance.choice([100, 5000]) if chance.randrange(2) else b"[]," * 2000
        raw = raw[:lo] + new + raw[hi:]
    return raw


@dataclass(frozen=True)
class Decoder:
    """A decoder: what it takes, how that is mutated, the errors it may raise, and what it may cost."""

    samples: list[bytes]
    decode: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    memory: int = 1 << 20
    mutate: Callable[[bytes, Random], bytes] = mutate
    least_taken: float = 0.0  # of all inputs
    cost: int = 1  # a test gives it so many times fewer inputs


def sample_of(kind: Any, depth: int = 0) -> Any:
    """A plain value that fits a type."""
    from diloco.elastic.protocol.wire import _hints

    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return sample_of(next(option for option in inside if option is not types.NoneType), depth + 1)
    if origin is tuple:
        several = len(inside) == 2 and inside[1] is ...
        return [sample_of(each, depth + 1) for each in ((inside[0],) * 2 if several else inside)]
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return [sample_of(hint, depth + 1) for hint in _hints(kind)]
    return {int: depth, str: "ab" * 32 if depth % 2 else "A", float: 0.25, bool: True}[kind]


def _as_json(value: object) -> bytes:
    from diloco.elastic.protocol.wire import dump

    return dump(value)


def control() -> Decoder:
    from diloco.elastic.protocol.wire import KINDS, decode_message
    from diloco.errors import MessageRefused

    samples = [_as_json([name, sample_of(kind)]) for name, kind in KINDS.items()]
    return Decoder(samples, decode_message, (MessageRefused,), 4 << 20, mutate_json, 0.01)


def packed() -> Decoder:
    from diloco.elastic.protocol.wire import PACKED, decode_message
    from diloco.errors import MessageRefused

    plain = control().samples

    def pack(raw: bytes, chance: Random) -> bytes:
        inside = mutate_json(chance.choice(plain), chance) + b" " * chance.choice([0, 0, 100, 10**6, 9 * 10**6])
        outside = PACKED + lzma.compress(inside, preset=0)
        return outside if chance.randrange(2) else mutate(outside, chance)

    samples = [PACKED + lzma.compress(raw, preset=0) for raw in plain]
    return Decoder(samples, decode_message, (MessageRefused,), 20 << 20, pack, cost=20)


def typed(kind: Any) -> Decoder:
    from diloco.elastic.protocol.wire import decode
    from diloco.errors import MessageRefused

    return Decoder([_as_json(sample_of(kind))], partial(decode, kind), (MessageRefused,), 4 << 20, mutate_json, 0.01)


def states() -> Decoder:
    from diloco.elastic.runtime.fetching import StateManifest

    return typed(StateManifest)


def records() -> Decoder:
    from diloco.elastic.protocol.record import LoggedRecord

    return typed(tuple[LoggedRecord, ...])


def memories() -> Decoder:
    from diloco.elastic.protocol.messages import Memory

    return typed(Memory)


def node() -> Decoder:
    """What is decoded goes to an island, as a member and as coordinator: no message ends it."""
    from nodes import OFFER, STATE, beat, options, proposal

    from diloco.elastic.protocol import messages as msg
    from diloco.elastic.protocol.node import Node
    from diloco.elastic.protocol.record import EMPTY, Ballot, Record
    from diloco.elastic.protocol.wire import decode_message, encode_message
    from diloco.errors import MessageRefused

    key, head, mine = STATE.key, STATE.head, Ballot(1, "A", 0)
    held = msg.Held(mine, Record(proposal("A", "B"), "ab" * 32))
    received = (msg.Received("B", ((0, 4),), ((0, 2),), True), msg.Received("A", ((4, 8),), (), True))
    said: list[msg.Message] = [
        beat(sequence=9, leading=True, missed=(1,)), msg.Collect(head, 2), msg.Promise(key, 1, 1, 8, held),
        msg.Promise(key, 1, 1, 8, None), msg.Nack(key, mine), msg.Follows(key, 1, "C"), msg.Ready(key, 1, (OFFER,), 9),
        msg.Begin(key, mine, proposal("A", "B"), ("A", "B"), (1, 1), first=(("A", 1), ("B", 1))),
        msg.Begin(key, mine, proposal(), ("A", "B"), (), EMPTY, "A"), msg.Begun(key, mine), msg.Done(key, mine, EMPTY),
        msg.Halt(key, mine), msg.Failed(key, mine, "B", "", refused=True, kept=received),
        msg.Commit(key, STATE.head_after(Record(proposal("A", "B"), EMPTY)), ("A", "B")), msg.Goodbye("x"),
    ]  # fmt: skip
    samples = [encode_message(message) for message in said]
    island: list[Any] = []

    def receive(raw: bytes) -> None:
        message, chance = decode_message(raw), Random(raw)
        if not island or not chance.randrange(50):
            settings = options(partition=chance.choice(["merge", "quorum"]))
            island[:] = [Node(chance.choice("AB"), STATE, settings, now=0.0, incarnation=1), 0.0]
        one, now = island[0], island[1] + 0.05
        for peer in {"A", "B", "C"} - {one.me}:
            one.peers.view(peer, now).banned_until = 0.0
        if not chance.randrange(3):
            for peer in {"A", "B", "C"} - {one.me}:
                one.receive(peer, beat(one.state.head, sequence=int(1000 * now)), now)
            one.offer(OFFER, now)
        try:
            one.receive(chance.choice(sorted({"A", "B", "C"} - {one.me})), message, now)
            one.tick(now + 0.01)
        except BaseException:
            island.clear()
            raise
        island[1] = now + 0.01

    return Decoder(samples, receive, (MessageRefused,), 8 << 20, mutate_json, 0.01, cost=2)


def frames(*, secure: bool) -> Decoder:
    from tape import Tape

    from diloco.comm.transport import frame
    from diloco.comm.transport.frame import SECURED, pack_header
    from diloco.comm.transport.transport import Stream
    from diloco.comm.transport.wire import WireCarrier
    from diloco.errors import StreamEnded, TransportError

    frame.MAX_HEAD, frame.MAX_PAYLOAD = 256, MAX_PAYLOAD  # in this process: so that limits are met
    flags = SECURED if secure else 0

    def made(chance: Random) -> bytes:
        raw = bytearray()
        for _ in range(chance.randrange(1, 5)):
            head, payload = chance.randbytes(chance.randrange(9)), chance.randbytes(chance.choice([0, 1, 99, 5000]))
            raw += pack_header(chance.randrange(254), head, payload, flags=flags) + head + payload
        return bytes(raw + pack_header(255, b"", b"", flags=flags))

    def read_all(raw: bytes) -> None:
        stream = Stream(WireCarrier(Tape(raw, secure=secure)))
        try:
            while True:
                assert len(stream.receive().payload) <= MAX_PAYLOAD
        except StreamEnded:
            return

    chance = Random(1)
    samples = [made(chance) for _ in range(20)]  # inside TLS nothing else looks at the payload
    return Decoder(samples, read_all, (TransportError,), 8 * MAX_PAYLOAD, least_taken=0.05 if secure else 0.0)


def spans() -> Decoder:
    from diloco.comm.codec.noise import PAGE
    from diloco.comm.reduce.pages import pack_spans, unpack_spans
    from diloco.comm.reduce.spans import Span
    from diloco.errors import FrameError

    samples = [pack_spans([Span(PAGE * n, PAGE * (n + 1)) for n in range(0, count, 2)]) for count in (0, 1, 9, 40)]
    return Decoder(samples, partial(unpack_spans, count=50 * PAGE + 3), (FrameError,), least_taken=0.001)


def codec(name: str) -> Decoder:
    import torch

    from diloco.comm.codec.noise import NoiseKey
    from diloco.comm.codec.registry import codec_named
    from diloco.errors import CodecError

    one, count, key = codec_named(name), 700, NoiseKey(1, 0, "a")
    values = torch.randn(count, generator=torch.Generator().manual_seed(7))
    samples = [bytes(one.encode(values * scale, key).numpy()) for scale in (1e-30, 1e-3, 1.0, one.largest / 10)]
    total = torch.zeros(count)

    def add(raw: bytes) -> None:
        payload = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)
        total.zero_()
        try:
            one.accumulate(payload, total, share=0.5)
        except CodecError:
            assert not total.any(), "refused, and yet something was added"
            raise
        assert torch.isfinite(total).all()
        assert 0 <= one.norm(payload, count) < float("inf")

    return Decoder(samples, add, (CodecError,), least_taken=0.02, cost=2)


def peer_records() -> Decoder:
    from tape import ISLAND

    from diloco.comm.peers.record import PeerRecord, decode, encode, unverified
    from diloco.errors import RecordRefused

    record = PeerRecord(
        run_id=b"r" * 32, public_key=ISLAND.public_key, control=("/ip4/10.0.0.7/tcp/31337",),
        bulk=(("10.0.0.7", 31338),), certificate=bytes(256), name="α", devices="8 x H200", mesh="fsdp 8",
        up_bits_per_s=1, down_bits_per_s=2, round=3, chain_digest=b"c" * 32, admission=b"a" * 206, sequence=4,
        expires_ms=int(NOW * 1000) + 30_500,
    )  # fmt: skip

    def both(raw: bytes) -> None:
        decode(raw, NOW)

    def unsigned(raw: bytes) -> None:
        unverified(raw)  # the signature hides most of the fields
        if Random(raw).randrange(8) == 0:
            both(raw)

    return Decoder([encode(record, ISLAND)], unsigned, (RecordRefused,))


def tickets() -> Decoder:
    from tape import key_file, load_key

    from diloco.comm.peers.ticket import Ticket
    from diloco.errors import TicketError

    owner = load_key(key_file(1))
    address = "/ip4/10.0.0.7/tcp/31337/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
    made = (
        Ticket.issue(owner, [address] * n, now=NOW, lifetime_s=60, peer=p) for n in (0, 2) for p in (None, b"p" * 32)
    )
    samples = [ticket.render().encode() for ticket in made]
    return Decoder(samples, lambda raw: Ticket.parse(raw.decode("latin-1"), NOW), (TicketError,))


def admissions() -> Decoder:
    from tape import ISLAND, key_file, load_key

    from diloco.comm.peers.admission import Admission, check_admission
    from diloco.comm.peers.identity import run_id_of
    from diloco.comm.peers.ticket import Ticket
    from diloco.errors import TicketError

    owner = load_key(key_file(1))
    ticket = Ticket.issue(owner, [], now=NOW, lifetime_s=60)
    admission = Admission.make(ticket.invite, ticket.secret, ISLAND.public_key)
    check = partial(check_admission.__wrapped__, run_id=run_id_of(owner.public_key), island=ISLAND.public_key)
    return Decoder([admission.pack()], check, (TicketError,))


def visitors() -> Decoder:
    from tape import ISLAND

    from diloco.comm.peers.packing import Malformed
    from diloco.comm.transport.rendezvous import pack_shown, read_shown

    return Decoder([pack_shown(ISLAND.public_key, b"a" * 206, b"s" * 64)], read_shown, (Malformed,))


def told_records() -> Decoder:
    from diloco.comm.peers.packing import Malformed
    from diloco.comm.transport.rendezvous import pack_records, read_records

    return Decoder([pack_records([b"r" * 900] * count) for count in (0, 1, 3)], read_records, (Malformed,))


def items() -> Decoder:
    from diloco.checkpoint.log.library import Item, ItemManifest
    from diloco.errors import ManifestRefused

    made = [Item("vector/momentum", bytes(size), 4096) for size in (0, 1, 30_000)]
    samples = [item.description().encode() for item in made]
    return Decoder(samples, ItemManifest.decode, (ManifestRefused,), least_taken=0.01)


def requests() -> Decoder:
    from diloco.checkpoint.log.library import Item
    from diloco.checkpoint.transfer.donor import CHUNK, DESCRIBE, WHOLE, _answer_to
    from diloco.comm.peers import packing

    item = Item("a", bytes(30_000), 4096)
    asked = b"\0" + packing.text("a", 200) + packing.integer(1, 4) + item.digest(1)

    def answer(raw: bytes) -> None:
        reader = packing.Reader(raw)
        kind, name = (CHUNK, DESCRIBE, WHOLE)[reader.integer(1) % 3], reader.text(200)
        _answer_to(kind, reader, item if name == "a" else None)

    return Decoder([asked, b"\1" + packing.text("a", 200)], answer, (packing.Malformed,))


def genesis() -> Decoder:
    from diloco.errors import JoinRefused, MessageRefused
    from diloco.run.genesis import Genesis

    tree = {
        "protocol": 7, "config": {"seed": 1}, "names": ["a", "b"], "shapes": [[2, 3], [4]], "data": "x", "samples": 9,
        "founder": "A", "owner": "ab" * 32, "parent": None, "signature": "cd" * 64,
    }  # fmt: skip

    def read(raw: bytes) -> None:
        Genesis.parse(raw).is_of(b"r" * 32)

    return Decoder([json.dumps(tree).encode()], read, (JoinRefused, MessageRefused), 4 << 20, mutate_json, 0.01)


def amendments() -> Decoder:
    from diloco.elastic.protocol.record import Amendment, Key

    force = {"round": 3, "parent": "ab", "keep": ["A"]}
    texts = [json.dumps({"evict": ["A"], "revoke": ["ab"], "force": force, "inner.lr": 0.1}).encode()]

    def read(raw: bytes) -> None:
        amendment = Amendment(1, raw.decode("latin-1"), "00" * 64)
        assert isinstance((*amendment.evicts, *amendment.revokes, *amendment.kept(Key(3, "ab"))), tuple)

    return Decoder(texts, read, (), 4 << 20, mutate_json, 0.5)


def histories() -> Decoder:
    """What a newcomer takes from a member, as far as to what people are shown of it."""
    from diloco.checkpoint.log.history import ContributionHeader, RoundHeader, chain_of, headers_in
    from diloco.cli.history import cells_of
    from diloco.history.rounds import RunHistory
    from diloco.run.names import Names

    parts = (ContributionHeader("A", 10, 2, 10, 0.5, 7), ContributionHeader("B", 10, 2, 10, late=True))
    made = RoundHeader("ab" * 32, "cd" * 32, 3, 1_800_000_000_000, 6, 0, 20, 60, 100, parts, 2, joined=("B",))
    changed = replace(made, amendment=1, changes='{"inner.lr": 0.1}', left=("C",), silent=("C",), exchange_ms=9)

    def read(raw: bytes) -> None:
        found = RunHistory(chain_of(headers_in(raw)), Names({}), None)
        for header in found.rounds:
            " ".join(cells_of(found, header).values()).encode()
        json.dumps(found.plain(), allow_nan=False)

    return Decoder([made.line(), changed.line()], read, (), 4 << 20, mutate_json, 0.9, cost=10)


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()  # it lives as long as the process


def snapshots() -> Decoder:
    """A manifest and its files, as a bucket has them; half of the time its own digest is made anew."""
    import torch

    from diloco.checkpoint.log.snapshot import SnapshotContents, read_manifest, read_vectors, write_snapshot
    from diloco.checkpoint.log.writing import canonical
    from diloco.errors import SnapshotDamaged

    folder = Path(_folder().name) / "snapshots"
    folder.mkdir(exist_ok=True)
    contents = SnapshotContents(
        3, "ab" * 32, (1, 3), {"x": 1}, {"parameters": torch.ones(1000), "momentum": torch.ones(9)}
    )
    path = write_snapshot(folder, contents, shard_values=600)
    whole = (path / "manifest.json").read_bytes()

    def change(raw: bytes, chance: Random) -> bytes:
        raw = mutate_json(raw, chance)
        try:
            tree = json.loads(raw)
            tree.pop("digest")
            text = canonical({**tree, "digest": hashlib.sha256(canonical(tree)).hexdigest()}) + b"\n"
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError, OverflowError):
            return raw
        return text if chance.randrange(4) else raw

    def read(raw: bytes) -> None:
        (path / "manifest.json").write_bytes(raw)
        read_vectors(path, read_manifest(path))

    return Decoder([whole], read, (SnapshotDamaged,), 8 << 20, change, cost=10)


def segments() -> Decoder:
    """A log as a disk or a bucket has it; half of the time the checks of the frames are right."""
    from diloco.checkpoint.log.journal import Entry, Header, Journal, Kind, header_frame, record_frame
    from diloco.checkpoint.log.segments import SegmentWriter
    from diloco.errors import SaveError

    folder = Path(_folder().name) / "log"
    folder.mkdir(exist_ok=True)
    payload = bytes(500)
    digest = hashlib.sha256(payload).hexdigest()
    frames = [
        (Kind.HEADER, header_frame(Header("g" * 64, "v0", 0)), b""),
        (Kind.MEMORY, b"[]", b""),
        *((Kind.PAYLOAD, digest.encode(), payload) for _ in range(1)),
        *((Kind.RECORD, record_frame(Entry(n, f"v{n}", f"v{n - 1}", b"x", digest)), b"header") for n in (1, 2, 3)),
        (Kind.STATE, b"v3 abc", b""),
    ]

    def written(heads: list[tuple[int, bytes, bytes]]) -> bytes:
        for path in folder.glob("*.seg"):
            path.unlink()
        writer = SegmentWriter(folder)
        for kind, head, body in heads:
            writer.write(kind, head, body)
        writer.close()
        return writer.path.read_bytes()

    def change(raw: bytes, chance: Random) -> bytes:
        if chance.randrange(2):
            return mutate(raw, chance)
        heads = [
            (kind, mutate_json(head, chance) if not chance.randrange(3) else head, body) for kind, head, body in frames
        ]
        return written(heads)

    def read(raw: bytes) -> None:
        for path in folder.glob("*.seg"):
            path.unlink()
        (folder / "log-00000001.seg").write_bytes(raw)
        journal = Journal.read(folder)
        entries = [*journal.chain("v0"), *journal.leading_to("v3")]
        assert len(entries) < 20
        for entry in entries:
            journal.payload(entry.payload)
        journal.broken_after(["v0"], "v3")

    return Decoder([written(frames)], read, (SaveError,), 8 << 20, change, cost=10)


DECODERS: dict[str, Callable[[], Decoder]] = {
    "control": control,
    "control packed": packed,
    "control in a node": node,
    "bulk frames": partial(frames, secure=False),
    "bulk frames in TLS": partial(frames, secure=True),
    "bulk spans": spans,
    **{
        f"bulk {name}": partial(codec, name)
        for name in ("fp32", "bf16", "int8", "int4", "fp4", "sign", "sparse", "dct", "lowrank", "union:64")
    },
    "records": records,
    "memories": memories,
    "states": states,
    "amendments": amendments,
    "genesis": genesis,
    "histories": histories,
    "peer records": peer_records,
    "tickets": tickets,
    "admissions": admissions,
    "visitors": visitors,
    "told records": told_records,
    "items": items,
    "requests": requests,
    "snapshots": snapshots,
    "segments": segments,
}


@dataclass
class Found:
    """What came of one decoder's inputs."""

    name: str
    inputs: int = 0
    taken: int = 0
    slowest_s: float = 0.0
    peak_bytes: int = 0
    failure: str = ""
    input: str = ""  # in hex, of a failure
    skipped: str = ""


class Hangs(BaseException):
    pass


def _hangs(*_: object) -> None:
    raise Hangs


def feed(name: str, inputs: int, seed: int = 0) -> Found:
    """Give a decoder so many inputs, and stop at the first that it does not stand."""
    found = Found(name)
    try:
        decoder = DECODERS[name]()
    except ImportError as missing:
        return Found(name, skipped=str(missing))
    raw = b""
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = signal.signal(signal.SIGALRM, _hangs)
    try:
        for raw in decoder.samples:
            if not _takes(decoder, raw):
                raise AssertionError("what was not touched must pass")
        chance = Random(seed)
        for watched in (True, False):
            count = min(inputs, WATCHED // decoder.cost) if watched else inputs - found.inputs
            if watched:
                tracemalloc.start()
            for _ in range(count):
                raw = decoder.mutate(chance.choice(decoder.samples), chance)
                if watched:
                    tracemalloc.reset_peak()
                    base = tracemalloc.get_traced_memory()[0]
                signal.setitimer(signal.ITIMER_REAL, HANGS_S)
                started = time.process_time()
                found.taken += _takes(decoder, raw)
                took_s = time.process_time() - started
                signal.setitimer(signal.ITIMER_REAL, 0)
                found.inputs += 1
                found.slowest_s = max(found.slowest_s, took_s)
                if took_s > MOST_S * (10 if watched else 1):
                    raise AssertionError(f"it took {took_s:.1f} s")
                if watched:
                    peak = tracemalloc.get_traced_memory()[1] - base
                    found.peak_bytes = max(found.peak_bytes, peak)
                    if peak > decoder.memory:
                        raise AssertionError(f"it took {peak} bytes of memory")
            if watched:
                tracemalloc.stop()
        if 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) > MOST_GROWTH:
            raw = b""
            raise AssertionError("the process has grown too large")
    except (Exception, Hangs) as wrong:  # noqa: BLE001 -- whatever it is, it is what is looked for
        found.failure = f"{type(wrong).__name__}: {wrong}"[:300]
        found.input = raw[:4096].hex()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if tracemalloc.is_tracing():
            tracemalloc.stop()
    return found


def _takes(decoder: Decoder, raw: bytes) -> bool:
    """Whether the decoder took it. What is not allowed is raised."""
    try:
        decoder.decode(raw)
    except decoder.allowed:
        return False
    return True


def joined(parts: list[Found]) -> Found:
    """Add up what several processes found of one decoder; that too few inputs were taken is a failure as well."""
    bad = next((part for part in parts if part.failure), parts[0])
    whole = Found(
        bad.name, sum(part.inputs for part in parts), sum(part.taken for part in parts),
        max(part.slowest_s for part in parts), max(part.peak_bytes for part in parts), bad.failure, bad.input,
        bad.skipped,
    )  # fmt: skip
    if not whole.failure and not whole.skipped and whole.taken < DECODERS[whole.name]().least_taken * whole.inputs:
        whole.failure = f"only {whole.taken} of {whole.inputs} were taken: this tries too little"
    return whole


def main() -> int:
    """Feed all decoders in several processes, and print what came of it; 1 if one did not stand its inputs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="for each decoder")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", help="decoders whose names begin so")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    names = [name for name in DECODERS if name.startswith(options.only or "")]
    each, rest = divmod(options.inputs, options.jobs)
    shares = [(each + (part < rest), options.seed * 1000 + part) for part in range(options.jobs)]
    started = time.monotonic()
    with ProcessPoolExecutor(options.jobs) as pool:
        work = {name: [pool.submit(feed, name, *share) for share in shares if share[0]] for name in names}
        found = [joined([part.result() for part in parts]) for parts in work.values()]
    seconds = time.monotonic() - started
    if options.json:
        failures = {
            "name": "fuzz.failures",
            "value": sum(bool(one.failure) for one in found),
            "limit": 0,
            "better": "lower",
        }
        print(json.dumps({"checks": [failures], "seconds": seconds, "decoders": [asdict(one) for one in found]}))
    else:
        for one in found:
            told = (
                one.failure
                or one.skipped
                or f"{one.taken} taken, at most {one.slowest_s:.3f} s, {one.peak_bytes} bytes"
            )
            print(f"{one.name:20} {one.inputs:9,}  {told}")
            if one.failure:
                print(f"    {one.input[:400]}")
    return int(any(one.failure for one in found))


if __name__ == "__main__":
    sys.exit(main())
