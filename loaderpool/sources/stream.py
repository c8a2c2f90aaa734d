"""Sources that are read once, in order, in one place: database cursors, message queues, files of lines, generators.

An item has no index that could be asked for. Its *position* is its number in the stream (behind the shuffle window, if
there is one), and what a batch holds follows from that alone.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import numbers
import operator
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from loaderpool.checks import check_signature, open_parameter, whole_number
from loaderpool.errors import ArgumentError, SourceError, add_note, brief
from loaderpool.hints import known_names_only
from loaderpool.plan.batches import Plan
from loaderpool.plan.generators import PASS, CapturedGenerators
from loaderpool.plan.item_names import MOST_GENERATORS
from loaderpool.plan.permutation import shuffled
from loaderpool.system import clock
from loaderpool.system.progress import Progress

# Between two looks at the clock while items are dropped. Shorter: looks cost, if items are quick. Longer: late lines.
_LOOK_NS = 50_000_000


class StreamSource:
    """An iterator or an iterable, as the user gave it."""

    def __init__(self, items: Any) -> None:
        self.items = items
        self.was_opened = False  # whether it was read, or begun to be
        # The random generators that it holds, each pass over it with states of its own; None: none are seeded.
        self.captured: CapturedGenerators | None = None

    @property
    def is_one_shot(self) -> bool:
        """Whether it can be read only once: an iterator, where an iterable begins again each time."""
        return is_iterator(self.items)

    @property
    def kind(self) -> str:
        """What it is, for messages."""
        return type(self.items).__name__

    def open(self) -> Iterator[Any]:
        """The items, from the first one on; SourceError where it was read and cannot be read again."""
        if self.is_one_shot and self.was_opened:
            raise SourceError(
                f"source is a {self.kind}, which can be read only once, and an earlier epoch has read it. For several "
                "epochs, pass an object whose __iter__ returns a new iterator each time."
            )
        self.was_opened = True
        return by_next(iter(self.items))

    def serves(self, read_for: int, epoch: int, plan: Plan, window: int) -> bool:
        """Whether what is read ahead, from the first item on for an epoch, is what a pass of another one needs."""
        return not plan.start and (epoch == read_for or not window or self.is_one_shot)


def is_iterator(obj: Any) -> bool:
    """Return whether an object is an iterator. A `Loader` is none, although it answers `next` with an error."""
    return isinstance(obj, Iterator) and hasattr(type(obj), "__next__")


def kind_of_iterable_dataset(obj: Any) -> str:
    """Return how messages name an IterableDataset; "" for any other object. Imports nothing."""
    for base in type(obj).__mro__:
        library = base.__module__.partition(".")[0]
        if base.__name__ == "IterableDataset" and library in _LIBRARIES:
            return f"an IterableDataset of {_LIBRARIES[library]}"
    return ""


_LIBRARIES = {"datasets": "Hugging Face Datasets", "torch": "PyTorch"}


class _Begun:
    """Hands out an iterator that was begun, without a call of the iterator's own `__iter__`."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items


def by_next(items: Iterator[Any]) -> Iterator[Any]:
    """Return the items of an iterator of the user's, read by `next` alone.

    `for` and `islice` call `iter` on what they read, and some iterators begin again then.
    """
    return itertools.chain(_Begun(items))  # in C: an item costs some nanoseconds more


def nothing_there(plan: Plan) -> str:
    """Return what is said of a stream, or of generators, that give no batch."""
    if plan.drop_remainder and plan.batch_size is not None:
        return "The stream ended before its first batch was full, and drop_remainder=True leaves out smaller batches."
    return "source is empty: the stream ended before its first item"


