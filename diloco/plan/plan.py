"""Answer for one configuration: what its setting does on these links, which one would be better, and why."""

from dataclasses import dataclass, replace
from math import inf

from diloco.config.schema import Config, SyncConfig
from diloco.model.accelerators import CPU, Accelerator
from diloco.plan.fit import Need, need_of
from diloco.plan.memory import Memory, memory_of
from diloco.plan.predict import Host, LinkModel, Prediction, Situation, Workload, data_parallel_utilisation, predict
from diloco.plan.profiles import Profile
from diloco.plan.search import Found, bandwidth_needed, cost, ladder, longest_phase, search
from diloco.units import format_rate

# What a GPU needs for a block however small it is: its kernels are launched one by one. A guess; compiled or not.
LAUNCH_S = {False: 0.7e-3, True: 0.25e-3}
NO_LINE = LinkModel(inf, inf)  # then the question is which one is needed


@dataclass(frozen=True)
class Machine:
    """Describe what an island computes on."""

    name: str
    dtype: str
    profile: Profile
    accelerator: Accelerator | None = None  # None: measured, and of unknown memory

    @property
    def flops(self) -> float:
        """Return the operations per second of each accelerator: as measured, else what training usually gets."""
        if self.profile.flops is not None:
            return self.profile.flops
        assert self.accelerator is not None
        return self.accelerator.flops(self.dtype)

    @property
    def host(self) -> Host:
        """Return what a round costs the leader's CPU, with the measured codec times where the profile has some."""
        plain = Host(trains_too=True) if self.on_cpu else Host.of_gpus()
        return replace(plain, codec_ns={**plain.codec_ns, **self.profile.codec_ns})

    @property
    def on_cpu(self) -> bool:
        """Return whether the island trains on a CPU, which rounds then take time from."""
        return self.name.lower().startswith(CPU)


@dataclass(frozen=True)
class Row:
    """Hold a predicted setting and the rate that it needs for each target."""

    prediction: Prediction
    needed_bits_per_s: tuple[float | None, ...]  # for each target; None: no rate is enough


@dataclass(frozen=True)
class Plan:
    """Hold the whole answer: the given setting, the chosen one, the best others, memory and data parallel."""

    machine: Machine
    situation: Situation
    memory: Memory
    need: Need
    targets: tuple[float, ...]  # the first one decides
    given: Row
    chosen: Row | None  # None: no link was given to choose for
    others: tuple[Row, ...]
    tried: int
    data_parallel: float  # its utilisation
    run_steps: int

    @property
    def never_synchronises(self) -> bool:
        """Return whether the given setting's phase is longer than the whole run."""
        return self.given.prediction.steps > self.run_steps


def make_plan(
    config: Config, work: Workload, machine: Machine, *, islands: int, line: LinkModel, targets: tuple[float, ...]
) -> Plan:
    """Predict the given setting and look for a better one.

    With `line` equal to NO_LINE nothing is chosen: a ladder of settings shows which rate each of them needs.
    """
    config = with_accumulate(config, work, machine)
    situation = Situation(work, islands, line, _step_s(config, work, machine), machine.host)
    memory = memory_of(work, config, machine.dtype, islands=islands, step_s=situation.step_s)
    processes = config.island.fsdp * config.island.tp
    need = need_of(memory, work.trained, config, on_cpu=machine.on_cpu, processes=processes)
    run_steps = config.inner.steps
    if line == NO_LINE:
        rungs = ladder(config.sync, work.blocks, run_steps)
        found = Found(None, tuple(predict(situation, sync) for sync in rungs), 0)
    else:
        found = search(situation, config.sync, targets[0], run_steps=run_steps)

    def row(prediction: Prediction) -> Row:
        return Row(prediction, tuple(bandwidth_needed(situation, prediction.sync, target) for target in targets))

    return Plan(
        machine, situation, memory, need, targets,
        given=row(predict(situation, config.sync)), chosen=row(found.chosen) if found.chosen else None,
        others=tuple(map(row, found.others)), tried=found.tried, data_parallel=data_parallel_utilisation(situation),
        run_steps=run_steps,
    )  # fmt: skip


