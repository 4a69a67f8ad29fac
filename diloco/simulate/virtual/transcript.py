"""Record what happened, as lines that people read."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco.elastic.protocol import messages as m
from diloco.elastic.protocol.record import Record
from diloco.simulate.virtual.costs import Timeline

Entry = tuple[float, str] | tuple[float, str, str, m.Message]


@dataclass
class Transcript:
    """Collect entries; messages become text only when they are read, since nearly all transcripts never are."""

    timeline: Timeline
    fragments: int
    entries: list[Entry] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)  # of records: 2a, and where there is a fork, 2b

    def note(self, text: str) -> None:
        """Add a line of text at the current virtual time."""
        self.entries.append((self.timeline.now, text))

    def see(self, name: str, effect: m.Effect) -> None:
        """Add an effect of a node, if it is worth a line: messages but for heartbeats, commits and notes."""
        match effect:
            case m.Send(to, message) if not isinstance(message, m.Heartbeat):
                self.entries.append((self.timeline.now, name, to, message))
            case m.Append(record):
                self._tell_commit(name, record)
            case m.Note(kind, peer, text):
                self.note(f"{name}: {kind} {peer}: {text}")

    def _tell_commit(self, name: str, record: Record) -> None:
        """Add a line for a commit, with a label for its record: rivals of one round get other letters."""
        proposal = record.proposal
        who = ",".join(proposal.islands) or "nobody"
        if self.fragments > 1 and proposal.contributions:
            who += f", fragment {proposal.fragment}"
        if proposal.amendment is not None:
            who += f", amendment {proposal.amendment.number}"
        number = str(proposal.key.round)
        if record.digest not in self.labels:
            rivals = sum(label[:-1] == number for label in self.labels.values())
            self.labels[record.digest] = f"{number}{chr(ord('a') + min(rivals, 25))}"
        self.note(f"{name} commits round {number} of {who} = {self.labels[record.digest]}")

    def lines(self) -> Iterator[str]:
        """Yield the entries as text, each with its time in seconds."""
        for entry in self.entries:
            if len(entry) == 2:
                yield f"{entry[0]:7.2f}  {entry[1]}"
            else:
                yield f"{entry[0]:7.2f}    {entry[1]} -> {entry[2]} {brief(entry[3])}"


def brief(message: m.Message) -> str:
    """Format a message in a few words: its kind, and what distinguishes it."""
    kind = type(message).__name__.lower()
    match message:
        case m.Begin(ballot=ballot, proposal=proposal, adopted=adopted):
            what = "adopted " if adopted else ""
            return f"begin {what}{ballot.term}.{ballot.attempt} of {','.join(proposal.islands) or 'nobody'}"
        case m.Collect(term=term) | m.Promise(term=term):
            return f"{kind} {term}"
        case m.Nack(promise=promise):
            return f"nack, promised {promise.term} of {promise.coordinator}"
        case m.Ready(offers=(offer,)) if offer.fragment == 0:
            return f"ready {offer.lo}..{offer.hi}"
        case m.Ready(offers=offers):
            return "ready " + ", ".join(f"{offer.lo}..{offer.hi} of {offer.fragment}" for offer in offers)
    return kind