def read_batches(
    stream: StreamSource, plan: Plan, *, window: int, seed: int, epoch: int
) -> Generator[tuple[int, list[Any]], None, None]:
    """The items of each batch of this shard, and the position of the first one; positions in a batch are consecutive.

    Each shard reads the whole stream and keeps its rows. Items before the plan's start are read and dropped. A window
    shuffles among each other so many items, in an order that seed and epoch key; 0: none. Raises SourceError where the
    stream ends long before the plan's start, and what reading an item raises; items of an unfinished batch are lost.
    """
    turn = _Turn(None if stream.is_one_shot else stream.captured, epoch)
    with turn:
        items = stream.open()
        if window:
            items = shuffled(items, window, seed, epoch)
        position = skip(items, plan.start, "the stream")
    rows = plan.most_rows
    width, mine = rows * plan.num_shards, rows * plan.shard_index
    if position <= plan.start - width:
        raise SourceError(
            f"The stream has only {position} items, but the saved position is after item {plan.start}. The state was "
            "saved for another stream, or the stream has become shorter."
        )
    if position < plan.start:  # the place is behind its last batch, which was a smaller one
        return
    while True:
        with turn:
            block = list(itertools.islice(items, width))
        if len(block) < width:
            break
        yield position + mine, block[mine : mine + rows]
        position += width
        del block  # or it would be held while the next one is read
    tail = plan.closed(position + len(block)).after(position)
    if tail.batches_per_epoch:
        first, *others = tail.positions(epoch, 0).tolist()
        yield first, block[first - position : first - position + 1 + len(others)]


def skip(items: Iterator[Any], count: int, what: str) -> int:
    """Read items and drop them; returns how many there were. If it takes long, lines on stderr report the progress.

    Args:
        items: of a stream, or of generators.
        count: the number of items.
        what: names what has the items; "": nothing is reported.
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
    """While a pass reads, random generators that the stream holds have the pass's states; else their own."""

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


# ---- generators, each of which a worker reads ----

_DEFAULT_CYCLE = 16
_MOST_ITEMS = 1 << 40  # of a shard: positions of items have 40 bits
_BY_NAME = (
    "rng",
    "worker",
)  # what a generator is given besides its shard, where it has such parameters


@dataclasses.dataclass(frozen=True)
class WorkerInfo:
    """Identity of a replica or shard of a generator; passed to its parameter `worker`."""

    index: int  # Number of the replica or shard, from 0, over all processes.
    count: int  # Number of replicas or shards, over all processes.
    seed: int  # Seed for random numbers; differs for each replica and epoch.
    epoch: int  # Epoch number, from 0.
    shard: Any = None  # Element of `shards`, or `None`.


