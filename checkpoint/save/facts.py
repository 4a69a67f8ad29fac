"""Which saves a folder has and what they say about themselves, without tensors: for commands that do not train."""

import json
from pathlib import Path
from typing import Any

from diloco.atomic import ASIDE, PART
from diloco.errors import SaveError

FACTS = ("step", "round", "outer_step", "exchange", "skipped", "checked_at", "data", "config")
TOGETHER = "together"  # a save of an outer state by itself has none


def saves(folder: Path) -> list[Path]:
    """List the complete saves in a folder, by step; one left as `.aside` counts until its replacement is there."""
    found = sorted(path.parent for path in folder.glob("save-*/facts.json") if path.parent.suffix != PART)
    return [save for save in found if save.suffix != ASIDE or save.with_suffix("") not in found]


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the entries of a save's `facts.json`; `together` is None where it has none."""
    try:
        facts = json.loads((folder / "facts.json").read_text())
        return {name: facts[name] for name in FACTS} | {TOGETHER: facts.get(TOGETHER)}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SaveError(
            f"{folder}/facts.json cannot be used ({error!r}): delete {folder} to fall back to an older save"
        ) from None


def among_others(save: Path) -> dict[str, Any] | None:
    """Return what a save says of the island's part in a run. None: there is none, or it cannot be read."""
    try:
        found: dict[str, Any] | None = read_facts(save)[TOGETHER]
    except SaveError:
        return None
    return found


def age(save: Path) -> tuple[int, int, int]:
    """Return what a save is sorted by, see `order`. A save that cannot be read is the oldest."""
    try:
        facts = read_facts(save)
    except SaveError:
        return -1, -1, -1
    return order(facts)


def order(facts: dict[str, Any]) -> tuple[int, int, int]:
    """Return what a save's facts are sorted by: the clock of its outer state, its round, then the inner steps that its
    island had done. Rounds begin again at 1 where a run of one island is resumed with other settings, that clock goes
    on; an island's own, `step`, may go back within a round."""
    return facts["outer_step"] or 0, facts["round"], (facts["exchange"] or {}).get("steps", facts["step"])
