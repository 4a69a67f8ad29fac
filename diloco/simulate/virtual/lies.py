"""Say what a hostile or broken member may say, for scenarios: each lie changes the messages of one kind."""

from collections.abc import Callable
from dataclasses import replace

from diloco.elastic.protocol import messages as m
from diloco.elastic.protocol.record import Amendment, Grant, Head, Latch, Offer, Proposal

Lie = Callable[[m.Message], m.Message]
SOMEBODY = "nobody's name"
FORGED = Amendment(1, "{}", "00" * 64)


def _of_offers(change: Callable[[Offer], Offer]) -> Lie:
    """Return the lie that changes every offer of a *ready*."""

    def tell(message: m.Message) -> m.Message:
        if not isinstance(message, m.Ready):
            return message
        return replace(message, offers=tuple(map(change, message.offers)))

    return tell


def _of(kind: type[m.Message], change: Callable[..., m.Message]) -> Lie:
    """Return the lie that changes messages of one kind."""
    return lambda message: change(message) if isinstance(message, kind) else message


def _of_begins(change: Callable[[Proposal], Proposal]) -> Lie:
    """Return the lie that changes the proposal of a *begin* with contributions."""

    def tell(begin: m.Begin) -> m.Message:
        return replace(begin, proposal=change(begin.proposal)) if begin.proposal.contributions else begin

    return _of(m.Begin, tell)


def _of_contributions(change: Callable[[Offer], Offer]) -> Lie:
    """Return the lie that changes every offer that a *begin* contains."""

    def changed(proposal: Proposal) -> Proposal:
        parts = (replace(part, offer=change(part.offer)) for part in proposal.contributions)
        return replace(proposal, contributions=tuple(parts))

    return _of_begins(changed)


def _later(offer: Offer) -> Offer:
    return replace(offer, lo=offer.lo + 1, hi=offer.hi + 1)


def _weighs_itself_most(proposal: Proposal) -> Proposal:
    first, *others = proposal.contributions
    return replace(proposal, contributions=(replace(first, weight=10**6), *others))


def _accuse_in_turn(begun: m.Begun) -> m.Failed:
    blamed = "ACDE"[(begun.ballot.term + begun.ballot.attempt) % 4]
    return m.Failed(begun.key, begun.ballot, blamed, "garbage", refused=True)


LIES: dict[str, Lie] = {
    "marks": _of_offers(_later),
    "nothing": _of_offers(lambda offer: replace(offer, hi=offer.lo)),
    "samples": _of_offers(lambda offer: replace(offer, samples=(*offer.samples, *offer.samples))),
    "steps": _of_offers(lambda offer: replace(offer, steps=offer.tokens + 1)),
    "amendments": _of(m.Promise, lambda promise: replace(promise, amendment=FORGED)),
    "heads": _of(m.Heartbeat, lambda beat: replace(beat, head=beat.head._replace(tokens=10**9))),
    "refusals": _of(m.Begun, lambda begun: m.Failed(begun.key, begun.ballot, "A", "garbage", refused=True)),
    "accusations": _of(m.Begun, _accuse_in_turn),
    "stores": _of(m.Done, lambda done: m.Failed(done.key, done.ballot, "", "it cannot be fetched")),
    "promises": _of(m.Heartbeat, lambda beat: replace(beat, promise=beat.promise._replace(term=10**9))),
    "terms": _of(m.Collect, lambda collect: replace(collect, term=10**9)),
    "ballots": _of(m.Begin, lambda begin: replace(begin, ballot=begin.ballot._replace(coordinator=SOMEBODY))),
    "members": _of(m.Begin, lambda begin: replace(begin, members=(SOMEBODY,))),
    "contributors": _of(m.Begin, lambda begin: replace(begin, members=begin.members[::-1])),
    "rates": _of(m.Begin, lambda begin: replace(begin, bytes_per_s=tuple(-1 for _ in begin.bytes_per_s))),
    "fragments": _of_begins(lambda proposal: replace(proposal, fragment=7)),
    "orders": _of_begins(lambda proposal: replace(proposal, amendment=FORGED)),
    "contained": _of_contributions(_later),
    "turns": _of_contributions(lambda offer: replace(offer, fragment=offer.fragment + 1)),
    "settings": _of_begins(lambda proposal: replace(proposal, settings=replace(proposal.settings, lr=1e30))),
    "codecs": _of_begins(lambda proposal: replace(proposal, settings=replace(proposal.settings, codec="fp32"))),
    "clocks": _of_begins(lambda proposal: replace(proposal, step=10**9)),
    "weights": _of_begins(_weighs_itself_most),
    "strangers": _of_begins(lambda proposal: replace(proposal, roster=(*proposal.roster, SOMEBODY))),
    "rosters": _of_begins(lambda proposal: replace(proposal, roster=proposal.roster[:1], contributions=())),
    "answers": _of_begins(lambda proposal: replace(proposal, answered=())),
    "releases": _of_begins(lambda proposal: replace(proposal, releases=(f"{SOMEBODY}#1",))),
    "witnesses": _of_begins(lambda proposal: replace(proposal, witnesses=proposal.islands[:1])),
    "latches": _of_begins(lambda proposal: replace(proposal, latch=Latch(Head(0, 0, ""), "00" * 64))),
    "leases": _of_begins(lambda proposal: replace(proposal, grants=(Grant("A#1", ((10**6, 10**6 + 8),)),))),
}
