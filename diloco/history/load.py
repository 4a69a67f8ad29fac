"""What a run has learned so far: the outer parameters of its newest save, as one whole model. Where there is no save,
as in a folder that `diloco restore` made or a witness has, those of the newest round that the log leads to.

It works while the run is training: saves appear by a rename, and one that is pruned while it is read is passed over.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.checkpoint.log.snapshot import manifests
from diloco.checkpoint.save.facts import order, read_facts
from diloco.checkpoint.save.saver import read_outer
from diloco.config.file import load_config, parse_config
from diloco.config.schema import Config
from diloco.data.batches import open_source
from diloco.data.samples import OWN_LOOP
from diloco.data.source import source_kind
from diloco.data.tokenizer import Tokenizer, load_tokenizer
from diloco.errors import DataError, SaveError
from diloco.history.find import RUNS, logs_of, saves_of
from diloco.history.log import furthest, genesis_of, newest_state, state_of
from diloco.island.island import materialise
from diloco.island.layout import Layout
from diloco.model.build import Network, build_network
from diloco.model.decoder import Decoder
from diloco.run.folder import refuse_other_protocols
from diloco.run.genesis import own_sections


@dataclass(frozen=True)
class TrainedModel:
    """Hold the model of a run's newest readable save, and what that save says of the run."""

    module: nn.Module  # fp32, on the CPU, in evaluation mode
    config: Config
    step: int  # of the outer state
    round: int
    save: Path  # or the log
    passed: tuple[str, ...]  # newer saves that cannot be read, and why

    @property
    def vocab(self) -> int:
        """Return how many tokens the model knows."""
        return self.module.shape.vocab if isinstance(self.module, Decoder) else int(self._hf.vocab_size)

    @property
    def context(self) -> int:
        """Return how many tokens the model sees at once; the length of training sequences where it does not say."""
        if isinstance(self.module, Decoder):
            return self.module.shape.context
        return getattr(self._hf, "max_position_embeddings", None) or self.config.data.sequence

    @property
    def _hf(self) -> Any:
        return self.module.config


def find_run(name: str) -> Path:
    """Find the folder of a run, or of one island of it, by its path or by its name under runs/; it must hold a save, or
    a log with a snapshot."""
    places = [place for place in (Path(name).expanduser(), RUNS / name) if place.is_dir()]
    if found := [place for place in places if saves_of(place)] or [
        place for place in places if _logs_with_state(place)
    ]:
        refuse_other_protocols(found[0])
        return found[0]
    if places:
        raise SaveError(
            f"{places[-1]} holds no save yet: a run saves every checkpoint.snapshot_every rounds and when it ends"
        )
    names = sorted(path.name for path in RUNS.glob("*") if saves_of(path))
    hint = f"there are {', '.join(names)}" if names else "give the folder that checkpoint.dir named"
    raise SaveError(f"{name}: no such run, neither as a folder nor under {RUNS}/: {hint}")


def load_trained(folder: Path) -> TrainedModel:
    """Load the newest readable save as a model on the CPU; frozen parameters, in no save, get initial values."""
    save, facts, vector, passed = _read_newest(folder) if saves_of(folder) else _read_log(folder)
    if facts["data"] == OWN_LOOP:
        raise SaveError(
            f"{save} is of a program of its own (diloco.connect), and only that knows its model: load it there, "
            "inside `with run.outer_parameters():`"
        )
    config = parse_config(facts["config"])
    network = _network(config, len(vector))
    layout = Layout.of_module(network.module)
    if layout.size != len(vector):
        raise SaveError(f"{save} holds {len(vector)} values, its model has {layout.size}: use the diloco that wrote it")
    materialise(network.module, torch.device("cpu"))
    frozen = any(not parameter.requires_grad for parameter in network.module.parameters())
    with torch.no_grad():
        for name, value in chain(network.initial() if frozen else (), layout.views(vector)):
            network.module.get_parameter(name).copy_(value)
    return TrainedModel(network.module.eval(), config, facts["outer_step"], facts["round"], save, passed)


def _logs_with_state(folder: Path) -> list[Path]:
    return [log for log in logs_of(folder) if any(manifests(log))]


def _read_log(folder: Path) -> tuple[Path, dict[str, Any], Tensor, tuple[str, ...]]:
    """Replay the log that leads furthest; nothing is written."""
    log = furthest(_logs_with_state(folder))
    genesis, file = genesis_of(log), log.parent / "config.yaml"
    config = genesis.configure(own_sections(load_config(file)) if file.is_file() else {})
    state, vectors = state_of(log, newest_state(log).head.round)
    facts = {
        "data": genesis.data, "config": config.model_dump(mode="json"), "outer_step": state.step,
        "round": state.head.round,
    }  # fmt: skip
    return log, facts, vectors["parameters"], ()


def _read_newest(folder: Path) -> tuple[Path, dict[str, Any], Tensor, tuple[str, ...]]:
    passed: dict[Path, str] = {}
    while True:
        known: dict[Path, dict[str, Any]] = {}
        gone = False
        for save in saves_of(folder):  # again each time: whoever prunes or replaces one has just written another
            try:
                known[save] = read_facts(save)
            except SaveError as error:
                if save.exists():
                    passed[save] = str(error)
                else:
                    gone = True
        left = [save for save in known if save not in passed]
        if not left and gone:
            continue
        if not left:
            raise SaveError([f"{folder} holds no save any more", *passed.values()][-1])
        newest = max(left, key=lambda save: order(known[save]))
        try:
            vector = read_outer(newest)["parameters"]
        except SaveError as error:
            if newest.exists():
                passed[newest] = str(error)
            continue
        return newest, known[newest], vector, tuple(why for save, why in passed.items() if save.exists())


def _network(config: Config, length: int) -> Network:
    """Build the network whose vector has this length. Its vocabulary follows from that: the data need not be on this
    machine, unless the embeddings are frozen."""

    def build(vocab: int) -> Network:
        return build_network(config.model, data_vocab=vocab, sequence=config.data.sequence, seed=config.seed)

    if config.model.hf is not None or config.model.vocab is not None:
        return build(1)
    one, two = (Layout.of_module(build(vocab).module).size for vocab in (1, 2))
    if one == two:  # frozen embeddings: they are in no vector
        return build(open_source(config.data, cache_dir=Path(config.dir).resolve().parent / "cache").vocab)
    return build(1 + (length - one) // (two - one))


def tokenizer_of(trained: TrainedModel, given: str | None = None) -> Tokenizer:
    """Load the run's tokenizer, or the one given; raise DataError if it has more tokens than the model."""
    config = trained.config
    spec = given or source_kind(config.data).tokenizer(config.data, [config.model.hf] if config.model.hf else [])
    tokenizer = load_tokenizer(spec)
    if tokenizer.vocab > trained.vocab:
        raise DataError(
            f"the tokenizer {spec} has {tokenizer.vocab} tokens, the model {trained.vocab}: "
            "give the one that the run was trained with, by --tokenizer"
        )
    return tokenizer
