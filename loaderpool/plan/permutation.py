"""Random orders: permutations of any length, and shuffling of streams in a window.

A permutation computes the number at any position directly and stores no order. A number below
`size` is split into a low half of `low_bits` bits and a high half below `high_count`. Rounds change
the halves in turn, each by a keyed hash of the other. Every round can be undone, so all of them
together can be undone too. This is a Feistel network, a bijection.

```
    high ──⊞─────────●── …      ⊞: high = (high + hash(low)) mod high_count
           │         │
    low  ──●─────────⊕── …      ⊕: low ^= hash(high), its topmost bits
```

The network permutes `high_count << low_bits` numbers, a few more than `size`. A result that is too
large goes through the network again until it is below `size` (cycle walking), so a bijection of
`range(size)` remains. Only the low half is a power of two. So the excess is below `2**low_bits`,
which is about the root of `size`, and walking is rare.

Halves of a few bits have few round functions, and some orders of three or five items would be more
frequent than others. So up to `TABLE_SIZE`, the order is that of a hash of each position, stored as
a table.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. There the three are
called prefix cipher (the table), cycle-walking cipher and generalized Feistel cipher.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from loaderpool.system.hashes import blake2b, shake_256

_Item = TypeVar("_Item")

MAX_SIZE = 1 << 62
"""Largest size. Both halves have at most 32 bits, so a half plus a hash fits 64 bits."""

TABLE_SIZE = 1 << 12
"""Largest size for which a table of 8 bytes per position is kept.

Smaller: the network has halves of fewer bits, see `_ROUNDS`. Larger: the table takes more memory,
and more than the current 0.3 ms to make.
"""

_ROUNDS = 6
"""Number of rounds, even: half of them change the high half and half the low one.

Smaller: neighbours have the same high half, and they stay neighbours if no round separates them.
With four rounds, that is 1.8 times as likely as by chance for 1024 numbers (measured). With six,
the excess is about `2**-low_bits` (estimated): 1.6 % just above `TABLE_SIZE`, 0.1 % at a million.
Larger: each round takes some 5 us for a batch of 32, which takes 28.
"""

# Constants of SplitMix64: difference between two states; then shifts and factors that mix a state.
_GAP, _LAST_SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(31)
_MIXES = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
# Positions that are permuted at once. Smaller: an epoch takes longer. Larger: temporary arrays take
# more memory.
_BLOCK = 1 << 16
# Number of random places drawn at once. Smaller: more calls of NumPy. Larger: a short stream draws
# places that it never needs.
_DRAWN = 1024


class Permutation:
    """Bijection of `range(size)` that depends only on `size` and `key`.

    It is the same on every machine and NumPy version. It takes some kilobytes at most, for any
    size, and never changes. Threads may share it.

    Args:
        size: how many numbers are permuted, 1 to `MAX_SIZE`.
        key: any number of up to 128 bits; similar keys give unrelated orders.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        seed = key.to_bytes(16, "little")
        self._table: npt.NDArray[np.int64] | None = None
        if size <= TABLE_SIZE:
            self._table = orders_by_hash(size, [key])[0]
        low_bits = (size - 1).bit_length() // 2
        # A table needs no rounds.
        # The words are 0-d arrays: as ufunc operands they cost half as much as NumPy scalars, and
        # they never change the dtype.
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
            positions: int64[n], each 0 to size - 1, in any order, repeated or not. It is not
                changed.

        Raises:
            IndexError: a position is negative or not below the size.
        """
        values = positions.astype(np.uint64)
        # As uint64, a negative position is very large, so one comparison finds both kinds.
        if values.size and values.max() >= self._size:
            raise IndexError(f"a position is not in range({self._size})")
        if self._table is not None:
            return self._table[positions]
        values = self._network(values)
        while values.size and values.max() >= self._size:  # on average, at most 1/64 of the values
            outside = values >= self._size
            values[outside] = self._network(values[outside])
        return values.view(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Apply all rounds. The overflow of the uint64 operations is the intended mod 2**64."""
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
    """Yield an offset and two odd factors of 64 bits for each round, hashed from the whole seed."""
    stream = shake_256(b"loaderpool network" + seed).digest(24 * _ROUNDS)
    for offset, factor, spread in struct.iter_unpack("<3Q", stream):
        yield offset, factor | 1, spread | 1


def orders_by_hash(size: int, keys: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return range(size) sorted by 64 hashed bits each, for each key: int64[keys, size].

    All orders are equally likely (ties: below one in 2**40).
    """
    seeds = (b"loaderpool table" + key.to_bytes(16, "little") for key in keys)
    stream = b"".join(shake_256(seed).digest(8 * size) for seed in seeds)
    return np.frombuffer(stream, "<u8").reshape(-1, size).argsort(axis=1, kind="stable")


@functools.lru_cache(maxsize=8)
def permutation(size: int, seed: int, epoch: int) -> Permutation:
    """Return the order of an epoch.

    The orders of the few epochs in progress are kept: this one, the next one, other passes.
    """
    return Permutation(size, stream_key("shuffle", seed, epoch))


def stream_key(purpose: str, seed: int, epoch: int) -> int:
    """Return 128 well-mixed bits, unrelated for any two different (purpose, seed, epoch).

    The purpose is a word without spaces, so no two triples have the same text. The others are any
    integers.
    """
    digest = blake2b(
        f"{purpose} {seed} {epoch}".encode(), digest_size=16, person=b"loaderpool"
    ).digest()
    return int.from_bytes(digest, "little")


def permuted_blocks(size: int, seed: int, epoch: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the items of a shuffled epoch, in consecutive blocks of positions."""
    order = permutation(size, seed, epoch)
    for start in range(0, size, _BLOCK):
        yield order.take(np.arange(start, min(size, start + _BLOCK)))


def random_bits(key: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return a random number of 64 bits for each position.

    The generator is SplitMix64. Its first state is the low 64 bits of the key. Position p gets the
    output for the state after p steps. The numbers are the same on every machine and NumPy version.
    A generator of NumPy would take three times as long for a batch, because each batch needs a new
    one.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.

    Args:
        key: number from `stream_key`.
        positions: int64[n], in any order.
    """
    bits = positions.astype(np.uint64)
    bits *= _GAP
    bits += np.uint64(key & ((1 << 64) - 1))
    for shift, factor in _MIXES:
        bits ^= bits >> shift
        bits *= factor
    bits ^= bits >> _LAST_SHIFT
    return bits


def shuffled(items: Iterator[_Item], window: int, seed: int, epoch: int) -> Iterator[_Item]:
    """Yield all items, each moved randomly within a window of `window` items.

    The order is the same for the same seed and epoch.
    """
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
