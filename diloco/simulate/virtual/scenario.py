"""Play disasters as small scripts that people read, on a world without chance. Below `---` is what must happen.

    python -m diloco.simulate.virtual.scenario [--write] FILE…

runs them, or writes down what happens now.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from diloco.elastic.protocol.member import MAX_MISFITS
from diloco.elastic.protocol.messages import Begin, Collect
from diloco.elastic.protocol.options import Options
from diloco.elastic.protocol.ranges import size
from diloco.elastic.protocol.record import EVICT, FORCE, Ballot, Head
from diloco.elastic.protocol.rules import ALL
from diloco.elastic.protocol.state import RunState
from diloco.errors import ConfigError
from diloco.simulate.virtual.chances import DisasterConfig, disaster_world
from diloco.simulate.virtual.check import Violation
from diloco.simulate.virtual.faults import MOMENTS, both_ways, costs_of
from diloco.simulate.virtual.harsh import SteadyChances
from diloco.simulate.virtual.lies import LIES
from diloco.simulate.virtual.trainer import Input, SyncPace
from diloco.simulate.virtual.world import World

PATIENCE_S = 60.0  # of `until`
LIFE_S = 15.0  # within which a round must be committed


class Unmet(AssertionError):
    """Signal that something which a scenario expects is not so."""


@dataclass
class Scenario:
    """Hold a parsed script, and the transcripts that it must give."""

    setup: DisasterConfig = field(default_factory=lambda: DisasterConfig(smooth=True))
    founders: tuple[str, ...] = ()
    samples: int | None = None  # after which the data ends
    steps: int | None = None  # where the run's clock ends
    start: tuple[int, float] = (1, 0.0)  # with how many islands the first round begins, and until when it waits
    commands: list[str] = field(default_factory=list)
    rule: str = ""  # without which
    violation: str = ""  # this happens; "": something that it expects does not
    told: dict[str, str] = field(default_factory=dict)  # the transcripts: with all rules (""), and without that one


def parse(text: str) -> Scenario:
    """Parse a script; what stands below each `---` is an expected transcript."""
    script, *parts = re.split(r"^---(.*)\n", text, flags=re.MULTILINE)
    scenario = Scenario(told={parts[i].strip().removeprefix("without "): parts[i + 1] for i in range(0, len(parts), 2)})
    names: set[str] = set()
    for line in script.splitlines():
        match line.partition("#")[0].split():
            case []:
                pass
            case ["islands", *founders]:
                scenario.founders = tuple(founders)
                names |= set(founders)
            case ["min", count]:
                scenario.setup = replace(scenario.setup, min_islands=int(count))
            case ["partition", kind]:
                scenario.setup = replace(scenario.setup, partition=kind)
            case ["founding", "by", count, "within", seconds]:
                scenario.start = int(count), float(seconds)
            case ["samples", count]:
                scenario.samples = int(count)
            case ["steps", count]:
                scenario.steps = int(count)
            case ["flat", count]:
                scenario.setup = replace(scenario.setup, flat_up_to=int(count))
            case ["fragments", count]:
                scenario.setup = replace(scenario.setup, pace=SyncPace(int(count)))
            case ["fragments", count, "overlapped"]:
                scenario.setup = replace(scenario.setup, pace=SyncPace(int(count), overlap=1))
            case ["without", rule, "violation", invariant]:
                scenario.rule, scenario.violation = rule, invariant
            case ["without", rule, "unmet"]:
                scenario.rule = rule
            case words:
                scenario.commands.append(" ".join(words))
                names |= {words[1]} if words[0] in ("start", "witness") else set()
    scenario.setup = replace(scenario.setup, islands=len(names))
    return scenario


def play(scenario: Scenario, *, without: str = "") -> str:
    """Play a scenario, and return its transcript; `without` switches a rule off.

    Raises Unmet, or Violation with the transcript as its second argument. Without a rule, only expectations of a live
    round are checked.
    """
    world = world_of(scenario, without=without)
    world.found(scenario.founders, scenario.samples)
    try:
        for command in scenario.commands:
            if not (scenario.violation and without and command.startswith("expect") and "live" not in command):
                obey(world, command)
    except Unmet as unmet:
        if without:
            raise Violation(str(unmet), _told(world) + f"{unmet}\n") from None
        raise
    except Violation as violation:
        violation.args = (str(violation), _told(world) + f"{violation}\n")
        raise
    return _told(world)


def world_of(scenario: Scenario, *, without: str = "") -> World:
    """Build the world of a scenario, in which nobody has founded the run yet; `without` switches a rule off."""
    rules = replace(ALL, **{without: False}) if without else ALL
    setup = replace(scenario.setup, rules=rules)
    world = disaster_world(setup, costs_of(setup))
    world.options = replace(
        world.options,
        start_islands=scenario.start[0],
        start_s=scenario.start[1],
        steps=scenario.steps,
        amended=_amended,
    )
    return world


def _amended(options: Options, state: RunState) -> Options:
    """Let the clock end where the last change of it says."""
    said = [changes["steps"] for each in state.amendments if "steps" in (changes := json.loads(each.changes))]
    return replace(options, steps=said[-1]) if said else options


def obey(world: World, command: str) -> None:
    """Carry out one command of a script."""
    match command.split():
        case ["run", seconds]:
            world.timeline.run(world.now + float(seconds))
        case ["until", who, "commits", "round", number]:
            _until(world, lambda: _newest(world, who).head.round >= int(number), command)
        case ["until", who, "holds", "round", number]:
            _until(world, lambda: _holds(world, who, int(number)), command)
        case ["crash" | "stop" | "mute" as what, who, "when" | "after" as when, doer, *doing]:
            _strike(world, (what, who), when, (who if doer == "it" else doer, doing[-1]))
        case ["crash" | "stop" | "resume" | "leave" | "start" as what, *names]:
            for name in names:
                getattr(world, what)(name)
        case ["witness", name]:
            world.witnesses.add(name)
            world.start(name)
        case ["amend", *names]:
            world.amend(names)
        case ["prolong", steps, "at", *names]:
            world.amend(names, json.dumps({"steps": int(steps)}))
        case ["evict", name, "at", *names]:
            world.amend(names, json.dumps({EVICT: [name]}))
        case ["force", *kept, "at", name]:
            key = world.lives[name].node.state.key
            world.amend([name], json.dumps({FORCE: {"round": key.round, "parent": key.parent, "keep": kept}}))
        case ["exchange", seconds]:
            _steady(world).exchange_s = float(seconds)
        case ["mean", seconds]:
            _steady(world).mean_s = float(seconds)
        case ["disk" | "snapshot" as what, name, seconds]:
            (_steady(world).lags if what == "disk" else _steady(world).snapshots)[name] = float(seconds)
        case ["mute", name]:
            world.mute.add(name)
        case ["rate", name, bytes_per_s]:
            world.lives[name].node.own.bytes_per_s = int(bytes_per_s)
        case ["late", name, "by", seconds]:
            world.reductions.late = {name: float(seconds)}
        case ["late", *names]:
            world.reductions.late = dict.fromkeys(names, 1.0)
        case ["spoil", name]:
            world.reductions.spoilt.add(name)
        case ["slow", name, times]:
            world.lives[name].trainer.speed = 1 / float(times)
        case ["cut" | "cut-one-way" as what, *sides] if "|" in sides:
            bar = sides.index("|")
            ends = sides[:bar], sides[bar + 1 :]
            world.note(f"* {command}")
            world.sever(both_ways(*ends) if what == "cut" else product(*ends))
        case ["heal"]:
            world.heal()
        case ["expect", "a", "live", "round"]:
            before = _newest(world, "anybody").head.round
            world.timeline.run(world.now + LIFE_S)
            if _newest(world, "anybody").head.round == before:
                raise Violation(f"I4: no round within {LIFE_S:.0f} s")
        case ["expect", *words]:
            _expect(world, words, command)
        case _:
            _misbehave(world, command)


def _misbehave(world: World, command: str) -> None:
    """Let an island be hostile, or broken, from now on."""
    match command.split():
        case ["flood", name]:
            for peer in [peer for peer in world.lives if peer != name]:
                for _ in range(MAX_MISFITS + 1):
                    world.deliver(name, peer, Collect(Head(0, -1, ""), 1))
        case ["garbage", name, "at", peer]:
            world.enter(peer, lambda node, now: node.ban(name, "sent garbage", now))
        case ["lie", name, about]:
            world.liars[name] = LIES[about]
        case ["truth", name]:
            del world.liars[name]
        case ["forge", name]:
            world.forgers.add(name)
        case ["refuse", name]:
            own = world.lives[name].node.own
            own.options = replace(own.options, objection=lambda state, amendment: f"{name} cannot do that")
        case ["damage", name]:
            for peer in world.lives:
                world.enter(peer, _report("damaged" if peer == name else "right"))
        case ["norm", name, norm]:
            world.lives[name].trainer.works[0].norm = float(norm)
        case _:
            raise ConfigError(f"no such command in a scenario: {command}")


def _report(digest: str) -> Input:
    return lambda node, now: node.report_digest(digest, now)


def _steady(world: World) -> SteadyChances:
    assert isinstance(world.costs, SteadyChances)
    return world.costs


def _until(world: World, come: Callable[[], bool], command: str) -> None:
    """Run until the condition holds; Unmet if it does not within PATIENCE_S."""
    end = world.now + PATIENCE_S
    while not come():
        if world.now >= end:
            raise Unmet(f"not within {PATIENCE_S:.0f} s: {command}")
        world.timeline.run(world.now + 0.05)


def _holds(world: World, who: str, number: int) -> bool:
    """Return whether an island holds the result of this round, which is not committed yet."""
    held = world.lives[who].node.own.held
    return held is not None and held.record.proposal.key.round == number


def _strike(world: World, what: tuple[str, str], when: str, deed: tuple[str, str]) -> None:
    """Hit an island once, just before an island does a thing, or just after."""
    (act, victim), (doer, thing) = what, deed

    def blow(name: str) -> None:
        if act == "mute":
            world.mute.add(victim)
        elif when == "when":
            getattr(world, act)(victim)
        elif act == "crash":
            world.crash_soon(victim, 1)
        else:
            world.timeline.after(0, lambda: world.stop(victim))

    kind = {"appends": "append", "fetches": "fetchresult", "stores": "remember"}.get(thing, thing)
    world.once(MOMENTS[kind], blow, doer)


def _newest(world: World, who: str) -> RunState:
    """Return the state of an island's disk; of `anybody`, that of the greatest head."""
    names = world.lives if who == "anybody" else [who]
    return max((world.disks[name].states[-1] for name in names), key=lambda state: state.head)


