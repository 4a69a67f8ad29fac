"""Model how long things take in virtual time: compute, links and all-reduces.

Control messages have a weight, leave on their sender's uplink one after the other, and take their receiver's time. A
heartbeat that says what the last one said is taken in without asking the node, which would do nothing else (a test
compares). Ticks with nothing to do are left out: an island that does not lead ticks when a heartbeat is due; one that
leads looks at what has come every 20 ms, or as often as so many islands let it.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from diloco.comm.codec.registry import codec_named, result_codec_for
from diloco.comm.reduce.grid import grid_of
from diloco.comm.reduce.spans import CHUNKS
from diloco.elastic.protocol.messages import Begin, Commit, Heartbeat, Message, Promise
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.peers import LivenessReport, Peers, PeerView
from diloco.elastic.protocol.record import Head, Proposal
from diloco.elastic.protocol.wire import PACK_BYTES, dump, to_plain
from diloco.elastic.runtime.reducing import FLAT_UP_TO, SLACK, connect_s
from diloco.plan.predict import Host, LinkModel
from diloco.simulate.virtual.allreduce import Cost, flat, two_level
from diloco.simulate.virtual.costs import Costs, Timeline
from diloco.simulate.virtual.world import KEEP_RECORDS, Life, World

DAY_S = 86400.0
REGIONS = 8  # islands are spread around the world: each region has its own time of day
NAME_CHARS = 52  # of a peer's identity, which messages carry many times
PACKED = 0.22  # is left of a large message; identities are random, and those of the model are not
PLACE_BYTES = 5
FRAME_BYTES = 80  # of a frame and of TLS, around a message
WAKE_S = 0.007  # until the thread that a message is for has it
MESSAGE_S = 150e-6  # to take in a message; measured on 2 ARM cores
BYTE_S = 0.5e-6  # and for each byte of it
TICK_S = 0.02
IDLE_S = 0.25  # between two ticks of one that leads and has heard nothing
LOOK_S = 1e-4  # what looking at its answers takes a coordinator, for each island
STATE_BYTES = 8  # a value: parameters and momentum


@dataclass(frozen=True)
class VirtualConfig:
    """Describe a run in virtual time: islands, links, model, failures and the protocol's options."""

    islands: int
    line: LinkModel = field(default_factory=lambda: LinkModel(100e6, 100e6, 0.04))  # of each
    values: int = 150_000_000  # in one round
    codec: str = "int8"
    phase_s: float = 300.0  # of inner steps, between two rounds
    spread: float = 0.1  # the slowest needs so much longer
    jitter: float = 0.02  # of every phase
    mtbf_s: float | None = None  # between two failures, of all islands together
    back_s: float = 300.0  # until a failed island is back, on average
    silent: float = 0.5  # of failures: nobody hears a connection close
    diurnal: float = 0.0  # of the rate is lost at the worst time of the day
    seconds: float = 3600.0
    seed: int = 0
    silence_s: float = 5.0
    straggler: float = 1.5
    two_level: bool | None = None  # how vectors are reduced; None: as real islands do, by their number
    flat_up_to: int = 64  # heartbeats, see diloco.elastic.protocol.liveness
    host: Host = field(default_factory=Host.of_gpus)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the islands' names, which are as long as real peer ids."""
        return tuple(map(name_of, range(self.islands)))

    def reduces_in_two_levels(self, members: int) -> bool:
        """Return whether so many members reduce in groups first; by default as real islands do."""
        return members > FLAT_UP_TO if self.two_level is None else self.two_level

    def pace(self, index: int) -> float:
        """Return how many times longer than the fastest an island computes: evenly spread, in no order."""
        return 1 + self.spread * ((index * 0.618034) % 1)

    def rate(self, index: int, now: float) -> float:
        """Return the share of an island's rate that is left at this time of its day."""
        noon = now / DAY_S + (index % REGIONS) / REGIONS
        return 1 - self.diurnal * (1 - math.cos(2 * math.pi * noon)) / 2


def name_of(index: int) -> str:
    """Return an island's name: its index, padded to the length of a real peer id."""
    return str(index).zfill(NAME_CHARS)


@dataclass
class Traffic:
    """Count one island's control messages and their bytes, and track when its uplink and thread are free."""

    sent: int = 0
    received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    up_free: float = 0.0  # when what was sent before is out
    busy: float = 0.0  # until messages that came before are dealt with


