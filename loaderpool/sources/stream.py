"""Sources that are read once, in order, in one place: database cursors, message queues, files of lines, generators.

An item has no index that could be asked for. Its *position* is its number in the stream (behind the shuffle window, if
there is one), and what a batch holds follows from that alone.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from loaderpool.errors import ArgumentError, SourceError, brief
from loaderpool.plan.base import BasePlan, shuffled
from loaderpool.plan.order import Plan
from loaderpool.settings.checks import check_signature, whole_number
from loaderpool.system import clock

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
    from loaderpool.system.long_work import LongWork  # few streams go on in the middle

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


# ---- many files read at once, as `tf.data.Dataset.interleave` has it ----


def interleave(
    files: Sequence[Any],
    open_fn: Callable[[Any], Iterable[Any]],
    cycle_length: int = 8,
    block_length: int = 1,
    *,
    on_error: Literal["raise", "skip"] = "raise",
) -> Interleave:
    """Return a stream of the records of many files, in the order of a deterministic `tf.data.Dataset.interleave`.

    Records are read in one place; to read in all workers, use `Loader.from_generator(open_fn, shards=files)`.

    Args:
        files: what `open_fn` is called with, in this order.
        open_fn: `open_fn(file)` gives what iterates over the file's records.
        cycle_length: files that are open at once and take turns, at least 1.
        block_length: records that a file gives in its turn, at least 1.
        on_error: "skip" leaves out the rest of a file whose reading raises, and warns.
    """
    given = listed("files", files)
    if not callable(open_fn):
        raise ArgumentError(f"open_fn must be callable as open_fn(file), got {brief(open_fn)}")
    check_signature("open_fn", open_fn, "file", may_take=())
    if on_error not in ("raise", "skip"):
        raise ArgumentError(f'on_error must be "raise" or "skip" (the rest of that file), got {brief(on_error)}')
    return Interleave(
        given,
        open_fn,
        whole_number("cycle_length", cycle_length, at_least=1, hint="files that are open at once"),
        whole_number("block_length", block_length, at_least=1, hint="records that a file gives in its turn"),
        on_error,
    )


class Interleave:
    """What `interleave` gives: iterated from the start each time.

    Attributes:
        files: the files.
        open_fn: reads one.
        cycle_length: how many are open at once.
        block_length: records that each gives in its turn.
    """

    def __init__(
        self,
        files: list[Any],
        open_fn: Callable[[Any], Iterable[Any]],
        cycle_length: int,
        block_length: int,
        on_error: str,
    ) -> None:
        self.files, self.open_fn = files, open_fn
        self.cycle_length, self.block_length = cycle_length, block_length
        self._on_error = on_error

    def __iter__(self) -> Iterator[Any]:
        files = iter(self.files)
        places: list[Generator[Any] | None] = [None] * min(self.cycle_length, len(self.files))
        at = given = open_count = 0
        has_more = True
        try:
            while has_more or open_count:
                place = places[at]
                if place is not None:
                    record = next(place, _END)
                    if record is not _END:
                        given += 1
                        if given == self.block_length:
                            at, given = (at + 1) % len(places), 0
                        yield record
                        continue
                    places[at] = None
                    open_count -= 1
                elif has_more:
                    file = next(files, _END)
                    has_more = file is not _END
                    if has_more:
                        places[at] = self._read(file)
                        open_count += 1
                    continue
                at, given = (at + 1) % len(places), 0
        finally:
            for place in places:
                if place is not None:
                    place.close()

    def _read(self, file: Any) -> Generator[Any]:
        """The records of a file; where reading them raises, the file is noted, or its rest left out."""
        try:
            yield from self.open_fn(file)
        except Exception as error:
            if self._on_error == "raise":
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(f"while {brief(file)} was read")
                raise
            warnings.warn(f"the rest of {brief(file)} is left out: {type(error).__name__}: {error}", stacklevel=3)

    def __repr__(self) -> str:
        return f"<{len(self.files)} files interleaved, {self.cycle_length} at once>"


_END = object()  # stands for what comes after a file's last record


def listed(name: str, value: Any) -> list[Any]:
    """Return the files, ranges or the like that the user gave, in their order.

    Raises:
        ArgumentError: not a sequence of them, or without an order that is the same in each process, or there are none.
    """
    if isinstance(value, (set, frozenset)):
        raise ArgumentError(f"{name} is a set, which has another order in each process: pass sorted({name})")
    if isinstance(value, Mapping):
        raise ArgumentError(f"{name} is a {type(value).__name__}: pass list({name}), or list({name}.items())")
    has_no_length = not hasattr(type(value), "__len__") or getattr(value, "shape", None) == ()
    if isinstance(value, (str, bytes)) or has_no_length:
        raise ArgumentError(f"{name} must be a sequence of files, ranges or the like, got {brief(value)}")
    if not len(value):
        raise ArgumentError(f"{name} is empty: nothing would ever be read")
    return list(value)
