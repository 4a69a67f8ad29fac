"""Names on Hugging Face's hub as local folders: what is missing here is downloaded, weights and settings, never code.

`HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they mean to the library.
"""

import re
from pathlib import Path

from diloco.errors import DilocoError, MissingExtra, first_line

PART = r"(?!\.\.?(?:/|\Z))[\w.-]+"  # of a revision, which becomes part of paths: never `.` or `..`
NAME = re.compile(rf"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@{PART}(/{PART})*)?")  # owner/name, or owner/name@revision
SETTINGS = ("config.json", "generation_config.json")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def is_hub_name(given: str) -> bool:
    """Tell whether this is the name of something on the hub, as far as its form goes; a file here comes first."""
    return NAME.fullmatch(given) is not None and not Path(given).expanduser().exists()


def local_folder(given: str, files: tuple[str, ...], what: str, kind: type[DilocoError]) -> Path:
    """Return the path that was given, or, for a name on the hub, a folder with these files of it.

    Those that are not here yet are downloaded. `what` names the setting in errors, which are of this kind.
    """
    if not is_hub_name(given):
        return Path(given).expanduser()
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]
    except ImportError:
        raise MissingExtra("huggingface_hub", "hf", f"{what}={given}") from None
    disable_progress_bars()
    name, _, revision = given.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(files)))
    except _errors() as error:
        reason = first_line(error).rstrip(".")
        raise kind(
            f"{what}={given!r}: there is no such file or folder here, and the hub does not give it ({reason}): name a "
            "local folder, or look at the name and at the way to the hub"
        ) from None


def _errors() -> tuple[type[Exception], ...]:
    """Return what a download raises; a connection that breaks is an error of newer libraries' own HTTP client."""
    try:
        from httpx import HTTPError
    except ImportError:
        return OSError, ValueError, RuntimeError
    return OSError, ValueError, RuntimeError, HTTPError
