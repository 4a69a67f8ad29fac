"""What an island sees of its run and of the others, worked out from its protocol node. Pure, so that simulated islands
are asked the same way."""

from collections.abc import Callable, Sequence, Set

from diloco.checkpoint.log.history import ContributionHeader, RoundHeader
from diloco.elastic.protocol.node import Node
from diloco.elastic.protocol.peers import PeerView
from diloco.elastic.protocol.protocol_state import ProtocolState
from diloco.elastic.protocol.record import holder_name, quorum
from diloco.report.status import IslandStatus, RunStatus

LAST_ROUNDS = 20  # that shares are counted over
SPEED_ROUNDS = 5
GONE_S = 3600.0  # for which one that is no member any more is still shown

Name = Callable[[str], str]


def view_of(node: Node, headers: Sequence[RoundHeader], name: Name, *, now: float, at: float) -> RunStatus:
    """Return what an island sees. `now` is the node's clock, `at` Unix time; `headers` are the last rounds."""
    own = node.own
    lately = Lately(headers)
    rounds = lately.rounds
    term = own.term  # whose coordinator knows who is ready: found once, since a run may have many islands
    ready = set(term.offers(own.due)) if term is not None and term.begin is None else set[str]()
    seen = [_other(node, peer, lately, name, ready, now=now, at=at) for peer in _shown(node, now)]
    me = _me(node, lately, name, now=now)
    phase, since = _phase(own, now)
    round_s = own.seen_round_s
    steps = own.options.steps or 0
    return RunStatus(
        run="", me=own.me, at=at, round=own.state.head.round, step=own.state.step, steps=steps, phase=phase,
        phase_since=at - since, round_s=round_s, exchange_s=own.exchange_s, eta_s=_eta_s(rounds, own.state.step, steps),
        rounds=len(rounds), loss=rounds[-1].loss if rounds else None, min_islands=own.options.min_islands,
        silence_s=own.options.silence_s, quorum=own.needs_quorum, islands=(me, *seen),
    )  # fmt: skip


def _shown(node: Node, now: float) -> list[str]:
    """Return whom to show: members, whoever is heard, and who was lost within the last hour; in the roster's order."""
    own = node.own
    recent = [
        peer for peer, view in own.peers.views.items()
        if (view.heard and now - view.heard_at < GONE_S) or peer in own.state.evicted
    ]  # fmt: skip
    return [peer for peer in dict.fromkeys((*own.state.roster, *sorted(recent))) if peer != own.me]


def _phase(own: ProtocolState, now: float) -> tuple[str, float]:
    """Return the phase of the round that follows the head, and for how many seconds it has lasted."""
    current = own.current
    if current is None:
        return "collecting", max(0.0, now - (own.updated_at[-1] if own.updated_at else now))
    return ("exchanging" if current.done is None else "storing"), max(0.0, now - current.since)


def _eta_s(rounds: Sequence[RoundHeader], step: int, steps: int) -> float | None:
    """Return the seconds until the last step at the pace of the last rounds; None if that is not known."""
    if len(rounds) < 2 or not steps:
        return None
    seconds, done = (rounds[-1].time_ms - rounds[0].time_ms) / 1000, rounds[-1].step - rounds[0].step
    return (steps - step) * seconds / done if done > 0 and seconds > 0 else None


class Lately:
    """Say what the last rounds with contributions show of each island: its share, its loss, its speed."""

    def __init__(self, headers: Sequence[RoundHeader]) -> None:
        self.rounds = [header for header in headers if header.contributions][-LAST_ROUNDS:]
        self._parts: dict[str, list[tuple[RoundHeader, ContributionHeader]]] = {}
        for header in self.rounds:
            for part in header.contributions:
                self._parts.setdefault(part.island, []).append((header, part))
        self._weight = sum(part.weight for part in self.rounds[-1].contributions) if self.rounds else 0
        self._since = self.rounds[-SPEED_ROUNDS:][0].round if self.rounds else 0

    def figures(self, peer: str) -> dict[str, float | int | None]:
        """Return an island's share, how often it contributed, its last loss, and its tokens/s over its last rounds."""
        parts = self._parts.get(peer, [])
        share = None
        if self.rounds:
            is_last = bool(parts) and parts[-1][0] is self.rounds[-1]
            share = parts[-1][1].weight / max(1, self._weight) if is_last else 0.0
        found: dict[str, float | int | None] = {"share": share, "contributed": len(parts)}
        if parts:
            found["loss"] = parts[-1][1].loss
        recent = [each for each in parts if each[0].round >= self._since]
        if len(recent) > 1 and (seconds := (recent[-1][0].time_ms - recent[0][0].time_ms) / 1000) > 0:
            found["tokens_per_s"] = sum(part.tokens for _, part in recent[1:]) / seconds
        return found


