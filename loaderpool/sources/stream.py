"""Sources that are read once, in order, in one place: database cursors, message queues, files of lines, generators.

An item has no index that could be asked for. Its *position* is its number in the stream (behind the shuffle window, if
there is one), and what a batch holds follows from that alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from loaderpool.errors import SourceError
from loaderpool.plan.base import BasePlan
from loaderpool.plan.order import Plan
from loaderpool.plan.window import shuffled
from loaderpool.system import clock
from loaderpool.system.long_work import LongWork

_TOLD_NS = 50_000_000  # from one word about how far a way is to the next, at least


class StreamSource:
    """An iterator or an iterable, as the user gave it.

    Attributes:
        was_opened: whether it was read, or begun to be.

    Args:
        items: what is iterated.
    """

    def __init__(self, items: Any) -> None:
        self.items = items
        self.was_opened = False

    @property
    def is_one_shot(self) -> bool:
        """Whether it can be read only once: an iterator, where an iterable begins again each time."""
        return isinstance(self.items, Iterator)

    @property
    def kind(self) -> str:
        """What it is, for messages."""
        return type(self.items).__name__

    def open(self) -> Iterator[Any]:
        """The items, from the first one on.

        Raises:
            SourceError: it was read before and cannot be read again.
        """
        if self.is_one_shot and self.was_opened:
            raise SourceError(
                f"source is a {self.kind}, which can be read only once, and an earlier pass has read it: for several "
                "epochs pass an object whose __iter__ begins anew each time"
            )
        self.was_opened = True
        return iter(self.items)

    def serves(self, read_for: int, epoch: int, plan: BasePlan, window: int) -> bool:
        """Whether what is read ahead, from the first item on for one epoch, is what a pass of another one needs.

        Args:
            read_for: the epoch that it is read for.
            epoch: of the pass.
            plan: of the pass's batches.
            window: items that are shuffled among each other, in an order that the epoch keys; 0 for none.
        """
        return not plan.begins_at and (epoch == read_for or not window or self.is_one_shot)

    def __repr__(self) -> str:
        return f"<stream of a {self.kind}>"


def nothing_there(drops_remainder: bool) -> str:
    """Return what is said of a stream that gives no batch."""
    if drops_remainder:
        return "the stream ended before its first batch was full, and drop_remainder=True leaves out what is smaller"
    return "source is empty: the stream ended before its first item"


def _read_up_to(items: Iterator[Any], place: int) -> int:
    """Read items and drop them; returns how many there were."""
    position, wanted = 0, 1
    with LongWork(f"loaderpool: reading the stream up to item {place:,}, where it goes on", place) as work:
        while position < place:
            began_ns = clock.monotonic_ns()
            read = sum(1 for _ in itertools.islice(items, min(wanted, place - position)))
            position += read
            if not read:
                break
            work.reach(position)
            if clock.monotonic_ns() - began_ns < _TOLD_NS:  # of items that come fast not many words are made
                wanted *= 2
    return position


def read_batches(
    stream: StreamSource, plan: Plan, *, window: int, seed: int, epoch: int
) -> Iterator[tuple[int, list[Any]]]:
    """The items of each batch of this shard, and the position of the first one; positions in a batch are consecutive.

    Each shard reads the whole stream and keeps its rows. Items before the plan's start are read and dropped.

    Args:
        stream: what is read; opened at the first step.
        plan: an open one.
        window: items that are shuffled among each other; 0 for none.
        seed: keys that order.
        epoch: keys it, too.

    Raises:
        SourceError: the stream ends long before the plan's start.
        Exception: whatever reading an item raises; items of an unfinished batch are lost.
    """
    items = stream.open()
    if window:
        items = shuffled(items, window, seed, epoch)
    position = _read_up_to(items, plan.start)
    rows = plan.most_rows
    width, mine = rows * plan.num_shards, rows * plan.shard_index
    if position <= plan.start - width:
        raise SourceError(
            f"the stream has only {position} items, and the place to go on from is behind item {plan.start}: it is not "
            "the stream that the state was saved for, or has become shorter"
        )
    if position < plan.start:  # the place is behind its last batch, which was a smaller one
        return
    while len(block := list(itertools.islice(items, width))) == width:
        yield position + mine, block[mine : mine + rows]
        position += width
        del block  # or it would be held while the next one is read
    tail = plan.closed(position + len(block)).after(position)
    if tail.batches_per_epoch:
        first, *others = tail.positions(epoch, 0).tolist()
        yield first, block[first - position : first - position + 1 + len(others)]
