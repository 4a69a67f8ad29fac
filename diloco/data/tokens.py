"""Token files: tokenised once, on demand or by `diloco tokenize`, and read by position ever after.

A file begins with 128 bytes, little-endian, sealed by their own digest:

magic 8 | version 4 | bytes per token 4 | vocab 8 | count 8 | SHA-256 of the payload 32 | tokenizer digest 32 | seal 32
"""

import fcntl
import hashlib
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from diloco.atomic import publish
from diloco.config.schema import DataConfig
from diloco.data.files import CHUNK, Files, refusing
from diloco.data.source import Progress, Source, SourceKind, Tokens, check_range, seal
from diloco.data.tokenizer import BYTES, tokenizer_digest
from diloco.errors import DataError

VERIFY_BYTES = 1 << 30  # a file up to this size is read once and checked before training
MAGIC = b"DILOCOTK"
VERSION = 1
WIDTHS = (2, 4)
HEADER_SIZE = 128

_FIELDS = struct.Struct("<8sIIQQ32s32s")
_UNKNOWN = bytes(32)
_AGAIN = "delete it and make it again (diloco tokenize)"


@dataclass(frozen=True)
class TokenFileInfo:
    """Describe a token file, as its header does."""

    path: Path
    vocab: int
    count: int
    width: int  # bytes per token
    digest: str  # SHA-256 of the payload
    tokenizer: str | None  # digest of the tokenizer, where known


def width_for(vocab: int) -> int:
    """Return the bytes of the narrowest token that holds range(vocab): 2 or 4."""
    for width in WIDTHS:
        if 1 <= vocab <= 256**width:
            return width
    raise DataError(f"a vocabulary of {vocab} tokens: a token file holds 1 to {256 ** WIDTHS[-1]}")


def pack_header(info: TokenFileInfo) -> bytes:
    """Encode a token file's header, sealed by its own digest."""
    tokenizer = bytes.fromhex(info.tokenizer) if info.tokenizer else _UNKNOWN
    digest = bytes.fromhex(info.digest)
    fields = _FIELDS.pack(MAGIC, VERSION, info.width, info.vocab, info.count, digest, tokenizer)
    return fields + hashlib.sha256(fields).digest()


def unpack_header(path: Path, header: bytes, file_size: int) -> TokenFileInfo:
    """Decode a token file's header, and refuse one that is damaged or does not fit the file's size."""
    if header[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path} is not a token file: make one with diloco tokenize, or import a raw .bin file")
    if len(header) < HEADER_SIZE:
        raise DataError(f"{path} is cut short within its header: {_AGAIN}")
    _, version, width, vocab, count, digest, tokenizer = _FIELDS.unpack_from(header)
    if version != VERSION:
        raise DataError(f"{path} has token file version {version}, this diloco reads {VERSION}: {_AGAIN}")
    if hashlib.sha256(header[: _FIELDS.size]).digest() != header[_FIELDS.size : HEADER_SIZE]:
        raise DataError(f"{path} has a damaged header: {_AGAIN}")
    info = TokenFileInfo(path, vocab, count, width, digest.hex(), None if tokenizer == _UNKNOWN else tokenizer.hex())
    _check(info, file_size)
    return info


def _check(info: TokenFileInfo, file_size: int) -> None:
    if info.width not in WIDTHS:
        raise DataError(f"{info.path} has {info.width} bytes per token, not 2 or 4: {_AGAIN}")
    if not 1 <= info.vocab <= 256**info.width:
        raise DataError(f"{info.path} has a vocabulary of {info.vocab} in {info.width} bytes per token: {_AGAIN}")
    if info.count == 0:
        raise DataError(f"{info.path} has no tokens: tokenise files that hold text")
    expected = HEADER_SIZE + info.count * info.width
    if file_size != expected:
        problem = "cut short" if file_size < expected else "followed by bytes that do not belong to it"
        raise DataError(f"{info.path} is {problem}: {file_size} bytes instead of {expected}: {_AGAIN}")


