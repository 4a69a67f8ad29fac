from pathlib import Path

from diloco.cli.log import say, story
from diloco.history.restore import Restored, restore_run


def restore_command(url: str, folder: Path) -> None:
    restored = restore_run(url, folder, lambda what, text: say(f"{what}: {text}"))
    say(story(str(folder), restored.findings))
    say("\n".join(["next:", *what_next(restored)]))
    raise SystemExit(bool(restored.findings.problems))


def what_next(restored: Restored) -> list[str]:
    folder = restored.folder
    return [
        f"  diloco join TICKET --dir {folder}",
        "      takes part in the run again, if it still goes on somewhere",
        f"  diloco rewind {folder} {restored.round}",
        "      makes a new run of it that goes on from there: the old run's key is not in the copy, and need not be",
    ]
