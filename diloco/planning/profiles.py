"""What was measured on a machine: the JSON of `diloco bench speed` and of `diloco bench codec`."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError

MAKE_ONE = "make one with: diloco bench speed --json > speed.json"


@dataclass(frozen=True)
class Profile:
    device: str = ""
    flops: float | None = None  # a second, of one process
    codec_ns: dict[str, tuple[float, float]] = field(default_factory=dict)  # a value: to encode, to decode


def read_profiles(paths: Iterable[Path]) -> Profile:
    """Later ones add to earlier ones."""
    profile = Profile()
    for path in paths:
        profile = _add(profile, path, _read(path))
    return profile


def _add(profile: Profile, path: Path, figures: dict[str, Any]) -> Profile:
    try:
        if "tokens_per_s" in figures:
            flops = float(figures["tokens_per_s"]) * float(figures["flops_per_token"])
            if not flops > 0:
                raise ValueError
            return Profile(str(figures["device"]), flops, profile.codec_ns)
        if "speed" in figures:
            return Profile(profile.device, profile.flops, _codec_ns(path, figures))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        raise ConfigError(f"--profile {path}: figures are missing or damaged; {MAKE_ONE}") from None
    raise ConfigError(f"--profile {path}: neither of bench speed nor of bench codec; {MAKE_ONE}")


def _codec_ns(path: Path, figures: dict[str, Any]) -> dict[str, tuple[float, float]]:
    if not str(figures["device"]).startswith("cpu"):
        raise ConfigError(f"--profile {path}: islands encode on the CPU; measure with bench codec --device cpu --json")
    values = float(figures["values"])
    rows = figures["speed"].items()
    return {name: (1e9 * row["encode_s"] / values, 1e9 * row["decode_s"] / values) for name, row in rows}


def _read(path: Path) -> dict[str, Any]:
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--profile {path}: no such file; {MAKE_ONE}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"--profile {path}: cannot be read: {error}; {MAKE_ONE}") from None
    if not isinstance(figures, dict):
        raise ConfigError(f"--profile {path}: must hold one JSON object; {MAKE_ONE}")
    return figures
