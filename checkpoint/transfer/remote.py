"""A folder at an fsspec URL: `s3://bucket/runs/mine`, `gs://…`, `file:///mnt/shared`, `memory://…`.

Objects appear whole or not at all where the service does it so (S3, GCS). Whatever is read back has digests of its own.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from diloco.atomic import appearing
from diloco.errors import RemoteError

TRIES = 5
FIRST_WAIT_S = 0.5  # doubled each time
HOPELESS = ("NoCredentialsError", "PartialCredentialsError", "NoSuchBucket", "InvalidAccessKeyId", "AccessDenied")

Result = TypeVar("Result")


class Remote:
    def __init__(
        self, url: str, *, tries: int = TRIES, wait: Callable[[float], object] = time.sleep, **options: Any
    ) -> None:
        """`wait` is called between two tries; `options` go to the file system."""
        try:
            from fsspec.core import url_to_fs

            own_folders = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}  # others have none
            self._files, self._root = url_to_fs(url, **own_folders, **options)
        except ImportError as missing:
            extra = " (pip install 'diloco[s3]')" if url.startswith("s3:") else ""
            raise RemoteError(
                f"checkpoint.remote={url} needs a package that is not installed: {missing}{extra}"
            ) from None
        except ValueError as error:
            raise RemoteError(f"checkpoint.remote={url} is no address that fsspec knows: {error}") from None
        self.url = url.rstrip("/")
        self._tries, self._wait = tries, wait

    def check(self) -> None:
        """That it can be written to and read: better now than after a day."""
        self._do("be written to", lambda: self._files.pipe_file(f"{self._root}/.check", b"diloco"))
        self._do("be read", self._list)

    def sizes(self) -> dict[str, int]:
        """All objects by name."""
        return self._do("be read", self._list)

    def _list(self) -> dict[str, int]:
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            if self._bucket_missing():
                raise
            return {}
        cut = len(self._root.rstrip("/")) + 1
        return {path[cut:]: int(info["size"]) for path, info in found.items() if not path.endswith("/.check")}

    def _bucket_missing(self) -> bool:
        bucket = self._root.split("/")[0]
        return bool(bucket) and not self._files.exists(bucket)

    def push(self, local: Path, name: str) -> None:
        self._do(f"take {name}", lambda: self._files.put_file(str(local), f"{self._root}/{name}"))

    def pull(self, name: str, local: Path) -> None:
        """To a file that appears at once."""
        with appearing(local) as part:
            self._do(f"give {name}", lambda: self._files.get_file(f"{self._root}/{name}", str(part)))

    def remove(self, name: str) -> None:
        def delete() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(f"{self._root}/{name}")

        self._do(f"delete {name}", delete)

    def _do(self, what: str, act: Callable[[], Result]) -> Result:
        """Every service has exceptions of its own: all are told in our words, with theirs as the reason."""
        for tried in range(1, self._tries + 1):
            try:
                return act()
            except Exception as error:
                if _hopeless(error) or tried == self._tries:
                    advice = "create the bucket, or mend the address or the credentials"
                    raise RemoteError(f"{self.url} cannot {what} ({_reason(error)}): {advice}") from error
                self._wait(FIRST_WAIT_S * 2 ** (tried - 1))
        raise AssertionError("unreachable")


def _hopeless(error: Exception) -> bool:
    """Trying again would not help."""
    words = f"{type(error).__name__} {error}"
    return isinstance(error, PermissionError | FileNotFoundError) or any(sign in words for sign in HOPELESS)


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
