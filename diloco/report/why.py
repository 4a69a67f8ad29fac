"""Answer *why* in words: a table of questions, each a function from facts to sentences. Pure.

A sentence says what is so, by which measurement, and what to do. Facts are a run's status, the headers of its rounds
and the events of islands on this machine; whatever is not known is not guessed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from diloco.checkpoint.log.history import RoundHeader
from diloco.errors import SaveError
from diloco.report.events import Event, IslandNews, of_kind
from diloco.report.status import IslandStatus, RunStatus
from diloco.report.terminal import names
from diloco.units import counted, format_count, format_duration, format_rate

SLOW = 1.5  # times the others' median: slower than that is worth a sentence
LONG = 1.3  # times a usual round
SLOW_DISK_S = 1.0  # for a write
FULL_LINK = 0.8  # of its limit: then the link is the limit
CLOCK_S = 10.0
WORTH_SAYING_S = 2.0
LATELY_S = 600.0


@dataclass(frozen=True)
class Facts:
    """Hold what is known: about the run now, all its rounds, and what islands of this machine reported."""

    status: RunStatus | None = None
    rounds: Sequence[RoundHeader] = ()
    events: Sequence[Event] = ()
    name: Callable[[str], str] = lambda peer: peer  # what an island is called, by its id
    now: float = field(default_factory=time.time)

    def news(self, island: str, *what: str, since: float | None = None) -> IslandNews | None:
        """Return the last that was reported of an island, of these kinds, within the last ten minutes."""
        after = self.now - LATELY_S if since is None else since
        found = [
            each for each in of_kind(self.events, IslandNews)
            if each.island == island and each.what in what and each.time >= after
        ]  # fmt: skip
        return found[-1] if found else None


def why_now(facts: Facts) -> list[str]:
    """Return what holds the run up now, the most important first; one sentence if nothing does."""
    if facts.status is None:
        return ["nothing is known of what the run does now: no island of it on this machine has said anything"]
    if all(each.state in ("ended", "left", "lost", "evicted") for each in facts.status.islands):
        return [_not_running(facts.status)]
    found = [sentence for ask in QUESTIONS for sentence in ask(facts, facts.status)]
    if not found and (starting := [each for each in facts.status.islands if each.state == "starting"]):
        found = [sentence for each in starting for sentence in _state(facts, facts.status, each)]
    return found or [_healthy(facts.status)]


def is_known(facts: Facts, name: str) -> bool:
    """Tell whether an island of this name is or was in the run."""
    return name in _islands(facts) or (facts.status is not None and facts.status.island(name) is not None)


def _islands(facts: Facts) -> list[str]:
    """List the islands that the status and the rounds know, by name."""
    peers = {part.island for each in facts.rounds for part in each.contributions}
    peers |= {peer for each in facts.rounds for peer in each.left}
    seen = () if facts.status is None else facts.status.islands
    return sorted({*map(facts.name, peers), *(each.name for each in seen)})


def why_island(facts: Facts, name: str) -> list[str]:
    """Return why an island does what it does: why it is not in the roster, contributes nothing, or was left out. Raise
    SaveError where no island is or was called that."""
    status = facts.status
    island = status.island(name) if status is not None else None
    if status is None or island is None:
        return _of_history(facts, name)
    found = [
        *_state(facts, status, island), *_contribution(facts, status, island), *_own_trouble(facts, status, island)
    ]  # fmt: skip
    return found or [f"{island.name} trains, and its work is in the last rounds: nothing is wrong with it"]


def why_round(facts: Facts, number: int) -> list[str]:
    """Return why a round took as long as it did, who was missing in it, and what it changed."""
    # a run that was resumed with other settings has counted anew: the last one of this number is meant
    at = max((place for place, each in enumerate(facts.rounds) if each.round == number), default=None)
    if at is None:
        last = facts.rounds[-1].round if facts.rounds else 0
        return [f"round {number} is not known here: the last one is round {last}"]
    header, before = facts.rounds[at], facts.rounds[at - 1] if at else None
    found = [*_duration(facts, header, before), *_members(facts, header, before)]
    return found or [f"how long round {number} took is not known here; everybody was in it"]


# what holds a run up


def _quorum(facts: Facts, status: RunStatus) -> list[str]:
    waiting = [each for each in status.islands if each.cause == "quorum"]
    if not waiting:
        return []
    missing, me = waiting[0].waiting_for, waiting[0]
    here = [each.name for each in status.islands if each.member and each.name not in missing]
    gone = [each for each in status.islands if each.name in missing and each.state in ("silent", "ended")]
    known = [_lost_sentence(facts, status, each) for each in gone]
    return [
        f"nothing is committed: {names(here)} alone {'is' if len(here) == 1 else 'are'} no quorum of the "
        f"{len(here) + len(missing)} members; {_listed(missing)} cannot be heard from {me.name}",
        *known,
        f"{'only if' if known else 'if'} {_listed(missing)} {'is' if len(missing) == 1 else 'are'} gone for good, the "
        f"owner continues without: diloco force-roster RUN --keep {','.join(here)}",
    ]


def _returning(facts: Facts, status: RunStatus) -> list[str]:
    return [
        f"{each.name} has come back and looks for {_listed(each.waiting_for)}, with whom it was last in a round: alone "
        "it goes on elastic.rejoin_s after its start, so that nothing they have committed meanwhile is undone"
        for each in status.islands
        if each.cause == "returning"
    ]


def _too_few(facts: Facts, status: RunStatus) -> list[str]:
    waiting = [each for each in status.islands if each.cause in ("min_islands", "start_islands")]
    if not waiting:
        return []
    here = sum(each.state not in AWAY for each in status.islands)
    if waiting[0].cause == "start_islands":
        return [f"the first round waits for more islands (elastic.start_islands): {counted(here, 'island')} so far"]
    return [
        f"rounds wait for islands: {here} of the {status.min_islands} that elastic.min_islands asks for "
        f"{'is' if here == 1 else 'are'} there. Start more, or lower it: diloco set RUN elastic.min_islands={here}"
    ]


def _lost(facts: Facts, status: RunStatus) -> list[str]:
    gone = [each for each in status.islands if each.state in ("lost", "ended", "silent") and not each.heard_by]
    waits = status.own.cause == "quorum"  # whose absence it is has been said
    said = next((each.waiting_for for each in status.islands if each.cause == "quorum"), ())
    return [
        _lost_sentence(facts, status, each)
        for each in gone
        if each.name not in said and not (waits and each.state == "lost")
    ]


def _excluded(facts: Facts, status: RunStatus) -> list[str]:
    return [
        sentence
        for each in status.islands
        if each.state in ("excluded", "evicted")
        for sentence in _state(facts, status, each)
    ]


def _no_route(facts: Facts, status: RunStatus) -> list[str]:
    found = [_cut_sentence(status, each) for each in status.islands if each.state == "lost" and each.heard_by]
    others = [each for each in status.islands if each.state not in (*AWAY, "excluded") and each.island != status.me]
    found += [_cut_sentence(status, each) for each in others if not each.reaches_me and each.member]
    lately = [each for each in of_kind(facts.events, IslandNews) if facts.now - each.time < LATELY_S]
    said = [f"{each.text}: one of them is left out of rounds, in turn" for each in lately if each.what == "cut off"]
    return found or list(dict.fromkeys(said))


def _catching_up(facts: Facts, status: RunStatus) -> list[str]:
    return [_catching_sentence(status, each) for each in status.islands if each.state == "catching up"]


def _slow_island(facts: Facts, status: RunStatus) -> list[str]:
    speeds = {
        each.name: each.tokens_per_s for each in _training(status) if each.tokens_per_s and each.told_by == each.name
    }
    found = []
    for name, speed in speeds.items():
        others = [other for each, other in speeds.items() if each != name and other is not None]
        if others and speed and (usual := median(others)) > SLOW * speed:
            found.append(
                f"{name} is slow: it trains {format_count(speed)} tokens/s where the others have "
                f"{format_count(usual)}, {usual / speed:.1f} times as many; its GPU or CPU is the bottleneck, and "
                "rounds wait for it (elastic.adaptive gives each island as many steps as it has time for)"
            )
    return found or _waited_for(status) or _left_behind(status)


def _left_behind(status: RunStatus) -> list[str]:
    """Name whom the last round went on without, though it trains."""
    slow = [each for each in _training(status) if each.member and each.share == 0.0 and each.contributed]
    return [
        f"the last round went on without {each.name}, which was not ready in time: {_part(status, each)}. What it does "
        "meanwhile comes late; a larger elastic.straggler waits longer"
        for each in slow
        if each.state in ("training", "sending", "waiting")
    ]


def _waited_for(status: RunStatus) -> list[str]:
    """Name whom the coordinator waits for, for longer than a whole round usually takes."""
    leader = next((each for each in status.islands if each.leads), None)
    waited_s = status.at - status.phase_since
    if leader is None or not leader.waiting_for or status.round_s is None or status.phase != "collecting":
        return []
    if leader.cause != "round":  # that has been said
        return []
    if waited_s < max(LONG * status.round_s, status.round_s + WORTH_SAYING_S):
        return []
    have = "has" if len(leader.waiting_for) == 1 else "have"
    return [
        f"{_listed(leader.waiting_for)} {have} not come to the round after "
        f"{format_duration(waited_s)}; a round usually takes {format_duration(status.round_s)}"
    ]


def _link(facts: Facts, status: RunStatus) -> list[str]:
    found = [sentence for each in _training(status) if (sentence := _full_link(each))]
    if not found and status.round_s and status.exchange_s > status.round_s / 2:
        found = [
            f"the exchange takes {format_duration(status.exchange_s)} of a round's {format_duration(status.round_s)}: "
            "the links are the bottleneck. Exchange less (sync.codec), less often (sync.every) or beside training "
            "(sync.delay); diloco plan says what that brings"
        ]
    return found


def _disk(facts: Facts, status: RunStatus) -> list[str]:
    return [sentence for each in status.islands if each.state not in AWAY for sentence in _disk_trouble(each)]


def _clock(facts: Facts, status: RunStatus) -> list[str]:
    return list(dict.fromkeys(sentence for each in status.islands for sentence in _clock_trouble(status, each)))


def _twins(facts: Facts, status: RunStatus) -> list[str]:
    return [sentence for each in status.islands for sentence in _twin_trouble(facts, each)]


def _samples(facts: Facts, status: RunStatus) -> list[str]:
    waiting = [each.name for each in status.islands if each.cause == "samples"]
    then = "the next round does that, unless all of the data is taken (data.epochs)"
    return [f"{name} waits for samples to be leased: {then}" for name in waiting]


QUESTIONS: tuple[Callable[[Facts, RunStatus], list[str]], ...] = (
    _quorum, _returning, _too_few, _excluded, _lost, _no_route, _catching_up, _disk, _slow_island, _link, _samples,
    _clock, _twins,
)  # fmt: skip
AWAY = ("lost", "left", "ended", "evicted", "silent")


# why an island …


def _state(facts: Facts, status: RunStatus, each: IslandStatus) -> list[str]:
    """Say why an island is not at work, or not in the roster."""
    match each.state:
        case "evicted":
            return [f"{each.name} is out for good: the run's owner has taken it out (diloco evict)"]
        case "left":
            return [f"{each.name} said goodbye {_ago(facts, each)}: it stopped in good order, and can come back"]
        case "lost" | "ended" | "silent":
            return [_lost_sentence(facts, status, each)]
        case "excluded":
            news = facts.news(each.name, "excluded", "refused", "diverged", since=0.0)
            why = f": {news.text}" if news is not None and news.text else ""
            return [f"{each.name} is excluded {each.text}{why}. It takes part again after that, if it does better"]
        case "catching up":
            return [_catching_sentence(status, each)]
        case "starting":
            return [f"{each.name} has not got the run's state yet: it is starting, or fetches it from members"]
    if each.cause in ("quorum", "returning", "min_islands", "start_islands"):
        return [sentence for ask in (_quorum, _returning, _too_few) for sentence in ask(facts, status)]
    if not each.member:
        return [*_kept_out(facts, each), *_joining(facts, status, each)][:1]
    return []


def _kept_out(facts: Facts, each: IslandStatus) -> list[str]:
    news = facts.news(each.name, "kept out", since=0.0)
    return [] if news is None else [f"{each.name} is not in the roster: {news.text}; ask the run's owner for a ticket"]


def _joining(facts: Facts, status: RunStatus, each: IslandStatus) -> list[str]:
    lead = next((other.name for other in status.islands if other.leads), "its coordinator")
    return [f"{each.name} is not in the roster yet: the next round that {lead} leads takes it in"]


def _contribution(facts: Facts, status: RunStatus, each: IslandStatus) -> list[str]:
    """Say why an island's contribution is 0, or small."""
    if each.state == "witnessing":
        return [f"{each.name} contributes nothing because it is a witness: it stores and votes"]
    if each.share or not status.rounds or not each.member or each.state in AWAY:
        return []
    refused = facts.news(each.name, "refused", "excluded", "diverged")
    slow = facts.news(each.name, "slow")
    part = _part(status, each)
    if refused is not None:
        return [f"{each.name} contributes nothing now, {part}: it was {refused.what}: {refused.text}"]
    if slow is not None:
        return [f"{each.name} takes part in some rounds only, {part}: {slow.text}"]
    if each.step and each.contributed == 0:
        return [f"{each.name} trains and has not contributed yet: its first round comes when its phase is over"]
    return [f"the last round did not wait for {each.name}, {part}: what it has done since comes with the next one"]


