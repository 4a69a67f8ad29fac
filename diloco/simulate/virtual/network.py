"""Control messages on modelled links: what they weigh, when they arrive, how many an island has to deal with.

A heartbeat that says what the last one said is taken in without asking the node, which would do nothing else (a test
compares).
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

from diloco.elastic.protocol.messages import Begin, Commit, Heartbeat, Message, Promise
from diloco.elastic.protocol.peers import LivenessReport
from diloco.elastic.protocol.record import Proposal
from diloco.elastic.protocol.wire import PACK_BYTES, dump, to_plain
from diloco.simulate.virtual.costs import Network
from diloco.simulate.virtual.setting import NAME_CHARS, Setting
from diloco.simulate.virtual.shared import hears_no_news
from diloco.simulate.virtual.world import World

PACKED = 0.22  # is left of a large message; identities are random, and those of the model are not
PLACE_BYTES = 5
FRAME_BYTES = 80  # of a frame and of TLS, around a message
WAKE_S = 0.007  # until the thread that a message is for has it
MESSAGE_S = 150e-6  # to take in a message; measured on 2 ARM cores
BYTE_S = 0.5e-6  # and for each byte of it


@dataclass
class Traffic:
    """Of one island."""

    sent: int = 0
    received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    up_free: float = 0.0  # when what was sent before is out
    busy: float = 0.0  # until messages that came before are dealt with


class ModelledLinks(Network):
    def __init__(self, setting: Setting, world: World) -> None:
        self._world, self._timeline = world, world.timeline
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self.heartbeats = 0
        self._beats: list[tuple[str, Heartbeat]] = []  # of one input: to whom
        self._said: dict[str, Heartbeat] = {}  # by each island, the last time
        self._sizes: dict[type, int] = {}
        self._proposals: dict[str, int] = {}
        self._out_s = 8 / setting.line.up_bits_per_s  # a byte
        self._delay_s = setting.line.delay_s

    def send(self, sender: str, to: str, message: Message) -> None:
        if isinstance(message, Heartbeat):
            self._beats.append((to, message))
            return
        size = self.size(message)
        ours, theirs = self.traffic[sender], self.traffic[to]
        ours.sent += 1
        ours.bytes_sent += size
        theirs.received += 1
        theirs.bytes_received += size
        now = self._timeline.now
        out = (ours.up_free if ours.up_free > now else now) + size * self._out_s
        came = out + self._delay_s
        ours.up_free = out
        taken = (theirs.busy if theirs.busy > came else came) + MESSAGE_S + BYTE_S * size
        theirs.busy = taken
        self._timeline.at(taken + WAKE_S, partial(self._world.deliver, sender, to, message))

    def flush(self, sender: str) -> None:
        """One heartbeat to many, who hear it together when the last one does."""
        if not self._beats:
            return
        beats, self._beats = self._beats, []
        peers, beat = [to for to, _ in beats], beats[-1][1]
        if beat != self._said.get(sender):
            self._said[sender] = beat
        size, count = self.size(beat), len(peers)
        self.heartbeats += count
        ours = self.traffic[sender]
        ours.sent += count
        ours.bytes_sent += count * size
        ours.up_free = max(ours.up_free, self._timeline.now) + count * size * self._out_s
        came, cost_s = ours.up_free + self._delay_s, MESSAGE_S + BYTE_S * size
        for peer in peers:
            theirs = self.traffic[peer]
            theirs.received += 1
            theirs.bytes_received += size
            theirs.busy = (theirs.busy if theirs.busy > came else came) + cost_s
        self._timeline.at(came + cost_s + WAKE_S, partial(self._hear, sender, peers, self._said[sender]))

    def _hear(self, sender: str, peers: list[str], beat: Heartbeat) -> None:
        world, now, words = self._world, self._timeline.now, dict[int, LivenessReport]()
        for peer in peers:
            life = world.lives.get(peer)
            away = life is None or peer in world.stopped or (sender, peer) in world.cut
            if life is None or away or not hears_no_news(life.node, sender, beat, now, words):
                world.deliver(sender, peer, beat)

    def size(self, message: Message) -> int:
        """Of its kind: the first one's; what says much of every island is measured each time."""
        kind, extra = type(message), 0
        if isinstance(message, Heartbeat):
            extra = PLACE_BYTES * len(message.missed or ())
        elif isinstance(message, Begin):
            members = (NAME_CHARS + 3) * len(message.members) + 9 * len(message.bytes_per_s)
            extra = members + self._proposal_size(message.proposal)
        elif isinstance(message, Commit):
            extra = self._proposal_size(message.record.proposal)
        elif isinstance(message, Promise) and message.held is not None:
            extra = self._proposal_size(message.held.record.proposal)
        if kind not in self._sizes:
            self._sizes[kind] = FRAME_BYTES + len(dump([kind.__name__, to_plain(message)])) - extra
        size = self._sizes[kind] + extra
        return size if size <= PACK_BYTES else int(PACKED * size)

    def _proposal_size(self, proposal: Proposal) -> int:
        if proposal.digest not in self._proposals:
            self._proposals[proposal.digest] = len(dump(to_plain(proposal)))
        return self._proposals[proposal.digest]