def _expect(world: World, words: list[str], command: str) -> None:
    """Check one expectation of a script; Unmet if it is not so."""
    best = world.newest
    log = next(world.disks[name].log for name, life in world.lives.items() if life.node.state.head == best.head)
    match words:
        case ["round", number, "of", who]:
            found = ",".join(log[int(number) - 1].proposal.islands) if int(number) <= len(log) else "not committed"
        case ["round", "at", "least", number, "at", who]:
            found = ",".join(name for name in who.split(",") if world.disks[name].states[-1].head.round >= int(number))
        case ["round", number, "at", who]:
            found = ",".join(name for name in who.split(",") if world.disks[name].states[-1].head.round == int(number))
        case ["some", "round", "of", who]:
            found = who if any(",".join(record.proposal.islands) == who for record in log) else "none"
        case ["updates", "at", "least", who]:
            found = who if best.updates >= int(who) else str(best.updates)
        case ["roster", who]:
            found = ",".join(best.roster)
        case ["witnesses", who]:
            found = ",".join(best.witnesses)
        case ["progress", number, "of", who, *fragment, "contained"]:  # … in fragment 2 contained
            marks = [mark for (island, _, f), mark in best.marks if island == who and fragment[2:] in ([], [str(f)])]
            found = who if sum(marks) >= int(number) else f"only {sum(marks)}"
        case ["hole", "of", who]:
            found = ",".join(f"{mark[0]} {size(pages)}" for mark, _, pages in best.holes) or "nobody"
        case ["late", "progress", "of", who, "contained"]:
            parts = [part for record in log for part in record.proposal.contributions if part.island == who]
            found = who if any(part.offer.late for part in parts) else "none"
        case ["one", "branch", "at", who]:
            chain = {record.digest for record in log}
            found = ",".join(name for name in who.split(",") if world.disks[name].states[-1].head.digest in chain)
        case ["no" as who, "amendments"]:
            found = "some" if best.amendments else "no"
        case ["amendments", who]:
            found = ",".join(str(amendment.number) for amendment in best.amendments)
        case ["overlaps", who]:
            found = "yes" if best.ledger.overlaps else "no"
        case ["samples", who]:
            found = "none" if best.ledger.exhausted() else "left"
        case _:
            raise ConfigError(f"no such expectation in a scenario: {command}")
    if found != who:
        raise Unmet(f"{command}: it is {found or 'nobody'}")


