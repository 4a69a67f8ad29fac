"""Write the pages of the reference from the code: settings from the schema, commands from their help, and events.

python tests/docs.py            say which pages are stale (the exit code is 1 if one is)
python tests/docs.py --write    rewrite them
"""

import argparse
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from os.path import expanduser
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import ParameterInfo

from diloco.cli.app import app
from diloco.config.fields import OneOf
from diloco.config.schema import Config
from diloco.report.events import KINDS, NEWS, Event, IslandNews
from diloco.report.metrics import ALWAYS, METRICS
from diloco.report.status import CAUSES, STATES, IslandStatus, RunStatus
from diloco.run.genesis import OWN, SHARED, SUGGESTED
from diloco.train.amend import CHANGEABLE, RENAMED

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
WIDTH = 120
TYPES = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}
PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
LIMITS = {
    "ge": "at least {}",
    "gt": "above {}",
    "lt": "below {}",
    "le": "at most {}",
    "max_length": "at most {} characters",
}

CONFIGURATION = """\
# Configuration

One YAML file describes a run. Every key has a default, so a file names only what differs from it. `diloco config`
prints all keys with their values and meanings; `diloco config FILE --set inner.lr=1e-3` prints what that file and that
change amount to. `--set SECTION.KEY=VALUE` changes one key on the command line.

A value that cannot be right is refused before anything starts, with the key, the value and what to write instead. So
are keys that cannot work together. Whole numbers may have a suffix (`2k`, `25M`), durations a unit (`80ms`, `5s`,
`2min`); a duration without a unit is in seconds. `null` unsets a key.

This page is written by `python tests/docs.py --write` from `diloco/config/`.
"""
COMMANDS = """\
# Commands

`diloco COMMAND --help` prints what this page has about a command. A command that cannot do what it was asked to do
prints a line that begins with `error[CODE]` and exits with 2; [Troubleshooting](../troubleshooting.md) explains every
code.

This page is written by `python tests/docs.py --write` from the command line's own help (`diloco/cli/`).
"""


EVENTS = """\
# Events

Each island writes what happens to it to `events.jsonl` in its folder, one JSON object a line, and hands the same events
to its terminal and its trackers. `event` is the kind, `v` the version of that kind, `time` the island's own clock in
seconds since 1970. Numbers that JSON lacks (NaN, infinity) are `null`.

A field that is added changes no version: ignore the fields that you do not know. A field that is removed, renamed or
given another meaning raises the version of its kind: pass over events of a higher version than the one you know. In
Python, `diloco.report.events` has a dataclass for each kind, and `diloco.report.watching.Tail` follows a file.

This page is written by `python tests/docs.py --write` from `diloco/report/events.py`.
"""


STATUS = """\
# Status

`diloco status --json` prints one such object (with `--watch`, one a line). A running island writes it to `status.json`
in its folder every second, and members answer a ticket to *watch* with it. Fields are only ever added: ignore those
that you do not know. Texts come from other machines: show them as text.

This page is written by `python tests/docs.py --write` from `diloco/report/status.py`.
"""


METRICS_PAGE = """\
# Metrics

`diloco run … --metrics 9464`, or `log.metrics: 9464`, has an island answer Prometheus at
`http://127.0.0.1:9464/metrics`. That is loopback: `--metrics 0.0.0.0:9464` lets other machines read it, whoever they
are. Several islands that one command starts have the following ports, one each. Ask by an address, by `localhost`, by
what `hostname` says, or by the name that `log.metrics` has (`--metrics box.example:9464`): other names get a 421, so
that no web page elsewhere reads it by a name of its own.

Every sample has the labels {always}: the run's name, and that of the island that tells. Counters begin anew when an
island is started again. What is not known has no sample. `examples/grafana.json` is a dashboard to import into Grafana.

This page is written by `python tests/docs.py --write` from `diloco/report/metrics.py`.
"""


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    for cells in (header, ("---",) * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells).replace("|  |", "| |") + " |"
    yield ""


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


# the configuration


def configuration() -> str:
    fields = Config.model_fields
    sections = {name: field.annotation for name, field in fields.items() if is_section(field.annotation)}
    lines = [CONFIGURATION, "## Top level", "", who_sets("run"), ""]
    lines += keys("", {name: field for name, field in fields.items() if name not in sections})
    for name, section in sections.items():
        lines += [f"## {name}", "", wrapped(f"{section.__doc__} {who_sets(name)}"), ""]
        lines += keys(f"{name}.", section.model_fields)
    return "\n".join(lines).rstrip() + "\n"


