"""Quantities written by people: `20mbit`, `80ms`, `25M`. Parsers return plain numbers in base units."""

import math
import re

_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([a-zA-Z/]*)\s*$")

RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
DURATION_UNITS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
COUNT_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}

SIZE_UNITS = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12} | {
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40
}  # fmt: skip

MAX_DELAY_S = 10.0
SLOWEST, FASTEST = 1.0, 1e15  # bits per second, of any link
MAX_COUNT = 2**63 - 1


def parse_rate(value: object) -> float:
    """Parse a rate such as `20mbit`, `1.5gbit` or `1gbit/s`, and return bits per second."""
    rate = _parse(value, RATE_UNITS, "a rate such as 20mbit or 1gbit")
    if rate and not SLOWEST <= rate <= FASTEST:
        raise ValueError("no link has such a rate: write one from 1bit to 1000tbit, such as 20mbit or 1gbit")
    return rate


def parse_duration(value: object) -> float:
    """Parse a duration such as `80ms`, `5s` or `2min`, and return seconds; a bare number is seconds."""
    return _parse(value, DURATION_UNITS, "a duration such as 80ms, 5s or 2min")


def parse_link(value: str) -> tuple[float, float]:
    """Parse `100mbit,40ms`, or `100mbit` alone, and return bits per second and the one-way delay in seconds."""
    rate, _, delay = value.partition(",")
    bits_per_s = parse_rate(rate.strip())
    if not bits_per_s:
        raise ValueError("a link without any rate carries nothing")
    return bits_per_s, parse_delay(delay.strip()) if delay else 0.0


def parse_delay(value: str) -> float:
    """Parse a delay of a network such as `80ms`, and return seconds.

    A unit is required: whoever writes a bare 20 means milliseconds.
    """
    if not value[-1:].isalpha():
        raise ValueError("the unit is missing; write a delay such as 20ms")
    delay_s = parse_duration(value)
    if delay_s > MAX_DELAY_S:
        raise ValueError(f"{value} is no delay of a network: at most {MAX_DELAY_S:g}s")
    return delay_s


def parse_count(value: object) -> int:
    """Parse a whole number such as `25M`, `1_000` or `2k`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        number: float = value
    else:
        number = _parse(value, COUNT_UNITS, "a whole number such as 2000 or 25M")
    if number != int(number):
        raise ValueError(f"{value!r} is not a whole number")
    if number > MAX_COUNT:
        raise ValueError(f"is too large: at most {MAX_COUNT:.2g}")
    return int(number)


def parse_bytes(value: object) -> int:
    """Parse a number of bytes such as `50GB` or `500MiB`."""
    return int(_parse(value, SIZE_UNITS, "a number of bytes such as 50GB or 500MB"))


def is_whole(text: str) -> bool:
    """Return whether a text is plain digits, as islands are numbered: no sign, no ².

    More than nine digits can mean nothing, and do not count.
    """
    return re.fullmatch("[0-9]{1,9}", text) is not None


def parse_share(value: str) -> float:
    """Parse a share such as `95%`, and return a number above 0 and below 1.

    The percent sign is required: a bare 95 or 0.95 may mean either.
    """
    number, unit = value.strip()[:-1], value.strip()[-1:]
    share = _parse(number, {"": 1.0}, "a share such as 95%") / 100 if unit == "%" else math.nan
    if not 0 < share < 1:
        raise ValueError("write a share above 0% and below 100%, such as 95%")
    return share


def _parse(value: object, units: dict[str, float], expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"write {expected}")
    number, unit = str(value), ""
    if isinstance(value, str):
        if (match := _NUMBER.match(value)) is None:
            raise ValueError(f"write {expected}")
        number, unit = match[1].replace("_", ""), match[2].lower().removesuffix("/s")
    if unit not in units:
        problem = f"unknown unit {unit!r}" if unit else "the unit is missing"
        raise ValueError(f"{problem}; write {expected}")
    quantity = float(number) * units[unit]  # an int that no float can hold is infinite
    if not math.isfinite(quantity) or quantity < 0:
        raise ValueError(f"must be finite and not negative; write {expected}")
    return quantity


def format_rate(bits_per_s: float) -> str:
    """Return bits per second as text for people, such as `20 mbit/s`."""
    return _scaled(bits_per_s, [("gbit/s", 1e9), ("mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0)])


def format_count(number: float) -> str:
    """Return a number as text for people, with three digits: `25M`, `1.5k`; B is 10⁹."""
    return _scaled(number, [("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)], space="")


def format_loss(loss: float | None) -> str:
    """Return a loss with four digits after the point; `nan` for one that is no number."""
    return "nan" if loss is None else f"{loss:.4f}"


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: `1 step`, `2 steps`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_size(size: float) -> str:
    """Return bytes as text for people, in powers of 1024: `1.5 GiB`."""
    return _scaled(size, [("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)])


def format_bytes(size: float) -> str:
    """Return bytes as text for people, as those who sell them count: `50 GB`."""
    return _scaled(size, [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)])


def format_duration(seconds: float) -> str:
    """Return seconds as text to be read at a glance: `0.4 s`, `48 s`, `3:05 min`, `2:10 h`; whole minutes and
    hours are never written as many seconds or minutes."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h"


def _scaled(number: float, units: list[tuple[str, float]], space: str = " ") -> str:
    for unit, scale in units:
        if float(f"{number:.3g}") >= scale:
            scaled = number / scale
            digits = f"{scaled:.0f}" if scaled >= 1000 else f"{float(f'{scaled:.3g}'):g}"  # 1000 KiB is no MiB yet
            return f"{digits}{space if unit else ''}{unit}"
    return f"{number:.3g}{space}{units[-1][0]}".rstrip()
