"""Number and name the islands that a page shows, and put together what it shows of the present."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from diloco.dashboard.figures import TrainingShares
from diloco.report.shape import IslandNumbers, now_of
from diloco.report.status import IslandStatus, RunStatus
from diloco.report.tables import harmless
from diloco.run.names import Names, short_key


def present(
    status: RunStatus | None, why: Sequence[str], numbers: IslandNumbers, names: Names, trained: TrainingShares
) -> dict[str, Any]:
    """Return what a page shows of the present; each island with its number, and with its key's end where two share a
    name."""
    count = Counter(each.name for each in ([] if status is None else status.islands))

    def label(each: IslandStatus) -> str:
        name = each.name or names.of(each.island)
        return harmless(f"{name} ({short_key(each.island)})" if each.name and count[each.name] > 1 else name)

    def more(each: IslandStatus) -> dict[str, Any]:
        share = trained.share(each.island)
        known = {} if share is None else {"utilisation": round(share, 4)}
        return {"name": label(each), "number": numbers.of(each.island), **known}

    return now_of(status, why, more)
