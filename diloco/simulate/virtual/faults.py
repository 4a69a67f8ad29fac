"""Draw random disasters: a schedule of faults from a seed, and what must hold when it is over.

A campaign is many of them, one after the other or in several processes, and the description of those that violate an
invariant.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product
from operator import lt

from diloco.elastic.protocol import messages as m
from diloco.elastic.protocol.rules import ALL, Rules
from diloco.simulate.virtual.chances import PHASE_S, SILENCE_S, Chances, DisasterConfig, disaster_world
from diloco.simulate.virtual.check import Violation
from diloco.simulate.virtual.costs import Timeline
from diloco.simulate.virtual.harsh import HarshChances, SteadyChances
from diloco.simulate.virtual.trainer import USUAL, SyncPace
from diloco.simulate.virtual.world import Pair, World

FAULTY_S = 40.0
QUIET_ROUNDS = 15  # by the time that exchanges and disks take
QUIET_S = 45.0  # with one fragment; late progress of one of several comes in once in a pass
FIRST_STREAMING = 200  # smaller seeds are disasters that tests know by number
CATCH_UP_ROUNDS = 2  # in which everybody must come to the head that others have
PATIENCE = 4  # more quiet times at most, for late progress: a contribution carries two phases of it
STRUCK = (m.Append, m.Commit, m.Begin, m.Done, m.Promise, m.Ready, m.Remember, m.FetchResult)
MOMENTS: dict[str, type] = {kind.__name__.lower(): kind for kind in STRUCK}
MIXES = {
    "crashes": ["crash"],
    "restarts": ["crash", "restart", "restart", "stop"],
    "cascade": ["cascade"],
    "power": ["power", "restart"],
    "orphans": ["orphans", "crash"],
    "partitions": ["split", "split", "one way", "pair", "three"],
    "everything": ["crash", "restart", "stop", "split", "one way", "pair", "three", "cascade"],
}
HARSH_MIXES = {
    **MIXES,
    "first pair": ["first pair", "first pair", "restart"],
    "deaf": ["deaf first", "one way", "split"],
    "goodbyes": ["goodbye", "restart", "split"],
    "bans": ["spoil", "restart", "pair"],
}
EXCHANGES = "exchanges"  # a mix of its own, drawn apart: each fault strikes in the middle of one
LOSSES = {"crash in an exchange": "start", "stop in an exchange": "resume", "cut off in an exchange": "heal"}
PARTITIONS = ("quorum", "merge", "auto")
WEIGHTS = {"cascade": 4, "partitions": 2}


Made = dict[str, tuple[int, tuple[int, ...]]]  # incarnation, and progress by fragment


@dataclass(frozen=True)
class Fault:
    """Describe one fault.

    `moment`: the thing that an island does next, before or after which the fault strikes.
    """

    at: float
    kind: str
    islands: tuple[str, ...] = ()
    moment: str = ""
    number: int = 0

    def __str__(self) -> str:
        return " ".join([f"{self.at:5.1f} {self.kind}", *self.islands, self.moment]).rstrip()


@dataclass(frozen=True)
class Disaster:
    """Hold everything that a seed decides: the world, who joins late, the faults, the amendments."""

    setup: DisasterConfig
    mix: str
    late: tuple[tuple[str, float], ...]  # islands that join, and when
    faults: tuple[Fault, ...]
    apart: tuple[str, ...] = ()  # two that never reach each other
    all_return: bool = False  # those who crashed, when the faults are over
    amendments: tuple[tuple[float, tuple[str, ...]], ...] = ()  # when the owner makes one, and where it is handed in


def disaster(seed: int, rules: Rules = ALL, islands: int | None = None, partition: str = "") -> Disaster:
    """Draw the disaster of a seed; the same seed always gives the same one."""
    chance = random.Random(seed)
    drawn = chance.choice(("merge", "quorum"))
    setup = DisasterConfig(islands or chance.randint(2, 9), partition or drawn, seed, rules, pace_of(seed))
    mix = chance.choices(list(MIXES), [WEIGHTS.get(mix, 1) for mix in MIXES])[0]
    names = setup.names
    late = tuple((name, chance.uniform(0, FAULTY_S)) for name in names[2:] if chance.random() < 0.2)
    faults: list[Fault] = []
    for _ in range(chance.randint(1, 8)):
        faults += _fault(chance, mix, names)
    apart = tuple(chance.sample(names, 2)) if mix == "partitions" and len(names) > 2 and chance.random() < 0.3 else ()
    ordered = tuple(sorted(faults, key=lambda fault: fault.at))
    all_return = chance.random() < 0.5
    return Disaster(setup, mix, late, ordered, apart, all_return, amendments_of(seed, names))


def harsh_disaster(seed: int, rules: Rules = ALL, islands: int | None = None, partition: str = "") -> Disaster:
    """Draw a harsh disaster: more kinds of faults, in a world where exchanges are long and disks lag."""
    chance = random.Random(f"{seed}/harsh")
    drawn = chance.choice(PARTITIONS)
    setup = DisasterConfig(
        islands or chance.randint(2, 7), partition or drawn, seed, rules, pace_of(seed), harsh=True,
        min_islands=chance.choice((1, 1, 1, 2)),
    )  # fmt: skip
    mix, names = chance.choice(list(HARSH_MIXES)), setup.names
    mix = EXCHANGES if random.Random(f"{seed}/exchanges").random() < 0.1 else mix
    length_s = faulty_s(setup)
    late_share = 0.8 if setup.partition == "auto" else 0.25  # a latch takes three
    late = tuple((name, chance.uniform(0, length_s)) for name in names[2:] if chance.random() < late_share)
    faults: list[Fault] = []
    for _ in range(chance.randint(1, 10)):
        faults += _fault(chance, mix, names, length_s)
    apart = tuple(chance.sample(names, 2)) if len(names) > 2 and chance.random() < 0.1 else ()
    ordered = tuple(sorted(faults, key=lambda fault: fault.at))
    return Disaster(setup, mix, late, ordered, apart, chance.random() < 0.5, amendments_of(seed, names))


def faulty_s(setup: DisasterConfig) -> float:
    """Return for how long faults strike: longer where exchanges are."""
    return FAULTY_S + 3 * costs_of(setup).exchange_s


def costs_of(setup: DisasterConfig) -> Chances:
    """Return the times of a disaster's world."""
    timeline = Timeline(setup.seed, smooth=setup.smooth)
    if setup.harsh:
        return HarshChances(timeline)
    return SteadyChances(timeline) if setup.smooth else Chances(timeline)