class ReplicatedSource:
    """What makes a generator, and for which shards.

    Args:
        make_generator: called once for each copy, or for each shard with it; gives what is iterated.
        shards: any picklable things; None: it runs in copies.
        cycle_length: how many shards are open at once; None: 16, or all.
        copies: how many there are without shards; None: as many as workers where they can differ, else one.
        shard_lengths: number of items of each shard, or one number for all; None: unknown.

    Attributes:
        only_here: what it reads that is in this process's memory, so that no worker can; None: nothing.
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
        if (count := operator.length_hint(shards)) > MOST_GENERATORS:  # before they are listed
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
        self.copies, self.cycle_length = copies, cycle_length
        by_position = 0 if shards is None else 1
        # Which of "rng" and "worker" it is given.
        self.takes = frozenset(
            name for name in _BY_NAME if open_parameter(make_generator, name, by_position)
        )
        check_signature("make_generator", make_generator, "shard" if by_position else "", _BY_NAME)

    def lanes(self, workers: int, is_chosen: bool, num_shards: int) -> int:
        """Return how many of them run at once in this process of a training of `num_shards` processes.

        Of so many workers (0: unknown, and changes); `is_chosen`: the user has asked for this number with this loader.
        """
        if self.shards is not None:
            least = len(self.shards) // num_shards
            if not least:
                raise ArgumentError(
                    f"shards must be at least one for each of num_shards={num_shards} processes, got {len(self.shards)}"
                )
            return min(least, self.cycle_length or _DEFAULT_CYCLE)
        if self.copies:
            return self.copies
        times = num_shards * (workers if is_chosen else 1)
        if not self.takes and times <= 1:
            return 1
        if not self.takes:
            raise ArgumentError(
                f"{self.kind} has no parameter worker or rng, so its {times} replicas would yield the same items. Pass "
                "shards=, add a parameter worker and yield only the items of replica worker.index, or remove workers=. "
                f"To keep the repeated items, set copies={1 if num_shards > 1 else times}"
            )
        if not workers:
            raise ArgumentError(
                f"{self.kind} runs in one replica for each worker, but the number of workers in this pool varies. "
                "Set copies=n or shards=, or fix the number of workers"
            )
        return workers

    @property
    def kind(self) -> str:
        """What it is, for messages."""
        return getattr(self.make_generator, "__qualname__", type(self.make_generator).__name__)


def _got(obj: Any) -> str:
    """Return how messages name what is no generator function, and what to pass instead."""
    kind = type(obj).__name__
    if isinstance(obj, types.GeneratorType):
        return f"{kind}: pass the generator function itself, without calling it"
    if library := kind_of_iterable_dataset(obj):
        return f"{kind}, {library}: pass its method __iter__, with copies=1"
    return kind


def checked_lengths(given: Any, count: int, what: str) -> tuple[int, ...]:
    """Return the number of items of each of `count` shards, as the user stated them."""
    if isinstance(given, numbers.Integral):
        return (whole_number("shard_lengths", given, at_least=0, at_most=_MOST_ITEMS),) * count
    lengths = listed("shard_lengths", given)
    if len(lengths) != count:
        raise ArgumentError(
            f"shard_lengths must have one number for each of {count} {what}, got {len(lengths)}"
        )
    return tuple(
        whole_number(f"shard_lengths[{number}]", length, at_least=0, at_most=_MOST_ITEMS)
        for number, length in enumerate(lengths)
    )


def replicated(source: Any) -> ReplicatedSource | None:
    """Return the generators that a source consists of, or is read by; None: there are none."""
    if isinstance(source, ReplicatedSource):
        return source
    has_some = hasattr(
        type(source), "_loaderpool_generators"
    )  # files that are compressed or remote
    return source._loaderpool_generators if has_some else None


# ---- many files read at once, as `tf.data.Dataset.interleave` has it ----


@known_names_only
def interleave(
    files: Sequence[Any],
    open_fn: Callable[[Any], Iterable[Any]],
    cycle_length: int = 8,
    block_length: int = 1,
) -> Interleave:
    """Return a stream of the records of many files, in the order of a deterministic `tf.data.Dataset.interleave`.

    One process reads all files. To read in all workers, use `Loader.from_generator(open_fn, shards=files)`.

    Args:
        files: Sequence of files, opened in this order.
        open_fn: Function `open_fn(file)` that returns an iterable of the file's records.
        cycle_length: Number of files that are open at once and take turns, at least 1. Default: 8.
        block_length: Number of records that a file yields in its turn, at least 1. Default: 1.
    """
    return Interleave(files, open_fn, cycle_length, block_length)


class Interleave:
    """Stream as returned by `interleave`. Each iteration starts from the beginning."""

    def __init__(self, files: Any, open_fn: Any, cycle_length: int, block_length: int) -> None:
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

    def _records(self, file: Any) -> Iterator[Any]:
        try:
            yield from by_next(iter(self.open_fn(file)))
        except Exception as error:
            add_note(error, f"while {brief(file)} was read")
            raise

    def __repr__(self) -> str:
        return f"<{len(self.files)} files interleaved, {self.cycle_length} at once>"


def listed(name: str, value: Any) -> list[Any]:
    """Return the files, ranges or the like that the user gave: a sequence, in an order that each process has."""
    is_other = isinstance(value, (str, bytes, set, frozenset, Mapping)) or not hasattr(
        type(value), "__len__"
    )
    if is_other or getattr(value, "shape", None) == () or not len(value):
        raise ArgumentError(
            f"{name} must be a sequence of at least one file, range or the like, in a fixed order such as "
            f"sorted({name}), got {brief(value)}"
        )
    return list(value)
