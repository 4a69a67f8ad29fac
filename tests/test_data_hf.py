"""Hugging Face data sets from local disk; no network."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.data.hf import hf_source
from diloco.data.source import Source
from diloco.errors import DataError, MissingExtra

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "scratch")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    splits = {"train": ["one", "", "zwölf"], "test": ["three"]}
    columns = {
        name: datasets.Dataset.from_dict({"text": texts, "n": [0] * len(texts)}) for name, texts in splits.items()
    }
    datasets.DatasetDict(columns).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def text_of(source: Source) -> str:
    return bytes(source.read(0, len(source)).astype("u1")).decode()


def load(path: Path | str, split: str = "train", field: str = "text", *, cache: Path) -> Source:
    return hf_source(str(path), split, field, "bytes", cache)


def test_a_saved_data_set(saved: Path, tmp_path: Path) -> None:
    assert text_of(load(saved, cache=tmp_path / "cache")) == "one\0zwölf\0"
    assert text_of(load(saved, "test", cache=tmp_path / "cache")) == "three\0"


def test_a_saved_split_is_only_itself(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["x"]}, split="train").save_to_disk(tmp_path / "one")
    assert text_of(load(tmp_path / "one", cache=tmp_path / "cache")) == "x\0"
    with pytest.raises(DataError, match="is the split 'train', not 'test'"):
        load(tmp_path / "one", "test", cache=tmp_path / "cache")


def test_records_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in ["a", "b\n"]))
    assert text_of(load(file, field="body", cache=tmp_path / "cache")) == "a\0b\n\0"


def test_a_folder_of_records(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "t"}\n')
    (tmp_path / "set" / "test.jsonl").write_text('{"text": "v"}\n')
    assert text_of(load(tmp_path / "set", "test", cache=tmp_path / "set" / "cache")) == "v\0"


def test_it_is_tokenised_once_and_again_when_it_changes(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(saved, cache=tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "datasets.exceptions", None)
    assert load(saved, cache=tmp_path / "cache").fingerprint() == first.fingerprint()
    (saved / "train" / "new.arrow").write_bytes(b"x")
    with pytest.raises(MissingExtra, match="needs datasets"):
        load(saved, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    "split, field, problem",
    [
        ("valid", "text", "no split 'valid'; it has train, test"),
        ("train", "txt", "no field 'txt'; it has text, n"),
        ("train", "n", "has int, not text, in field 'n' of record 0"),
    ],
)
def test_what_does_not_fit_is_named(saved: Path, tmp_path: Path, split: str, field: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        load(saved, split, field, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*.tokens")) == []


def test_damaged_records_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nnot json\n')
    with pytest.raises(DataError, match=r"cannot load the data set .*bad\.jsonl: ") as caught:
        load(tmp_path / "bad.jsonl", cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_name_goes_to_the_library_and_never_with_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(path: str, *, split: str, trust_remote_code: bool = True) -> Any:
        assert (path, split, trust_remote_code) == ("org/set", "train", False)
        return datasets.Dataset.from_dict({"text": ["x"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert text_of(load("org/set", cache=tmp_path)) == "x\0"


def test_a_name_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise datasets.exceptions.DatasetNotFoundError("not on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"org/set \(and there is no such local path\): not on the Hub$"):
        load("org/set", cache=tmp_path)
