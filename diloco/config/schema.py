"""The one configuration that serves every mode. Each field says what it means; `diloco config` prints them all.

Reading files, overrides and error messages are in `diloco.config.file`.
"""

from math import inf
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from diloco.comm.codec.registry import CODECS, codec_named
from diloco.config.fields import (
    Count,
    Fraction,
    ListenAddress,
    Number,
    Positive,
    Seconds,
    Section,
    Where,
    auto_or,
    auto_or_count,
    key,
    names,
    on_or_off,
    one_of,
    steps_or_time,
)
from diloco.config.launch import LaunchConfig
from diloco.units import parse_duration

GUESSED_STEPS = 100  # in a phase whose length is a time


class ModelConfig(Section):
    """What is trained."""

    preset: Literal["tiny", "35m", "90m", "150m", "1b", "3b"] | None = key(
        None, "a built-in size; tiny if hf is not set"
    )
    hf: Where | None = key(None, "instead: a Hugging Face causal LM: a folder, a config.json or OWNER/NAME")
    weights: Literal["auto", "load", "fresh"] = key(
        "auto", "hf: load the folder's weights, or start fresh from its config"
    )
    vocab: Positive | None = key(None, "preset: size of the vocabulary; null takes the data's")
    blocks: Positive | None = key(None, "preset: overrides the number of transformer blocks")
    width: Positive | None = key(None, "preset: overrides the width of the residual stream")
    heads: Positive | None = key(None, "preset: overrides the number of attention heads")
    kv_heads: Positive | None = key(None, "preset: overrides the number of key/value heads")
    feed_forward: Positive | None = key(None, "preset: overrides the width inside SwiGLU")
    tied: bool | None = key(None, "preset: one matrix for embedding and head")
    freeze: Annotated[tuple[str, ...], BeforeValidator(names)] = key(
        (), "parameters that stay as they are, by name pattern (embed.*)"
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        shape = ("vocab", "blocks", "width", "heads", "kv_heads", "feed_forward", "tied")
        if self.hf is not None and self.preset is not None:
            raise ValueError(
                f"model.preset={self.preset!r} and model.hf={self.hf!r} are both set: keep one (null unsets a key)"
            )
        if self.hf is not None and (wrong := [name for name in shape if getattr(self, name) is not None]):
            raise ValueError(
                f"model.{wrong[0]} belongs to a preset: with model.hf the shape comes from its config.json"
            )
        return self


# What else can be chosen by name, and where it is: `module:Class`, loaded by whoever uses it.
SOURCES = {
    "stdlib": "diloco.data.text:Stdlib",
    "text": "diloco.data.text:Text",
    "tokens": "diloco.data.tokens:TokenFiles",
    "hf": "diloco.data.hf:HuggingFace",
}
OUTER_OPTIMIZERS = {
    "nesterov": "diloco.train.optimizers:Nesterov",
    "sgd": "diloco.train.optimizers:Sgd",
    "adam": "diloco.train.optimizers:Adam",
}
SINKS = {"tensorboard": "diloco.report.trackers:TensorBoard", "wandb": "diloco.report.trackers:WandB"}


class DataConfig(Section):
    """What it is trained on."""

    source: Annotated[str, one_of(SOURCES)] = key(
        "stdlib", "stdlib: Python's own library as bytes; text: files; tokens: a token file; hf: a data set"
    )
    path: Where | None = key(None, "text: file or folder; tokens: token file; hf: data set folder or name")
    tokenizer: Where = key("bytes", "text, hf: `bytes`, or a Hugging Face tokenizer: its folder or OWNER/NAME")
    split: str = key("train", "hf: which split of the data set")
    field: str = key("text", "hf: which field holds the text")
    sequence: Positive = key(256, "tokens in a sample")
    epochs: Positive | None = key(None, "end the run after so many passes over the data; null: after inner.steps only")
    validation: Fraction = key(0.02, "share of the samples, from the end, kept for validation")

    @model_validator(mode="after")
    def _path_where_needed(self) -> Self:
        if self.source != "stdlib" and self.path is None:
            raise ValueError(f"data.source={self.source!r} needs data.path: say where the data is")
        if self.source == "stdlib" and self.path is not None:
            raise ValueError(
                f"data.path={self.path!r} is not used by data.source='stdlib': set data.source to text or tokens"
            )
        return self


class IslandConfig(Section):
    """How one island computes: accelerators, batch, precision."""

    batch: Positive = key(16, "samples in one inner step of the island, over all its processes")
    accumulate: Annotated[Any, BeforeValidator(auto_or_count)] = key(
        1, "micro-batches that make up one inner step; auto: as few as fit into the accelerator's memory"
    )
    fsdp: Positive = key(1, "processes that share parameters and data (FSDP)")
    tp: Positive = key(1, "processes that share each matrix (tensor parallel)")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto takes CUDA where there is one")
    dtype: Literal["auto", "bf16", "fp32"] = key(
        "auto", "compute type, parameters stay fp32; auto: bf16 on CUDA, fp32 on CPU"
    )
    outer: Literal["host", "device"] = key(
        "host", "where the island keeps the outer state; device: its leader's GPU, which works it out in either case"
    )
    compile: bool = key(False, "torch.compile the model")
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass to save memory")
    hang_s: Annotated[Seconds, Field(gt=0)] = key(
        900.0, "seconds without progress until a mesh counts as hung; its start, first step and saves get 4 times that"
    )

    @property
    def mesh(self) -> str:
        """Describe the mesh for people, as in `fsdp 2 x tp 1`."""
        return f"fsdp {self.fsdp} x tp {self.tp}"

    @property
    def least_accumulate(self) -> int:
        """Return the micro-batches of a step, at least; `auto` may find that it takes more."""
        return 1 if self.accumulate == "auto" else int(self.accumulate)

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        parts = self.fsdp * self.least_accumulate
        if self.batch % parts:
            raise ValueError(
                f"island.batch={self.batch} cannot be divided by island.fsdp={self.fsdp} x "
                f"island.accumulate={self.accumulate}: use a multiple of {parts}"
            )
        return self


class InnerConfig(Section):
    """The optimizer inside an island."""

    optimizer: Literal["adamw", "muon"] = key(
        "adamw", "muon: orthogonal updates for the blocks' matrices, AdamW for the rest, at the same lr"
    )
    lr: Number = key(4e-4, "peak learning rate", gt=0)
    momentum: Fraction = key(0.95, "muon's momentum (Nesterov)")
    betas: tuple[Fraction, Fraction] = key((0.9, 0.99), "AdamW's decay of first and second moment")
    eps: Number = key(1e-8, "AdamW's epsilon", gt=0)
    weight_decay: Number = key(0.1, "decay of matrices (not of norms and biases)", ge=0)
    clip: Number = key(1.0, "largest gradient norm; 0 does not clip", ge=0)
    steps: Positive = key(2000, "inner steps in the whole run")
    warmup: Count = key(100, "steps of linear warm-up", ge=0)
    schedule: Literal["cosine", "wsd", "constant"] = key("cosine", "after warm-up; wsd: constant, then linear decay")
    final_lr: Fraction = key(0.05, "cosine, wsd: where the learning rate ends, as a share of lr")
    decay: Fraction = key(0.2, "wsd: the share of all steps spent decaying")

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        if self.warmup >= self.steps:
            raise ValueError(
                f"inner.warmup={self.warmup} must be below inner.steps={self.steps}: lower it or train longer"
            )
        if self.schedule == "wsd" and self.warmup + self.decay * self.steps > self.steps:
            raise ValueError(
                f"inner.warmup={self.warmup} and inner.decay={self.decay} of {self.steps} steps overlap: lower one"
            )
        return self


class OuterConfig(Section):
    """The optimizer that combines the islands."""

    optimizer: Annotated[str, one_of(OUTER_OPTIMIZERS)] = key(
        "nesterov", "applied to the mean of the islands' pseudo-gradients"
    )
    lr: Annotated[Any, auto_or(lambda lr: 0 < lr < inf, "a number above 0")] = key(
        "auto",
        "auto follows the number of islands, 0.4 for 1 (0.7 with inner muon) to 0.8 for 8; nearer to 1 in short runs",
    )
    momentum: Annotated[Any, auto_or(lambda share: 0 <= share < 1, "a number from 0 to below 1")] = key(
        "auto",
        "nesterov's, adam's decay of the first moment; auto: 0.9 (0.6 with inner muon and one island), less in runs of "
        "under 200 rounds",
    )
    beta2: Fraction = key(0.99, "adam's decay of the second moment", alias="second")  # as it was called before
    eps: Number = key(1e-8, "adam's epsilon", gt=0)

    @model_validator(mode="after")
    def _adam_needs_a_rate(self) -> Self:
        if self.optimizer == "adam" and self.lr == "auto":
            raise ValueError(
                "outer.optimizer=adam moves every parameter by about outer.lr a round, whatever was trained: give "
                "outer.lr a number (1e-3 is a start); auto is for nesterov and sgd"
            )
        return self


class SyncConfig(Section):
    """When islands meet, and what travels."""

    every: Annotated[int | str, BeforeValidator(steps_or_time)] = key(
        50, "inner steps between two rounds; or a time such as 60s, from the end of a round to the next"
    )
    growth: Number = key(0.0, "phases grow as lr falls, to max(every, (growth / lr)^2) steps; 0: they do not", ge=0)
    fragments: Positive = key(1, "parts that are synchronised one after the other, each once in `every` steps")
    pattern: Literal["strided", "sequential"] = key(
        "strided", "how blocks are dealt out to fragments; what is in no block is the last fragment"
    )
    delay: Count = key(0, "inner steps between sending and applying, during which training goes on", ge=0)
    apply: Literal["rebase", "replace", "mix", "eager"] = key(
        "rebase",
        "how a result enters the island: with what was trained meanwhile on top (rebase), without it (replace), half "
        "and half (mix), or a whole phase later, the island's own part at once (eager)",
    )
    alpha: Fraction = key(0.5, "mix: the island's own share in its new parameters")
    codec: Annotated[str, one_of(CODECS)] = key(
        "int8", "how pseudo-gradients travel between islands (an island alone sends nothing)"
    )
    feedback: Annotated[Literal["auto", "on", "off"], BeforeValidator(on_or_off)] = key(
        "auto", "what encoding loses is added to the next contribution; auto: for codecs that leave much out"
    )
    feedback_decay: Fraction = key(0.95, "what is left of that from one contribution to the next")

    @property
    def every_s(self) -> float | None:
        """Return the length of a phase in seconds, or None where it is a number of steps."""
        return parse_duration(self.every) if isinstance(self.every, str) else None

    @property
    def phase_steps(self) -> int:
        """Return the inner steps of a phase; where that is a time, a guess to use before the first phase is over."""
        return self.every if isinstance(self.every, int) else GUESSED_STEPS

    @property
    def trains_on(self) -> bool:
        """Tell whether training goes on while a round is under way."""
        return self.delay > 0 or self.apply == "eager"

    @property
    def feeds_back(self) -> bool:
        """Tell whether what encoding loses is added to the next contribution."""
        return codec_named(self.codec).needs_feedback if self.feedback == "auto" else self.feedback == "on"

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.every_s is not None and self.fragments > 1:
            raise ValueError(
                f"sync.every={self.every} with sync.fragments={self.fragments}: fragments take turns by the run's "
                "clock, which counts steps: give sync.every as a number of steps, or leave sync.fragments at 1"
            )
        if self.every_s is not None and self.growth:
            raise ValueError(f"sync.growth makes phases longer in steps, and sync.every={self.every} fixes their time")
        if self.every_s is None and self.delay >= self.phase_steps:
            raise ValueError(
                f"sync.delay={self.delay} must be below sync.every={self.every}: a fragment is applied before it is "
                "launched again; to overlap a whole phase use sync.apply=eager"
            )
        if self.every_s is None and self.fragments > self.phase_steps:
            raise ValueError(f"sync.fragments={self.fragments}: sync.every={self.every} steps are too few for them")
        if self.apply == "replace" and self.delay:
            raise ValueError(
                f"sync.apply=replace with sync.delay={self.delay} would throw away what is trained meanwhile: "
                "use rebase or mix"
            )
        if self.feedback == "off" and codec_named(self.codec).needs_feedback:
            raise ValueError(
                f"sync.codec={self.codec} sends a small part of each contribution, and without feedback the rest "
                "would be lost: leave sync.feedback at auto"
            )
        if self.apply == "eager" and (self.delay or self.fragments > 1):
            raise ValueError("sync.apply=eager overlaps whole phases: leave sync.delay at 0 and sync.fragments at 1")
        return self


class ElasticConfig(Section):
    """What happens when islands come, go, stall or lose each other (an island alone has nobody to wait for)."""

    min_islands: Positive = key(1, "islands a round needs")
    silence_s: Annotated[Seconds, Field(gt=0)] = key(
        5.0, "seconds without a sign of life until an island counts as lost"
    )
    straggler: Annotated[Number, Field(ge=1)] = key(
        1.5, "begin a round without an island that takes this many times what half of the islands needed"
    )
    slowest: Annotated[Number, Field(ge=1)] = key(
        2.0, "an island whose exchange takes longer than this many usual rounds is in every k-th round only"
    )
    adaptive: bool = key(False, "slower islands do fewer inner steps in a round, so that all arrive together")
    grace_s: Annotated[Seconds, Field(ge=0)] = key(
        20.0, "seconds an island that is asked to stop waits for a round to take its progress"
    )
    partition: Literal["auto", "quorum", "merge"] = key(
        "auto", "a cut network: `quorum`, a minority waits; `merge`, both sides train on; `auto`, quorum from three on"
    )
    min_voters: Positive = key(
        3, "silence alone removes no island from the roster if fewer than this many would be left (quorum)"
    )
    rejoin_s: Annotated[Seconds, Field(ge=0)] = key(
        60.0, "seconds for which an island that comes back looks for the others before it goes on alone (merge)"
    )
    start_islands: Positive = key(1, "the first round waits for this many islands")
    start_s: Annotated[Seconds, Field(ge=0)] = key(300.0, "but no longer than this many seconds")


class CheckpointConfig(Section):
    """What survives a crash."""

    dir: Where | None = key(None, "the run's folder; null takes runs/NAME")
    snapshot_every: Positive = key(20, "passes (a round of every fragment) between two snapshots, and two saves")
    keep: Count = key(2, "snapshots that are kept, with the log since the oldest of them; 0 keeps everything", ge=0)
    remote: str | None = key(None, "a second place to which snapshots and the log are copied (s3://…, file:///…)")


class EvaluateConfig(Section):
    """Validation loss of the outer parameters."""

    every: Count = key(1, "passes (a round of every fragment) between two validations; 0 never", ge=0)
    samples: Positive = key(64, "samples in one validation, rounded up to whole batches")


class LogConfig(Section):
    """Where events and figures go."""

    every: Positive = key(10, "inner steps between two progress reports")
    tensorboard: bool = key(False, "write TensorBoard files to the run's folder (extra: tensorboard)")
    wandb: bool = key(False, "report to Weights & Biases (extra: wandb)")
    metrics: ListenAddress | None = key(
        None, "answer Prometheus at this port of this machine; HOST:PORT for others; the next island has the next port"
    )
    sinks: Annotated[tuple[Annotated[str, one_of(SINKS)], ...], BeforeValidator(names)] = key(
        (), "the same by name, for sinks that have no key of their own"
    )

    @property
    def wanted(self) -> list[str]:
        """List all sinks that are asked for by name, each once."""
        own = {"tensorboard": self.tensorboard, "wandb": self.wandb}
        return list(dict.fromkeys([*(name for name, asked in own.items() if asked), *self.sinks]))


class Config(Section):
    """Hold all settings of a training run."""

    run: str = key("quickstart", "name of the run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    seed: Count = key(0, "initial parameters and order of the data follow from it", ge=0, lt=2**63)
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    island: IslandConfig = IslandConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    sync: SyncConfig = SyncConfig()
    elastic: ElasticConfig = ElasticConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    log: LogConfig = LogConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.evaluate.every and self.data.validation == 0:
            raise ValueError(
                f"evaluate.every={self.evaluate.every} needs data to validate on, but data.validation=0: "
                "raise data.validation or set evaluate.every=0"
            )
        if self.elastic.adaptive and (self.sync.fragments > 1 or self.sync.delay or self.sync.apply == "eager"):
            raise ValueError(
                "elastic.adaptive ends an island's phase early, which needs rounds that are waited for: "
                "leave sync.fragments at 1, sync.delay at 0 and sync.apply at rebase"
            )
        if self.elastic.adaptive and self.sync.growth:
            raise ValueError(
                f"sync.growth={self.sync.growth:g} makes phases longer, elastic.adaptive ends them after an island's "
                "share of sync.every: choose one of them"
            )
        if self.elastic.adaptive and self.sync.every_s is not None:
            raise ValueError(
                f"sync.every={self.sync.every} gives every island the same time already: leave elastic.adaptive off"
            )
        return self

    @property
    def dir(self) -> str:
        """Return the run's folder: `checkpoint.dir`, or runs/NAME by default."""
        return self.checkpoint.dir or f"runs/{self.run}"

    def of_island(self) -> Self:
        """Return what an island needs of this, for its files and trackers: how it was launched may hold keys of other
        services, and is no part of the run."""
        kept = {name: value for name, value in self if name in self.model_fields_set and name != "launch"}
        return self.model_construct(**{**dict(self), "launch": LaunchConfig()}, _fields_set=set(kept))