def _told(world: World) -> str:
    return "".join(f"{line}\n" for line in _grouped(_worth_reading(world)))


def _worth_reading(world: World) -> Iterator[tuple[float, str]]:
    """Yield notes and the first *begin* of each ballot; other messages are left out."""
    begun: set[Ballot] = set()
    for entry in world.transcript.entries:
        if len(entry) == 2:
            if entry[0] > 0:  # that founders start is no news
                yield entry
        elif isinstance(begin := entry[3], Begin) and begin.ballot not in begun:
            begun.add(begin.ballot)
            fresh = f"of {','.join(begin.proposal.islands) or 'nobody'}"
            fresh += f", after {','.join(peer for peer, _ in begin.first)}" if begin.first else ""
            fresh += f", though {begin.proposal.hole.island} is lost" if begin.proposal.hole is not None else ""
            value = f"what {begin.holder} holds" if begin.adopted else fresh
            yield entry[0], f"{entry[1]} begins {begin.ballot.term}.{begin.ballot.attempt} {value}"


def _grouped(entries: Iterator[tuple[float, str]]) -> Iterator[str]:
    """Yield the lines; islands that commit the same record one after the other share a line."""
    names: list[str] = []
    first, what = 0.0, ""
    for now, text in [*entries, (0.0, "")]:
        name, commits, record = text.partition(" commits ")
        if names and (not commits or record != what):
            yield f"{first:7.2f}  {','.join(names)} commit{'s' * (len(names) == 1)} {what}"
            names = []
        if commits:
            first, what = (first if names else now), record
            names.append(name)
        elif text:
            yield f"{now:7.2f}  {text}"


