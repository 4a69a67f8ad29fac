"""A keyed shuffle of range(n) that needs no memory: every island computes any place of it alone.

A Feistel network over Z_a x Z_a with a = ceil(sqrt(n)) is a bijection of range(a * a). Values that land at n or above
are sent through again until they land below (cycle walking); that keeps it a bijection of range(n), and as a * a
exceeds n by less than 2 * a it happens rarely. Only wrapping 64-bit integers: bit-identical on every platform.
"""

import hashlib
import math

import numpy as np
import numpy.typing as npt

ROUNDS = 8
LARGEST = 2**62

_U64 = npt.NDArray[np.uint64]
_KEYED_BY = "diloco shuffle 1"  # another number here reorders the data of every run


def permute(positions: npt.ArrayLike, n: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return where each position of range(n) goes in this epoch, in the shape of `positions`."""
    if not 1 <= n <= LARGEST:
        raise ValueError(f"cannot shuffle {n} elements")
    given = np.asarray(positions, dtype=np.int64)
    if given.size and (given.min() < 0 or given.max() >= n):
        raise IndexError(f"positions must be in range({n})")
    side = np.uint64(math.isqrt(n - 1) + 1)
    keys = _round_keys(n, seed, epoch)
    places = _feistel(given.reshape(-1).astype(np.uint64), side, keys)
    while (outside := places >= np.uint64(n)).any():
        places[outside] = _feistel(places[outside], side, keys)
    return places.astype(np.int64).reshape(given.shape)


def over_epochs(positions: npt.NDArray[np.int64], n: int, seed: int | None) -> npt.NDArray[np.int64]:
    """Map positions, which continue over epochs, to range(n).

    Each epoch has an order of its own, if there is a seed.
    """
    epochs, places = np.divmod(positions, n)
    if seed is not None:
        for epoch in np.unique(epochs):
            places[epochs == epoch] = permute(places[epochs == epoch], n, seed, int(epoch))
    return places


def _feistel(values: _U64, side: np.uint64, keys: _U64) -> _U64:
    left, right = values // side, values % side
    for key in keys:
        left, right = right, (left + _mix(right ^ key) % side) % side
    return left * side + right


def _mix(x: _U64) -> _U64:
    """Apply the finaliser of SplitMix64; array products wrap modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(n: int, seed: int, epoch: int) -> _U64:
    digest = hashlib.sha512(f"{_KEYED_BY}: n={n} seed={seed} epoch={epoch}".encode()).digest()
    return np.frombuffer(digest, dtype="<u8", count=ROUNDS).astype(np.uint64)
