"""How a launched island was told to take part: by options of `diloco run --attach`, or, in a program of somebody's own
that this command starts (`launch.script`), by a variable with the same in it."""

import json
import os
import shlex
from dataclasses import asdict, dataclass
from math import inf
from typing import NoReturn

from diloco.errors import ConfigError

VARIABLE = "DILOCO_LAUNCHED"


@dataclass(frozen=True)
class Launched:
    """Hold the options by which an island was started; paths are relative to the working folder."""

    config: str
    secret: str
    at: str = ""  # where other islands are, as --at takes it
    dir: str | None = None
    wait_s: float = inf  # for a member that answers
    host: str | None = None
    port: int | None = None

    @classmethod
    def given(cls) -> "Launched | None":
        """Return what the program that started this one has said, if that was `diloco run --attach --script`."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))

    def become(self, script: str) -> NoReturn:
        """Replace this process by a program that takes part by `diloco.connect`."""
        words = shlex.split(script)
        try:
            os.execvpe(words[0], words, {**os.environ, VARIABLE: json.dumps(asdict(self))})
        except (OSError, IndexError) as error:
            raise ConfigError(f"--script {script!r} cannot be started ({error}): correct launch.script") from None
