"""Where the other islands may be, and visits to them: by tickets, by what was seen last, and by what others tell."""

from collections.abc import Mapping, Sequence

from diloco.comm.peers.addressbook import AddressBook, by_peer, rendezvous_points
from diloco.comm.peers.identity import peer_id_of
from diloco.comm.peers.noticeboard import Noticeboard
from diloco.comm.peers.ticket import Ticket
from diloco.comm.transport.rendezvous import HostPort, Rendezvous
from diloco.run.local import Connection

MEET_AT_ONCE = 64  # of those of whom others have told


class Neighbours:
    """Know where others may be by their ids, and visit them."""

    def __init__(
        self, me: str, book: AddressBook, ticket: Ticket, connection: Connection, board: Noticeboard,
        rendezvous: Rendezvous,
    ) -> None:  # fmt: skip
        self._me, self._book, self._ticket, self._connection = me, book, ticket, connection
        self._board, self._rendezvous = board, rendezvous

    def places(self) -> dict[str, tuple[str, ...]]:
        """Return the multiaddrs of others: as last seen, as found just now, and as this peer's ticket says."""
        places = by_peer((*self._connection.found_now(), *self._ticket.addresses))
        for peer, last_seen in self._book.others.items():
            places[peer] = tuple(dict.fromkeys((*last_seen, *places.get(peer, ()))))
        places.pop(self._me, None)
        return places

    def visit(self, places: Mapping[str, Sequence[str]]) -> set[str]:
        """Visit peers where their records say, and beside these multiaddrs; return who lets this one in."""
        records = {peer_id_of(key): record for key, record in self._board.peers().items()}
        doors: dict[str, list[HostPort]] = {}
        for peer, addresses in places.items():
            record = records.get(peer)
            known = record.bulk if record is not None and not record.relay else ()
            doors[peer] = list(dict.fromkeys((*known, *rendezvous_points(addresses))))
        return self._rendezvous.visit(doors) if doors else set()

    def meet_new(self) -> set[str]:
        """Visit those of whom others have told: their directory may not bring them this peer's record."""
        return self.visit(dict.fromkeys(sorted(self._rendezvous.told)[:MEET_AT_ONCE], ()))
