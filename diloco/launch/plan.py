"""Which islands are started on this machine, where, and by which commands."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from diloco.config.schema import Config

OWN = ("island", "log", "evaluate", "checkpoint")  # a joiner's own sections; all others come from the founder


@dataclass(frozen=True)
class Plan:
    config: Config
    path: Path
    overrides: tuple[str, ...]
    islands: int
    link: str | None = None
    host: str | None = None
    restart: bool = True
    resume: bool = False

    @property
    def folder(self) -> Path:
        return Path(self.config.dir)

    @property
    def names(self) -> list[str]:
        return [f"island-{number}" for number in range(1, self.islands + 1)]

    @property
    def environment(self) -> dict[str, str]:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return {"OMP_NUM_THREADS": str(max(1, cores // self.islands))}

    def founder(self) -> list[str]:
        changes = [*self.overrides, f"checkpoint.dir={self.folder / self.names[0]}"]
        resume = ["--resume"] if self.resume else []
        return ["run", str(self.path), "--islands", "1", *resume, *_sets(changes), *self.network()]

    def joiner(self, name: str) -> list[str]:
        where = ["--name", name, "--dir", str(self.folder / name)]
        return ["join", str(self.folder / "ticket"), *where, *_sets(self._own()), *self.network()]

    def _own(self) -> list[str]:
        sections = {name: getattr(self.config, name).model_dump(mode="json", exclude_unset=True) for name in OWN}
        leaves = [(f"{name}.{key}", value) for name, tree in sections.items() for key, value in tree.items()]
        return [f"{key}={json.dumps(value)}" for key, value in leaves if key != "checkpoint.dir"]

    def network(self) -> list[str]:
        given = {"--link": self.link, "--host": self.host}
        return [word for option, value in given.items() if value is not None for word in (option, value)]


def _sets(changes: list[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]
