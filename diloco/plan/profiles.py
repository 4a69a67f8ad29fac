"""Read what was measured on a machine: the JSON of `diloco bench speed` and of `diloco bench codec`."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError

LEAST, MOST = 1e-18, 1e18  # of anything that is measured
MAKE_ONE = "make one with: diloco bench speed --json > speed.json"


@dataclass(frozen=True)
class Profile:
    """Hold measured figures of a machine; what was not measured is None or empty."""

    device: str = ""
    flops: float | None = None  # a second, of one process
    codec_ns: dict[str, tuple[float, float]] = field(default_factory=dict)  # a value: to encode, to decode


def read_profiles(paths: Iterable[Path]) -> Profile:
    """Read the files into one profile; a later file adds to the earlier ones, or replaces their figures."""
    profile = Profile()
    for path in paths:
        profile = _add(profile, path, _read(path))
    return profile


def _add(profile: Profile, path: Path, figures: dict[str, Any]) -> Profile:
    """Add one file's figures, which are those of bench speed or of bench codec, to a profile."""
    try:
        if "tokens_per_s" in figures:
            flops = _figure(path, figures, "tokens_per_s") * _figure(path, figures, "flops_per_token")
            return Profile(str(figures["device"]), flops, profile.codec_ns)
        if "speed" in figures:
            return Profile(profile.device, profile.flops, _codec_ns(path, figures))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ConfigError(f"--profile {path}: figures are missing or damaged; {MAKE_ONE}") from None
    raise ConfigError(f"--profile {path}: neither of bench speed nor of bench codec; {MAKE_ONE}")


def _codec_ns(path: Path, figures: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the nanoseconds per value of each codec: to encode and to decode."""
    if not str(figures["device"]).startswith("cpu"):
        raise ConfigError(f"--profile {path}: islands encode on the CPU; measure with bench codec --device cpu --json")
    ns = 1e9 / _figure(path, figures, "values")
    return {
        name: (ns * _figure(path, row, "encode_s", name), ns * _figure(path, row, "decode_s", name))
        for name, row in figures["speed"].items()
    }


def _figure(path: Path, figures: dict[str, Any], key: str, of: str = "") -> float:
    """Return one number of the file, and refuse it unless it lies between LEAST and MOST."""
    figure = float(figures[key])
    if not LEAST <= figure <= MOST:
        place = f"speed.{of}.{key}" if of else key
        raise ConfigError(
            f"--profile {path}: {place} is {figure:g}: it must lie between {LEAST:g} and {MOST:g}; {MAKE_ONE}"
        )
    return figure


def _read(path: Path) -> dict[str, Any]:
    """Return the JSON object that the file holds."""
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--profile {path}: no such file; {MAKE_ONE}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--profile {path}: cannot be read: {error}; {MAKE_ONE}") from None
    if not isinstance(figures, dict):
        raise ConfigError(f"--profile {path}: must hold one JSON object; {MAKE_ONE}")
    return figures