def check(path: Path) -> None:
    """Play a scenario with all rules, and without the one it is about. Raises AssertionError if it has changed."""
    scenario = parse(path.read_text())
    for rule, told in outcomes(scenario).items():
        if told != scenario.told.get(rule):
            raise Unmet(f"{path} {rule and f'without {rule} '}now goes like this:\n{told}")


def outcomes(scenario: Scenario) -> dict[str, str]:
    """Return the transcripts by rule: with all rules (empty), and without the one that the scenario is about."""
    told = {"": play(scenario)}
    if scenario.rule:
        try:
            play(scenario, without=scenario.rule)
        except Violation as violation:
            if not violation.args[0].startswith(scenario.violation):
                raise
            told[scenario.rule] = violation.args[1]
        else:
            raise Unmet(f"without {scenario.rule}, {scenario.violation} should be violated")
    return told


def write(path: Path) -> None:
    """Replace the expected transcripts in the file by what happens now."""
    text = path.read_text()
    script = re.split(r"^---", text, flags=re.MULTILINE)[0]
    for rule, told in outcomes(parse(text)).items():
        script += f"--- without {rule}\n{told}" if rule else f"---\n{told}"
    path.write_text(script)


def main(arguments: list[str]) -> None:
    """Check the scenarios in these files, or write what happens now if `--write` is among the arguments."""
    work = write if "--write" in arguments else check
    for name in arguments:
        if name != "--write":
            work(Path(name))
            print(f"{name}: {'written' if work is write else 'holds'}")


if __name__ == "__main__":
    main(sys.argv[1:])
