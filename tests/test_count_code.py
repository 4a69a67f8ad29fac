"""Lines count as the script says, and no line of the product is left out."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from count_code import PRODUCT, ROOT, count_folder, count_lines

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
    (check,) = told["checks"]
    assert {**check, "value": 0} == {"name": "house.code_lines", "value": 0, "limit": 22300, "better": "lower"}
    assert check["value"] == sum(told["rooms"].values()) > 0
    assert told["rooms"].keys() == set(PRODUCT) and told["tests_lines"] > 0