class TokenFile:
    """Read a token file as a source.

    The header is checked at once, each token when it is read, the digest by `verify`.
    """

    def __init__(self, path: Path) -> None:
        self._files = Files([path])
        size = self._files.sizes[0]
        self.info = unpack_header(path, self._files.read(0, 0, min(size, HEADER_SIZE)), size)
        self.vocab = self.info.vocab
        self.name = str(path)

    def __len__(self) -> int:
        return self.info.count

    def read(self, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop). Raise DataError for one outside the vocabulary: the file is damaged."""
        check_range(self, start, stop)
        width = self.info.width
        payload = self._files.read(0, HEADER_SIZE + start * width, HEADER_SIZE + stop * width)
        tokens: Tokens = np.frombuffer(payload, dtype=f"<u{width}")
        if tokens.size and tokens.max() >= self.vocab:
            place = int(np.argmax(tokens >= self.vocab))
            raise DataError(
                f"{self.name} has token {tokens[place]} at position {start + place}, outside its vocabulary of "
                f"{self.vocab}: the file is damaged, delete it and make it again"
            )
        return tokens

    def fingerprint(self) -> str:
        """Compute the digest from the header alone, without reading the tokens."""
        return seal(self.vocab, len(self), self.info.width, bytes.fromhex(self.info.digest))

    def verify(self) -> None:
        """Read everything and compare it with the digest in the header."""
        digest = hashlib.sha256()
        for chunk in self._files.chunks(0, start=HEADER_SIZE):
            digest.update(chunk)
        if digest.hexdigest() != self.info.digest:
            raise DataError(f"{self.name} is damaged: its tokens do not match their digest; delete it, make it again")


class TokenFiles(SourceKind):
    """Open a token file as a source."""

    def open(self, config: DataConfig, cache_dir: Path, progress: Progress) -> Source:
        """Open the token file; one of at most 1 GiB is read and verified before training."""
        tokens = TokenFile(path := Path(config.path or ""))
        if path.stat().st_size <= VERIFY_BYTES:
            tokens.verify()
        return tokens

    def tokenizer(self, config: DataConfig, others: Iterable[str] = ()) -> str:
        """Find the tokenizer whose digest the file holds: bytes, the configured one, or one of `others`."""
        made_with = TokenFile(Path(config.path or "")).info.tokenizer
        for spec in (BYTES, config.tokenizer, *others):
            with suppress(DataError):  # a model's folder may hold no tokenizer
                if tokenizer_digest(spec) == made_with:
                    return spec
        raise DataError(f"{config.path} does not say where its tokenizer is: name its folder by --tokenizer")

    def vocab(self, config: DataConfig) -> int:
        """Read the vocabulary's size from the file's header."""
        return TokenFile(Path(config.path or "")).vocab


class TokenWriter:
    """Write next to `path` and rename at the end: under that name there is a whole file or none.

    `with TokenWriter(path, vocab=50257) as writer: writer.write(tokens)`; after that `writer.info` is set.
    """

    info: TokenFileInfo

    def __init__(self, path: Path, vocab: int, tokenizer: str | None = None) -> None:
        self.path, self.vocab, self.tokenizer = path, vocab, tokenizer
        self.count = 0
        self._width = width_for(vocab)
        self._digest = hashlib.sha256()
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")

    def __enter__(self) -> Self:
        with refusing("write", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._partial, "xb")
            self._file.write(bytes(HEADER_SIZE))
        return self

    def write(self, tokens: npt.ArrayLike | Sequence[int]) -> None:
        """Append tokens to the file. Raise DataError for one outside the vocabulary."""
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
        with refusing("write", self.path, "; nothing is left of it"):
            self._file.write(payload)
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
        digest = self._digest.hexdigest()
        self.info = TokenFileInfo(self.path, self.vocab, self.count, self._width, digest, self.tokenizer)
        with refusing("write", self.path, "; nothing is left of it"):
            self._file.seek(0)
            self._file.write(pack_header(self.info))
            self._file.flush()
            publish(self._partial, self.path, durable=True)


def import_raw(path: Path, out: Path, dtype: Literal["uint16", "uint32"], vocab: int) -> TokenFileInfo:
    """Make a token file from bare little-endian tokens, such as nanoGPT's train.bin (uint16, vocab 50257)."""
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


def cached(cache_dir: Path, key: str, build: Callable[[Path], object]) -> TokenFile:
    """Return the token file for `key`, built if it is missing; the key names all that its content follows from."""
    path = cache_dir.expanduser() / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.tokens"
    if not path.exists():
        # The islands of one machine start together; without the lock each would tokenise the same text.
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                for left in path.parent.glob(f".{path.name}.*.partial"):  # by writers that were killed
                    left.unlink(missing_ok=True)
                build(path)
    return TokenFile(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which other processes of this machine wait for."""
    with refusing("write to the cache folder", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path, "ab")  # noqa: SIM115 (closed below, which also unlocks)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            message = f"cannot lock files in {path.parent} ({error.strerror}): use a cache folder on a local disk"
            raise DataError(message) from error
        yield
