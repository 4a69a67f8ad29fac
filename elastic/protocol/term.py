"""What a coordinator keeps of its term."""

from dataclasses import dataclass, field

from diloco.elastic.protocol.messages import Begin, Failed, Held, Promise, Ready
from diloco.elastic.protocol.record import Ballot, Offer, Record


@dataclass
class Term:
    """One term of this coordinator. `begin` is the attempt under way; without one, it collects."""

    number: int
    coordinator: str
    attempt: int = 0
    answers: dict[str, Promise | None] = field(default_factory=dict)  # None: it has another head
    asked: dict[str, float] = field(default_factory=dict)  # alive without an answer: since when
    ready: dict[str, Ready] = field(default_factory=dict)
    ready_at: dict[str, float] = field(default_factory=dict)
    adopted: Record | None = None
    fetching: tuple[str, Record] | None = None  # what is to be adopted or committed, and who has it
    fetches: int = 0
    begin: Begin | None = None
    begun_at: float = 0.0
    done: dict[str, str] = field(default_factory=dict)
    failures: list[tuple[str, Failed]] = field(default_factory=list)
    settle_at: float = 0.0
    resend_at: float = 0.0
    resends: int = 0

    @property
    def ballot(self) -> Ballot:
        return Ballot(self.number, self.coordinator, self.attempt)

    def promised(self) -> dict[str, Promise]:
        return {peer: answer for peer, answer in self.answers.items() if answer is not None}

    def highest_held(self) -> tuple[str, Held] | None:
        """Return who holds the result of the highest ballot, and that result.

        Attempts of this term do not count: only its coordinator could have committed them.
        """
        held = [(peer, answer.held) for peer, answer in self.promised().items() if answer.held is not None]
        held = [(peer, one) for peer, one in held if one.ballot[:2] != self.ballot[:2]]
        return max(held, key=lambda pair: (pair[1].ballot, pair[0])) if held else None

    def offers(self, fragment: int) -> dict[str, Offer]:
        return {
            peer: offer for peer, ready in self.ready.items() for offer in ready.offers if offer.fragment == fragment
        }
