"""Record what the README's two commands print, as pictures: `python tests/recording.py` (`make record`, five minutes).

The commands run in a new folder and print as into a file. Of their lines the pictures show a choice, in order, with `…`
where some are left out.
"""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "img"
WIDTH = 112
QUICKSTART = r"quickstart: |round +([123]|1[23]) |done: "
DEMO = r">>> (rounds|round|island)|.* died |island-3 joined: |done: |digests equal"


def run(*command: str) -> str:
    """What the command prints, in the order of its two streams. It must end well."""
    with TemporaryDirectory(prefix="diloco-record-") as folder:
        for name in ("examples", "diloco"):
            (Path(folder) / name).symlink_to(ROOT / name)
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout}")
    return done.stdout


def chosen(printed: str, pattern: str) -> Iterator[str]:
    """The lines that the pattern matches, with a round before and after each event; a mark where others were. What
    comes after the digests of a first run is left out."""
    lines = [line for line in printed.partition("\nnext:")[0].splitlines() if line.strip()]
    events = {number for number, line in enumerate(lines) if re.match(pattern, line)}
    beside = {number + step for number in events if not lines[number].startswith("round") for step in (-1, 1)}
    shown = sorted(events | {number for number in beside & {*range(len(lines))} if lines[number].startswith("round")})
    for before, number in itertools.pairwise([-1, *shown]):
        if number > before + 1:
            yield "…"
        yield lines[number]


def draw(title: str, command: str, lines: list[str], path: Path) -> None:
    console = Console(record=True, width=WIDTH, file=StringIO())
    console.print(Text(f"$ {command}", style="bold"), no_wrap=True)
    for line in lines:
        console.print(Text(line, style="yellow" if line.startswith(">>>") else ""), no_wrap=True, overflow="ellipsis")
    drawn = console.export_svg(title=title, theme=MONOKAI, unique_id=path.stem)
    path.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL) + "\n")  # fetched from elsewhere
    print(path.relative_to(ROOT))


def main() -> None:
    quickstart = list(chosen(run("-m", "diloco", "run", "examples/quickstart.yaml"), QUICKSTART))
    draw("one island", "diloco run examples/quickstart.yaml", quickstart, PICTURES / "quickstart.svg")
    demo = list(chosen(run("-m", "diloco", "demo"), DEMO))
    draw("four islands, one is killed and returns", "diloco demo", demo, PICTURES / "demo.svg")


if __name__ == "__main__":
    main()
