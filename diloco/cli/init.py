"""Declare `diloco init`: a configuration to begin with, for a model, its data and a number of islands."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.errors import ConfigError, DataError, ModelError

# what else of a preset differs from the defaults, so that its first run is a sensible one
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "data": {"sequence": 128}, "island": {"batch": 8}, "sync": {"every": 25}, "log": {"every": 5},
        "inner": {"lr": 3e-3, "warmup": 40, "steps": 300}, "checkpoint": {"snapshot_every": 4},
    },
    "35m": {"data": {"sequence": 512}, "inner": {"lr": 1e-3, "warmup": 200, "steps": 6000}, "sync": {"every": 30}},
    "90m": {"data": {"sequence": 1024}, "inner": {"lr": 6e-4, "warmup": 500, "steps": 20000}, "sync": {"every": 50}},
    "150m": {"data": {"sequence": 1024}, "inner": {"lr": 4e-4, "warmup": 1000, "steps": 40000}, "sync": {"every": 100}},
    "1b": {
        "data": {"sequence": 1024}, "island": {"activation_checkpointing": True}, "sync": {"every": 100},
        "inner": {"lr": 2e-4, "warmup": 1000, "steps": 50000},
    },
    "3b": {
        "data": {"sequence": 2048}, "island": {"activation_checkpointing": True}, "sync": {"every": 100},
        "inner": {"lr": 1.5e-4, "warmup": 2000, "steps": 100000},
    },
}  # fmt: skip
LOADED = {"inner": {"lr": 1e-4, "warmup": 50, "steps": 1000}, "sync": {"every": 50}}  # weights that know something
SEQUENCE = 512
DATA_FILES = (".json", ".jsonl", ".csv", ".parquet")
DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")  # on the hub: some have no owner


def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The YAML file to write.")] = Path("run.yaml"),
    model: Annotated[
        str, typer.Option(help="tiny, 35m, 90m, 150m, 1b, 3b, or a Hugging Face model: a folder, or a name on the hub.")
    ] = "tiny",
    data: Annotated[
        str,
        typer.Option(help="stdlib (Python's own), a text file or folder, a token file, or a data set: folder or name."),
    ] = "stdlib",
    islands: Annotated[int, typer.Option(min=1, max=64, help="Number of islands that will take part.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write a configuration to begin with.

    Each key that it sets has its meaning beside it; all others have their defaults (diloco config FILE prints them).
    """
    from diloco.atomic import create_file, write_file
    from diloco.cli.shared import next_commands, say
    from diloco.config.file import parse_config, render_chosen

    # nobody trains ahead while the others start
    together = {"elastic": {"start_islands": islands}} if islands > 1 else {}
    tree = merged(model_settings(model), data_settings(data, model), together)
    config = parse_config({"run": run_name(file), **tree})
    start = f"diloco run {file}" + (f" --islands {islands}" if islands > 1 else "")
    text = f"# {start}\n# All other keys have their defaults: diloco config {file}\n{render_chosen(config)}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if force:
            write_file(file, text)
        elif not create_file(file, text.encode()):
            raise ConfigError(f"{file} exists already: name another file, or add --force to replace it")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}): name another file") from None
    commands = {start: "trains" if islands == 1 else f"trains {islands} islands on this machine"}
    if islands > 1:
        commands[f"diloco run {file} --islands 1 --host ADDRESS"] = (
            "starts the first of them here; on the other machines: diloco join TICKET (diloco ticket show)"
        )
    say(f"{file} is written", *next_commands(commands))


def run_name(file: Path) -> str:
    """Make a run's name of a file's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("-._")[:64] or "run"


def model_settings(model: str) -> dict[str, Any]:
    """Return what a preset or a Hugging Face model asks for."""
    from diloco.model.hub import is_hub_name

    if model in SIZES:
        return merged({"model": {"preset": model}}, SIZES[model])
    folder = Path(model).expanduser()
    described = folder / "config.json" if folder.is_dir() else folder
    if not described.exists():
        if not is_hub_name(model):
            raise ModelError(
                f"--model {model}: neither {', '.join(SIZES)} nor a folder with a config.json nor a name on the hub "
                "(OWNER/NAME, or OWNER/NAME@REVISION)"
            )
        return merged({"model": {"hf": model}, "data": {"sequence": SEQUENCE}}, LOADED)
    try:
        longest = json.loads(described.read_text()).get("max_position_embeddings") or SEQUENCE
        sequence = min(SEQUENCE, int(longest))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{described} is not the config.json of a model: {error}") from None
    return merged({"model": {"hf": model}, "data": {"sequence": sequence}}, LOADED)


def data_settings(data: str, model: str) -> dict[str, Any]:
    """Return how this data is read; text for a Hugging Face model by the model's own tokenizer."""
    if data == "stdlib":
        if model not in SIZES:
            raise DataError(f"--data stdlib is plain bytes, which {model} was not trained on: give text by --data PATH")
        return {"data": {"source": "stdlib"}}
    path = Path(data).expanduser()
    if not path.exists() and (not DATASET.fullmatch(data) or data.startswith(".")):
        raise DataError(f"--data {data}: there is no such file or folder, and it is no name on the hub")
    found: dict[str, Any] = {"source": kind_of(path), "path": data}
    if found["source"] != "tokens" and model not in SIZES:
        found["tokenizer"] = model if Path(model).expanduser().is_dir() or not Path(model).exists() else "bytes"
    return {"data": found}


def kind_of(path: Path) -> str:
    """Return which source reads what lies there; what lies nowhere is a name on the hub."""
    if not path.exists() or path.suffix in DATA_FILES or (path / "dataset_info.json").exists():
        return "hf"
    if path.is_dir():
        holds = any(file.suffix in DATA_FILES for file in path.iterdir())
        return "hf" if holds or (path / "dataset_dict.json").exists() else "text"
    from diloco.data.tokens import MAGIC

    with path.open("rb") as file:
        return "tokens" if file.read(len(MAGIC)) == MAGIC else "text"


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    """Put sections together; of two values for one key the later counts."""
    whole: dict[str, Any] = {}
    for tree in trees:
        for section, keys in tree.items():
            whole[section] = {**whole.get(section, {}), **keys}
    return whole
