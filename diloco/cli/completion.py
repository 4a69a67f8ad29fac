"""Declare `diloco completion`: the script by which a shell completes commands, options, runs and settings."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

VARIABLE = "_DILOCO_COMPLETE"  # by it the script asks this program what could follow
PLAIN = re.compile(r"[\w.-]+")  # a shell is handed no other names: it would take them for its own language

# typer's script, and no space after `inner.lr=`: the value comes next
BASH = f"""\
_diloco_completion() {{
    local IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="${{COMP_WORDS[*]}}" COMP_CWORD=$COMP_CWORD {VARIABLE}=complete_bash $1 ) )
    [[ ${{COMPREPLY[0]-}} == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}}
complete -o default -F _diloco_completion diloco"""


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the script with which a shell completes commands.

    For bash, add `source <(diloco completion bash)` to ~/.bashrc; for zsh, the same with zsh to ~/.zshrc, after
    compinit; for fish, diloco completion fish > ~/.config/fish/completions/diloco.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    print(BASH if shell == "bash" else get_completion_script(prog_name="diloco", complete_var=VARIABLE, shell=shell))


def run_names(incomplete: str) -> Iterator[str]:
    """Yield the runs under runs/ whose names begin so; where a path is typed, nothing, and the shell lists files."""
    for folder in sorted(Path("runs").glob("*/")):
        is_run = any((folder / name).exists() for name in ("config.yaml", "identity.key", "events.jsonl"))
        if is_run and folder.name.startswith(incomplete) and PLAIN.fullmatch(folder.name):
            yield folder.name


def settings(incomplete: str) -> Iterator[str]:
    """Yield the keys of a configuration that begin so, each with its `=`; after that the shell is on its own."""
    if "=" not in incomplete:
        from diloco.config.file import all_keys

        yield from (f"{key}=" for key in all_keys() if key.startswith(incomplete))
