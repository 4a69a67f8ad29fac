"""Lines count as the script says, and no line of the product is left out."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from count_code import PRODUCT, ROOT, count_folder, count_lines
from docstrings import Item, is_good, items_in

SOURCE = '''\
"""A module's docstring,
over two lines."""

import os  # counts: the comment beside it does not matter

# a comment alone
TABLE = {
    # inside an expression, too

    "a": 1,
}
TEXT = """counts,

all three"""


class Thing:
    """Not counted."""

    def method(self) -> None:
        "Not counted either."
        """Counts: the second string is not the docstring."""
        x = 1; y = 2
        return x + \\
            y
'''


def test_code_counts_and_words_about_it_do_not():
    counted = ["import", "TABLE", '"a"', "}", "TEXT", "", "all three", "class", "def", "second", "x; y", "return", "y"]
    assert count_lines(SOURCE) == len(counted)


@pytest.mark.parametrize("source", ["", "\n\n", "# only a comment\n", '"""Only a docstring."""'])
def test_a_file_without_code_counts_nothing(source: str):
    assert count_lines(source) == 0


@pytest.mark.parametrize(
    ("name", "docstring", "good"),
    [
        ("bytes_sent", "Return the bytes that have left this machine.", True),
        ("bytes_sent", "Return the bytes sent.", False),  # the name says that
        ("send_bytes", "Send the bytes.", False),
        ("bytes_sent", "What has passed.", False),
        ("bytes_sent", "", False),
        ("Window", "hold chunks until they are added.", False),
    ],
)
def test_a_docstring_counts_if_it_starts_with_a_verb_and_says_more_than_the_name(name, docstring, good):
    assert is_good(Item("file.py", 1, name, docstring)) == good


def test_what_is_public_is_listed():
    source = "class A:\n def b(self): ...\n def _c(self): ...\nclass _D:\n def e(self): ...\ndef f():\n def g(): ..."
    assert [item.name for item in items_in(ast.parse(source), "file.py")] == ["A", "b", "f"]


def test_a_linked_folder_counts_once(tmp_path: Path):
    for name in ("outer", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "outer" / "link").symlink_to("../beside")
    assert [count_folder(tmp_path / "outer"), count_folder(tmp_path)] == [2, 4]


def test_every_python_file_outside_the_tests_is_counted():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert {name.split("/")[0] for name in listed.split()} == {*PRODUCT, "tests", "examples", "setup.py"}


def test_the_figures_come_as_json():
    command = [sys.executable, ROOT / "tests" / "count_code.py", "--json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    lines, documented = told["checks"]
    assert {**lines, "value": 0} == {"name": "house.code_lines", "value": 0, "limit": 40350, "better": "lower"}
    assert lines["value"] == sum(told["rooms"].values()) > 0 and lines["value"] <= lines["limit"]
    assert documented["name"] == "house.docstring_share" and documented["value"] >= documented["limit"] == 0.7
    assert told["rooms"].keys() == set(PRODUCT) and told["tests_lines"] > 0
