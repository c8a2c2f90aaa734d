"""Random orders: of any length, where each position is known at once and nothing is kept; and of streams, in a window.

A number below `size` is split into a low half of `low_bits` bits and a high half below `high_count`. Rounds change
the halves in turn, each by a keyed hash of the other, so that every round, and hence the whole, can be undone: a
Feistel network, a bijection.

```
    high ──⊞─────────●── …      ⊞: high = (high + hash(low)) mod high_count
           │         │
    low  ──●─────────⊕── …      ⊕: low ^= hash(high), its topmost bits
```

The network permutes `high_count << low_bits` numbers, a few more than `size`; a result that is too large goes through
it again until it fits (cycle walking), which leaves a bijection of `range(size)`. As only the low half is a power of
two, the excess is below `2 ** low_bits`, about the root of `size`, so that walking is rare.

Halves of a few bits have only a handful of round functions, and some orders of three or five items would come up more
often than others. Up to `TABLE_SIZE` the order is therefore that of a hash of each position, kept as a table.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, where the three are called prefix
cipher (the table), cycle-walking cipher and generalized Feistel cipher.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_Item = TypeVar("_Item")

MAX_SIZE = 1 << 62
"""Largest size: both halves stay within 32 bits, so that no 64-bit sum of a half and a hash overflows."""

TABLE_SIZE = 1 << 12
"""Up to here a table of 8 bytes a position is kept. Smaller: the network meets halves of fewer bits, see `_ROUNDS`.
Larger: the table takes more memory, and making it more than the 0.3 ms it takes now."""

_ROUNDS = 6
"""Even: half of them change the high half and half the low one. Fewer: neighbours have the same high half, and where
all rounds that could part them leave it so, they stay neighbours. With four rounds that makes it 1.8 times as likely as
by chance for 1024 numbers (measured); with six the excess is about `2 ** -low_bits` (estimated): 1.6 % just above
`TABLE_SIZE`, 0.1 % at a million. More: each costs some 5 us for a batch of 32, which takes 28."""

# Random places drawn at once. Fewer: each costs a call of NumPy's. More: a short stream pays for some it never needs.
_DRAWN = 1024


class Permutation:
    """A bijection of `range(size)`, set by `size` and `key` alone, the same on every machine and NumPy version.

    It holds some kilobytes at most, whatever its size, and never changes; threads may share it.

    Args:
        size: how many numbers are permuted, 1 to `MAX_SIZE`.
        key: any number of up to 128 bits; nearby keys give unrelated orders.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        seed = key.to_bytes(16, "little")
        self._table = _sorted_by_hash(size, seed) if size <= TABLE_SIZE else None
        low_bits = (size - 1).bit_length() // 2
        # With a table there are no rounds: a mix makes many small permutations, and their keys would be half the time.
        # 0-d arrays: as ufunc operands they cost half of what NumPy scalars do, and they never change the dtype.
        self._rounds = [] if self._table is not None else [
            tuple(np.array(word, np.uint64) for word in words) for words in _round_keys(seed)
        ]  # fmt: skip
        self._numbers = tuple(
            np.array(word, np.uint64)
            for word in (32, 64 - low_bits, low_bits, (1 << low_bits) - 1, -(-size >> low_bits))
        )

    def take(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers at `positions`, in a new array.

        Args:
            positions: int64[n], each 0 to size - 1, in any order, repeated or not; left as it is.

        Raises:
            IndexError: a position is negative or not below the size.
        """
        values = positions.astype(np.uint64)
        # As uint64 a negative position is a huge one, so that one look finds both kinds.
        if values.size and values.max() >= self._size:
            raise IndexError(f"a position is not in range({self._size})")
        if self._table is not None:
            return self._table[positions]
        values = self._network(values)
        while values.size and values.max() >= self._size:  # at most one in 64, on average
            outside = values >= self._size
            values[outside] = self._network(values[outside])
        return values.view(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Go through all rounds, by uint64 operations whose overflow is the wanted mod 2**64."""
        half_word, to_low, low_bits, low_mask, high_count = self._numbers
        low, high = values & low_mask, values >> low_bits
        mixed, folded = np.empty_like(low), np.empty_like(low)
        for number, (offset, factor, spread) in enumerate(self._rounds):
            np.add(high if number & 1 else low, offset, mixed)
            np.multiply(mixed, factor, mixed)
            np.right_shift(mixed, half_word, folded)
            np.bitwise_xor(mixed, folded, mixed)
            np.multiply(mixed, spread, mixed)
            if number & 1:
                np.right_shift(mixed, to_low, mixed)
                np.bitwise_xor(low, mixed, low)
            else:
                np.right_shift(mixed, half_word, mixed)
                np.add(high, mixed, high)
                np.remainder(high, high_count, high)
        np.left_shift(high, low_bits, high)
        np.bitwise_or(high, low, high)
        return high


def _round_keys(seed: bytes) -> Iterator[tuple[int, int, int]]:
    """Return for each round an offset and two odd factors, 64 bits each, all of them hashed from the whole seed."""
    import hashlib  # with OpenSSL, which `import loaderpool` need not wait for

    stream = hashlib.shake_256(b"loaderpool network" + seed).digest(24 * _ROUNDS)
    for offset, factor, spread in struct.iter_unpack("<3Q", stream):
        yield offset, factor | 1, spread | 1


def _sorted_by_hash(size: int, seed: bytes) -> npt.NDArray[np.int64]:
    """range(size) sorted by 64 hashed bits each: all orders are equally likely (ties: below one in 2**40)."""
    import hashlib

    stream = hashlib.shake_256(b"loaderpool table" + seed).digest(8 * size)
    return np.frombuffer(stream, "<u8").argsort(kind="stable").astype(np.int64)


@functools.lru_cache(maxsize=8)
def permutation(size: int, seed: int, epoch: int) -> Permutation:
    """An epoch's order, kept for the few epochs that are under way at once (this one, the next, other passes)."""
    return Permutation(size, stream_key("shuffle", seed, epoch))


def stream_key(purpose: str, seed: int, epoch: int) -> int:
    """Return 128 well-mixed bits, unrelated for any two different (purpose, seed, epoch).

    The purpose is a word without spaces, so that no two triples read the same; the others are any integers.
    """
    import hashlib  # with OpenSSL, which `import loaderpool` need not wait for

    digest = hashlib.blake2b(
        f"{purpose} {seed} {epoch}".encode(), digest_size=16, person=b"loaderpool"
    ).digest()
    return int.from_bytes(digest, "little")


def shuffled(items: Iterator[_Item], window: int, seed: int, epoch: int) -> Iterator[_Item]:
    """All the items, each moved by chance within a window of so many; the same order for the same seed and epoch."""
    generator = np.random.Generator(np.random.Philox(key=stream_key("window", seed, epoch)))
    held: list[_Item] = []
    places: list[Any] = []
    for item in items:
        if len(held) < window:
            held.append(item)
            continue
        if not places:
            places = generator.integers(window, size=_DRAWN).tolist()
        place = places.pop()
        held[place], item = item, held[place]
        yield item
    for place in generator.permutation(len(held)).tolist():
        yield held[place]
