"""What the documents say can be done can be done: pages, links, commands, settings and error codes exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml
from documents import DOCUMENTS, FENCE, PAGES, ROOT, commands_in, is_external, links_in, prose, words_of

import docs
from diloco.cli.app import app
from diloco.config.file import flat, parse_config
from diloco.config.schema import Config
from diloco.errors import DilocoError

WRITTEN = [path for path in DOCUMENTS if path not in docs.PAGES]  # by people
CONFIG_KEYS = set(flat(Config().model_dump()))

REFUSED = typer.BadParameter.__mro__[1]  # what typer raises for any mistake on a command line


def each(documents: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("document", documents, ids=lambda path: str(path.relative_to(ROOT)))


def test_the_reference_is_what_the_code_says() -> None:
    assert list(docs.stale()) == [], "run `python tests/docs.py --write`"


# the site


def pages_of(nav: list[dict[str, str | list]]) -> Iterator[str]:
    for entry in nav:
        for below in entry.values():
            yield from pages_of(below) if isinstance(below, list) else [below]


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(pages_of(site["nav"])) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES)


# links


def anchors(document: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them; of a page, only those that are the same on the site."""
    titles = re.findall(r"^#{1,6} +(.*?) *#*$", prose(document), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", title) for title in titles]
    github = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}
    site = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in plain}
    return github & site if document in PAGES else github


def broken(document: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    return not target.exists() or bool(anchor and anchor not in anchors(target))


@each(DOCUMENTS)
def test_relative_links_lead_to_a_file_and_to_a_heading_in_it(document: Path) -> None:
    assert [link for link in links_in(document) if not is_external(link) and broken(document, link)] == []


@each(PAGES)
def test_links_of_a_page_stay_inside_the_site(document: Path) -> None:
    local = [link for link in links_in(document) if not is_external(link)]
    outside = [link for link in local if not (document.parent / link).resolve().is_relative_to(ROOT / "docs")]
    assert outside == [], "name a file of the repository by its path, in backticks"


# errors


def tree(error: type[DilocoError]) -> Iterator[type[DilocoError]]:
    yield error
    for kind in error.__subclasses__():
        yield from tree(kind)


def test_every_error_code_is_explained() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    explained = re.findall(r"^##+ error\[([^]]+)\]$", page, re.MULTILINE)
    codes = {kind.code for kind in tree(DilocoError)}
    assert sorted(codes - set(explained)) == [], "a heading `## error[CODE]` is missing for each"


def test_every_class_of_error_is_listed_with_its_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| \[`([a-z-]+)`\]\(#error", page, re.MULTILINE)
    assert sorted(listed) == sorted((kind.__name__, kind.code) for kind in tree(DilocoError))


def test_every_report_of_a_running_island_is_explained() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    headings = re.findall(r"^### ([a-z, ]+)$", page.partition("## Reports of a running island")[2], re.MULTILINE)
    source = "".join(path.read_text() for path in (ROOT / "elastic").rglob("*.py"))
    kinds = set(re.findall(r'(?:\.note|Note)\(\s*"([a-z ]+)"', source))
    assert {"slow", "waiting", "lost"} <= kinds, "what the pattern must find"
    assert kinds - {kind for heading in headings for kind in heading.split(", ")} == set()


# commands and settings


def mistake_in(command: str) -> str:
    """What the command line would answer, without doing anything. Empty where it has nothing to say against it."""
    program, *words = words_of(command)
    at, path = typer.main.get_command(app), program
    while (below := getattr(at, "commands", None)) is not None:
        if not words or (words[0].startswith("-") and path != "diloco simulate") or words[0].isupper():
            return ""  # NAME stands for any
        if words[0] not in below and path == "diloco simulate":
            words = ["islands", *words]  # it is left out in most places
        if words[0] not in below:
            return f"there is no {path} {words[0]}"
        at, path, words = below[words[0]], f"{path} {words[0]}", words[1:]
    try:
        at.make_context(path, words)
    except REFUSED as refused:
        return refused.format_message()
    except typer.Exit:  # --help
        pass
    return ""


@each(WRITTEN)
def test_commands_in_blocks_are_understood(document: Path) -> None:
    mistakes = {command: mistake_in(command) for command in commands_in(document)}
    assert {command: mistake for command, mistake in mistakes.items() if mistake} == {}


@each(WRITTEN)
def test_commands_in_a_line_have_no_other_options_than_there_are(document: Path) -> None:
    """They are often cut short, so what they lack does not matter. "There is no `diloco x`" may be true."""
    spans = re.findall(r"(?<!\bno )`(diloco [a-z][^`]*)`", prose(document).replace("\\|", "|"))
    mistakes = {span: mistake_in(" ".join(span.split())) for span in spans}
    assert {span: said for span, said in mistakes.items() if said.startswith(("there is no", "No such option"))} == {}


@each(WRITTEN)
def test_settings_that_documents_change_exist(document: Path) -> None:
    shown = "\n".join([*commands_in(document), prose(document)])
    keys = re.findall(r"--set ([a-z_]+\.?[a-z_0-9]*)=", shown)
    assert [key for key in keys if key not in CONFIG_KEYS] == []


@each(WRITTEN)
def test_configurations_in_documents_are_valid(document: Path) -> None:
    blocks = [yaml.safe_load(block) for _, kind, block in FENCE.findall(document.read_text()) if kind == "yaml"]
    for tree in blocks:
        if isinstance(tree, dict) and tree.keys() <= Config.model_fields.keys():
            parse_config(tree)


# code


EXAMPLES = [block for _, kind, block in FENCE.findall((ROOT / "CONTRIBUTING.md").read_text()) if kind == "python"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.partition("\n")[0].removeprefix("# "))
def test_examples_of_extensions_can_be_loaded(example: str) -> None:
    place = ROOT / example.partition("\n")[0].removeprefix("# ")
    assert place.parent.is_dir() and not place.exists()
    exec(compile(example, place, "exec"), {"__name__": place.stem})