def _own_trouble(facts: Facts, status: RunStatus, each: IslandStatus) -> list[str]:
    link = [_full_link(each)] if _full_link(each) else []
    return [*_disk_trouble(each), *link, *_clock_trouble(status, each), *_twin_trouble(facts, each)]


def _of_history(facts: Facts, name: str) -> list[str]:
    """Say of an island that no status knows what the rounds know."""
    parts = [each for each in facts.rounds if any(facts.name(part.island) == name for part in each.contributions)]
    left = [each for each in facts.rounds if any(facts.name(peer) == name for peer in each.left)]
    if not parts and not left:
        raise SaveError(f"{name}: no such island; the run has {', '.join(_islands(facts)) or 'none that is known'}")
    found = [f"{name} contributed to {counted(len(parts), 'round')}, the last one {parts[-1].round}"] if parts else []
    if left and (not parts or left[-1].round >= parts[-1].round):
        silent = any(facts.name(peer) == name for peer in left[-1].silent)
        how = "it had given no answer in that round" if silent else "it had said goodbye, or was not heard any more"
        found.append(f"it left the roster with round {left[-1].round}: {how}")
    return found


# why a round …


def _duration(facts: Facts, header: RoundHeader, before: RoundHeader | None) -> list[str]:
    usual, took_s = _usual_s(facts.rounds, header), _took_s(header, before)
    if took_s is None:
        return []
    known = "" if usual is None else f", usually {format_duration(usual)}"
    is_long = usual is not None and took_s > LONG * usual
    ordinary = ": nothing out of the ordinary" if usual is not None and not is_long else ""
    found = [f"round {header.round} took {format_duration(took_s)}{known}{ordinary}"]
    if header.collect_ms or header.exchange_ms:
        found.append(_split(facts.rounds, header, is_long=is_long))
    return [*found, *_slowest(facts, header)]


