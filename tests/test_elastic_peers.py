"""Who is thought to be alive."""

from diloco.elastic.protocol.peers import Peers

ROSTER = ("A", "B", "C", "D", "E")


def heard(**last: float) -> Peers:
    """A's view of the others, silence_s = 2."""
    peers = Peers(2.0)
    for peer, at in last.items():
        peers.hear(peer, at)
    return peers


def test_silence_is_believed_after_a_while():
    peers = heard(B=8.0, C=8.0, D=8.0, E=5.0)
    assert peers.alive(9.9, ROSTER) == {"B", "C", "D"}


def test_silence_of_a_majority_is_believed_three_times_later():
    peers = heard(B=9.0, C=5.0, D=5.0, E=5.0)
    assert peers.alive(10.0, ROSTER) == {"B", "C", "D", "E"}
    assert peers.heard_lately("B", 10.0) and not peers.heard_lately("C", 10.0)
    assert peers.alive(11.1, ROSTER) == {"B"}


def test_half_is_no_majority():
    assert heard(B=5.0).alive(8.0, ("A", "B")) == set()


def test_a_closed_connection_is_quick_evidence_until_it_speaks_again():
    peers = heard(B=9.0, C=9.0)
    peers.views["B"].closed = True
    assert peers.alive(9.1, ROSTER) == {"C"}
    peers.hear("B", 9.2)
    assert peers.alive(9.3, ROSTER) == {"B", "C"}


def test_closed_connections_do_not_make_a_silent_majority():
    peers = heard(B=9.0, C=5.0, D=5.0, E=5.0)
    peers.views["C"].closed = peers.views["D"].closed = True
    assert peers.alive(9.5, ROSTER) == {"B"}


def test_who_slept_blames_nobody():
    peers = heard(B=1.0, C=2.0)
    peers.reset(60.0)
    assert peers.alive(60.0, ROSTER) == {"B", "C"}


def test_bans_end():
    peers = heard(B=9.0)
    peers.views["B"].banned_until = 10.0
    assert peers.banned("B", 9.5) and peers.alive(9.5, ROSTER) == set()
    assert not peers.banned("B", 10.0) and peers.alive(10.0, ROSTER) == {"B"}


class Busy(Peers):
    """Another thread gets to know somebody meanwhile."""

    def is_alive(self, peer: str, now: float, roster: tuple[str, ...]) -> bool:
        self.hear(f"{peer}'", now)
        return super().is_alive(peer, now, roster)


def test_who_is_alive_may_be_asked_while_others_come():
    peers = Busy(2.0)
    peers.know({"B", "C"}, 9.0)
    assert peers.alive(9.1, ROSTER) == {"B", "C"}


def test_order_is_the_same_everywhere():
    peers = Peers(2.0)
    peers.know({"C", "B", "E", "D"}, 0.0)
    assert list(peers.views) == ["B", "C", "D", "E"]


def test_one_that_only_the_directory_knows_is_not_alive():
    peers = heard(B=9.0)
    peers.know({"C", "X"}, 9.0)
    assert peers.alive(9.1, ROSTER) == {"B", "C"}, "a member of the roster counts until it has been silent for long"
    peers.hear("X", 9.2)
    assert peers.alive(9.3, ROSTER) == {"B", "C", "X"}


def test_to_hear_is_more_than_to_think_alive():
    peers = heard(B=9.0, D=5.0)
    peers.know({"C"}, 9.0)
    assert [peer for peer in "BCDX" if peers.hears(peer, 9.1)] == ["B"]
    peers.views["B"].closed = True
    assert not peers.hears("B", 9.1)
