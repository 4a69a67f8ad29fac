"""Real islands in one kind of bad weather each: processes of their own, real cuts of the network, real signals."""

import os
from pathlib import Path

import pytest
from launched import wait_until
from real_islands import open_islands

from diloco.bench.soak import SoakConfig, observe
from diloco.bench.soak_checks import judge
from diloco.bench.soak_network import choose_backend
from diloco.bench.soak_plan import Fault
from diloco.run.peer import EXPIRES_S

pytestmark = pytest.mark.soak
HOUR_S = 3600.0
WEATHER = {
    "three and three cut for 90 s": (6, [Fault("cut", 5, 95, (1, 2, 3), (4, 5, 6))]),
    "the founder alone cut for 90 s": (6, [Fault("cut", 5, 95, (1,), (2, 3, 4, 5, 6))]),
    "two and one cut for 150 s": (3, [Fault("cut", 5, 155, (1, 2), (3,))]),
    "p2pd killed": (3, [Fault("daemon", 5, 5, (1,)), Fault("daemon", 20, 20, (2,))]),
    "stopped for a minute": (4, [Fault("stop", 5, 65, (1,))]),
    "asleep for a minute, with its daemon": (4, [Fault("freeze", 5, 65, (2,))]),
    "a clock an hour ahead": (3, [Fault("skew", 5, 6, (2,), amount=HOUR_S)]),
    "a clock an hour behind": (3, [Fault("skew", 5, 6, (3,), amount=-HOUR_S)]),
    "one comes back while the others are away": (
        4,
        [Fault("kill", 5, 40, (1,)), *(Fault("freeze", 38, 58, (island,)) for island in (2, 3, 4))],
    ),
    "the first two cannot reach each other": (4, [Fault("pair", 5, 65, (1,), (2,))]),
    "the founder is heard and hears nobody": (4, [Fault("one-way", 5, 65, (2, 3, 4), (1,))]),
}
NETWORK = {"cut", "pair", "one-way"}


@pytest.mark.parametrize("name", WEATHER)
def test_nothing_is_lost_and_everybody_comes_together(name: str, tmp_path: Path) -> None:
    islands, faults = WEATHER[name]
    if os.geteuid() != 0 and any(fault.kind in NETWORK for fault in faults):
        pytest.skip("network namespaces need root")
    backend = choose_backend("netns" if os.geteuid() == 0 else "auto")
    config = SoakConfig(2.0, islands, 5.0, 1, "auto", faults=True, baseline=1.0, backend=backend)
    seconds = max(fault.until_s for fault in faults) + 5.0
    seen = observe(config, tmp_path / "soak", tuple(sorted(faults, key=lambda fault: fault.at_s)), seconds)
    checks = {check.name: check for check in judge(seen, merge=False, quiet_per_s=None).checks}
    wanted = ("rounds_lost", "samples_twice", "rounds_unchecked", "digests_equal", "together", "crashes")
    missed = {name: checks[f"soak.{name}"].value for name in wanted if not checks[f"soak.{name}"].holds}
    assert not missed, (missed, seen.crashes)


def test_a_newcomer_gets_in_whose_download_outlasts_its_record(tmp_path: Path) -> None:
    """Its state takes two lives of a record to come; members refuse whoever has none."""
    with open_islands(tmp_path) as start:
        founder = start(1)
        assert wait_until(lambda: founder.rounds_of(1), 90)
        state = sum(path.stat().st_size for path in next((founder.folder / "outer").glob("snapshot-*")).iterdir())
        newcomer = start(2, **{"max-down": f"{8 * state / (2 * EXPIRES_S) / 1000:.2f}kbit"})
        assert wait_until(lambda: newcomer.told("joined") or newcomer.process.poll() is not None, 300)
        assert newcomer.process.poll() is None, newcomer.process.communicate()[1]
        joined, began = newcomer.events("elastic")[0]["time"], newcomer.folder.stat().st_ctime
        assert newcomer.told("joined")[0].endswith("from 1 peer") and joined - began > 0
