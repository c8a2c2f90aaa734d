"""Orders by the lengths of items: batches of a token budget, and sequences packed into rows.

Both shuffle the items of an epoch, unless `shuffle=False`, and cut them into windows of a fixed
number of items. Only items of one window share a batch or row:

```
    order        5 2 9 1 │ 7 3 8 3      lengths, in windows of four items
    budget of 12 9│5 2│1 │ 8│7│3 3      longest first; a batch costs its rows times its longest item
    rows of 10   1 9│5 2 │ 7 3│8│3      the items of a row have at most 10 in total
```

Then the batches or rows of each window are shuffled. Otherwise long ones would come first.

Runs in: the main process, when an epoch begins. The result depends only on lengths, settings, seed
and epoch.
"""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt

from loaderpool.plan.batches import joined_ranges
from loaderpool.plan.permutation import permuted_blocks, stream_key

_Integers = npt.NDArray[np.int64]


def token_batches(
    lengths: _Integers,
    max_tokens: int,
    max_rows: int | None,
    window: int,
    *,
    seed: int,
    epoch: int,
    shuffle: bool,
) -> tuple[_Integers, _Integers]:
    """Return batches whose padded size is at most `max_tokens`: their rows times the longest item.

    The last batch of a window has the remaining items, and is usually smaller. The shuffle keeps it
    at the end of its window. So the first batch of an epoch, which determines the size of buffers,
    is full.

    Args:
        lengths: Length of each item of the source, 0 to `max_tokens`.
        max_tokens: Largest number of tokens in a batch, padding included.
        max_rows: Largest number of rows in a batch; None: no limit.
        window: Number of items of a window.
        seed: Seed of the shuffle.
        epoch: Number of the epoch.
        shuffle: False: windows come in the order of the source, and the batches of each window from
            long to short items.

    Returns:
        The items in their new order, int64[items], and the end of each batch, int64[batches]. The
        longest item of a batch comes first.
    """
    items = _in_order(len(lengths), seed, epoch, shuffle)
    ordered = lengths[items]
    windows = np.arange(len(items)) // window
    by_length = np.lexsort((-ordered, windows))
    stops: list[int] = []
    is_rest: list[bool] = []
    most = np.maximum(1, max_tokens // np.maximum(1, ordered[by_length]))
    if max_rows is not None:
        most = np.minimum(most, max_rows)
    wanted, at = most.tolist(), 0
    for end in (*range(window, len(items), window), len(items)):
        while at < end:
            is_rest.append(at + wanted[at] > end)
            at = min(end, at + wanted[at])
            stops.append(at)
    ends = np.array(stops, np.int64)
    rows = np.diff(ends, prepend=0)
    if shuffle:
        keys = _random_keys("batches", seed, epoch, len(ends))
        shuffled = np.lexsort((keys, np.array(is_rest), windows[ends - 1]))
        by_length = by_length[joined_ranges((ends - rows)[shuffled], ends[shuffled])]
        ends = rows[shuffled].cumsum()
    return items[by_length], ends


def packed_rows(
    lengths: _Integers, capacity: int, window: int, *, seed: int, epoch: int, shuffle: bool
) -> tuple[_Integers, _Integers]:
    """Return rows of items. The total length of each row is at most `capacity`.

    No window has more rows than the algorithm first-fit-decreasing would need.

    Args:
        lengths: Length of each item of the source, 0 to `capacity`.
        capacity: Length of a row.
        window: Number of items of a window.
        seed: Seed of the shuffle.
        epoch: Number of the epoch.
        shuffle: False: items are not shuffled, and rows are sorted by their first item.

    Returns:
        The items in their new order, int64[items], and the end of each row, int64[rows]. The items
        of a row keep their order.
    """
    items = _in_order(len(lengths), seed, epoch, shuffle)
    ordered = lengths[items]
    rows = np.empty(len(items), np.int64)
    counts = [0]
    for start in range(0, len(items), window):
        found, count = _packed(ordered[start : start + window], capacity)
        rows[start : start + window] = found + counts[-1]
        counts.append(counts[-1] + count)
    if shuffle:
        windows = np.repeat(np.arange(len(counts) - 1), np.diff(counts))
        order = np.lexsort((_random_keys("rows", seed, epoch, counts[-1]), windows))
    else:
        order = np.unique(rows, return_index=True)[1].argsort()
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    rows = places[rows]
    return items[rows.argsort(kind="stable")], np.bincount(rows).cumsum()


def _in_order(size: int, seed: int, epoch: int, shuffle: bool) -> _Integers:
    """Return the items of an epoch, in the order of `Loader(shuffle=True)` or of the source."""
    return np.concatenate([*permuted_blocks(size, seed, epoch)]) if shuffle else np.arange(size)


def _random_keys(purpose: str, seed: int, epoch: int, size: int) -> npt.NDArray[np.uint64]:
    """Return random numbers that are the same on every machine and NumPy version."""
    keys: npt.NDArray[np.uint64] = np.random.Philox(
        key=stream_key(purpose, seed, epoch)
    ).random_raw(size)
    return keys


# ---- rows of one window ----


def _packed(lengths: _Integers, capacity: int) -> tuple[_Integers, int]:
    """Return the row of each item, and the number of rows.

    Best-fit-decreasing usually needs the fewest possible rows. If it needs more than the lower
    bound, try first-fit-decreasing as well, which takes four times as long.
    """
    found, count = _best_fit(lengths, capacity)
    if count > fewest_rows(lengths, capacity):
        fewer = _first_fit(lengths, capacity, count - 1)
        if fewer is not None:
            return fewer, int(fewer.max()) + 1
    return found, count


def _best_fit(lengths: _Integers, capacity: int) -> tuple[_Integers, int]:
    """Put each item, the longest first, into the fullest row that has space for it.

    Return the row of each item, and the number of rows.
    """
    order = (-lengths).argsort(kind="stable")
    spaces: list[int] = []  # the different sizes of free space that rows have, ascending
    rows_by_space: dict[int, list[int]] = {}  # rows with each size of free space
    rows: list[int] = []
    count = 0
    for length in lengths[order].tolist():
        at = bisect.bisect_left(spaces, length)
        if at == len(spaces):
            row, left = count, capacity - length
            count += 1
        else:
            space = spaces[at]
            left = space - length
            same = rows_by_space[space]
            row = same.pop()
            if not same:
                del spaces[at], rows_by_space[space]
        rows.append(row)
        if left in rows_by_space:
            rows_by_space[left].append(row)
        else:
            rows_by_space[left] = [row]
            bisect.insort(spaces, left)
    found = np.empty(len(lengths), np.int64)
    found[order] = rows
    return found, count


def _first_fit(lengths: _Integers, capacity: int, count: int) -> _Integers | None:
    """Put each item, the longest first, into the first row that has space for it.

    Return the row of each item, or None if `count` rows are not enough.
    """
    order = (-lengths).argsort(kind="stable")
    leaves = 1 << max(0, count - 1).bit_length()
    # A binary tree whose leaves are the rows' free spaces. Node n has the larger number of its
    # children, the nodes 2 * n and 2 * n + 1.
    largest = [capacity] * (2 * leaves)
    rows: list[int] = []
    for length in lengths[order].tolist():
        node = 1
        while node < leaves:
            node *= 2
            if largest[node] < length:
                node += 1
        if node - leaves >= count or largest[node] < length:
            return None
        rows.append(node - leaves)
        largest[node] -= length
        while node > 1:
            node //= 2
            space = max(largest[2 * node], largest[2 * node + 1])
            if largest[node] == space:
                break
            largest[node] = space
    found = np.empty(len(lengths), np.int64)
    found[order] = rows
    return found


def fewest_rows(lengths: _Integers, capacity: int) -> int:
    """Return a lower bound for the number of rows.

    Two items of more than half a row never share a row. Choose a length k of at most half a row,
    and ignore all shorter items. An item longer than `capacity - k` is then alone in its row. Each
    other item of more than half a row has a row with some free space. The items from k to half a
    row need the total of this space, and further rows if it is too small. Each k gives a lower
    bound. The result is the largest one.

    Source: Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem",
    1990 (the bound L2).
    """
    ascending = np.sort(lengths)
    half = int(ascending.searchsorted(capacity // 2, side="right"))
    least = np.append(0, ascending[:half])
    low = ascending.searchsorted(least)
    high = ascending.searchsorted(capacity - least, side="right")
    sums = np.append(0, ascending.cumsum())
    over = sums[high] - sums[low] - (high - half) * capacity
    return len(ascending) - half + max(0, -int((-over // capacity).min()))