def amendments_of(seed: int, names: tuple[str, ...]) -> tuple[tuple[float, tuple[str, ...]], ...]:
    """Draw the owner's amendments, in half of the seeds. They are drawn apart, as the pace is."""
    chance = random.Random(f"{seed}/amendments")
    if seed < FIRST_STREAMING or chance.random() < 0.5:
        return ()
    times = sorted(chance.uniform(0, FAULTY_S) for _ in range(chance.randint(1, 5)))
    return tuple((at, tuple(chance.sample(names, chance.choice((1, 1, 2))))) for at in times)


def pace_of(seed: int) -> SyncPace:
    """Draw the pace: a third of the seeds have fragments or overlap.

    It is drawn apart, so that everything else of a disaster stays as it is.
    """
    chance = random.Random(f"{seed}/pace")
    if seed < FIRST_STREAMING or chance.random() > 1 / 3:
        return USUAL
    fragments, overlap = chance.choice([(2, 0), (3, 0), (1, 1), (2, 1), (3, 1)])
    return SyncPace(fragments, overlap, scarce=chance.random() < 0.3)


def _fault(chance: random.Random, mix: str, names: tuple[str, ...], faulty_s: float = FAULTY_S) -> list[Fault]:
    """Draw one fault of this mix, with the one that ends it."""
    kinds = HARSH_MIXES.get(mix, list(LOSSES))
    kind, at, name = chance.choice(kinds), chance.uniform(1, faulty_s), chance.choice(names)
    length = chance.uniform(0.5, 6 * SILENCE_S + (faulty_s - FAULTY_S) / 2)
    match kind:
        case "crash" | "restart":
            crash = Fault(at, "crash", (name,), number=chance.randint(1, 12))
            return [crash] if kind == "crash" else [crash, Fault(at + length, "start", (name,))]
        case "stop":
            return [Fault(at, "stop", (name,)), Fault(at + length, "resume", (name,))]
        case "cascade":
            return _cascade(chance, at)
        case "power":
            moment, number = _moment(chance)
            return [Fault(at, "power cut", (name,), moment, number), Fault(at + length, "all back", (name,))]
        case "orphans":
            return [Fault(at, "orphan")]
        case "goodbye":
            return [Fault(at, "leave", (name,)), Fault(at + length, "start", (name,))]
        case "spoil":
            return [Fault(at, "spoil", (name,))]
        case "crash in an exchange" | "stop in an exchange" | "cut off in an exchange":
            at, percent = chance.uniform(1, FAULTY_S), chance.randint(30, 110)
            return [Fault(at, kind, (name,), number=percent), Fault(at + length, LOSSES[kind], (name,))]
        case "first pair" | "deaf first":
            return [Fault(at, kind), Fault(at + length, "heal")]
        case "pair":
            pair = tuple(chance.sample(names, 2))
            return [Fault(at, "pair", pair), *([] if chance.random() < 0.3 else [Fault(at + length, "heal")])]
    side = tuple(name for name in names if chance.random() < 0.5)
    return [Fault(at, kind, side, number=chance.randint(0, 99)), Fault(at + length, "heal")]