class Views(dict[str, PeerView]):
    """Hold an island's views of all others in the directory.

    Each view comes into being when it is looked at, as old as the island's own life.
    """

    def __init__(self, me: str, everybody: dict[str, None], since: float) -> None:
        super().__init__()
        self.me, self.everybody, self.since = me, everybody, since

    def __missing__(self, peer: str) -> PeerView:
        if peer == self.me or peer not in self.everybody:
            raise KeyError(peer)
        view = self[peer] = PeerView(self.since)
        return view

    def __contains__(self, peer: object) -> bool:
        return peer in self.everybody and peer != self.me

    def __iter__(self) -> Iterator[str]:
        return (peer for peer in self.everybody if peer != self.me)

    def __len__(self) -> int:
        return len(self.everybody) - 1

    # As a Mapping has them: by what is asked above. A dict's own would leave out who was never looked at.
    get, keys, items, values = Mapping.get, Mapping.keys, Mapping.items, Mapping.values  # type: ignore[assignment]

    def seen(self) -> Iterable[tuple[str, PeerView]]:
        """Yield only the views that were looked at so far."""
        return super().items()


class SharedPeers(Peers):
    """Keep an island's view of its peers without a view for each of thousands."""

    views: Views

    def __init__(self, silence_s: float, me: str, everybody: dict[str, None], now: float) -> None:
        super().__init__(silence_s, Views(me, everybody, now))
        self.dealt_with: dict[str, tuple[Heartbeat, Head]] = {}  # the last heartbeat of each, at this head

    def know(self, peers: Iterable[str], now: float) -> None:
        """Do nothing: all islands are in the directory."""

    def view(self, peer: str, now: float) -> PeerView:
        return self.views[peer]

    def touch(self, peer: str, sequence: int, now: float) -> bool:
        """Note a heartbeat as a node does; return False if its sender is banned, or a later one came before."""
        view = self.views[peer]
        if now < view.banned_until or sequence < view.sequence:
            return False
        self.hear(peer, now)
        view.sequence = sequence
        return True

    def reset(self, now: float) -> None:
        """Forget all silence, as every island does after a sleep; also that of peers never looked at."""
        self.views.since = max(self.views.since, now)
        for _, view in self.views.seen():
            view.heard_at = max(view.heard_at, now)

    def judge_alone(self, now: float, but: Collection[str]) -> None:
        """Drop all reports, as on every island.

        Peers that were never looked at count as alive, unless a report has missed them or `but` names them.
        """
        words, self.reports = self.reports, {}
        missed = [peer for word in words.values() for peer, place in word.places.items() if place in word.missed]
        for peer in (*missed, *but):
            self.views.get(peer)  # its silence is remembered
        for peer, view in self.views.seen():
            if peer not in but and any(word.hears(peer) for word in words.values()):
                view.heard_at = max(view.heard_at, now)
        if words:
            self.views.since = max(self.views.since, now)


def hears_no_news(
    node: Node, sender: str, beat: Heartbeat, sequence: int, now: float, words: dict[int, LivenessReport]
) -> bool:
    """Take in a heartbeat that the node has dealt with at this head: its sender is heard, and that is all.

    Return False where the node must be asked. A coordinator that lacks the sender's answer would ask again. `beat` has
    no number of its own, `sequence` is that; `words` holds what it says, once for all who hear it.
    """
    peers, state, term = node.peers, node.state, node.own.term
    assert isinstance(peers, SharedPeers)
    known = beat.head == state.head and peers.dealt_with.get(sender) == (beat, state.head)
    at_rest = not (node.own.leaving or node.own.diverged) and (term is None or term.answers.get(sender) is not None)
    if not (known and at_rest and peers.touch(sender, sequence, now)):
        peers.dealt_with[sender] = beat, state.head
        return False
    if beat.missed is not None and not node.liveness.broadcasts:
        key = id(state.places)
        peers.accept_report(
            sender, words.get(key) or words.setdefault(key, LivenessReport(now, frozenset(beat.missed), state.places))
        )
    return True


