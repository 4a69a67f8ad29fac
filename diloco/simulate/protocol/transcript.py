"""What happened, as lines that people read."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from diloco.elastic.protocol.messages import Begin, Collect, Message, Nack, Promise, Ready

Entry = tuple[float, str] | tuple[float, str, str, Message]


@dataclass
class Transcript:
    """Messages become text only when somebody reads it: nearly all transcripts are never read."""

    entries: list[Entry] = field(default_factory=list)

    def tell(self, now: float, text: str) -> None:
        self.entries.append((now, text))

    def sent(self, now: float, sender: str, to: str, message: Message) -> None:
        self.entries.append((now, sender, to, message))

    def lines(self, *, messages: bool = True) -> Iterator[str]:
        for entry in self.entries:
            if len(entry) == 2:
                yield f"{entry[0]:7.2f}  {entry[1]}"
            elif messages:
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
