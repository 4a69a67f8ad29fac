"""What many islands hold alike is kept, and worked out, once. They see the same as if each had its own."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from diloco.elastic.protocol.messages import Heartbeat
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.peers import LivenessReport, Peers, PeerView
from diloco.elastic.protocol.record import Head, Record
from diloco.elastic.protocol.state import RunState


@dataclass(frozen=True)
class SharedState(RunState):
    @cached_property
    def _after(self) -> dict[str, RunState]:
        return {}

    def after(self, record: Record) -> RunState:
        if record.digest not in self._after:
            self._after[record.digest] = super().after(record)
        return self._after[record.digest]


class Views(dict[str, PeerView]):
    """Of everybody in the directory; each comes into being when it is looked at, as old as the island's own life."""

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
        return super().items()


class SharedPeers(Peers):
    views: Views

    def __init__(self, silence_s: float, me: str, everybody: dict[str, None], now: float) -> None:
        super().__init__(silence_s, Views(me, everybody, now))
        self.dealt_with: dict[str, tuple[Heartbeat, Head]] = {}  # the last heartbeat of each, at this head

    def know(self, peers: Iterable[str], now: float) -> None:
        """Everybody is in the directory."""

    def view(self, peer: str, now: float) -> PeerView:
        return self.views[peer]

    def touch(self, peer: str, now: float) -> bool:
        """As `hear`, unless it is banned."""
        view = self.views[peer]
        if now < view.banned_until:
            return False
        view.heard_at, view.closed, view.left = now, False, False
        return True

    def reset(self, now: float) -> None:
        self.views.since = max(self.views.since, now)
        for _, view in self.views.seen():
            view.heard_at = max(view.heard_at, now)

    def judge_alone(self, now: float, but: Collection[str]) -> None:
        """As on every island; those who were never looked at are vouched for, unless somebody has missed them."""
        words, self.reports = self.reports, {}
        missed = [peer for word in words.values() for peer, place in word.places.items() if place in word.missed]
        for peer in (*missed, *but):
            self.views.get(peer)  # its silence is remembered
        for peer, view in self.views.seen():
            if peer not in but and any(word.hears(peer) for word in words.values()):
                view.heard_at = max(view.heard_at, now)
        if words:
            self.views.since = max(self.views.since, now)


def hears_no_news(node: Node, sender: str, beat: Heartbeat, now: float, words: dict[int, LivenessReport]) -> bool:
    """Take in a heartbeat that the node has dealt with at this head: its sender is heard, and that is all.

    Return False where the node must be asked. A coordinator that lacks the sender's answer would ask again. `words`:
    what the heartbeat says, once for all who hear it.
    """
    peers, state, term = node.peers, node.state, node.own.term
    assert isinstance(peers, SharedPeers)
    known = peers.dealt_with.get(sender) == (beat, state.head) and beat.head == state.head
    at_rest = not (node.own.leaving or node.own.diverged) and (term is None or term.answers.get(sender) is not None)
    if not (known and at_rest and peers.touch(sender, now)):
        peers.dealt_with[sender] = beat, state.head
        return False
    if beat.missed is not None and not node.liveness.broadcasts:
        key = id(state.places)
        peers.accept_report(
            sender, words.get(key) or words.setdefault(key, LivenessReport(now, frozenset(beat.missed), state.places))
        )
    return True
