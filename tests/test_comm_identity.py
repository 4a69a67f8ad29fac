"""One key file per peer: made once, private, refused when it is not what it should be."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diloco.comm.peers.identity import Identity, peer_id_of, verify
from diloco.errors import IdentityError


def test_the_key_file_is_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "peer" / "key"
    first, second = Identity.load(path), Identity.load(path)
    assert first == second and first.peer_id == second.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["key"]


def test_many_first_uses_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = pool.map(lambda _: Identity.load(tmp_path / "key").public_key, range(32))
    assert len(set(keys)) == 1
    assert os.listdir(tmp_path) == ["key"]


def test_signatures_fit_one_key_and_one_message(tmp_path: Path) -> None:
    mine, other = Identity.load(tmp_path / "mine"), Identity.load(tmp_path / "other")
    signature = mine.sign(b"words")
    assert verify(mine.public_key, signature, b"words")
    assert not verify(mine.public_key, signature, b"other words")
    assert not verify(other.public_key, signature, b"words")
    assert not verify(mine.public_key, signature[:-1], b"words")
    assert not verify(b"no key", signature, b"words")


def test_the_peer_id_is_libp2ps() -> None:
    """The test vector of libp2p's specification of peer ids."""
    public_key = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert peer_id_of(public_key) == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
    assert len(peer_id_of(bytes(32))) == 52


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o610])
def test_a_key_that_others_can_use_is_refused_with_the_mend(tmp_path: Path, mode: int) -> None:
    Identity.load(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load(tmp_path / "key")


@pytest.mark.parametrize("damage", [bytes.hex, lambda raw: raw[:-1], lambda raw: raw + b"x", lambda raw: b""])
def test_a_damaged_key_is_refused_by_name_and_kept(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "key"
    Identity.load(path)
    raw = damage(path.read_bytes())  # type: ignore[operator]
    path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    with pytest.raises(IdentityError, match=f"{path} is damaged"):
        Identity.load(path)
    assert path.exists()


def test_one_changed_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "key"
    Identity.load(path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        with pytest.raises(IdentityError):
            Identity.load(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError):
        Identity.load(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(IdentityError, match="not a file"):
        Identity.load(tmp_path / "pipe")
    (tmp_path / "file").touch()
    with pytest.raises(IdentityError, match="cannot use"):
        Identity.load(tmp_path / "file" / "key")


def test_the_secret_is_not_shown(tmp_path: Path) -> None:
    assert "Ed25519" not in repr(Identity.load(tmp_path / "key"))
