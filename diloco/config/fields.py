"""What every section of the configuration is made of: kinds of values, and how a setting is declared."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from os.path import expanduser
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError

from diloco.units import parse_count, parse_duration


def number(value: object) -> float:
    """Parse a number, also one such as 4e-4 that YAML reads as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("write a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("write a number such as 0.1 or 4e-4") from None


def auto_or(fits: Callable[[float], bool], expected: str) -> BeforeValidator:
    """Accept `auto`, or a number that fits."""

    def parse(value: object) -> float | str:
        if value == "auto":
            return "auto"
        with suppress(ValueError):
            if fits(given := number(value)):
                return given
        raise ValueError(f"write `auto` or {expected}")

    return BeforeValidator(parse)


def steps_or_time(value: object) -> int | str:
    """Parse a number of inner steps, or check a time, which stays as it was written."""
    with suppress(ValueError):
        if isinstance(value, str) and value.strip()[-1:].isalpha() and parse_duration(value) > 0:
            return value.strip()
    with suppress(ValueError):
        if (steps := parse_count(value)) >= 1:
            return steps
    raise ValueError("write a number of inner steps, 1 or more, or a time such as 60s or 5min")


def auto_or_count(value: object) -> int | str:
    """Accept `auto`, or a whole number from 1."""
    with suppress(ValueError):
        if value == "auto":
            return "auto"
        if (count := parse_count(value)) >= 1:
            return count
    raise ValueError("write a whole number, 1 or more, or `auto`")


def on_or_off(value: object) -> object:
    """Turn a bool back into `on` or `off`: YAML reads a plain `on` as true."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def names(value: object) -> object:
    """Turn a single name into a list of one."""
    return (value,) if isinstance(value, str) else value


def parse_address(text: str) -> tuple[str, int]:
    """Split HOST:PORT; without a host it is this machine's own address, which others cannot reach."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("write a port such as 9464, or an address such as 0.0.0.0:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


def listen_address(value: object) -> str:
    """Check a port, or HOST:PORT, at which this machine is to listen; it stays as it was written."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError("write a port such as 9464, or an address such as 0.0.0.0:9464")
    parse_address(str(value))
    return str(value)


@dataclass(frozen=True, eq=False)
class OneOf:
    """Accept a name out of a table that others can add to.

    Any other is refused as pydantic refuses what is not in a Literal.
    """

    names: Iterable[str]

    def __call__(self, value: object) -> object:
        if value not in (known := list(self.names)):
            raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, known))})
        return value


def one_of(known: Iterable[str]) -> BeforeValidator:
    """Accept a name out of a table that others can add to."""
    return BeforeValidator(OneOf(known))


ListenAddress = Annotated[str, BeforeValidator(listen_address)]
Where = Annotated[str, Field(min_length=1), AfterValidator(expanduser)]
Count = Annotated[int, BeforeValidator(parse_count)]
Seconds = Annotated[float, BeforeValidator(parse_duration)]
Number = Annotated[float, BeforeValidator(number)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Positive = Annotated[Count, Field(ge=1)]


class Section(BaseModel):
    """Refuse unknown keys and changes: the base of all sections."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True, loc_by_alias=False
    )


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """Declare a setting with its default, its meaning for people, and its limits."""
    return Field(default=default, description=meaning, **limits)
