"""Run by test_supervision.py under torchrun: one process lives, but does not come to where the other waits for it."""

import time

from diloco.config.schema import IslandConfig
from diloco.island.mesh import open_mesh


def read_for_ever() -> None:
    time.sleep(3600)


with open_mesh(IslandConfig(batch=2, fsdp=2, device="cpu", hang_s=3)) as place:
    place.activity.begin("inner step 1")
    if place.rank == 1:
        read_for_ever()
    place.any(False)
