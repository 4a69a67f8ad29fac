"""Predict what our trainer will do on given links: seconds of a step and of a round, bytes, utilisation.

All islands are alike here. Validation, saves and lost islands cost extra and are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from diloco.comm.codec.registry import CODECS
from diloco.config.schema import SyncConfig

DAY_S = 86400.0
AGREE_HOPS = 4  # ready, begin, done, commit: one way each; of them, ready takes none where the coordinator comes last
ROUND_S = 0.03  # of threads that wake each other, whatever is sent
PIPELINE = 3  # chunks of a span: results of the first flow while contributions to the others still come
LINK_SHARE = 0.98  # of the rate that an all-reduce gets: diloco bench allreduce measures it
MANY_PASSES = 8  # until the waiting of one pass is that of every later one
DATA_PARALLEL_BITS = 16


@dataclass(frozen=True)
class Workload:
    """Describe a model on its islands in numbers.

    `fragments(count, pattern)` returns how many values each fragment has, `bytes_of(codec, values, islands)` what an
    island sends and receives in a round of so many values.
    """

    name: str
    parameters: int
    trained: int
    blocks: int
    width: int
    feed_forward: int
    vocab: int
    flops_per_token: float
    tokens_per_step: int  # of one island
    fragments: Callable[[int, str], tuple[int, ...]]
    bytes_of: Callable[[str, int, int], tuple[int, int]]


@dataclass(frozen=True)
class LinkModel:
    """Describe how each island is connected: rates in bits per second and the one-way delay."""

    up_bits_per_s: float
    down_bits_per_s: float
    delay_s: float = 0.0  # one way

    def reduce_s(self, sent: float, received: float) -> float:
        """Return the seconds of an all-reduce in which an island sends and receives so many bytes.

        The delay counts there and back, but the way back of a long transfer begins while the way there is still in use.
        """
        transfer_s = max(8 * sent / self.up_bits_per_s, 8 * received / self.down_bits_per_s) / LINK_SHARE
        return transfer_s + self.delay_s + max(0.0, self.delay_s - transfer_s / PIPELINE)


def codec_times(times_faster: float = 1.0) -> dict[str, tuple[float, float]]:
    """Return each codec's nanoseconds per value on the leader's CPU: to encode a contribution, to decode a mean."""
    return {name: (codec.cpu_ns[0] / times_faster, codec.cpu_ns[1] / times_faster) for name, codec in CODECS.items()}


@dataclass(frozen=True)
class Host:
    """Describe what a round costs the leader's CPU, in nanoseconds per value or byte."""

    codec_ns: dict[str, tuple[float, float]] = field(default_factory=codec_times)
    cut_ns: float = 1.0  # a value: read it, subtract, take the norm
    apply_ns: float = 9.0  # a value: the outer optimizer, and into the island
    digest_ns: float = 1.0  # a byte of the result
    trains_too: bool = False  # islands on CPUs: what a round takes of it is lost to training

    @classmethod
    def of_gpus(cls) -> "Host":
        """Make one for a machine with GPUs: more and faster cores, by a guess three times; a digest is one thread."""
        return cls(codec_times(3), cut_ns=0.33, apply_ns=3.0, digest_ns=0.6)

    def seconds(self, codec: str, values: int, result_bytes: float) -> float:
        """Return the CPU seconds of one round of so many values: cut, encode, decode, apply, digest."""
        per_value_ns = self.cut_ns + sum(self.codec_ns[codec]) + self.apply_ns
        return 1e-9 * (values * per_value_ns + result_bytes * self.digest_ns)


@dataclass(frozen=True)
class Situation:
    """Hold everything that a prediction depends on, but for how islands synchronise."""

    work: Workload
    islands: int
    line: LinkModel
    step_s: float
    host: Host = field(default_factory=Host)


@dataclass(frozen=True)
class Round:
    """Describe one round of one fragment: bytes of an island, and the seconds of its parts."""

    sent: int
    received: int
    host_s: float
    agree_s: float
    reduce_s: float

    @property
    def seconds(self) -> float:
        """Return the time from launch to applied: the leader's own work, agreement and all-reduce."""
        return self.host_s + self.agree_s + self.reduce_s


