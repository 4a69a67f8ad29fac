"""What stays of a record for ever: its header, for people and for the file of the run's history."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from diloco.checkpoint.log.history import GIVEN_BYTES, MOST, MOST_MS, ContributionHeader, RoundHeader, headers_in
from diloco.checkpoint.log.store import Store
from diloco.checkpoint.transfer.fetch import request
from diloco.comm.transport.transport import Addresses, Transport
from diloco.elastic.protocol.record import Contribution, LoggedRecord
from diloco.errors import MessageRefused, TransferFailed, TransportError

HISTORY_S = 60.0  # for all donors together

log = logging.getLogger(__name__)


def header_of(logged: LoggedRecord, before: Sequence[str], total_tokens: int, size: int) -> RoundHeader:
    """Return the header of a committed record.

    `before` is the roster that decided it, empty if that is not known; `total_tokens` those of the run with it, and
    `size` the bytes of its result.
    """
    record, proposal = logged.record, logged.record.proposal
    answered, amendment = proposal.answered, proposal.amendment
    return RoundHeader(
        digest=record.digest,
        parent=proposal.key.parent,
        round=proposal.key.round,
        time_ms=_time_ms(logged.time_ms),
        step=proposal.step,
        fragment=proposal.fragment,
        tokens=proposal.tokens,
        total_tokens=total_tokens,
        size=size,
        contributions=tuple(map(_contribution, proposal.contributions)),
        islands=len(proposal.roster),
        joined=tuple(peer for peer in proposal.roster if before and peer not in before),
        left=tuple(peer for peer in before if peer not in proposal.roster),
        silent=tuple(peer for peer in before if answered and peer not in answered),
        amendment=0 if amendment is None else amendment.number,
        changes="" if amendment is None else amendment.changes,
        collect_ms=_time_ms(logged.phases.collect_ms),
        exchange_ms=_time_ms(logged.phases.exchange_ms),
    )


def _contribution(given: Contribution) -> ContributionHeader:
    offer = given.offer
    loss = offer.loss if 0 < abs(offer.loss) < MOST else None
    return ContributionHeader(
        given.island, offer.tokens, offer.steps, given.weight, loss, offer.step_ms, offer.late
    )  # fmt: skip


def _time_ms(said: int) -> int:
    """Return a time that a peer has said; 0 (not known) for one that no header takes, so that the round stays."""
    return said if 0 <= said < MOST_MS else 0


def take_history(transport: Transport, donors: Addresses, head: str, store: Store, limit_s: float = HISTORY_S) -> None:
    """Fetch the headers of the rounds that led to a state, from the first donor that has them. Runs on a thread.

    They are for people: a peer could say anything of rounds that this island has not seen, and nothing depends on it.
    So whatever goes wrong here, the run goes on without them.
    """
    try:
        deadline = time.monotonic() + limit_s
        for donor, address in donors.items():
            timeout_s = (deadline - time.monotonic()) / 2  # one that is slow leaves time for the next
            try:
                raw = request(transport, address, "history", limit=GIVEN_BYTES, timeout_s=max(0.0, timeout_s))
            except (TransferFailed, TransportError, MessageRefused) as error:
                log.info("%s gives no history: %s", donor, error)
                continue
            if chain := _leading_to(head, headers_in(raw)):
                store.keep_headers([replace(header, added=True) for header in chain])
                return
    except Exception:  # the thread's outermost frame: history is for people, a round never waits for it
        log.exception("the headers of earlier rounds could not be taken from others")


def _leading_to(head: str, headers: Sequence[RoundHeader]) -> list[RoundHeader]:
    """Return the headers of the chain that ends with this record, oldest first, as far back as there is no gap."""
    known, chain = {header.digest: header for header in headers}, list[RoundHeader]()
    while (header := known.pop(head, None)) is not None:
        chain.append(header)
        head = header.parent
    return chain[::-1]
