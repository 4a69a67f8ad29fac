"""Read the documents that people wrote: their prose, their blocks, their links, and the commands in them.

`python tests/documents.py` lists the links that leave the repository, which no test follows.
"""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
GUIDES = [ROOT / "README.md", ROOT / "docs/getting-started.md", *sorted((ROOT / "docs/how-to").glob("*.md"))]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "examples").glob("*.md")), *PAGES]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)|(?:src|href)=\"([^\"]+)\"")


def prose(document: Path) -> str:
    return FENCE.sub("", document.read_text())


def links_in(document: Path) -> list[str]:
    return [link for pair in LINK.findall(prose(document)) for link in pair if link]


def is_external(link: str) -> bool:
    return re.match(r"[a-z]+:", link) is not None


def commands_in(document: Path) -> list[str]:
    """Commands of ours in its blocks, each on one line. One that is shown with the error it ends in is left out."""
    blocks = [block.replace("\\\n", " ") for _, _, block in FENCE.findall(document.read_text())]
    shown = re.compile(r"^ *(?:\$ )?(diloco .*)$(?!\nerror\[)", re.MULTILINE)
    return [command for block in blocks for command in shown.findall(block)]


def words_of(command: str) -> list[str]:
    """Up to where the shell takes over; `…` stands for more of the same."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    ends = [place for place, word in enumerate(words) if set(word) <= set("();<>|&")]
    return [word for word in words[: min(ends, default=None)] if word != "…"]


if __name__ == "__main__":
    for document in DOCUMENTS:
        for link in filter(is_external, links_in(document)):
            print(f"{document.relative_to(ROOT)}: {link}")
