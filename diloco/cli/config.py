"""`diloco config`."""

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.shared import Overrides


def config(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file; none: the defaults.")] = None,
    set_: Overrides = None,
) -> None:
    """Print every setting of a run with its meaning."""
    from diloco.config.file import load_config, render_config

    print(render_config(load_config(config, set_ or [])), end="")