def _cascade(chance: random.Random, at: float) -> list[Fault]:
    """Draw blow upon blow, each at a moment that matters; all islands come back later.

    Struck is the island that does the thing next, or its coordinator.
    """
    blows = []
    for index in range(chance.randint(1, 4)):
        kind = chance.choice(("crash at", "crash at", "crash coordinator at", "stop at"))
        moment, number = _moment(chance)
        blows.append(Fault(at + 0.01 * index, kind, (), moment, number))
    return [*blows, Fault(at + chance.uniform(3, 15), "all back")]


def _moment(chance: random.Random) -> tuple[str, int]:
    """Draw a moment, and when to strike. 0: before it; n: after it, and n - 1 more things."""
    return chance.choice(list(MOMENTS)), chance.choice((0, 0, 1, 1, 2, 3))


def run(plan: Disaster) -> World:
    """Run through the faults, then through a quiet time in which everything must recover. Raises Violation."""
    world = disaster_world(plan.setup, costs_of(plan.setup))
    try:
        _run(world, plan)
    except Violation as violation:
        violation.args = (str(violation), world)
        raise
    return world


def _run(world: World, plan: Disaster) -> None:
    late = dict(plan.late)
    world.lasting = both_ways(plan.apart[:1], plan.apart[1:])
    world.sever(world.lasting)
    world.found(tuple(name for name in world.names if name not in late))
    for name, when in plan.late:
        world.timeline.at(when, partial(world.start, name))
    for fault in plan.faults:
        world.timeline.at(fault.at, partial(inflict, world, fault))
    for when, names in plan.amendments:
        world.timeline.at(when, partial(world.amend, names))
    world.timeline.run(faulty_s(plan.setup) + 6 * SILENCE_S)
    _end_of_faults(world, all_return=plan.all_return)
    world.timeline.run(world.now + _bans_s(world))
    made = {name: (life.node.incarnation, life.trainer.made) for name, life in world.lives.items()}
    round_then = max((disk.states[-1].head.round for disk in world.disks.values() if disk.states), default=0)
    world.timeline.run(world.now + quiet_s(world))
    if _can_go_on(world, plan.apart):
        _check_liveness(world, round_then)
        _check_amendments(world, plan.apart)
        _check_no_loss(world, {name: life for name, life in made.items() if name not in plan.apart})


def _bans_s(world: World) -> float:
    """Return for how long islands still exclude others that live: where one of two does, no round can come about."""
    now = {name: world.costs.clock(name) for name in world.lives}
    rests = (
        view.banned_until - now[name]
        for name, life in world.lives.items()
        for peer, view in life.node.peers.views.items()
        if peer in world.lives
    )
    return max((0.0, *rests))