class Modelled(Costs):
    """Model compute, links and all-reduces; count each island's messages."""

    def __init__(self, setting: VirtualConfig) -> None:
        super().__init__(Timeline(setting.seed, smooth=False))
        self.setting, host = setting, setting.host
        self.unreachable_s = setting.silence_s
        encode_ns, decode_ns = host.codec_ns[setting.codec]
        self._encode_s = 1e-9 * setting.values * (host.cut_ns + encode_ns)
        self.apply_s = 1e-9 * setting.values * (decode_ns + host.apply_ns)
        self.result_bytes = codec_named(result_codec_for(setting.codec, 2)).size(setting.values)
        self._directory = dict.fromkeys(setting.names)
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self.heartbeats = 0
        self._beats: list[tuple[str, Heartbeat]] = []  # of one input: to whom
        self._said: dict[str, Heartbeat] = {}  # by each island, the last time
        self._sizes: dict[type, int] = {}
        self._proposals: dict[str, int] = {}
        self._out_s = 8 / setting.line.up_bits_per_s  # a byte

    def send(self, world: World, sender: str, to: str, message: Message) -> None:
        """Queue a message on its sender's uplink, and deliver it when its receiver has taken it in."""
        if isinstance(message, Heartbeat):
            self._beats.append((to, message))
            return
        size = self.size(message)
        ours, theirs = self.traffic[sender], self.traffic[to]
        ours.sent += 1
        ours.bytes_sent += size
        theirs.received += 1
        theirs.bytes_received += size
        now = self.timeline.now
        out = (ours.up_free if ours.up_free > now else now) + size * self._out_s
        came = out + self.setting.line.delay_s
        ours.up_free = out
        taken = (theirs.busy if theirs.busy > came else came) + MESSAGE_S + BYTE_S * size
        theirs.busy = taken
        self.timeline.at(taken + WAKE_S, partial(world.deliver, sender, to, message))

    def flush(self, world: World, sender: str) -> None:
        """Send one heartbeat to many peers, who hear it together when the last one does."""
        if not self._beats:
            return
        beats, self._beats = self._beats, []
        peers, beat = [to for to, _ in beats], beats[-1][1]
        plain = replace(beat, sequence=0)
        if plain != self._said.get(sender):
            self._said[sender] = plain
        size, count = self.size(beat), len(peers)
        self.heartbeats += count
        ours = self.traffic[sender]
        ours.sent += count
        ours.bytes_sent += count * size
        ours.up_free = max(ours.up_free, self.timeline.now) + count * size * self._out_s
        came, cost_s = ours.up_free + self.setting.line.delay_s, MESSAGE_S + BYTE_S * size
        for peer in peers:
            theirs = self.traffic[peer]
            theirs.received += 1
            theirs.bytes_received += size
            theirs.busy = (theirs.busy if theirs.busy > came else came) + cost_s
        self.timeline.at(came + cost_s + WAKE_S, partial(self._hear, world, sender, peers, beat, self._said[sender]))

    def _hear(self, world: World, sender: str, peers: list[str], beat: Heartbeat, plain: Heartbeat) -> None:
        """Let peers take in a heartbeat; their nodes are asked only where it is news."""
        now, words = self.timeline.now, dict[int, LivenessReport]()
        for peer in peers:
            life = world.lives.get(peer)
            away = life is None or peer in world.stopped or (sender, peer) in world.cut
            if life is None or away or not hears_no_news(life.node, sender, plain, beat.sequence, now, words):
                world.deliver(sender, peer, beat)

    def size(self, message: Message) -> int:
        """Return a message's bytes on the wire.

        They are those of the first message of its kind; the parts that list islands are measured each time.
        """
        kind, extra = type(message), 0
        if isinstance(message, Heartbeat):
            extra = PLACE_BYTES * len(message.missed or ())
        elif isinstance(message, Begin):
            members = (NAME_CHARS + 3) * len(message.members) + 9 * len(message.bytes_per_s)
            extra = members + self._proposal_size(message.proposal)
        elif isinstance(message, Commit):
            extra = (NAME_CHARS + 3) * len(message.stored_by)
        elif isinstance(message, Promise) and message.held is not None:
            extra = self._proposal_size(message.held.record.proposal)
        if kind not in self._sizes:
            self._sizes[kind] = FRAME_BYTES + len(dump([kind.__name__, to_plain(message)])) - extra
        size = self._sizes[kind] + extra
        return size if size <= PACK_BYTES else int(PACKED * size)

    def _proposal_size(self, proposal: Proposal) -> int:
        """Return a proposal's bytes, which are computed once."""
        if proposal.digest not in self._proposals:
            self._proposals[proposal.digest] = len(dump(to_plain(proposal)))
        return self._proposals[proposal.digest]

    def peers(self, name: str, now: float) -> SharedPeers:
        """Return a view of the peers that shares one directory with all islands."""
        return SharedPeers(self.setting.silence_s, name, self._directory, now)

    def first_tick_s(self, node: Node) -> float:
        """Draw the time to the first tick, so that islands do not send their heartbeats at once."""
        return node.own.options.heartbeat_s * self.timeline.chance("first tick")

    def ticks(self, life: Life) -> bool:
        """Return whether the island does not lead, has heard something, or has not ticked for IDLE_S."""
        return life.node.own.term is None or life.heard or self.timeline.now - life.ticked_at >= IDLE_S

    def tick_s(self, node: Node, islands: int) -> float:
        """Return the time between heartbeats; a leading island ticks as often as so many islands let it."""
        return node.own.options.heartbeat_s if node.own.term is None else max(TICK_S, LOOK_S * islands)

    def phase_s(self, name: str) -> float:
        """Return an island's phase by its pace, with a little jitter."""
        usual_s, chance = self.setting.phase_s * self.setting.pace(int(name)), self.timeline.chance(f"phase {name}")
        return usual_s * (1 + self.setting.jitter * (2 * chance - 1))

    def encode_s(self, name: str) -> float:
        return self._encode_s

    def fetch_s(self) -> float:
        """Return the seconds to download one result."""
        return self._transfer_s(self.result_bytes)

    def catch_up_s(self, name: str, missed: int) -> float:
        """Return the seconds to download the missed results; the whole state if they are more than KEEP_RECORDS."""
        whole = missed > KEEP_RECORDS
        return self._transfer_s(STATE_BYTES * self.setting.values if whole else missed * self.result_bytes)

    def _transfer_s(self, size: int) -> float:
        """Return the seconds to download so many bytes, with two round trips."""
        line = self.setting.line
        return 8 * size / line.down_bits_per_s + 4 * line.delay_s

    def closed_s(self, gone: Node, other: Node) -> float | None:
        """Return one delay where one of the two broadcasts: only such islands have streams to all. None: otherwise."""
        return self.setting.line.delay_s if other.liveness.broadcasts or gone.liveness.broadcasts else None

    def allreduce(self, members: int) -> Cost:
        """Return the cost of an all-reduce among so many members."""
        cost = two_level if self.setting.reduces_in_two_levels(members) else flat
        return cost(members, self.setting.values, self.setting.codec)

    def allreduce_s(self, begin: Begin, now: float) -> float:
        """Return the seconds of an all-reduce: all members wait for the slowest link, then digest the result."""
        setting = self.setting
        share = min(setting.rate(int(member), now) for member in begin.members) if setting.diurnal else 1.0
        digest_s = 1e-9 * setting.host.digest_ns * setting.values
        return self.allreduce(len(begin.members)).seconds(setting.line, share) + digest_s

    def made_s(self, begin: Begin) -> float:
        """Return the seconds of all levels but the last, which hands the mean round in each group."""
        members = len(begin.members)
        if not self.setting.reduces_in_two_levels(members):
            return math.inf
        cost = self.allreduce(members)
        return replace(cost, levels=cost.levels[:-1]).seconds(self.setting.line, 1.0)

    def group(self, begin: Begin, member: str) -> set[str]:
        """Return the members of the same row of the grid."""
        index = begin.members.index(member)
        groups = grid_of([1.0] * len(begin.members)).groups
        return {begin.members[other] for group in groups if index in group for other in group}

    def connect_s(self, begin: Begin) -> float:
        """Return what real islands allow whose coordinator has this link."""
        return connect_s(len(begin.members), self.setting.line.up_bits_per_s / 8)

    def reduce_s(self, begin: Begin) -> list[float]:
        """Return the same duration for each member, since all wait for the slowest link."""
        return [self.allreduce_s(begin, self.timeline.now)] * len(begin.members)

    def stall_s(self, begin: Begin, *, silent: bool) -> float:
        """Return the delay if connections close; else the time after which missing chunks are noticed."""
        stalled_s = self.setting.silence_s + SLACK * self.allreduce_s(begin, self.timeline.now) / CHUNKS
        return stalled_s if silent else self.setting.line.delay_s

    def failure_s(self, *, first: bool) -> float:
        return self.setting.line.delay_s
