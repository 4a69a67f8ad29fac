"""`diloco rewind`: an earlier round of a run becomes the beginning of a new one. Nothing of the old run is changed.

The new run has a genesis that names its parent, an owner's key of its own (old tickets let nobody in, and islands with
the old log are not taken for its members), and the outer state of that round as its first snapshot.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diloco.atomic import appearing
from diloco.comm.peers.identity import Identity
from diloco.config.file import flat, load_config, overrides_tree, render_config
from diloco.config.schema import Config
from diloco.data.samples import OWN_LOOP
from diloco.elastic.protocol.state import RunState
from diloco.errors import ConfigError, SaveError
from diloco.history.find import find_logs
from diloco.history.log import fragments_in, furthest, genesis_of, state_of
from diloco.run.branch import goes_on, refuse_other_state, released, write_branch
from diloco.run.folder import OUTER, has_log
from diloco.run.genesis import Genesis, own_sections
from diloco.train.amend import amended, changed


@dataclass(frozen=True)
class Branch:
    """Describe a run that begins where another one was."""

    folder: Path
    source: Path
    genesis: Genesis
    islands: int  # with a folder each, ready to go on

    @property
    def own_loop(self) -> bool:
        """Tell whether the run is a program with its own training loop (diloco.connect)."""
        return self.genesis.data == OWN_LOOP


def rewind(run: str, number: int, out: Path | None = None, overrides: Iterable[str] = ()) -> Branch:
    """Make a new run of an earlier round, in `out` or beside the old run, with a folder for each island that has a log.
    `overrides` are settings that differ from there on."""
    log = furthest(find_logs(run))
    source, islands = _run_of(log.parent)
    out = out or source.with_name(f"{source.name}-round-{number}")
    if out.exists():
        raise SaveError(f"{out} already exists: name another folder, after the round")
    genesis = genesis_of(log)
    state, vectors = state_of(log, number)
    config = _config(log.parent, genesis, state, list(overrides), out)
    try:
        with appearing(out, durable=True) as draft:
            homes = [draft] if islands == 1 else [draft / f"island-{n}" for n in range(1, islands + 1)]
            homes[0].mkdir(parents=True, exist_ok=True)
            founder = Identity.load(homes[0] / "identity.key").peer_id
            new = goes_on(genesis, state, vectors, config, founder, released(state.ledger))
            new = write_branch(homes[0], new, vectors, fragments_in(log))
            for home in homes[1:]:
                shutil.copytree(homes[0] / OUTER, home / OUTER)
            for place in {draft, *homes}:
                (place / "config.yaml").write_text(render_config(config), encoding="utf-8")
    except OSError as error:
        raise SaveError(f"{out} cannot be written ({error.strerror}): nothing was changed") from None
    return Branch(out, source, new, islands)


def _run_of(island: Path) -> tuple[Path, int]:
    """Return the folder of the whole run, and how many islands of it have a log there."""
    above = island.parent
    if island.name.startswith("island-") and (above / "config.yaml").is_file():
        return above, sum(has_log(other) for other in above.glob("island-*"))
    return island, 1


def _config(island: Path, genesis: Genesis, state: RunState, overrides: list[str], out: Path) -> Config:
    """Return the settings that were in force at that round, with what is to be different from there on."""
    file = island / "config.yaml"
    own = own_sections(load_config(file)) if file.is_file() else {}
    before = amended(genesis.configure(own), state.amendments)
    asked = flat(overrides_tree(overrides))
    config = changed(before, asked | {"checkpoint.dir": str(out)})
    refuse_other_state(before, config, f"the state of round {state.head.round}")
    if state.step >= config.inner.steps:
        raise ConfigError(
            f"round {state.head.round} is at step {state.step}, where inner.steps={config.inner.steps} ends the run: "
            f"take an earlier round, or train on with --set inner.steps={2 * state.step}"
        )
    return config