def is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def who_sets(section: str) -> str:
    """Say who decides about these keys, and which of them the owner of a run can change later."""
    changeable = [key.partition(".")[2] for key in CHANGEABLE if key.startswith(f"{section}.") and key not in RENAMED]
    shared = "The same for all islands of a run"
    if section not in SHARED:
        suggested = section == "island"
        return "Each island sets these for itself" + (f"; {listed(SUGGESTED)} default to the run's." * suggested or ".")
    if section == "data":
        return f"{shared}, except for {listed(OWN['data'])}, which say where the same data lies on this machine."
    if section == "model":
        return (
            f"{shared}, except for {listed(OWN['model'])}, which says where the same base model lies on this machine."
        )
    return f"{shared}. `diloco set` changes {listed(changeable)} while it trains." if changeable else f"{shared}."


def listed(names: Any) -> str:
    *most, last = [f"`{name}`" for name in names]
    return f"{', '.join(most)} and {last}" if most else last


def keys(prefix: str, fields: dict[str, FieldInfo]) -> list[str]:
    rows = [
        (f"`{prefix}{name}`", accepted(field.annotation, field.metadata), default_value(field), str(field.description))
        for name, field in fields.items()
    ]
    return list(table(("key", "value", "default", "meaning"), rows))


def default_value(field: FieldInfo) -> str:
    plain = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{yaml.safe_dump(plain, default_flow_style=True).removesuffix('...' + chr(10)).strip()}`"


def accepted(kind: Any, checks: list[Any]) -> str:
    """Say what can be written: one of several names, or what the key's own checks ask for, with its limits."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return accepted(parts[0], [*parts[1:], *checks])
    if NoneType in parts:
        (other,) = (part for part in parts if part is not NoneType)
        return f"{accepted(other, checks)}, or `null`"
    if names := list(choices(kind, checks)):
        return ", ".join(f"`{name}`" for name in names)
    if get_origin(kind) is tuple:
        return f"list of {'' if Ellipsis in parts else f'{len(parts)}: '}{accepted(parts[0], [])}"
    if get_origin(kind) is dict:
        return "`{NAME: value, …}`"
    return ", ".join([asked(checks) or TYPES[kind], *limits(checks)])


def choices(kind: Any, checks: list[Any]) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    for check in checks:
        if isinstance(names := getattr(check, "func", None), OneOf):
            yield from names.names


def asked(checks: list[Any]) -> str:
    """What a check says to write when it is given what can be no value at all."""
    for check in (check.func for check in checks if hasattr(check, "func")):
        if check is expanduser:
            return "path"
        try:
            check(object())
        except ValueError as error:
            text = str(error).removeprefix("write ").removeprefix("a ")
            return re.sub(r"^(whole number|duration) such as .*", r"\1", text)
    return ""


def limits(checks: list[Any]) -> Iterator[str]:
    for check in checks:
        if isinstance(check, FieldInfo):
            yield from limits(check.metadata)
        for name, words in LIMITS.items():
            value = getattr(check, name, None)
            if isinstance(value, int | float):
                yield words.format("2^63" if value == 2**63 else value)


# the events


def events() -> str:
    lines = [EVENTS, *table(("event", "what it reports"), [(f"[`{k}`](#{k})", meaning(e)) for k, e in KINDS.items()])]
    for name, kind in KINDS.items():
        lines += [
            f"## {name}",
            "",
            wrapped(f"{meaning(kind)} Version {kind.version}, `{kind.__name__}` in Python."),
            "",
        ]
        hints = get_type_hints(kind, include_extras=True)
        rows = [(f"`{each.name}`", json_type(hints[each.name]), get_args(hints[each.name])[1]) for each in fields(kind)]
        lines += table(("field", "value", "meaning"), [row for row in rows if row[0] != "`time`"])
        if kind is IslandNews:
            lines += table(("what", "meaning"), [(f"`{what}`", text) for what, text in NEWS.items()])
    return "\n".join(lines).rstrip() + "\n"


def status() -> str:
    lines = [STATUS, "## The run", "", *fields_table(RunStatus), "## An island", "", *fields_table(IslandStatus)]
    for heading, words in (("States", STATES), ("Causes", CAUSES)):
        rows = [(f"`{word}`", text.capitalize()) for word, text in words.items()]
        lines += [f"### {heading}", "", *table((heading.lower().removesuffix("s"), "meaning"), rows)]
    return "\n".join(lines).rstrip() + "\n"


def fields_table(kind: Any) -> Iterator[str]:
    hints = get_type_hints(kind, include_extras=True)
    rows = [(f"`{each.name}`", json_type(hints[each.name]), get_args(hints[each.name])[1]) for each in fields(kind)]
    return table(("field", "value", "meaning"), rows)


def meaning(kind: type[Event]) -> str:
    return " ".join(inspect.cleandoc(str(kind.__doc__)).split())


def json_type(kind: Any) -> str:
    """Say what a field's value is in JSON."""
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return json_type(parts[0])
    if get_origin(kind) is tuple:
        return "list"
    if parts:
        return " or ".join("`null`" if part is NoneType else json_type(part) for part in parts)
    return TYPES[kind]


# the command line


def commands() -> str:
    root = typer.main.get_command(app)
    lines = [COMMANDS, *options_table(root), *summaries("diloco", root)]
    for name, command in root.commands.items():
        lines += described(f"diloco {name}", command, "##")
    return "\n".join(lines).rstrip() + "\n"


def summaries(path: str, group: Any) -> Iterator[str]:
    names = {name: f"{path} {name}" for name in group.commands}
    rows = [
        (f"[`{names[name]}`](#{names[name].replace(' ', '-')})", paragraphs(command.help)[0])
        for name, command in group.commands.items()
    ]
    yield from table(("command", "what it does"), rows)


def described(path: str, command: Any, heading: str) -> Iterator[str]:
    """A command, and those below it."""
    yield from (f"{heading} {path}", "")
    for paragraph in paragraphs(command.help):
        yield from (wrapped(paragraph), "")
    if below := getattr(command, "commands", {}):
        yield from summaries(path, command)
        for name, child in below.items():
            yield from described(f"{path} {name}", child, f"{heading}#")
        return
    places = [each for each in command.params if each.param_type_name == "argument"]
    usage = [path, *["[OPTIONS]"] * (len(places) < len(command.params)), *map(place, places)]
    yield from ("```", " ".join(usage), "```", "")
    if places:
        yield from table(("argument", "meaning"), [(f"`{place(each)}`", str(each.help)) for each in places])
    yield from options_table(command)
    if command.epilog:
        yield from ("Example:", "", "```", command.epilog.removeprefix("Example: "), "```", "")


def paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n")]


def place(argument: Any) -> str:
    name = str(argument.metavar)
    return name if argument.required or name.startswith("[") else f"[{name}]"


def options_table(command: Any) -> Iterator[str]:
    declared = declarations(command)
    options = [each for each in command.params if each.param_type_name == "option"]
    if options:
        yield from table(("option", "default", "meaning"), [option_row(each, *declared[each.name]) for each in options])


def declarations(command: Any) -> dict[str, tuple[Any, list[Any]]]:
    """The type of each parameter of a command's function, and what typer is told about it."""
    annotations = {name: each.annotation for name, each in inspect.signature(command.callback).parameters.items()}
    split = {name: get_args(kind) if get_origin(kind) is Annotated else (kind,) for name, kind in annotations.items()}
    return {name: (kind, declared) for name, (kind, *declared) in split.items()}


def option_row(option: Any, kind: Any, declared: list[Any]) -> tuple[str, str, str]:
    value = "" if option.is_flag else f" {option.metavar or placeholder(kind)}"
    names = ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))
    meaning = [str(option.help), *(limit for each in declared for limit in limits_of_option(each))]
    meaning += ["(can be repeated)"] * (option.multiple and "repeated" not in meaning[0])
    meaning += ["Required."] * option.required
    return names, default_option(option), " ".join(meaning)


def placeholder(kind: Any) -> str:
    parts = [kind, *get_args(kind), *(inner for part in get_args(kind) for inner in get_args(part))]
    return next(PLACEHOLDERS[part] for part in parts if part in PLACEHOLDERS)


def default_option(option: Any) -> str:
    if option.secondary_opts and option.default is not None:
        return f"`{(option.opts if option.default else option.secondary_opts)[0]}`"
    return "" if option.is_flag or option.default in (None, "") else f"`{option.default}`"


def limits_of_option(declared: ParameterInfo) -> Iterator[str]:
    least, most = declared.min, declared.max
    if least is not None:
        yield f"At least {least:g}." if most is None else f"From {least:g} to {most:g}."


def metrics() -> str:
    lines = [METRICS_PAGE.format(always=listed(ALWAYS))]
    rows = [
        (f"`{each.full_name}`", each.kind, listed(each.labels) if each.labels else "", each.about) for each in METRICS
    ]
    return "\n".join([*lines, *table(("metric", "type", "more labels", "meaning"), rows)]).rstrip() + "\n"


PAGES = {
    REFERENCE / "configuration.md": configuration,
    REFERENCE / "commands.md": commands,
    REFERENCE / "events.md": events,
    REFERENCE / "status.md": status,
    REFERENCE / "metrics.md": metrics,
}


def stale() -> dict[Path, str]:
    """The pages that are not what the code says, each with what they should be."""
    pages = {path: written() for path, written in PAGES.items()}
    return {path: text for path, text in pages.items() if not path.exists() or path.read_text() != text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write, found = parser.parse_args().write, stale()
    for path, text in found.items():
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        print(f"{path.relative_to(ROOT)} {'is rewritten' if write else 'is stale: python tests/docs.py --write'}")
    raise SystemExit(bool(found) and not write)


if __name__ == "__main__":
    main()