def quiet_s(world: World) -> float:
    """Return the quiet seconds in which all must recover; more with several fragments and long exchanges."""
    round_s = world.costs.exchange_s + world.costs.slowest_write_s
    return (QUIET_S + QUIET_ROUNDS * round_s) * (1 + world.pace.fragments) / 2


def inflict(world: World, fault: Fault) -> None:
    """Apply a fault to the world now, and note it in the transcript."""
    world.note(f"* {str(fault)[6:]}")
    everybody = set(world.names)
    match fault.kind:
        case "crash":
            world.crash_soon(fault.islands[0], fault.number)
        case "start":
            if fault.islands[0] not in world.lives:
                world.start(fault.islands[0])
        case "stop":
            world.stop(fault.islands[0])
        case "resume":
            world.resume(fault.islands[0])
        case "pair":
            world.sever(both_ways(fault.islands[:1], fault.islands[1:]))
        case "split":
            world.sever(both_ways(fault.islands, everybody - set(fault.islands)))
        case "one way":
            world.sever(product(fault.islands, everybody - set(fault.islands)))
        case "three":
            group = {name: (index + fault.number) % 3 for index, name in enumerate(world.names)}
            world.sever(pair for pair in permutations(world.names, 2) if group[pair[0]] != group[pair[1]])
        case "first pair" | "deaf first" if len(roster := world.newest.roster if world.lives else ()) > 1:
            first, others = roster[:1], roster[1:2] if fault.kind == "first pair" else everybody - {roster[0]}
            world.sever(both_ways(first, others) if fault.kind == "first pair" else product(others, first))
        case "leave" if fault.islands[0] in world.lives and fault.islands[0] not in world.stopped:
            world.leave(fault.islands[0])
        case "spoil":
            world.calm = False  # it will be banned
            world.reductions.spoilt.add(fault.islands[0])
        case "heal":
            world.heal()
        case "orphan":
            _orphan(world)
        case "crash in an exchange" | "stop in an exchange" | "cut off in an exchange":
            world.once(m.Reduce, partial(_strike_exchange, world, fault))
        case "crash at" | "stop at" | "crash coordinator at" | "power cut":
            _strike(world, fault)
        case "all back":
            _all_back(world, without=fault.islands)


def both_ways(some: Iterable[str], others: Iterable[str]) -> set[Pair]:
    """Return the pairs between two groups, in both directions."""
    return {pair for one, other in product(some, others) for pair in ((one, other), (other, one))}


def _orphan(world: World) -> None:
    """Crash all members of the roster, so that only islands that have just joined are left."""
    roster = world.newest.roster if world.lives else ()
    if world.lives.keys() - set(roster):
        for name in roster:
            world.crash(name)


def _all_back(world: World, without: tuple[str, ...] = ()) -> None:
    """Resume and restart all islands that have been there before."""
    for name in world.names:
        world.resume(name)
        if name not in world.lives and name in world.disks and name not in without:
            world.start(name)


def _strike(world: World, fault: Fault) -> None:
    """Arrange that the fault hits when an island is about to do a thing of this kind, or has just done it."""

    def blow(name: str) -> None:
        match fault.kind:
            case "stop at":
                world.stop(name)
            case "crash at":
                crash(name)
            case "crash coordinator at":
                crash(world.lives[name].node.own.promise.coordinator)
            case "power cut":
                for each in list(world.lives):
                    crash(each)

    def crash(name: str) -> None:
        if fault.number:
            world.crash_soon(name, fault.number)
        else:
            world.crash(name)

    world.once(MOMENTS[fault.moment], blow)


def _strike_exchange(world: World, fault: Fault, _: str) -> None:
    """Lose a member when so many hundredths of the exchange that has just begun have passed."""
    (name,) = fault.islands

    def blow() -> None:
        if world.costs.calm:
            return
        match fault.kind:
            case "crash in an exchange":
                world.crash(name)
            case "stop in an exchange":
                world.stop(name)
            case "cut off in an exchange":
                world.sever(both_ways([name], set(world.names) - {name}))

    world.timeline.after(world.costs.exchange_s * fault.number / 100, blow)