@dataclass(frozen=True)
class Prediction:
    """Describe the steady state of one setting: what a phase and its rounds take."""

    sync: SyncConfig
    steps: int  # of a phase
    step_s: float
    rounds: tuple[Round, ...]  # of a phase, one for each fragment
    phase_s: float

    @property
    def utilisation(self) -> float:
        """Return the share of the time that is spent on inner steps."""
        return self.steps * self.step_s / self.phase_s

    @property
    def round_s(self) -> float:
        """Return the seconds of the largest fragment's round."""
        return max(one.seconds for one in self.rounds)

    @property
    def waited_s(self) -> float:
        """Return the seconds of a phase that are lost to training: waiting for rounds, and their work on a CPU."""
        return self.phase_s - self.steps * self.step_s

    @cached_property
    def sent_a_day(self) -> float:
        """Return the bytes that an island sends in 24 hours, in all-reduces."""
        return sum(one.sent for one in self.rounds) * DAY_S / self.phase_s

    @cached_property
    def received_a_day(self) -> float:
        """Return the bytes that an island receives in 24 hours, in all-reduces."""
        return sum(one.received for one in self.rounds) * DAY_S / self.phase_s


def predict(situation: Situation, sync: SyncConfig) -> Prediction:
    """Predict what the given way to synchronise does in this situation."""
    steps = phase_steps(sync, situation.step_s)
    counts = situation.work.fragments(sync.fragments, sync.pattern)
    rounds = tuple(_round(situation, sync.codec, count) for count in counts)
    return Prediction(sync, steps, situation.step_s, rounds, _phase_s(situation, sync, steps, rounds))


def phase_steps(sync: SyncConfig, step_s: float) -> int:
    """Return the inner steps of a phase; where `sync.every` is a time, how many fit into it, at least one."""
    return sync.phase_steps if sync.every_s is None else max(1, round(sync.every_s / step_s))


def data_parallel_utilisation(situation: Situation) -> float:
    """Return the utilisation of data parallel training over the same links.

    It is computed, not built: 16-bit gradients are sent at every step while the backward pass, 2/3 of a step,
    continues.
    """
    share = 2 * (situation.islands - 1) / situation.islands
    size = share * situation.work.trained * DATA_PARALLEL_BITS / 8
    reduce_s = situation.line.reduce_s(size, size) if size else 0.0
    return situation.step_s / (situation.step_s + max(0.0, reduce_s - situation.step_s * 2 / 3))


def _round(situation: Situation, codec: str, count: int) -> Round:
    """Predict a round of one fragment; an island alone sends nothing and agrees with nobody."""
    sent, received = situation.work.bytes_of(codec, count, situation.islands)
    host_s = situation.host.seconds(codec, count, received / 2)
    if situation.islands == 1:
        return Round(0, 0, host_s, 0.0, 0.0)
    line = situation.line
    agree_s = ROUND_S + (AGREE_HOPS - 1 / situation.islands) * line.delay_s
    return Round(sent, received, host_s, agree_s, line.reduce_s(sent, received))


def _phase_s(situation: Situation, sync: SyncConfig, steps: int, rounds: tuple[Round, ...]) -> float:
    """Return the seconds from one phase to the next, in the steady state.

    Rounds are serial. Training continues for `delay` steps after a launch, or until the next launch (eager), and then
    waits for results that have not arrived.
    """
    eager = sync.apply == "eager"
    apply_after = steps if eager else sync.delay
    overlapped = apply_after > 0
    count = len(rounds)
    launches = [(p * steps + round(steps * (f + 1) / count), f) for p in range(2 * MANY_PASSES) for f in range(count)]
    # at one step, what has come is applied first where the next phase starts from it
    events = [(step, 1, number) for number, (step, _) in enumerate(launches)]
    events += [(step + apply_after, 0 if eager else 2, number) for number, (step, _) in enumerate(launches)]
    now, done, free, over, marks = 0.0, 0, 0.0, dict[int, float](), list[float]()
    for step, kind, number in sorted(events):
        now += (step - done) * situation.step_s
        done = step
        one = rounds[launches[number][1]]
        if kind != 1:
            now = max(now, over[number])
            continue
        free = over[number] = max(now, free) + one.seconds
        if overlapped and situation.host.trains_too:
            now += one.host_s
        if (number + 1) % count == 0:
            marks.append(now)
    simulated = (marks[-1] - marks[MANY_PASSES - 1]) / (len(marks) - MANY_PASSES)
    return max(simulated, sum(one.seconds for one in rounds), steps * situation.step_s)
