"""`Taken`: the parts of an epoch that later batches do not contain, as intervals.

A consumer takes an epoch from its beginning. Users may also leave out later parts, for example
after a spike of the loss (`Loader.skip_batches`). The taken part and the parts left out are
intervals of numbers. A number is a position, or a global batch if the order determines the batches.
A plan with buckets has such intervals for each bucket, because each bucket is taken in order.

```
    number    0        5     8     11          16         start = (5, 8, 11)
              ├─ taken ┼─────┼─out─┼────────────┤
    left               5 6 7       8  9  10 ...  12       numbers without those left out
```

A plan divides the numbers that are left into batches, as if no number was left out. So any number
of shards can share them. Messages and saved states contain the intervals as a *start*: the first
number that was not taken, then the bounds of each interval after it. With buckets, each of these is
one number for each bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Start = int | tuple[int, ...]
"""Taken part and left-out parts of an epoch, as `Taken` reads them; falsy: the epoch is whole."""

_Integers = npt.NDArray[np.int64]


class Taken:
    """Intervals of an epoch that were taken or left out.

    Attributes:
        first: First number that is left, for each bucket.
        left_out: How many numbers after `first` are left out, for each bucket.

    Args:
        start: The intervals, in the form that the module's docstring describes.
        buckets: Number of buckets; 1 if the plan has none.
    """

    def __init__(self, start: Start, buckets: int = 1) -> None:
        numbers = (start,) if isinstance(start, int) and start else start or (0,) * buckets
        rows = np.array(numbers, np.int64).reshape(-1, buckets)
        self.first: list[int] = rows[0].tolist()
        self._gaps: list[list[tuple[int, int]]] = [[] for _ in self.first]
        self.left_out = [0] * buckets
        if len(rows) == 1:
            return
        for bucket, bounds in enumerate(rows[1:].T.tolist()):
            gaps = self._gaps[bucket]
            for begin, end in sorted(zip(bounds[::2], bounds[1::2], strict=True)):
                if begin >= end:
                    continue
                if begin <= self.first[bucket]:
                    self.first[bucket] = max(end, self.first[bucket])
                elif gaps and begin <= gaps[-1][1]:
                    gaps[-1] = gaps[-1][0], max(end, gaps[-1][1])
                else:
                    gaps.append((begin, end))
            self.left_out[bucket] = sum(end - begin for begin, end in gaps)

    def gaps(self) -> Iterator[tuple[int, int, int]]:
        """Yield the bucket, the first number, and the end of each part left out after `first`."""
        for bucket, gaps in enumerate(self._gaps):
            for begin, end in gaps:
                yield bucket, begin, end

    def numbers(self, left: Any, bucket: int = 0) -> Any:
        """Convert numbers that are counted without the parts left out into numbers of the epoch.

        Args:
            left: The counted numbers: int64[n], or one integer.
            bucket: Bucket of these numbers.
        """
        for begin, end in self._gaps[bucket]:
            left = left + (end - begin) * (left >= begin)
        return left

    def start_at(self, left: list[int]) -> Start:
        """Return the start of the part of the epoch that begins at these numbers.

        Args:
            left: One number for each bucket, counted without the parts left out.
        """
        first = [int(self.numbers(each, bucket)) for bucket, each in enumerate(left)]
        rows = [first]
        most = max(map(len, self._gaps))
        for number in range(most):
            pairs = [
                gaps[number] if number < len(gaps) and gaps[number][1] > start else (start, start)
                for gaps, start in zip(self._gaps, first, strict=True)
            ]
            if any(begin < end for begin, end in pairs):
                rows += [list(bounds) for bounds in zip(*pairs, strict=True)]
        if len(first) == 1 and len(rows) == 1:
            return first[0]
        return tuple(number for row in rows for number in row)

    def without(self, begin: Start, end: Start) -> Start:
        """Return the start that also leaves out one more part of the epoch.

        Args:
            begin: Start of an epoch that was taken up to the beginning of the part.
            end: Start of an epoch that was taken up to the end of the part.
        """
        buckets = len(self.first)
        start = self.start_at(self.first)
        numbers = (start,) if isinstance(start, int) else start
        for bound in (begin, end):
            numbers += (bound,) if isinstance(bound, int) and buckets == 1 else _of(bound, buckets)
        joined = Taken(numbers, buckets)
        return joined.start_at(joined.first)


def _of(start: Start, buckets: int) -> tuple[int, ...]:
    return start if isinstance(start, tuple) and start else (0,) * buckets
