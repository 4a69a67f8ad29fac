"""Token files: tokenised once, read by position ever after. The format is in `header`."""

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from diloco.atomic import publish
from diloco.config.schema import DataConfig
from diloco.data import header
from diloco.data.files import CHUNK, Files
from diloco.data.header import TokenFileInfo
from diloco.data.source import Progress, Source, SourceKind, Tokens, check_range, seal
from diloco.data.tokenizer import BYTES, tokenizer_digest
from diloco.errors import DataError

VERIFY_BYTES = 1 << 30  # a file up to this size is read once and checked before training


class TokenFile:
    """A source over a token file. The header is checked at once, each token when it is read, the digest by `verify`."""

    def __init__(self, path: Path) -> None:
        self._files = Files([path])
        size = self._files.sizes[0]
        self.info = header.unpack(path, self._files.read(0, 0, min(size, header.SIZE)), size)
        self.vocab = self.info.vocab
        self.name = str(path)

    def __len__(self) -> int:
        return self.info.count

    def read(self, start: int, stop: int) -> Tokens:
        check_range(self, start, stop)
        width = self.info.width
        payload = self._files.read(0, header.SIZE + start * width, header.SIZE + stop * width)
        tokens: Tokens = np.frombuffer(payload, dtype=f"<u{width}")
        if tokens.size and tokens.max() >= self.vocab:
            place = int(np.argmax(tokens >= self.vocab))
            raise DataError(
                f"{self.name} has token {tokens[place]} at position {start + place}, outside its vocabulary of "
                f"{self.vocab}: the file is damaged, delete it and make it again"
            )
        return tokens

    def fingerprint(self) -> str:
        return seal(self.vocab, len(self), self.info.width, bytes.fromhex(self.info.digest))

    def verify(self) -> None:
        """Read everything and compare with the digest in the header."""
        digest = hashlib.sha256()
        for chunk in self._files.chunks(0, start=header.SIZE):
            digest.update(chunk)
        if digest.hexdigest() != self.info.digest:
            raise DataError(f"{self.name} is damaged: its tokens do not match their digest; delete it, make it again")


class TokenFiles(SourceKind):
    def open(self, config: DataConfig, cache_dir: Path, progress: Progress) -> Source:
        tokens = TokenFile(path := Path(config.path or ""))
        if path.stat().st_size <= VERIFY_BYTES:
            tokens.verify()
        return tokens

    def tokenizer(self, config: DataConfig, others: Iterable[str] = ()) -> str:
        """The file holds its tokenizer's digest."""
        made_with = TokenFile(Path(config.path or "")).info.tokenizer
        for spec in (BYTES, config.tokenizer, *others):
            with suppress(DataError):  # a model's folder may hold no tokenizer
                if tokenizer_digest(spec) == made_with:
                    return spec
        raise DataError(f"{config.path} does not say where its tokenizer is: name its folder by --tokenizer")

    def vocab(self, config: DataConfig) -> int:
        return TokenFile(Path(config.path or "")).vocab


class TokenWriter:
    """Writes next to `path` and renames at the end: under that name there is a whole file or none.

    `with TokenWriter(path, vocab=50257) as writer: writer.write(tokens)`; after that `writer.info` is there.
    """

    info: TokenFileInfo

    def __init__(self, path: Path, vocab: int, tokenizer: str | None = None) -> None:
        self.path, self.vocab, self.tokenizer = path, vocab, tokenizer
        self.count = 0
        self._width = header.width_for(vocab)
        self._digest = hashlib.sha256()
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._partial, "xb")
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror}") from error
        self._put(bytes(header.SIZE))
        return self

    def write(self, tokens: npt.ArrayLike | Sequence[int]) -> None:
        array = np.asarray(tokens)
        if array.size == 0:
            return
        if not np.issubdtype(array.dtype, np.integer):
            raise DataError(f"tokens for {self.path} must be whole numbers, not {array.dtype}")
        if array.min() < 0 or array.max() >= self.vocab:
            place = int(np.argmax((array < 0) | (array >= self.vocab)))
            raise DataError(
                f"token {array.flat[place]} at position {self.count + place} is outside the vocabulary of "
                f"{self.vocab}: {self.path} was not written"
            )
        payload = array.astype(f"<u{self._width}").tobytes()
        self._digest.update(payload)
        self._put(payload)
        self.count += array.size

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def _finish(self) -> None:
        if self.count == 0:
            raise DataError(f"there are no tokens to write: {self.path} was not written")
        self.info = TokenFileInfo(
            self.path, self.vocab, self.count, self._width, self._digest.hexdigest(), self.tokenizer
        )
        try:
            self._file.seek(0)
            self._file.write(header.pack(self.info))
            self._file.flush()
            publish(self._partial, self.path, durable=True)
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror}") from error

    def _put(self, payload: bytes) -> None:
        try:
            self._file.write(payload)
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror}; nothing is left of it") from error


def import_raw(path: Path, out: Path, dtype: Literal["uint16", "uint32"], vocab: int) -> TokenFileInfo:
    """A token file from bare little-endian tokens, such as nanoGPT's train.bin (uint16, vocab 50257)."""
    if dtype not in ("uint16", "uint32"):
        raise DataError(f"raw tokens of type {dtype!r}: use uint16 or uint32")
    little = np.dtype(dtype).newbyteorder("<")
    files = Files([path])
    if files.sizes[0] % little.itemsize:
        raise DataError(f"{path} has {files.sizes[0]} bytes, no whole number of {dtype} tokens: is it another type?")
    assert CHUNK % little.itemsize == 0
    with TokenWriter(out, vocab) as writer:
        for chunk in files.chunks(0):
            writer.write(np.frombuffer(chunk, dtype=little))
    return writer.info