def _me(node: Node, lately: Lately, name: Name, *, now: float) -> IslandStatus:
    """Return this island's own status, as far as its node knows it: not whether its trainer works or waits."""
    own = node.own
    missing, cause = waits_for(node, now)
    state = "witnessing" if own.options.witness else "training"
    if own.leaving:
        state = "leaving"
    elif own.catching_up is not None:
        state = "catching up"
    elif own.current is not None and own.current.reducing:
        state = "sending"
    elif cause not in ("", "round"):
        state = "waiting"
    return IslandStatus(
        own.me, name(own.me), state, told_by=name(own.me), waiting_for=tuple(map(name, missing)), cause=cause,
        member=own.me in own.state.places, leads=own.term is not None, round=own.state.head.round, step=own.state.step,
        write_s=own.writes.slowest_s(now), **lately.figures(own.me),  # type: ignore[arg-type]
    )  # fmt: skip


def waits_for(node: Node, now: float) -> tuple[list[str], str]:
    """Return for whom a round waits, as this island knows it, and why: one of `status.CAUSES`, "" if for nothing."""
    own = node.own
    alive = node.liveness.alive(now)
    here = alive | {own.me}
    roster, options = own.state.roster, own.options
    present = [peer for peer in roster if peer == own.me or own.peers.hears(peer, now)]
    if own.needs_quorum and own.me in roster and not quorum(roster, present):
        return [peer for peer in roster if peer not in present], "quorum"
    if not own.needs_quorum and now < own.rejoin_until and 2 * len(present) <= len(roster):
        return [peer for peer in roster if peer not in present], "returning"
    if len(here - set(own.state.witnesses)) < options.min_islands:
        return [peer for peer in roster if peer not in here], "min_islands"
    if not own.state.updates and len(here) < options.start_islands and now < own.start_until:
        return [], "start_islands"
    if own.me not in roster:
        return [own.follows] if own.follows and own.follows != own.me else [], "joining"
    lease = own.state.ledger.lease_of(holder_name(own.me, own.incarnation))
    if own.want and not lease and not options.witness:
        return [own.follows] if own.follows and own.follows != own.me else [], "samples"
    if (term := own.term) is not None and term.begin is None:
        ready, promised = term.offers(own.due), term.promised()
        answers = [peer for peer in roster if peer in here and peer not in promised and peer != own.me]
        busy = [peer for peer in promised if peer not in ready and peer not in own.state.witnesses and peer in here]
        return answers or busy, "round"
    if term is not None and term.begin is not None:
        return [peer for peer in term.begin.members if peer not in term.done and peer != own.me], "round"
    return [own.follows] if own.follows and own.follows != own.me else [], "round"


def _other(
    node: Node, peer: str, lately: Lately, name: Name, ready: Set[str], *, now: float, at: float
) -> IslandStatus:
    """Return another island's status. For whom it waits is the coordinator's to say, of itself (`status.merged`)."""
    own, view = node.own, node.own.peers.views.get(peer) or PeerView(0.0)
    state, since, text = _state_of(node, peer, view, ready, now)
    round_number = view.head.round if view.head is not None else 0
    return IslandStatus(
        peer, name(peer), state, since=at - since if since is not None else 0.0, told_by=name(own.me), text=text,
        cause="round" if state == "waiting" else "", member=peer in own.state.places, leads=view.leading,
        round=round_number, write_s=view.write_s, reaches_me=node.liveness.hear_each_other(peer, now),
        **lately.figures(peer),  # type: ignore[arg-type]
    )  # fmt: skip


def _state_of(node: Node, peer: str, view: PeerView, ready: Set[str], now: float) -> tuple[str, float | None, str]:
    """Return another island's state, since how many seconds it has it, and more about it."""
    own = node.own
    if peer in own.state.evicted:
        return "evicted", None, ""
    if view.said_goodbye:
        return "left", now - view.heard_at, ""
    if now < view.banned_until:
        return "excluded", None, f"for another {view.banned_until - now:.0f} s"
    if view.closed or not node.liveness.is_alive(peer, now):
        how = "its connection broke" if view.closed else "it is silent"
        return "lost", (now - view.heard_at if view.heard else None), how if view.heard else "not heard yet"
    if view.behind_s > 0 or (view.behind_since is not None and now - view.behind_since > own.options.silence_s):
        more = f"about {view.behind_s:.0f} s more, as it says" if view.behind_s else ""
        return "catching up", now - view.behind_since if view.behind_since is not None else None, more
    if peer in own.state.witnesses:
        return "witnessing", None, ""
    current, term = own.current, own.term
    if current is not None and current.reducing and peer in current.begin.members:
        return "sending", now - current.since, ""
    if term is not None and peer in ready:
        return "waiting", now - term.ready_at[peer] if peer in term.ready_at else None, ""
    return "training", None, ""
