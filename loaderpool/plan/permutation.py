"""A shuffled order of any length, of which any position is known at once and nothing is kept.

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

import operator
import struct
from collections.abc import Iterator
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError

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

_KEY_BITS = 128
_WORD = (1 << 64) - 1


class Permutation:
    """A bijection of `range(size)`, set by `size` and `key` alone, the same on every machine and NumPy version.

    It holds some kilobytes at most, whatever its size, and never changes; threads may share it.

    Args:
        size: how many numbers are permuted, 1 to `MAX_SIZE`.
        key: any number of up to 128 bits; nearby keys give unrelated orders.

    Raises:
        ArgumentError: `size` or `key` is out of its range.
    """

    __slots__ = ("_high_count", "_low_bits", "_rounds", "_scalars", "_size", "_table", "_vectors")

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise ArgumentError(f"size must be 1 to 2**62, got {size}")
        if not 0 <= key < 1 << _KEY_BITS:
            raise ArgumentError(f"key must be a non-negative number of at most {_KEY_BITS} bits, got {key}")
        self._size = size
        seed = key.to_bytes(_KEY_BITS // 8, "little")
        self._table = _sorted_by_hash(size, seed) if size <= TABLE_SIZE else None
        self._low_bits = (size - 1).bit_length() // 2
        self._high_count = -(-size >> self._low_bits)
        # With a table there are no rounds: a mix makes many small permutations, and their keys would be half the time.
        self._rounds = tuple(_round_keys(seed)) if self._table is None else ()
        # 0-d arrays: as ufunc operands they cost half of what NumPy scalars do, and they never change the dtype.
        self._vectors = tuple(tuple(np.array(word, np.uint64) for word in words) for words in self._rounds)
        self._scalars = tuple(
            np.array(word, np.uint64)
            for word in (32, 64 - self._low_bits, self._low_bits, (1 << self._low_bits) - 1, self._high_count)
        )

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: SupportsIndex) -> int:
        """Return the number at `position`, 0 to size - 1.

        Raises:
            IndexError: `position` is negative or not below the size.
        """
        value = operator.index(position)
        if not 0 <= value < self._size:
            raise IndexError(f"position {value} is not in range({self._size})")
        if self._table is not None:
            return int(self._table[value])
        return self._walk(self._network(value))

    def __iter__(self) -> Iterator[int]:
        """All numbers in their order, made some at a time."""
        for start in range(0, self._size, 1024):
            yield from self.take(np.arange(start, min(start + 1024, self._size), dtype=np.int64)).tolist()

    def take(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers at `positions`, the same as `[self[p] for p in positions]` but some 50 times faster.

        Args:
            positions: int64[n], each 0 to size - 1, in any order, repeated or not; left as it is.

        Returns:
            int64[n], a new array.

        Raises:
            IndexError: a position is negative or not below the size.
        """
        values = positions.astype(np.uint64)
        if not values.size:
            return values.view(np.int64)
        # As uint64 a negative position is a huge one, so that one look finds both kinds.
        if values.max() >= self._size:
            raise IndexError(f"a position is not in range({self._size})")
        if self._table is not None:
            return self._table[positions]
        values = self._networks(values)
        if values.max() >= self._size:
            # One by one: they are too few, at most one in 64 on average, to repay a vectorised trip.
            for place in np.flatnonzero(values >= self._size).tolist():
                values[place] = self._walk(int(values[place]))
        return values.view(np.int64)

    def position_of(self, number: SupportsIndex) -> int:
        """Return where `number`, 0 to size - 1, stands: `self[self.position_of(number)] == number`.

        Raises:
            IndexError: `number` is negative or not below the size.
        """
        value = operator.index(number)
        if not 0 <= value < self._size:
            raise IndexError(f"number {value} is not in range({self._size})")
        if self._table is not None:
            return int(np.flatnonzero(self._table == value)[0])
        value = self._undone(value)
        while value >= self._size:  # the walk that led here, back
            value = self._undone(value)
        return value

    def _walk(self, value: int) -> int:
        """Return what a result of the network becomes: itself, or where it is too large the next that is not."""
        while value >= self._size:
            value = self._network(value)
        return value

    def _network(self, value: int) -> int:
        """Go through all rounds, in Python's integers."""
        low, high = value & ((1 << self._low_bits) - 1), value >> self._low_bits
        for number in range(_ROUNDS):
            mixed = self._mixed(number, high if number & 1 else low)
            if number & 1:
                low ^= mixed >> (64 - self._low_bits)
            else:
                high = (high + (mixed >> 32)) % self._high_count
        return high << self._low_bits | low

    def _undone(self, value: int) -> int:
        """Go back through all rounds: each changes one half by a hash of the other, which is still there."""
        low, high = value & ((1 << self._low_bits) - 1), value >> self._low_bits
        for number in reversed(range(_ROUNDS)):
            mixed = self._mixed(number, high if number & 1 else low)
            if number & 1:
                low ^= mixed >> (64 - self._low_bits)
            else:
                high = (high - (mixed >> 32)) % self._high_count
        return high << self._low_bits | low

    def _mixed(self, number: int, half: int) -> int:
        """Return a round's hash of one half, 64 bits."""
        offset, factor, spread = self._rounds[number]
        mixed = (half + offset) * factor & _WORD
        return (mixed ^ mixed >> 32) * spread & _WORD

    def _networks(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Go through all rounds with many values, by uint64 operations whose overflow is the wanted mod 2**64."""
        half_word, to_low, low_bits, low_mask, high_count = self._scalars
        low, high = values & low_mask, values >> low_bits
        mixed, folded = np.empty_like(low), np.empty_like(low)
        for number, (offset, factor, spread) in enumerate(self._vectors):
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
