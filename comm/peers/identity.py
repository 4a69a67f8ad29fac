"""A peer's identity: one Ed25519 key in one file, which p2pd reads too.

The file is libp2p's own private-key message, so the same key signs tickets and records and secures libp2p streams,
and a peer's libp2p id follows from its public key alone.
"""

import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from diloco.atomic import create_file
from diloco.errors import IdentityError

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
# Protobuf of libp2p's PrivateKey and PublicKey: field 1 = type 1 (Ed25519), field 2 = 64 or 32 bytes.
PRIVATE_HEADER = b"\x08\x01\x12\x40"
PUBLIC_HEADER = b"\x08\x01\x12\x20"
IDENTITY_MULTIHASH = b"\x00\x24"
FILE_BYTES = len(PRIVATE_HEADER) + 64
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


@dataclass(frozen=True)
class Identity:
    """Hold a peer's Ed25519 key and the file that it is kept in."""

    path: Path
    public_key: bytes
    _key: Ed25519PrivateKey = field(repr=False, compare=False)

    @classmethod
    def load(cls, path: str | Path) -> "Identity":
        """Load the identity in this file, or make one on first use.

        Several processes may do so at once and get the same one.
        """
        path = Path(path).absolute()
        try:
            if not path.exists():
                _create(path, Ed25519PrivateKey.generate())
            raw = _read_private(path)
        except OSError as error:
            raise IdentityError(f"cannot use the key file {path}: {error.strerror}") from error
        key = _parse(path, raw)
        return cls(path, key.public_key().public_bytes_raw(), key)

    @classmethod
    def of(cls, secret: bytes) -> "Identity":
        """Return the identity with this private key, of 32 bytes, which no file keeps."""
        key = Ed25519PrivateKey.from_private_bytes(secret)
        return cls(Path(os.devnull), key.public_key().public_bytes_raw(), key)

    @classmethod
    def keep(cls, path: Path, secret: bytes) -> "Identity":
        """Write this private key to a file, and load it; raise IdentityError if another one is there."""
        _create(path, Ed25519PrivateKey.from_private_bytes(secret))
        found = cls.load(path)
        if found.public_key != public_key_of(secret):
            raise IdentityError(f"{path} holds another key: this folder belongs to another island, choose another one")
        return found

    @property
    def peer_id(self) -> str:
        """Return the libp2p id in base58, by which other peers know this one."""
        return peer_id_of(self.public_key)

    def sign(self, data: bytes) -> bytes:
        """Return an Ed25519 signature of the data, 64 bytes."""
        return self._key.sign(data)


def new_secret() -> bytes:
    """Return a new Ed25519 private key, 32 bytes, that no file keeps."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_key_of(secret: bytes) -> bytes:
    """Return the public key that belongs to a private one."""
    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def sign_with(secret: bytes, data: bytes) -> bytes:
    """Return the signature of the data by a private key, 64 bytes."""
    return Ed25519PrivateKey.from_private_bytes(secret).sign(data)


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Tell whether the holder of this key signed the data; False for bytes that are no key, too."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_id_of(public_key: bytes) -> str:
    """Return libp2p's name for the holder of this key: short keys are not hashed, only wrapped."""
    return _base58(IDENTITY_MULTIHASH + PUBLIC_HEADER + public_key)


def public_key_in(peer: str) -> bytes:
    """Return the public key in a peer's id; raise IdentityError if the id is not that of an Ed25519 key."""
    number, header = 0, IDENTITY_MULTIHASH + PUBLIC_HEADER
    if not set(peer) <= set(BASE58) or len(peer) > 64:
        raise IdentityError(f"{peer[:64]!r} is no peer's id")
    for digit in peer:
        number = number * 58 + BASE58.index(digit)
    raw = number.to_bytes(64, "big").lstrip(b"\0").rjust(len(header) + PUBLIC_KEY_BYTES, b"\0")
    if peer_id_of(raw[len(header) :]) != peer:
        raise IdentityError(f"{peer} is no peer's id")
    return raw[len(header) :]


def run_id_of(owner: bytes) -> bytes:
    """Return the id of the run that the holder of this public key owns: the key's SHA-256."""
    return hashlib.sha256(owner).digest()


def _create(path: Path, key: Ed25519PrivateKey) -> None:
    """Write a key, unless another process wrote one first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = PRIVATE_HEADER + key.private_bytes_raw() + key.public_key().public_bytes_raw()
    create_file(path, raw, mode=0o600, durable=True)


def _read_private(path: Path) -> bytes:
    # Non-blocking: opening a named pipe would otherwise wait for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise IdentityError(f"the key file {path} is not a file: name another one")
        if mode & 0o077:
            shown = f"mode {stat.S_IMODE(mode):04o}"
            raise IdentityError(f"others can read the key file {path} ({shown}): chmod 600 '{path}'")
        return file.read(FILE_BYTES + 1)


def _parse(path: Path, raw: bytes) -> Ed25519PrivateKey:
    secret, public = raw[len(PRIVATE_HEADER) :][:32], raw[-PUBLIC_KEY_BYTES:]
    if len(raw) == FILE_BYTES and raw.startswith(PRIVATE_HEADER):
        key = Ed25519PrivateKey.from_private_bytes(secret)
        if key.public_key().public_bytes_raw() == public:
            return key
    raise IdentityError(
        f"the key file {path} is damaged or of another kind: restore it from a copy,"
        " or move it away to start with a new identity"
    )


def _base58(raw: bytes) -> str:
    number, digits = int.from_bytes(raw, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        digits = BASE58[digit] + digits
    return "1" * (len(raw) - len(raw.lstrip(b"\0"))) + digits
