"""Predict an island's memory in bytes. Parameters, gradients and states are counted; activations are estimated."""

from dataclasses import dataclass

from diloco.config.schema import Config
from diloco.plan.predict import Workload, phase_steps

FP32 = 4
KEPT_CONTRIBUTIONS_BYTES = 64 << 20  # of all fragments at most, in case that a heavier branch lacks them
# Bytes of a token that a block keeps for its backward pass, for each unit of its width and of its feed-forward;
# counted in our model. Then the logits of a token: as computed, in fp32, and their gradient.
KEPT_WIDTH = {"bf16": 37, "fp32": 57}
KEPT_FEED_FORWARD = {"bf16": 8, "fp32": 16}
LOGITS = {"bf16": 10, "fp32": 12}
COMPILED = 0.5  # of that is left where torch.compile fuses operations


@dataclass(frozen=True)
class Memory:
    """Hold the bytes that each accelerator needs, by use, and those that the host of the island's leader needs.

    `vectors` lie on the leader's accelerator with `island.outer: device`.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    vectors: float
    payloads: float

    @property
    def host(self) -> float:
        """Return the bytes on the leader's host: vectors of the outer state, and what is sent and received."""
        return self.vectors + self.payloads

    @property
    def accelerator(self) -> float:
        """Return the bytes on each accelerator: parameters, gradients, optimizer state and activations."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def memory_of(work: Workload, config: Config, dtype: str, *, islands: int, step_s: float) -> Memory:
    """Predict what an island of this configuration needs.

    `islands` and `step_s` decide how many contributions and results the leader keeps: an island alone keeps none.
    """
    world = config.island.fsdp * config.island.tp
    return Memory(
        parameters=FP32 * work.parameters / world,
        gradients=FP32 * work.trained / world,
        optimizer=FP32 * _inner_states(work, config.inner.optimizer) / world,
        activations=_activations(work, config, dtype) + (_bf16_copies(work, config) if dtype == "bf16" else 0.0),
        vectors=_vectors(work, config),
        payloads=_payloads(work, config, islands, step_s),
    )


def _inner_states(work: Workload, optimizer: str) -> float:
    """Count the inner optimizer's values: two per trained parameter, with Muon one in the blocks' matrices."""
    hidden = min(work.trained, work.blocks * (4 * work.width**2 + 3 * work.width * work.feed_forward))
    return 2 * work.trained - (hidden if optimizer == "muon" else 0)


def _bf16_copies(work: Workload, config: Config) -> float:
    """Return the bytes of the parameters' bf16 copies in use: of all, or of what FSDP gathers at a time."""
    if config.island.fsdp * config.island.tp == 1:
        return 2.0 * work.parameters
    return 2 * (work.vocab * work.width + 2 * work.parameters / work.blocks) / config.island.tp


def _activations(work: Workload, config: Config, dtype: str) -> float:
    """Estimate the activations of one micro-batch on one accelerator, in bytes."""
    island = config.island
    tokens = work.tokens_per_step / (island.fsdp * island.least_accumulate)
    block: float = KEPT_WIDTH[dtype] * work.width + KEPT_FEED_FORWARD[dtype] * work.feed_forward
    block *= COMPILED if island.compile else 1.0
    kept = work.blocks * block
    if island.activation_checkpointing:
        kept = work.blocks * work.width * (2 if dtype == "bf16" else 4) + block
    return tokens * (kept + LOGITS[dtype] * work.vocab) / island.tp


def _vectors(work: Workload, config: Config) -> float:
    """Return the bytes of the outer state, of what encoding lost, and of an anchor of its own, which an island has that
    trains on while a round is under way."""
    from diloco.train.optimizers import optimizer_named  # brings torch, which a plan of no CONFIG does without

    sync = config.sync
    states = len(optimizer_named(config.outer.optimizer).vectors)
    return FP32 * work.trained * (states + sync.trains_on + sync.feeds_back)


def _payloads(work: Workload, config: Config, islands: int, step_s: float) -> float:
    """Return the encoded bytes that the leader keeps of the largest fragment, its own contribution, what others send of
    theirs and the result, and of contributions that another branch may lack."""
    sync = config.sync
    counts = work.fragments(sync.fragments, sync.pattern)
    encoded = [work.bytes_of(sync.codec, count, 2)[0] for count in counts]  # two send half a contribution, half a mean
    rounds = max(1.0, config.inner.steps / phase_steps(sync, step_s))  # of each fragment in the whole run
    kept = sum(min(KEPT_CONTRIBUTIONS_BYTES / len(encoded), size * rounds) for size in encoded)
    return (2 + (islands - 1) / islands) * max(encoded) + (kept if islands > 1 else 0.0)