def _split(rounds: Sequence[RoundHeader], header: RoundHeader, *, is_long: bool) -> str:
    """Say how a round's time went by, and where one that was long has lost it."""
    collect_s, exchange_s = header.collect_ms / 1000, header.exchange_ms / 1000
    said = (
        f"{format_duration(collect_s)} until all contributions were there, inner steps included, and "
        f"{format_duration(exchange_s)} in the exchange"
    )
    others = [each for each in rounds if each is not header and each.contributions and each.collect_ms]
    if not is_long or not others:
        return said
    more_collect_s = collect_s - median(each.collect_ms for each in others) / 1000
    more_exchange_s = exchange_s - median(each.exchange_ms for each in others) / 1000
    if more_collect_s >= more_exchange_s:
        return f"{said}: it waited {format_duration(more_collect_s)} longer than usual for contributions"
    return f"{said}: the exchange took {format_duration(more_exchange_s)} longer than usual, by a link or a disk"


def _slowest(facts: Facts, header: RoundHeader) -> list[str]:
    timed = [part for part in header.contributions if part.step_ms]
    slowest = max(timed, key=lambda part: part.step_ms, default=None)
    others = [part.step_ms for part in timed if part is not slowest]
    if slowest is None or not others or slowest.step_ms < SLOW * median(others):
        return []
    return [
        f"{facts.name(slowest.island)} was slowest: {slowest.step_ms} ms for an inner step, the others "
        f"{median(others):.0f} ms"
    ]


