"""What the engine asks of a plan: which rows make up which batch of this shard, in any epoch.

A *position* is a place in the global order of an epoch, 0 to size - 1: a permutation of the source's indices under
`shuffle`, else the indices themselves. How they are dealt to batches and shards is said by one of two plans:
`order.Plan` cuts the order into ranges, `buckets.BucketPlan` groups its items by length.

Where an epoch was left, so that its rest can be made elsewhere, is a *start*: for `order.Plan` the first position that
no consumer has taken, for `buckets.BucketPlan` how many items of each bucket are taken. The whole epoch is what is
falsy.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from loaderpool.errors import ArgumentError
from loaderpool.plan.permutation import MAX_SIZE, Permutation

_Item = TypeVar("_Item")
# Random places drawn at once. Fewer: each costs a call of NumPy's. More: a short stream pays for some it never needs.
_DRAWN = 1024


def shuffled(items: Iterator[_Item], window: int, seed: int, epoch: int) -> Iterator[_Item]:
    """All the items, each moved by chance; the same order for the same seed and epoch.

    Args:
        items: the stream.
        window: how many items are held; 1: the order stays.
        seed: from 0.
        epoch: which epoch; each has an order of its own.
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


def stream_key(purpose: str, seed: int, epoch: int) -> int:
    """Return 128 well-mixed bits, unrelated for any two different (purpose, seed, epoch).

    Args:
        purpose: what they are for; a word without spaces, so that no two triples read the same.
        seed: any integer.
        epoch: any integer.
    """
    import hashlib  # with OpenSSL, which `import loaderpool` need not wait for

    digest = hashlib.blake2b(f"{purpose} {seed} {epoch}".encode(), digest_size=16, person=b"loaderpool").digest()
    return int.from_bytes(digest, "little")


Start = int | tuple[int, ...]


