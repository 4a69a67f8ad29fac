"""Signs of life: whom an island tells that it lives, and whom it believes to live.

A few islands all tell each other. Among many that would be n² messages every time. There, the first of the roster (the
*front*; its first leads) hear everybody, speak to everybody and say whom they miss. The rest speak to the front
only and take its word for the others. Whoever belongs to the front, leads, or has lost the front is *loud*: it speaks
to all and believes nobody's word, so that nobody is waited for whom only others can reach.
"""

from dataclasses import replace

from diloco.elastic.protocol.messages import Heartbeat
from diloco.elastic.protocol.peers import Word
from diloco.elastic.protocol.seat import Seat

FRONT = 4
LATELY = 2  # heartbeats


class Beating(Seat):
    def _beat(self, now: float) -> None:
        front = self._front(now)
        loud = self._is_loud(front, now)
        if loud and not self._loud:
            self.peers.judge_alone(now, but=front)  # whom it should have heard before
        self._loud, beat = loud, self.heartbeat()
        if not loud:
            # also to who seems lost, for it may hear, and to whoever has just become loud
            for peer in dict.fromkeys((*front, *self.state.roster[:FRONT], *self.peers.words)):
                self._say(peer, beat)
        else:
            self._say_all(beat if self._are_few() else replace(beat, missed=self._whom_it_misses(now)))

    def _are_few(self) -> bool:
        return len(self.peers.views) < self.options.flat_up_to

    def _front(self, now: float) -> list[str]:
        found: list[str] = []
        for peer in self.state.roster:
            if len(found) == FRONT:
                break
            if peer == self.me or self.is_alive(peer, now):
                found.append(peer)
        return found

    def _is_loud(self, front: list[str], now: float) -> bool:
        """Who leads, and to whom the front is no help: it does not hear it, or cannot fetch from it."""
        if self._are_few() or self.me in front or self.term is not None:
            return True
        views = [self.peers.views[peer] for peer in front]
        return not any(now - view.heard_at <= self.options.silence_s for view in views) or any(
            view.fetches_failed for view in views
        )

    def _whom_it_misses(self, now: float) -> tuple[int, ...]:
        """Places in the roster."""
        since, views = now - LATELY * self.options.heartbeat_s, self.peers.views
        heard = {peer for peer in self.state.roster if peer in views and views[peer].heard_at >= since} | {self.me}
        return tuple(place for peer, place in self.state.places.items() if peer not in heard)

    def _heed(self, sender: str, beat: Heartbeat, now: float) -> None:
        """Who is quiet takes the word of those who are not, and answers those whom nobody else helps on."""
        if self._loud:
            return
        if beat.head < self.state.head:
            self._say(sender, self.heartbeat())
        elif beat.missed is not None and beat.head == self.state.head:
            self.peers.believe(sender, Word(now, frozenset(beat.missed), self.state.places))

    def _voters(self) -> int:
        """How many of those an island hears are needed for a majority: of all, or of the front."""
        return len(self.state.roster) if self._loud else FRONT