def _members(facts: Facts, header: RoundHeader, before: RoundHeader | None) -> list[str]:
    found, came = [], {part.island for part in header.contributions}
    moves = {"joined with it": header.joined, "left the roster with it": header.left}
    missed = [part.island for part in before.contributions] if before is not None and came else []
    moves["contributed to the round before, and not to this one"] = tuple(
        peer for peer in missed if peer not in came and peer not in header.left
    )
    moves["gave its coordinator no answer"] = tuple(peer for peer in header.silent if peer not in header.left)
    moves["brought work of an earlier phase: it had missed a round"] = tuple(
        part.island for part in header.contributions if part.late
    )
    for words, peers in moves.items():
        if peers:
            found.append(f"{_listed([facts.name(peer) for peer in peers])} {words}")
    return found


def _took_s(header: RoundHeader, before: RoundHeader | None) -> float | None:
    if header.collect_ms or header.exchange_ms:
        return (header.collect_ms + header.exchange_ms) / 1000
    if before is None or not before.time_ms or not header.time_ms:
        return None
    return (header.time_ms - before.time_ms) / 1000


def _usual_s(rounds: Sequence[RoundHeader], header: RoundHeader) -> float | None:
    """Return what rounds with contributions usually took, without this one; None if fewer than three are known."""
    pairs = pairwise(rounds)
    times = [_took_s(each, before) for before, each in pairs if each.contributions and each is not header]
    known = [seconds for seconds in times if seconds is not None]
    return median(known) if len(known) > 2 else None


