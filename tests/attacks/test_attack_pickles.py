"""No file of a run can run code: nothing is unpickled, whoever wrote it."""

import ast
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import house
import pytest
import torch
import yaml
from alone import train
from trained_run import Command

from diloco.checkpoint.save.facts import saves
from diloco.config import file as config_file
from diloco.config.schema import Config
from diloco.errors import DilocoError

PICKLERS = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
HARMLESS = {("pickle", "PickleError")}  # an error class, to catch it
CHECKPOINTS = "torch.distributed.checkpoint"
CALLS = ("torch.load", "torch.save", "torch.hub.load", "torch.jit.load", "torch.export.load", "yaml.unsafe_load")
SWITCHES = ("allow_pickle", "trust_remote_code")


def offences(source: str) -> list[str]:
    """What in a module could unpickle something."""
    return [found for node in ast.walk(ast.parse(source)) for found in offences_of(node)]


def offences_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names):
            yield from (alias.name for alias in names if is_pickler(alias.name))
        case ast.ImportFrom(module, names) if module is not None:
            for alias in names:
                whole = f"{module}.{alias.name}"
                if (is_pickler(module) or is_pickler(whole)) and (module, alias.name) not in HARMLESS:
                    yield whole
                if whole in CALLS:
                    yield whole
        case ast.Attribute() if ast.unparse(node) in CALLS or ast.unparse(node).startswith(f"{CHECKPOINTS}."):
            yield ast.unparse(node)
        case ast.keyword(name, value) if name in SWITCHES and ast.unparse(value) != "False":
            yield f"{name}={ast.unparse(value)}"


def is_pickler(module: str) -> bool:
    return module.partition(".")[0] in PICKLERS or f"{module}.".startswith(f"{CHECKPOINTS}.")


def test_no_module_of_ours_can_unpickle_anything():
    found = {name: offences(file.read_text()) for name, file in house.MODULES.items()}
    assert {name: offence for name, offence in found.items() if offence} == {} and len(found) > 200


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "from torch.distributed.checkpoint.state_dict_loader import load",
        "state = torch.load(path, weights_only=False)",
        "from torch import load",
        "np.load(path, allow_pickle=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=None)",
    ],
)
def test_what_could_is_found(line: str):
    assert offences(line) != []


def test_configurations_are_read_by_a_loader_that_makes_plain_values_only():
    assert issubclass(config_file._UniqueKeys, yaml.SafeLoader)


class Evil:
    """Whoever unpickles it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.mark), "w")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def stranger(small: Callable[..., Config], tmp_path: Path) -> Config:
    """A run that was paused in the middle of a phase, and copied to a bucket."""
    config = small(checkpoint={"remote": f"file://{tmp_path}/far", "snapshot_every": 1})
    train(config, until=7)
    for older in saves(Path(config.dir))[:-1]:
        shutil.rmtree(older)
    return config


def contents(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in (".key", ".lock")]


def resume(config: Config) -> None:
    try:
        train(config, until=9, resume=True)
    except DilocoError as refused:
        assert "\n" not in str(refused)


def test_the_pickle_of_this_test_works(mark: Path):
    pickle.loads(pickle.dumps(Evil(mark))).close()
    assert mark.exists()


@pytest.mark.parametrize("form", ["pickle", pytest.param("zip", marks=pytest.mark.soak)])
def test_a_strangers_folder_runs_nothing(stranger: Config, mark: Path, tmp_path: Path, command: Command, form: str):
    """A malicious pickle in place of every file that it has, one after the other, and in those of earlier versions."""
    folder, kept, far = Path(stranger.dir), tmp_path / "kept", tmp_path / "far"
    (tmp_path / "evil").write_bytes(pickle.dumps(Evil(mark)))
    if form == "zip":
        torch.save(Evil(mark), tmp_path / "evil")
    evil = (tmp_path / "evil").read_bytes()
    shutil.copytree(folder, kept)
    (save,) = saves(folder)
    names = [path.relative_to(folder) for path in contents(folder)]
    inner = save.relative_to(folder) / "inner"
    assert {inner / "rank-00000.json", inner / "rank-00000.safetensors"} <= {*names} and len(names) > 12
    for number, name in enumerate([*names, inner / ".metadata", inner / "__0_0.distcp"]):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        (folder / name).write_bytes(evil)
        asked = [("log", folder, "--verify")] if form == "zip" else [
            ("log", folder), ("log", folder, "--verify"), ("export", folder, tmp_path / f"model-{number}"),
            ("sample", folder, "Hello", "--tokens", "1", "--device", "cpu"),
        ]  # fmt: skip
        for arguments in asked:
            said = command(*arguments)
            assert said.code in (0, 1, 2) and "Traceback" not in said.err, (name, arguments, said)
        resume(stranger)
        assert not mark.exists(), name
    for number, path in enumerate(contents(far)):
        before = path.read_bytes()
        path.write_bytes(evil)
        said = command("restore", f"file://{far}", tmp_path / f"back-{number}")
        assert said.code in (0, 2) and "Traceback" not in said.err, (path, said)
        assert not mark.exists(), path
        path.write_bytes(before)


def test_a_save_with_a_pickled_index_is_refused_in_one_line(stranger: Config, mark: Path):
    (save,) = saves(Path(stranger.dir))
    for path in (save / "inner").iterdir():
        path.unlink()
    (save / "inner" / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(
        DilocoError, match=r"inner was written by an earlier diloco, .* never loaded: delete .*save-"
    ) as no:
        train(stranger, resume=True)
    assert "\n" not in str(no.value) and not mark.exists()
    shutil.rmtree(save)
    assert train(stranger, resume=True).outcome.finished  # from its log, as the message says
