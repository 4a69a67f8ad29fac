"""`diloco simulate` is three commands in one: an option of another one is refused, not ignored."""

from collections.abc import Collection
from typing import Any

import typer

from diloco.errors import ConfigError

PROTOCOL = frozenset({"islands", "protocol", "seeds", "first", "without", "jobs"})
VIRTUAL = frozenset(
    {"islands", "link", "virtual", "first", "minutes", "mtbf", "back", "silence", "diurnal", "params", "codec", "phase"}
    | {"two_level", "json"}
)
NOT_REAL = (PROTOCOL | VIRTUAL) - {"islands", "link"}


def refuse_misplaced(context: typer.Context, *, virtual: bool, protocol: bool) -> None:
    """Only what was given on the command line counts."""
    given = [parameter for parameter in context.command.params if _is_given(context, parameter.name)]
    if virtual:
        wrong, mode = _outside(given, VIRTUAL), "has nothing to do with --virtual"
    elif protocol:
        wrong, mode = _outside(given, PROTOCOL), "has nothing to do with --protocol"
    else:
        wrong = [parameter for parameter in given if parameter.name in NOT_REAL]
        mode = "is for --virtual or --protocol: real islands do not take it"
    if wrong:
        raise ConfigError(f"{_as_written(wrong[0])} {mode}")


def _outside(given: list[Any], allowed: Collection[str]) -> list[Any]:
    return [parameter for parameter in given if parameter.name not in allowed]


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name) if name else None
    return source is not None and source.name == "COMMANDLINE"


def _as_written(parameter: Any) -> str:
    return parameter.opts[0] if parameter.param_type_name == "option" else "a CONFIG"
