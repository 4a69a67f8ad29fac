"""Share what several commands need: options that are declared once, how they are parsed, and how people are informed.

Nothing heavy may be imported here or at the top of a command's file: `--help` imports all of them.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from diloco.cli.completion import run_names, settings
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.report.live import Show

T = TypeVar("T")
Number = TypeVar("Number", int, float)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", autocompletion=settings,
        help="Change one key: --set inner.lr=1e-3. Can be repeated.",
    ),
]  # fmt: skip
JoinOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", autocompletion=settings,
        help="Change one key of island, checkpoint, evaluate or log: --set island.batch=4. Can be repeated.",
    ),
]  # fmt: skip
Link = Annotated[str | None, typer.Option(help="Emulate a link of this rate and one-way delay: 100mbit,40ms")]
RunHost = Annotated[
    str | None, typer.Option(help="Address at which other machines reach this one (default: none can).")
]
JoinHost = Annotated[
    str | None, typer.Option(help="Address at which other machines reach this one (default: found out).")
]
Port = Annotated[
    int | None,
    typer.Option(min=1, max=65534, help="TCP port to listen at, and the next one; open both (default: any two)."),
]
RelayRate = Annotated[
    str | None,
    typer.Option(
        "--relay", help="Rate at which to pass on for islands that nobody can dial: 20mbit; 0 for none (default: any)."
    ),
]
MaxUp = Annotated[str | None, typer.Option(help="Send at no more than this rate: 20mbit")]
MaxDown = Annotated[str | None, typer.Option(help="Receive at no more than this rate: 100mbit")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run's folder, its name under runs/, or one of its islands' folders.",
        autocompletion=run_names,
    ),
]  # fmt: skip
RunTokenizer = Annotated[
    str | None, typer.Option(help="The tokenizer, if the run's token file does not name it: `bytes` or a folder.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
MetricsAt = Annotated[
    str | None,
    typer.Option(
        "--metrics", metavar="PORT", show_default=False,
        help="Answer Prometheus at this port of this machine, or at HOST:PORT; as log.metrics does.",
    ),
]  # fmt: skip
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but how it ended.")]
EventsJson = Annotated[
    bool, typer.Option("--json", help="Print each event as a line of JSON, as events.jsonl has it, and nothing else.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@contextmanager
def loading() -> Iterator[None]:
    """Import what trains in the `with` block without the garbage collector, which would find nothing and take an eighth
    of the time; what was imported stays, so that later passes leave it out."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def parse_option(option: str, text: str, parse: Callable[[str], T]) -> T:
    """Parse an option's text; a mistake in it raises ConfigError, which names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def parse_positive(option: str, text: str, parse: Callable[[str], Number]) -> Number:
    """Parse an option's text as a number above zero."""
    number = parse_option(option, text, parse)
    if not number > 0:
        raise ConfigError(f"{option} {text}: must be above 0")
    return number


def show_of(*, quiet: bool, as_json: bool) -> "Show":
    """Return how training is shown, by the options --quiet and --json."""
    if quiet and as_json:
        raise ConfigError("--quiet prints nothing, --json every event: use one of them")
    return "json" if as_json else "quiet" if quiet else "auto"


def say(*lines: str, show: "Show" = "auto") -> None:
    """Print lines as they are, however long; to standard error where --json or --quiet keep standard output free."""
    from rich.console import Console

    console = Console(stderr=show != "auto", highlight=False)
    console.print(*lines, sep="\n", soft_wrap=True, markup=False, emoji=False)


def next_commands(commands: Mapping[str, str]) -> list[str]:
    """List the commands that can be typed now, each with what it does on the line below."""
    return ["next:", *(line for command, what in commands.items() for line in (f"  {command}", f"      {what}"))]
