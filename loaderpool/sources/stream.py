"""Streams: sources that one process reads once, in order. And generators, which workers read.

Examples of streams are database cursors, message queues, files of lines, and generators. An item
has no index. Its *position* is its number in the stream, after the shuffle window if there is one.
Positions alone determine the contents of a batch.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
import numbers
import operator
import os
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from loaderpool.checks import check_signature, is_async, open_parameter, whole_number
from loaderpool.errors import ArgumentError, SourceError, add_note, brief, counted
from loaderpool.hints import known_names_only
from loaderpool.plan.batches import Plan
from loaderpool.plan.generators import CapturedGenerators
from loaderpool.plan.item_names import MOST_GENERATORS
from loaderpool.plan.permutation import shuffled
from loaderpool.plan.stream_kinds import PASS
from loaderpool.system import clock
from loaderpool.system.progress import Progress

IS_ASYNC = (
    "whose items only an event loop can read: pass a list of keys as source, and await in "
    "`async def fn(key)`"
)

# Time between two reads of the clock while items are dropped. Smaller: reading the clock costs time
# if items are fast. Larger: progress is reported late.
_LOOK_NS = 50_000_000


class StreamSource:
    """The user's iterator or iterable."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items
        self.was_opened = False  # True once `open` was called
        # Random generators that the stream uses. Each pass has its own states of them. None: none
        # are seeded.
        self.captured: CapturedGenerators | None = None

    @property
    def is_one_shot(self) -> bool:
        """True if the stream is an iterator, which can be read only once.

        Other iterables start again each time.
        """
        return is_iterator(self.items)

    @property
    def kind(self) -> str:
        """Name of the user's class, for messages."""
        return type(self.items).__name__

    def open(self) -> Iterator[Any]:
        """Return an iterator over all items.

        Raises:
            SourceError: the stream was read, and cannot be read again.
        """
        if self.is_one_shot and self.was_opened:
            raise SourceError(
                f"source is a {self.kind}, which can be read only once, and an earlier epoch has "
                "read it. For several epochs, pass an object whose __iter__ returns a new iterator "
                "each time."
            )
        self.was_opened = True
        return by_next(iter(self.items))

    def serves(self, read_for: int, epoch: int, plan: Plan, window: int) -> bool:
        """Return True if items read ahead for one epoch can serve a pass of another epoch.

        Args:
            read_for: epoch for which the stream is read, from its first item on.
            epoch: epoch of the pass.
            plan: plan of the pass.
            window: size of the shuffle window; 0: no shuffle.
        """
        return not plan.start and (epoch == read_for or not window or self.is_one_shot)


def is_iterator(obj: object) -> TypeGuard[Iterator[Any]]:
    """Return True if an object is an iterator.

    A `Loader` is not an iterator. Its `__next__` only serves to raise a clear error.
    """
    return isinstance(obj, Iterator) and hasattr(type(obj), "__next__")


def kind_of_iterable_dataset(obj: object) -> str:
    """Return an IterableDataset's name for messages, or "" for other objects. Imports nothing."""
    for base in type(obj).__mro__:
        library = base.__module__.partition(".")[0]
        if base.__name__ == "IterableDataset" and library in _LIBRARIES:
            return f"an IterableDataset of {_LIBRARIES[library]}"
    return ""


_LIBRARIES = {"datasets": "Hugging Face Datasets", "torch": "PyTorch"}


class _Begun:
    """Iterable over an existing iterator. It does not call the iterator's own `__iter__`."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items


def by_next(items: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that reads the user's iterator by `next` alone.

    `for` and `islice` call `iter` on their argument, and some iterators start again then.
    """
    return itertools.chain(_Begun(items))  # runs in C, and adds some nanoseconds per item


def nothing_there(plan: Plan) -> str:
    """Return the error text for a stream or generators that yield too little for one batch."""
    if plan.drop_remainder and plan.batch_size is not None:
        return (
            "The stream ended before its first batch was full, and drop_remainder=True leaves out "
            "smaller batches."
        )
    return "source is empty: the stream ended before its first item"


