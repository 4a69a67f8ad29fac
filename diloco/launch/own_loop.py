"""Start a program of somebody's own as an island that was launched: `diloco run --attach SECRET --script COMMAND`."""

import os
import shlex
import sys
from typing import NoReturn

from diloco.comm.peers.addressbook import free_port
from diloco.config.schema import IslandConfig
from diloco.launch.backend import TEMPLATES
from diloco.run.launched import Launched

BY_TORCHRUN = "DILOCO_TORCHRUN"  # tells machine.sh that diloco does not start the processes of a single machine itself


def become_own_loop(told: Launched, script: str, island: IslandConfig) -> NoReturn:
    """Replace this process by the program; where its mesh has several processes, by torchrun, which starts them."""
    count = island.fsdp * island.tp
    if count > 1 and "RANK" not in os.environ:
        os.environ[BY_TORCHRUN] = "1"
        meeting = ["1", "127.0.0.1", str(free_port("127.0.0.1")), str(count)]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        script = shlex.join(["bash", str(TEMPLATES / "machine.sh"), *meeting, *torchrun, "--", *shlex.split(script)])
    told.become(script)