def with_accumulate(config: Config, work: Workload, machine: Machine) -> Config:
    """Return the configuration with a number for `island.accumulate: auto`: the smallest that should fit, else all."""
    island = config.island
    if island.accumulate != "auto":
        return config
    rows = island.batch // island.fsdp
    for count in (count for count in range(1, rows + 1) if rows % count == 0):
        found = config.model_copy(update={"island": island.model_copy(update={"accumulate": count})})
        memory = memory_of(work, found, machine.dtype, islands=1, step_s=1.0)
        if machine.on_cpu or machine.accelerator is None or memory.accelerator <= machine.accelerator.memory_bytes:
            break
    return found


def _step_s(config: Config, work: Workload, machine: Machine) -> float:
    """Return the seconds of an inner step: by FLOPs, and on a GPU no less than launching its kernels takes."""
    flops = work.flops_per_token * work.tokens_per_step
    seconds = flops / (machine.flops * config.island.fsdp * config.island.tp)
    if machine.profile.flops is not None or machine.on_cpu:
        return seconds
    return max(seconds, LAUNCH_S[config.island.compile] * work.blocks * config.island.least_accumulate)


def advice(plan: Plan) -> str:
    """Explain in one sentence which setting to take and why, and warn if the given one never synchronises."""
    if not plan.never_synchronises:
        return _advice(plan)
    phase = f"its phase of {plan.given.prediction.steps} steps is longer than the run of {plan.run_steps}"
    return f"{_advice(plan)}; yours never synchronises: {phase}"


def _advice(plan: Plan) -> str:
    given, target = plan.given.prediction, percent(plan.targets[0])
    if plan.chosen is None:
        return f"{describe(given.sync)} {_needs(plan, plan.given, target)}"
    chosen = plan.chosen.prediction
    name, share = describe(chosen.sync), percent(chosen.utilisation)
    if chosen.utilisation < plan.targets[0]:
        nearest = f"{name} comes nearest with {share}, and {_needs(plan, plan.chosen, target)}"
        return f"none of {plan.tried} settings reaches {target} here; {nearest}"
    if chosen.sync == given.sync:
        return f"keep it: none of {plan.tried} settings reaches {target} here at less cost in quality"
    if given.utilisation < plan.targets[0]:
        why = f"yours would train {percent(given.utilisation)} of the time"
    else:
        more = cost(given.sync, given.steps) - cost(chosen.sync, chosen.steps)
        why = f"yours reaches it too, at an expected {percent(more)} more loss"
    return f"take {name}: with {share} the mildest of {plan.tried} settings that reach {target} here; {why}"


def percent(share: float) -> str:
    """Format a share between 0 and 1 with three digits: 0.953 as `95.3 %`."""
    return f"{100 * share:.3g} %"


def _needs(plan: Plan, row: Row, target: str) -> str:
    """Explain which rate a setting needs for the first target, or why no rate is enough."""
    bits_per_s = row.needed_bits_per_s[0]
    if bits_per_s is None:
        longest = row.prediction.steps >= longest_phase(plan.run_steps)
        better = f"a run of {plan.run_steps} steps is too short for longer phases" if longest else "raise sync.every"
        return f"reaches {target} at no rate: delays and the leader's own work alone take longer; {better}"
    return f"needs {format_rate(bits_per_s)} up and down for {target}"


def describe(sync: SyncConfig) -> str:
    """Format a setting as it is written in a configuration, without keys that have their default."""
    keys: dict[str, object] = {"every": sync.every, "codec": sync.codec}
    keys |= {"fragments": sync.fragments} if sync.fragments > 1 else {}
    keys |= {"delay": sync.delay} if sync.delay else {}
    keys |= {"apply": sync.apply} if sync.apply != "rebase" else {}
    return "sync: {" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}"
