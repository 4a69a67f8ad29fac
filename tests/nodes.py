"""A node's options, what others say to it, and what it says."""

from records import record

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.node import Node, Options
from diloco.elastic.protocol.record import EMPTY, NO_BALLOT, Ballot, Contribution, Head, Offer, Record, Settings
from diloco.elastic.protocol.state import RunState

STATE = RunState(Head(0, 0, "0" * 64), ("A", "B", "C"), Ledger(epoch=1000))
OFFER = Offer(0, 0, 1, 10, (), incarnation=1)


def options(**changes) -> Options:
    return Options(lambda state, fragment, contributions: (Settings(), state.step), silence_s=2.0, **changes)


def those(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def said(effects, kind=object, to=None):
    sent = [send.message for send in those(effects, msg.Send) if to in (None, send.to)]
    return those(sent, kind)


def from_disk(node: Node, effects, now: float) -> list[msg.Effect]:
    """What follows when a coordinator's own *done* comes back from its disk."""
    return [effect for done in said(effects, msg.Done, to=node.me) for effect in node.receive(node.me, done, now)]


def proposal(*islands: str):
    return record(STATE, *(Contribution(island, OFFER, 10) for island in islands)).proposal


def begin(ballot: Ballot, *islands: str, members: tuple[str, ...] = ("A", "B")) -> msg.Begin:
    return msg.Begin(STATE.key, ballot, proposal(*islands), members, ())


def beat(
    head: Head = STATE.head, promise: Ballot = NO_BALLOT, *, hears: tuple[int, ...] = (0, 1, 2), **changes
) -> msg.Heartbeat:
    """A sign of life of one that is linked with the first three of the roster and follows A."""
    usual = {"incarnation": 1, "sequence": 1, "follows": "A", "roster_of": head.digest, "linked": hears}
    return msg.Heartbeat(head, promise, hears=hears, **usual | changes)


def commit(record: Record | None = None, *, stored_by: tuple[str, ...] = ("A", "B")) -> msg.Commit:
    record = record or Record(proposal(), EMPTY)
    return msg.Commit(STATE.key, STATE.head_after(record), stored_by)