def read_batches(
    stream: StreamSource, plan: Plan, *, window: int, seed: int, epoch: int
) -> Generator[tuple[int, list[Any]], None, None]:
    """Yield the batches of this shard: the position of the first item, and the items.

    Positions in a batch are consecutive. Each shard reads the whole stream and keeps its own rows.
    Items before the plan's start are read and dropped.

    Args:
        stream: the source.
        plan: plan of the pass.
        window: number of items that are shuffled among each other; 0: no shuffle.
        seed: seed of the shuffle, used together with the epoch.
        epoch: number of the epoch.

    Raises:
        SourceError: the stream ends before the plan's start, by more than a batch of all shards.
        Exception: any error of reading an item. The items of an unfinished batch are lost.
    """
    turn = _Turn(None if stream.is_one_shot else stream.captured, epoch)
    assert isinstance(plan.start, int)
    with turn:
        items = stream.open()
        if window:
            items = shuffled(items, window, seed, epoch)
        position = skip(items, plan.start, "the stream")
    rows = plan.most_rows
    width, mine = rows * plan.num_shards, rows * plan.shard_index
    if position <= plan.start - width:
        raise SourceError(
            f"The stream has only {counted(position, 'item')}, but the saved position is after "
            f"item {plan.start}. The state was saved for another stream, or the stream has become "
            "shorter."
        )
    if position < plan.start:  # the plan starts after the stream's last batch, a smaller one
        return
    while True:
        with turn:
            block = list(itertools.islice(items, width))
        if len(block) < width:
            break
        yield position + mine, block[mine : mine + rows]
        position += width
        del block  # so that its items are freed before the next block is read
    tail = plan.closed(position + len(block)).after(position)
    if tail.batches_per_epoch:
        first, *others = tail.positions(epoch, 0).tolist()
        yield first, block[first - position : first - position + 1 + len(others)]


