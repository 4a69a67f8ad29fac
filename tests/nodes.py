"""A node's options, what others say to it, and what it says."""

from records import record

from diloco.elastic.protocol import messages as msg
from diloco.elastic.protocol.ledger import Ledger
from diloco.elastic.protocol.node import Options
from diloco.elastic.protocol.record import Ballot, Contribution, Head, Offer, Settings
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


def proposal(*islands: str):
    return record(STATE, *(Contribution(island, OFFER, 10) for island in islands)).proposal


def begin(ballot: Ballot, *islands: str, members: tuple[str, ...] = ("A", "B")) -> msg.Begin:
    return msg.Begin(STATE.key, ballot, proposal(*islands), members, ())