# sentences that several questions share


def _not_running(status: RunStatus) -> str:
    if status.finished:
        return f"the run is finished: step {status.step}, round {status.round}"
    ended = [each for each in status.islands if each.state == "ended"]
    how = "its islands have left in good order" if status.ended else "their processes are gone"
    who = names([each.name for each in ended]) if ended else "nobody is there"
    if elsewhere := [each.name for each in status.islands if each.state == "lost"]:
        again = status.command or "the command that started it"
        return (
            f"nothing of the run is at work here: {who}: {how} at round {status.round}; whether {_listed(elsewhere)} "
            f"trains on elsewhere cannot be seen from here. {again} continues it"
        )
    return f"the run does not go on: {who}: {how} at round {status.round}; diloco run CONFIG --resume continues it"


def _healthy(status: RunStatus) -> str:
    members = [each for each in status.islands if each.member and each.state not in AWAY]
    usual = "" if status.round_s is None else f", a round takes {format_duration(status.round_s)}"
    return f"nothing holds the run up: {counted(len(members), 'island')} at work{usual}"


def _lost_sentence(facts: Facts, status: RunStatus, each: IslandStatus) -> str:
    since = _ago(facts, each)
    if each.state == "silent":
        return f"{each.name} is silent, last heard {since}: {each.text}"
    if each.state == "ended":
        return f"{each.name} does not run any more, last heard {since}: {each.text or 'its process is gone'}"
    if each.heard_by:
        return _cut_sentence(status, each)
    how = f"{each.text}, for longer than elastic.silence_s={status.silence_s:g}" if "silent" in each.text else each.text
    then = "; and rounds wait for it" if status.own.cause in ("quorum", "returning") else "; rounds go on without it"
    then = "" if status.own.state == "ended" else then
    return f"{each.name} is lost, last heard {since}: {how or 'nothing is heard of it'}{then}"


