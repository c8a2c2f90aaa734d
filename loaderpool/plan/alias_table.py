"""Alias tables: draw an item by its weight in constant time.

Each of the n items has a cell of the same probability, which is divided into levels. The lower
levels of a cell, up to a threshold, draw its own item. The others draw another item, the *alias*.
The weight of an item determines how many levels draw it. A *light* item has fewer levels than a
cell. A *heavy* item has at least as many, and its surplus fills the cells of light items. If the
last of these cells needs more than the surplus, the heavy item fills that cell anyway. The next
heavy item then fills the gap in the heavy item's own cell:

```
    levels     1    5    3    3       a cell has 3 levels, and 2 are missing in cell 0
    cell     |011| |111| |222| |333|  threshold of cell 0: 1, alias: 1
```

Light and heavy items are paired in the order of the source. Running sums of the missing levels of
light items, and of the surpluses of heavy items, determine which heavy item fills which cell. So
NumPy pairs whole chunks of items. A table is the same on every machine.

Sources: Walker, "An Efficient Method for Generating Discrete Random Variables with General
Distributions", 1977; for the order of pairs, Hübschle-Schneider and Sanders, "Parallel Weighted
Random Sampling", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_Integers = npt.NDArray[np.int64]
# All cells together have about 2**62 levels. Sums of levels fit int64.
_LEVELS_BITS = 62
# Items of a chunk. Smaller: more calls of NumPy. Larger: the allocator maps new pages for each
# array, and their page faults take longer than the calls.
_CHUNK = 1 << 15
# Number of weights that are added at once. Another number rounds sums differently, which may change
# tables, and with them the items of an epoch.
_COLUMNS = 1 << 12
# Weights are scaled first if the exponent of the largest one is above this, or below its negative.
# Otherwise a sum or the factor might overflow.
_MOST_EXPONENT = 400


def alias_table(
    weights: npt.NDArray[Any], chunk: int = _CHUNK, empty: Callable[..., _Integers] = np.empty
) -> npt.NDArray[np.uint64]:
    """Return the alias table of weights, from which `chosen` draws.

    Args:
        weights: number[items], finite, at least 0, and one above 0.
        chunk: number of items that are paired at once. The table does not depend on it.
        empty: returns the array for the table, as `numpy.empty`.

    Returns:
        uint64[items]: the alias of each cell in the low bits, and the threshold above them. The
        probabilities agree with the weights to 14 digits. Items of weight 0 are never drawn.
    """
    count = len(weights)
    shift, levels = _item_bits(count), (1 << _LEVELS_BITS) // count
    item_levels = _ItemLevels(weights, levels, chunk)
    table = empty(count, np.int64)
    lights = item_levels.items(is_heavy=False)
    # The current chunk of light items, their thresholds, and running sums of their missing levels.
    # `lacks` begins with the sum before the chunk. Light items before `at` have an alias already.
    light, kept, lacks, at = _NONE, _NONE, np.zeros(1, np.int64), 0
    heavy, given, waiting = np.array([item_levels.largest]), 0, _NONE
    for heavy, gives in item_levels.items(is_heavy=True):
        gives -= levels
        gives[0] += given
        np.add.accumulate(gives, out=gives)
        given, done = int(gives[-1]), 0
        # The last heavy item of the previous chunk had itself as alias, in place of this one.
        table[waiting] += heavy[0] - waiting
        following = np.append(heavy[1:], heavy[-1])
        while True:
            # Take the light cells that this chunk can fill, and the heavy items that are without
            # surplus after them.
            stop = at + int(lacks[at:-1].searchsorted(given))
            lacking = lacks[stop]
            ended = done + int(gives[done:].searchsorted(lacking, side="right"))
            # The first heavy item with surplus left fills the cell of a light item.
            givers, before = _ranks(lacks[at:stop], gives[done:ended])
            givers += done
            entries = heavy.take(givers)
            entries |= kept[at:stop]
            table[light[at:stop]] = entries
            # Each of these heavy items may have put too much into its last light cell.
            entries = gives[done:ended] + levels
            entries -= lacks[before + at]
            entries <<= shift
            entries |= following[done:ended]
            table[heavy[done:ended]] = entries
            at, done = stop, ended
            block = None if done == len(heavy) else next(lights, None)
            if block is None:
                break
            (light, kept), at = block, 0
            lacks = np.add.accumulate(np.append(lacking, levels - kept))
            kept <<= shift
        waiting = heavy[done - 1 : done]
        if done < len(heavy):  # because of rounding, no light cell needs the surplus of these
            table[heavy[done:]] = (levels << shift) | heavy[done:]
            waiting = _NONE
    # Because of rounding, a few levels may still be missing. The last heavy item fills them.
    last = int(heavy[-1])
    table[last] = (levels << shift) | last
    table[light[at:]] = kept[at:] | last
    for light, kept in lights:
        table[light] = (kept << shift) | last
    return table.view(np.uint64)


def chosen(table: npt.NDArray[np.uint64], bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the item that each random number draws from an alias table.

    Args:
        table: the alias table.
        bits: uint64[n], uniform from 0 to below 2**64.
    """
    count = len(table)
    shift = np.uint64(_item_bits(count))
    levels, cells = np.divmod(bits, np.uint64(count))
    entries = table[cells]
    # Drop two of the 64 random bits, because all levels together have 62 bits.
    is_own = levels >> np.uint64(64 - _LEVELS_BITS) < entries >> shift
    alias = entries & ((np.uint64(1) << shift) - np.uint64(1))
    return np.where(is_own, cells, alias)