def skip(items: Iterator[Any], count: int, what: str) -> int:
    """Read and drop items. Return the number of items read, which is smaller at the stream's end.

    If this takes long, lines on stderr report the progress.

    Args:
        items: items of a stream, or of generators.
        count: number of items to drop.
        what: name of the stream in the reports; "": no reports.
    """
    position, block = 0, 1
    progress = Progress(
        f"resuming: {{done}} of {count:,} items of {what} were read again in {{time}}"
    )
    while position < count:
        started_ns, wanted = clock.monotonic_ns(), min(block, count - position)
        found = sum(1 for _ in itertools.islice(items, wanted))
        position += found
        if found < wanted:
            break
        block = block * 2 if clock.monotonic_ns() - started_ns < _LOOK_NS else max(1, block // 2)
        if what and position < count:
            progress.reach(f"{position:,}")
    return position


class _Turn:
    """Context for reading in a pass: random generators of the stream have the pass's own states.

    On exit, the context saves these states and restores the previous ones. A pass enters its
    context repeatedly.

    Args:
        captured: random generators of the stream; None: there are none, and the context does
            nothing.
        epoch: epoch of the pass, which seeds the states at the first entry.
    """

    def __init__(self, captured: CapturedGenerators | None, epoch: int) -> None:
        self._captured, self._epoch = captured, epoch
        self._restore_pass: Callable[[], None] | None = None
        self._restore_others: Callable[[], None]

    def __enter__(self) -> None:
        if self._captured is None:
            return
        self._restore_others = self._captured.save()
        if self._restore_pass is None:
            self._captured.begin(PASS, self._epoch, 0)
        else:
            self._restore_pass()

    def __exit__(self, *error: object) -> None:
        if self._captured is not None:
            self._restore_pass = self._captured.save()
            self._restore_others()


# ---- generators: workers read them ----

_DEFAULT_CYCLE = 16
_MOST_ITEMS = 1 << 40  # maximum number of items of a shard, because positions have 40 bits
# Optional parameters of a generator function, besides the shard. They are passed by name.
_BY_NAME = ("rng", "worker")


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """Identity of a replica or shard of a generator; passed to its parameter `worker`."""

    index: int  # Number of the replica or shard, from 0, over all processes.
    count: int  # Number of replicas or shards, over all processes.
    seed: int  # Seed for random numbers; differs for each replica and epoch.
    epoch: int  # Epoch number, from 0.
    shard: Any = None  # Element of `shards`, or `None`.


class ReplicatedSource:
    """Generator function with its shards, or with a number of copies.

    Args:
        make_generator: function that returns an iterable. It is called with each shard, or once for
            each copy.
        shards: any picklable values; None: the generator runs in copies.
        cycle_length: number of shards that are open at once; None: 16, or all if there are fewer.
        copies: number of copies without shards. None: one for each worker if copies can differ,
            otherwise one.
        shard_lengths: number of items of each shard, or one number for all; None: unknown.

    Attributes:
        only_here: URL of a file in this process's memory, which no worker can read; None: no such
            file.
        reads_files: True if it reads a `FileSource` in order.
        takes: names of the optional parameters ("rng", "worker") that the function has.
    """

    def __init__(
        self,
        make_generator: Callable[..., Any],
        shards: Sequence[Any] | None,
        cycle_length: int | None,
        copies: int | None = None,
        shard_lengths: int | Sequence[int] | None = None,
    ) -> None:
        if not callable(make_generator):
            what = f"a function that returns a generator, got {_got(make_generator)}"
            raise ArgumentError(f"make_generator must be {what}")
        if inspect.isasyncgenfunction(make_generator) or is_async(make_generator):
            raise ArgumentError(f"make_generator is a function {IS_ASYNC}")
        # This check comes before `listed`, which copies all elements.
        if (count := operator.length_hint(shards)) > MOST_GENERATORS:
            raise ArgumentError(
                f"shards has {count:,} elements, but at most {MOST_GENERATORS:,} are supported"
            )
        if cycle_length is not None and shards is None:
            raise ArgumentError(
                "cycle_length needs shards: it is the number of shards that are open at once"
            )
        if copies is not None and shards is not None:
            raise ArgumentError(
                "copies and shards cannot be combined: one generator runs for each shard"
            )
        self.make_generator = make_generator
        if shard_lengths is not None and shards is None:
            raise ArgumentError(
                "shard_lengths needs shards: it is the number of items of each shard"
            )
        self.shards = None if shards is None else listed("shards", shards)
        self.shard_lengths: tuple[int, ...] | None = None
        if shard_lengths is not None and self.shards is not None:
            self.shard_lengths = checked_lengths(shard_lengths, len(self.shards), "shards")
        self.only_here: str | None = None
        self.reads_files = False
        self.copies, self.cycle_length = copies, cycle_length
        by_position = 0 if shards is None else 1
        self.takes = frozenset(
            name for name in _BY_NAME if open_parameter(make_generator, name, by_position)
        )
        check_signature("make_generator", make_generator, "shard" if by_position else "", _BY_NAME)

    def lanes(self, workers: int, is_chosen: bool, num_shards: int) -> int:
        """Return the number of generators that run at once for this process of a training.

        Args:
            workers: number of workers; 0: unknown, because it varies.
            is_chosen: True if the user set this number of workers for this loader.
            num_shards: number of processes of the training.

        Raises:
            ArgumentError: there are fewer shards than processes, or copies would yield the same
                items, or the number of copies depends on a number of workers that varies.
        """
        if self.shards is not None:
            least = len(self.shards) // num_shards
            if not least:
                raise ArgumentError(
                    f"shards must be at least one for each of num_shards={num_shards} processes, "
                    f"got {len(self.shards)}"
                )
            return min(least, self.cycle_length or _DEFAULT_CYCLE)
        if self.copies:
            return self.copies
        times = num_shards * (workers if is_chosen else 1)
        if not self.takes and times <= 1:
            return 1
        if not self.takes:
            raise ArgumentError(
                f"{self.kind} has no parameter worker or rng, so its {times} replicas would yield "
                "the same items. Pass shards=, add a parameter worker and yield only the items of "
                "replica worker.index, or remove workers=. To keep the repeated items, set "
                f"copies={1 if num_shards > 1 else times}"
            )
        if not workers:
            raise ArgumentError(
                f"{self.kind} runs in one replica for each worker, but the number of workers in "
                "this pool varies. Set copies=n or shards=, or fix the number of workers"
            )
        return workers

    @property
    def kind(self) -> str:
        """Name of the generator function, for messages."""
        return getattr(self.make_generator, "__qualname__", type(self.make_generator).__name__)


def _got(obj: object) -> str:
    """Return the name of an object in the error that refuses it, with advice on what to pass."""
    kind = type(obj).__name__
    if isinstance(obj, types.GeneratorType):
        return f"{kind}: pass the generator function itself, without calling it"
    if library := kind_of_iterable_dataset(obj):
        return f"{kind}, {library}: pass its method __iter__, with copies=1"
    return kind


def checked_lengths(given: int | Sequence[int], count: int, what: str) -> tuple[int, ...]:
    """Return the user's number of items for each of `count` shards, checked.

    Args:
        given: one number for each shard, or one number for all.
        count: number of shards.
        what: name of shards in messages, such as "files".
    """
    if isinstance(given, (int, numbers.Integral)):
        return (whole_number("shard_lengths", given, at_least=0, at_most=_MOST_ITEMS),) * count
    if isinstance(given, (str, bytes, set, frozenset, Mapping)) or not hasattr(given, "__len__"):
        raise ArgumentError(
            f"shard_lengths must be a list with the number of items of each of {count} {what}, or "
            f"one number for all, got {brief(given)}"
        )
    lengths = listed("shard_lengths", given)
    if len(lengths) != count:
        raise ArgumentError(
            f"shard_lengths must have one number for each of {count} {what}, got {len(lengths)}. "
            "One number for all of them is allowed, too: shard_lengths=n"
        )
    return tuple(
        whole_number(f"shard_lengths[{number}]", length, at_least=0, at_most=_MOST_ITEMS)
        for number, length in enumerate(lengths)
    )


def replicated(source: object) -> ReplicatedSource | None:
    """Return the generators of a source, or None if it has none.

    A source may be a `ReplicatedSource`, or a `FileSource` with compressed or remote files.
    """
    if isinstance(source, ReplicatedSource):
        return source
    has_some = hasattr(type(source), "_loaderpool_generators")
    return getattr(source, "_loaderpool_generators", None) if has_some else None


# ---- many files read at once, like `tf.data.Dataset.interleave` ----


@known_names_only
def interleave(
    files: Sequence[Any],
    open_fn: Callable[[Any], Iterable[Any]],
    cycle_length: int = 8,
    block_length: int = 1,
) -> Interleave:
    """Return a stream of the records of many files.

    The order is that of a deterministic `tf.data.Dataset.interleave`. One process reads all files.
    To read in all workers, use `Loader.from_generator(open_fn, shards=files)`.

    Args:
        files: Sequence of files, opened in this order.
        open_fn: Function `open_fn(file)` that returns an iterable of the file's records.
        cycle_length: Number of files that are open at once and take turns, at least 1. Default: 8.
        block_length: Number of records that a file yields in its turn, at least 1. Default: 1.
    """
    return Interleave(files, open_fn, cycle_length, block_length)


class Interleave:
    """Stream as returned by `interleave`. Each iteration starts from the beginning."""

    def __init__(
        self,
        files: Sequence[Any],
        open_fn: Callable[[Any], Iterable[Any]],
        cycle_length: int,
        block_length: int,
    ) -> None:
        if isinstance(files, (str, os.PathLike)):
            raise ArgumentError(
                f"files must be a sequence of paths, got one path, {brief(files)}. In "
                "Loader.from_generator, shards= are then lists of paths, such as [[a, b], [c, d]]"
            )
        self.files = listed("files", files)
        check_signature("open_fn", open_fn, "file", may_take=())
        self.open_fn = open_fn
        self.cycle_length = whole_number(
            "cycle_length", cycle_length, at_least=1, hint="files that are open at once"
        )
        self.block_length = whole_number(
            "block_length", block_length, at_least=1, hint="records that a file yields in its turn"
        )

    def user_parts(self) -> list[tuple[str, Any]]:
        """Return the arguments by their names, for messages (`walk.parts_of`)."""
        return [("files", self.files), ("open_fn", self.open_fn)]

    def __iter__(self) -> Iterator[Any]:
        left = collections.deque(self.files)
        places: list[Iterator[Any] | None] = [None] * min(self.cycle_length, len(self.files))
        at = 0
        while left or places.count(None) < len(places):
            if places[at] is None and left:
                places[at] = self._records(left.popleft())
            if (place := places[at]) is not None:
                given = 0
                for record in itertools.islice(place, self.block_length):
                    given += 1
                    yield record
                if given < self.block_length:
                    places[at] = None
            at = (at + 1) % len(places)

    def _records(self, file: object) -> Iterator[Any]:
        try:
            yield from by_next(iter(self.open_fn(file)))
        except Exception as error:
            add_note(error, f"while {brief(file)} was read")
            raise

    def __repr__(self) -> str:
        return f"<{len(self.files)} files interleaved, {self.cycle_length} at once>"


def listed(name: str, value: Sequence[Any]) -> list[Any]:
    """Return the user's sequence (of files, ranges or the like) as a list, checked.

    Sets and mappings are refused, because their order may differ between processes.
    """
    is_other = isinstance(value, (str, bytes, set, frozenset, Mapping)) or not hasattr(
        type(value), "__len__"
    )
    if is_other or getattr(value, "shape", None) == () or not len(value):
        raise ArgumentError(
            f"{name} must be a sequence of at least one file, range or the like, in a fixed order "
            f"such as sorted({name}), got {brief(value)}"
        )
    return list(value)