def _cut_sentence(status: RunStatus, each: IslandStatus) -> str:
    others = f", though {_listed(each.heard_by)} can reach both" if each.heard_by else ""
    return (
        f"{status.own.name} and {each.name} cannot reach each other{others}: rounds leave one of the two out, in turn. "
        "Look for a firewall or a missing route between them (diloco doctor TICKET on both)"
    )


def _part(status: RunStatus, each: IslandStatus) -> str:
    return f"{each.contributed} of the last {counted(status.rounds, 'round')} contain its work"


def _catching_sentence(status: RunStatus, each: IslandStatus) -> str:
    behind = status.round - each.round
    lag = f"{counted(behind, 'round')} behind" if each.round and behind > 0 else "behind"
    more = f" ({each.text})" if each.text else ""
    return f"{each.name} is {lag} and fetches what it has missed{more}: it contributes again when it is there"


def _full_link(each: IslandStatus) -> str:
    rate, limit = each.link_bytes_per_s, each.link_limit_bytes_per_s
    if not rate or not limit or rate < FULL_LINK * limit:
        return ""
    return (
        f"{each.name}'s link is the bottleneck: its last exchange ran at {format_rate(8 * rate)} of the "
        f"{format_rate(8 * limit)} that it may use"
    )


def _disk_trouble(each: IslandStatus) -> list[str]:
    if each.disk:
        return [f"{each.name}'s disk takes nothing: {each.disk}. It trains on, and a crash would lose it: make space"]
    if each.write_s > SLOW_DISK_S:
        return [f"{each.name}'s disk is the bottleneck: a write takes {format_duration(each.write_s)}, and rounds wait"]
    return []


def _clock_trouble(status: RunStatus, each: IslandStatus) -> list[str]:
    """Say whose clock is wrong: the run's time is the latest of all, so that one that is ahead makes others late."""
    told = [other for other in status.islands if other.told_by == other.name]
    if each not in told:
        return []
    off_s = each.clock_off_s - (median(other.clock_off_s for other in told) if len(told) > 2 else 0.0)
    if len(told) == 2:
        off_s = told[0].clock_off_s - told[1].clock_off_s
    if abs(off_s) < CLOCK_S:
        return []
    if len(told) == 2:
        whose = " and ".join(f"{other.name}'s" for other in told)
        return [f"the clocks of {whose} machines are {format_duration(abs(off_s))} apart: set the one that is wrong"]
    which = "behind" if off_s > 0 else "ahead of"
    whose = "the others'" if len(told) > 2 else "the run's, which is used"
    return [f"the clock of {each.name}'s machine is {format_duration(abs(off_s))} {which} {whose}: set the clock"]


def _twin_trouble(facts: Facts, each: IslandStatus) -> list[str]:
    news = facts.news(each.name, "twin")
    return [] if news is None else [f"{each.name}: {news.text}. Stop one of them, or give it a key of its own"]


def _training(status: RunStatus) -> list[IslandStatus]:
    return [each for each in status.islands if each.state not in AWAY and each.state != "witnessing"]


def _ago(facts: Facts, each: IslandStatus) -> str:
    return f"{format_duration(max(0.0, facts.now - each.since))} ago" if each.since else "before this island looked"


def _listed(who: Sequence[str]) -> str:
    *most, last = who
    return f"{', '.join(most)} and {last}" if most else last