def _end_of_faults(world: World, *, all_return: bool) -> None:
    """Heal the network and resume all islands; those that crashed come back only with `all_return`.

    Blows that wait for their moment, and results that were to be spoilt, are called off.
    """
    world.note("* the faults are over")
    world.costs.calm = True
    world.watchers.clear()
    world.reductions.spoilt.clear()
    world.heal()
    if all_return:
        _all_back(world)
    for name in list(world.stopped):
        world.resume(name)


def _can_go_on(world: World, apart: tuple[str, ...]) -> bool:
    """Return whether enough islands are alive and connected for rounds to continue."""
    there = set(world.lives) - set(apart[:1])  # of two that are apart, a round has one at most
    if len(there) < world.options.min_islands:
        return False
    quorum_needed = world.options.partition == "quorum" or any(
        life.node.own.needs_quorum for life in world.lives.values()
    )
    if not quorum_needed or not there:
        return bool(set(world.lives) - set(apart))
    roster = world.newest.roster
    return 2 * len(set(roster) & there) > len(roster) and bool(set(world.lives) - set(apart))


def _check_liveness(world: World, round_then: int) -> None:
    """Check I4 and I1: rounds continued, and all islands are at the newest head or just behind it."""
    heads = {name: life.node.state.head for name, life in world.lives.items()}
    best = max(heads.values())
    length_s = quiet_s(world)
    if best.round < round_then + length_s / (6 * (PHASE_S + world.costs.exchange_s + world.costs.slowest_write_s)):
        raise Violation(f"I4: only round {best.round} after {length_s:.0f} quiet seconds, from {round_then}")
    some = world.pace.fragments  # rounds may follow each other at once
    if any(head.round < best.round - some for head in heads.values()):  # to fetch one round may take longer than one
        world.timeline.run(
            world.now + CATCH_UP_ROUNDS * (PHASE_S + world.costs.exchange_s + world.costs.slowest_write_s)
        )
    behind = [name for name, life in world.lives.items() if life.node.state.head.round < best.round - some]
    if behind:
        raise Violation(f"I4: {behind} are behind, {heads}")
    heads = {name: life.node.state.head for name, life in world.lives.items()}
    best = max(heads.values())
    same = {head.digest for head in heads.values() if head.round == best.round}
    if len(same) > 1:
        raise Violation(f"I1: two heads at round {best.round} when all is quiet")


def _check_amendments(world: World, apart: tuple[str, ...]) -> None:
    """Check I6: an amendment that a reachable island has is contained, unless the one before it is nowhere."""
    there = world.lives.keys() - set(apart)
    held = {amendment.number for name in there for amendment in world.disks[name].amendments}
    if (number := len(world.newest.amendments) + 1) in held:
        raise Violation(f"I6: amendment {number} was handed in, and is contained nowhere")


def _check_no_loss(world: World, made: Made) -> None:
    """Check I3: all progress that was made before the quiet time is contained.

    A contribution carries two phases at most, so that one who owes many needs many rounds; with several fragments, an
    island that is behind also misses rounds that follow each other at once.
    """
    for _ in range(PATIENCE):
        if any(_lost(world, made)):
            world.timeline.run(world.now + quiet_s(world))
    for text in _lost(world, made):
        raise Violation(f"I3: {text}")


def _lost(world: World, made: Made) -> Iterator[str]:
    """Describe the progress of each island that should be contained, and is not."""
    best = world.newest
    for name, life in world.lives.items():
        incarnation, progress = made.get(name, (0, ()))
        contained = tuple(best.mark(name, incarnation, fragment) for fragment in range(len(progress)))
        if incarnation == life.node.incarnation and any(map(lt, contained, progress)):
            yield f"{name} made progress {progress}, only {contained} is contained"


def shorten(plan: Disaster) -> tuple[Disaster, Violation]:
    """Leave out faults one by one, as long as something is still violated."""
    found = violation_of(plan)
    assert found is not None
    index = 0
    while index < len(plan.faults):
        fewer = replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])
        if (still := violation_of(fewer)) is not None:
            plan, found = fewer, still
        else:
            index += 1
    return plan, found


def violation_of(plan: Disaster) -> Violation | None:
    """Run a disaster, and return what it violates; None: nothing."""
    try:
        run(plan)
    except Violation as violation:
        return violation
    return None
