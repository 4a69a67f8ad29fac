"""What happened, as lines that people read."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco.elastic.protocol.messages import (
    Append,
    Begin,
    Collect,
    Effect,
    Heartbeat,
    Message,
    Nack,
    Note,
    Promise,
    Ready,
    Send,
)
from diloco.elastic.protocol.record import Record
from diloco.simulate.virtual.timeline import Timeline

Entry = tuple[float, str] | tuple[float, str, str, Message]


@dataclass
class Transcript:
    """Messages become text only when somebody reads it: nearly all transcripts are never read."""

    timeline: Timeline
    fragments: int
    entries: list[Entry] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)  # of records: 2a, and where there is a fork, 2b

    def tell(self, text: str) -> None:
        self.entries.append((self.timeline.now, text))

    def see(self, name: str, effect: Effect) -> None:
        match effect:
            case Send(to, message) if not isinstance(message, Heartbeat):
                self.entries.append((self.timeline.now, name, to, message))
            case Append(record):
                self._tell_commit(name, record)
            case Note(kind, peer, text):
                self.tell(f"{name}: {kind} {peer}: {text}")

    def _tell_commit(self, name: str, record: Record) -> None:
        proposal = record.proposal
        who = ",".join(proposal.islands) or "nobody"
        if self.fragments > 1 and proposal.contributions:
            who += f", fragment {proposal.fragment}"
        if proposal.amendment is not None:
            who += f", amendment {proposal.amendment.number}"
        self.tell(f"{name} commits round {proposal.key.round} of {who} = {self._label(record)}")

    def _label(self, record: Record) -> str:
        if record.digest not in self.labels:
            number = str(record.proposal.key.round)
            rivals = sum(label[:-1] == number for label in self.labels.values())
            self.labels[record.digest] = f"{number}{chr(ord('a') + min(rivals, 25))}"
        return self.labels[record.digest]

    def lines(self) -> Iterator[str]:
        for entry in self.entries:
            if len(entry) == 2:
                yield f"{entry[0]:7.2f}  {entry[1]}"
            else:
                yield f"{entry[0]:7.2f}    {entry[1]} -> {entry[2]} {brief(entry[3])}"


def brief(message: Message) -> str:
    kind = type(message).__name__.lower()
    match message:
        case Begin(ballot=ballot, proposal=proposal, adopted=adopted):
            what = "adopted " if adopted else ""
            return f"begin {what}{ballot.term}.{ballot.attempt} of {','.join(proposal.islands) or 'nobody'}"
        case Collect(term=term) | Promise(term=term):
            return f"{kind} {term}"
        case Nack(promise=promise):
            return f"nack, promised {promise.term} of {promise.coordinator}"
        case Ready(offers=(offer,)) if offer.fragment == 0:
            return f"ready {offer.lo}..{offer.hi}"
        case Ready(offers=offers):
            return "ready " + ", ".join(f"{offer.lo}..{offer.hi} of {offer.fragment}" for offer in offers)
    return kind