@dataclass(frozen=True)
class BasePlan(abc.ABC):
    """The order of one shard in every epoch.

    Batches are formed here and never by a worker, hence they are the same for any number of workers.

    Raises:
        ArgumentError: a field is out of its range.
    """

    rows_vary: ClassVar[bool]
    """Whether any batch may have other rows than the one before, and another number in each epoch."""

    size: int
    """Items in the source, over all shards."""
    batch_size: int | None
    """Most rows of a batch of one shard; None: each item is an element by itself, planned as a batch of one row."""
    shuffle: bool = False
    """Whether each epoch has an order of its own."""
    seed: int = 0
    """Sets the orders of all epochs; any number from 0."""
    drop_remainder: bool = False
    """Whether what is too short for a full batch on every shard is left out."""
    num_shards: int = 1
    """Processes that share the epoch among them."""
    shard_index: int = 0
    """This process's number among them, from 0."""
    lanes: int = 0
    """Generators whose batches take turns; 0: there are none. Their batches have any number of rows up to the full."""
    is_open: bool = False
    """Whether the size is only a bound: of a stream, whose end is not known before it comes, or of what has no end."""
    is_endless: bool = False
    """Whether it is known to have no end, though it has an index: as many batches as are asked for."""

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_SIZE:
            raise ArgumentError(f"size must be 0 to 2**62, got {self.size}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ArgumentError(f"batch_size must be at least 1, or None, got {self.batch_size}")
        if self.seed < 0:
            raise ArgumentError(f"seed must not be negative, got {self.seed}")
        if self.num_shards < 1:
            raise ArgumentError(f"num_shards must be at least 1, got {self.num_shards}")
        if not 0 <= self.shard_index < self.num_shards:
            raise ArgumentError(
                f"shard_index must be 0 to num_shards - 1, got {self.shard_index} with num_shards={self.num_shards}"
            )

    # ---- numbers, the same in each epoch ----

    @property
    @abc.abstractmethod
    def batches_per_epoch(self) -> int:
        """Batches of this shard in an epoch; the same for every shard."""

    @property
    @abc.abstractmethod
    def full_batches(self) -> int:
        """How many batches, from the first one on, the engine may take for equal; at most one follows.

        They have `most_rows` rows, unless rows vary: then this is all of them.
        """

    @property
    @abc.abstractmethod
    def most_rows(self) -> int:
        """The most rows that a batch of this shard has."""

    @property
    @abc.abstractmethod
    def last_rows(self) -> int:
        """Rows of the batch behind the `full_batches`; where there is none, `most_rows`."""

    @property
    @abc.abstractmethod
    def rows_per_epoch(self) -> int:
        """Rows of all batches of this shard."""

    @property
    @abc.abstractmethod
    def rows_left_out(self) -> int:
        """Rows of an epoch that no shard has, for `drop_remainder`."""

    @property
    @abc.abstractmethod
    def repeated_rows(self) -> int:
        """Rows that come a second time in an epoch, over all shards, so that no shard has a batch less."""

    # ---- the rest of an epoch ----

    @property
    @abc.abstractmethod
    def begins_at(self) -> Start:
        """The start that it was given; falsy: it is the whole epoch."""

    @abc.abstractmethod
    def after(self, start: Start) -> BasePlan:
        """Return the rest of an epoch from there on, counted from its beginning; falsy: the whole of it.

        Raises:
            ArgumentError: there is no such start.
        """

    @abc.abstractmethod
    def start_after(self, epoch: int, batches: int) -> Start:
        """Return what all shards together have taken with their first so many batches.

        After the last batch it is also what `drop_remainder` leaves out.
        """

    @abc.abstractmethod
    def read_start(self, value: Any) -> Start:
        """Return a start of this plan from what JSON made of one.

        Raises:
            ValueError: it is none; says why.
        """

    # ---- batches ----

    @abc.abstractmethod
    def rows(self, epoch: int, batch: int) -> int:
        """Return how many rows a batch of this shard has, at least 1.

        Raises:
            IndexError: the epoch has no such batch.
        """

    @abc.abstractmethod
    def positions(
        self, epoch: int, batch: int, row_start: int = 0, row_stop: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the positions of a batch's rows, or of its rows `row_start` up to but without `row_stop`.

        Args:
            epoch: which epoch, from 0.
            batch: which batch of this shard, from 0.
            row_start: first row, from 0.
            row_stop: the row after the last, at most `rows(epoch, batch)`; None: to the end of the batch.

        Returns:
            int64[row_stop - row_start], ascending.

        Raises:
            IndexError: the epoch has no such batch, or the batch no such rows.
        """

    @abc.abstractmethod
    def positions_of(self, epoch: int, batch: int, count: int) -> npt.NDArray[np.int64]:
        """Return the positions of `count` consecutive batches, one after the other: what a chunk holds.

        Args:
            epoch: which epoch, from 0.
            batch: the first of them.
            count: how many, from 0.

        Returns:
            int64[rows of all these batches].

        Raises:
            IndexError: the epoch does not have all of these batches.
        """

    @abc.abstractmethod
    def place(self, epoch: int, position: int) -> tuple[int, int] | None:
        """The batch of this shard that has the position, and the row in it; None where another shard or none has it.

        Args:
            epoch: which epoch, from 0.
            position: in the global order, 0 to size - 1.
        """

    def batch_of_another_bucket(self, epoch: int) -> int | None:
        """Return the first batch of this shard whose items are not of the first one's bucket; None: there is none."""
        return None

    # ---- the global order ----

    def indices(self, epoch: int, positions: npt.NDArray[np.int64]) -> list[int]:
        """Return the source's indices at these positions in an epoch; without `shuffle` the positions themselves.

        Args:
            epoch: which epoch, from 0.
            positions: int64[n], each 0 to size - 1.

        Returns:
            n indices, as Python integers, since a source may be a list or a user's own class.

        Raises:
            IndexError: with `shuffle`, a position is not below the size.
        """
        if self.shuffle and positions.size:
            positions = permutation(self.size, self.seed, epoch).take(positions)
        indices: list[int] = positions.tolist()
        return indices

    def position_of(self, epoch: int, index: int) -> int:
        """Return the position at which an epoch has the source's item `index`; the way back from `indices`.

        Args:
            epoch: which epoch, from 0.
            index: 0 to size - 1.

        Raises:
            IndexError: the source has no such item.
        """
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is not in range({self.size})")
        return permutation(self.size, self.seed, epoch).position_of(index) if self.shuffle else index


def share_of(rows: int, num_shards: int, shard_index: int) -> tuple[int, int]:
    """One shard's part of rows that are split evenly: its first row and how many; the first shards have one row more.

    Where there are fewer rows than shards they are dealt again, so that each shard has one.
    """
    if 0 < rows < num_shards:
        return shard_index % rows, 1
    share, longer_shards = divmod(rows, num_shards)
    return shard_index * share + min(shard_index, longer_shards), share + (shard_index < longer_shards)


def bounds_of(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return where each of several batches begins and ends in what has one after the other."""
    return list(itertools.pairwise(itertools.accumulate(rows, initial=0)))


@lru_cache(maxsize=8)
def permutation(size: int, seed: int, epoch: int) -> Permutation:
    """An epoch's order, kept for the few epochs that are under way at once (this one, the next, other passes)."""
    return Permutation(size, stream_key("shuffle", seed, epoch))


class Numbering:
    """Where each batch number is in a plan. The rest of an epoch has that epoch's last numbers.

    Args:
        plan: of whole epochs.
        epoch: of which `rest` is where it begins.
        rest: as `BasePlan.after` has it; falsy: all epochs are whole.
    """

    def __init__(self, plan: BasePlan, epoch: int = 0, rest: Start = 0) -> None:
        self._plan, self._epoch, self._rest = plan, epoch, rest
        self._rest_plan = plan.after(rest) if rest else plan
        self.batches_per_epoch, self.lanes = plan.batches_per_epoch, plan.lanes
        self.batch_size = plan.most_rows
        self._missing = self.batches_per_epoch - self._rest_plan.batches_per_epoch

    @property
    def first(self) -> int:
        """The number of the first batch of `epoch`."""
        return self._epoch * self.batches_per_epoch + self._missing

    def locate(self, number: int) -> tuple[int, int, Start]:
        """Return the epoch of batch `number`, which batch of it that is, and where it begins (0: it is whole)."""
        epoch, batch = divmod(number, self.batches_per_epoch)
        if self._rest and epoch == self._epoch:
            return epoch, batch - self._missing, self._rest
        return epoch, batch, 0

    def alike(self, number: int) -> int:
        """Return how many batches from `number` on may share a slot: the last one of an epoch may be shorter."""
        _, batch, rest = self.locate(number)
        return max(1, (self._rest_plan if rest else self._plan).full_batches - batch)

    def total_rows(self, number: int, count: int) -> int:
        """Return the rows of `count` batches from `number` on, all of one epoch."""
        epoch, batch, rest = self.locate(number)
        plan = self._rest_plan if rest else self._plan
        if plan.rows_vary:
            return sum(plan.rows(epoch, each) for each in range(batch, batch + count))
        return (count - 1) * plan.most_rows + (plan.most_rows if batch + count <= plan.full_batches else plan.last_rows)


class LanePlaces(NamedTuple):
    """How many batches of each lane were taken; the batches of one lane are always taken in their order."""

    taken: tuple[int, ...]
    """By lane."""
    over: frozenset[int] = frozenset()
    """Lanes that have no more."""

    @property
    def begin_at(self) -> int:
        """The lowest number of a batch that was not taken; where all lanes are over, one behind all batches."""
        lanes = len(self.taken)
        left = [batch * lanes + lane for lane, batch in enumerate(self.taken) if lane not in self.over]
        return min(left) if left else max(self.taken) * lanes


_MARK = 1 << 62
_ITEM_BITS = 40  # more items than any generator yields in a week, in few enough bits
MOST_GENERATORS = 1 << 22


def first_position(generator: int) -> int:
    """Return the position of the first item that a generator yields."""
    return _MARK | generator << _ITEM_BITS


def generated_item(position: int) -> tuple[int, int] | None:
    """Return the numbers of the generator and of its item; None where it is an index into a source."""
    if position < _MARK:
        return None
    return (position ^ _MARK) >> _ITEM_BITS, position & ((1 << _ITEM_BITS) - 1)


def item_name(position: int) -> str:
    """Return what messages call what is at a position."""
    return f"{'source index' if generated_item(position) is None else 'item'} {item_number(position)}"


def item_number(position: int) -> str:
    """Return the same without a word for what it is: 17, or 17 of generator 2."""
    generated = generated_item(position)
    return numbered(position) if generated is None else numbered(generated[1], generated[0])


def numbered(item: int, generator: int | None = None) -> str:
    """Return how texts number an item of a source, or of a generator."""
    return f"{item}" if generator is None else f"{item} of generator {generator}"