_NONE = np.empty(0, np.int64)


def _item_bits(count: int) -> int:
    """Return how many bits the largest item number of `count` items takes."""
    return (count - 1).bit_length()


def _ranks(lacks: _Integers, gives: _Integers) -> tuple[_Integers, _Integers]:
    """Return the rank of each number of two ascending arrays in the other array.

    The rank of x in `gives` is the number of `gives` that are at most x. The rank of x in `lacks`
    is the number of `lacks` that are below x.
    """
    # A stable sort merges two sorted arrays. It takes a fifth of the time of two binary searches.
    is_give = np.concatenate((gives, lacks)).argsort(kind="stable") < len(gives)
    of_lacks, of_gives = np.flatnonzero(~is_give), np.flatnonzero(is_give)
    of_lacks -= np.arange(len(lacks))
    of_gives -= np.arange(len(gives))
    return of_lacks, of_gives


class _ItemLevels:
    """Number of levels that draw each item, in proportion to its weight.

    The numbers are computed chunk by chunk.

    Attributes:
        largest: item with the largest weight.

    Args:
        weights: weights of the items.
        levels: number of levels in a cell.
        chunk: number of items in a chunk.
    """

    def __init__(self, weights: npt.NDArray[Any], levels: int, chunk: int) -> None:
        self._weights, self._chunk = weights, chunk
        self._numbers = np.empty(chunk)  # reused
        # The least float64 of a heavy item. float64 has not all integers above 2**53.
        self._least = float(levels)
        if self._least < levels:
            self._least = math.nextafter(self._least, math.inf)
        self.largest = int(weights.argmax())
        self._exponent = math.frexp(float(weights[self.largest]))[1]
        self._factor = len(weights) * levels / self._total()

    def _total(self) -> float:
        """Return the sum of all weights, which is the same on every machine.

        The order in which `numpy.sum` adds may depend on the machine. So this method adds rows of
        `_COLUMNS` weights to one row of sums, and then accumulates that row from left to right.
        """
        sums = np.zeros(_COLUMNS)
        for start in range(0, len(self._weights), _COLUMNS):
            part = self._scaled(slice(start, start + _COLUMNS))
            sums[: len(part)] += part
        return float(np.add.accumulate(sums)[-1])

    def _scaled(self, items: slice) -> npt.NDArray[Any]:
        part = self._weights[items]
        if abs(self._exponent) > _MOST_EXPONENT:
            return np.ldexp(part.astype(np.float64), -self._exponent)
        return part

    def items(self, is_heavy: bool) -> Iterator[tuple[_Integers, _Integers]]:
        """Yield the light or heavy items of each chunk, and their numbers of levels.

        Chunks without such items are left out.
        """
        find = np.greater_equal if is_heavy else np.less
        for start in range(0, len(self._weights), self._chunk):
            part = self._scaled(slice(start, start + self._chunk))
            numbers = self._numbers[: len(part)]
            np.multiply(part, self._factor, out=numbers, dtype=np.float64)
            found = np.flatnonzero(find(numbers, self._least))
            if found.size:
                levels = numbers.take(found).astype(np.int64)
                found += start
                yield found, levels
