"""What an engine is given, and what it hands to the loader: batches that came together, and where they wait."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.config import LoaderConfig, UnitKind
from loaderpool.element.spec import ElementSpec
from loaderpool.errors import LoaderpoolError
from loaderpool.memory.layout import ALIGNMENT_BYTES, BatchCounts, varying_counts
from loaderpool.plan.batches import Plan
from loaderpool.sources.stream import StreamSource
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.pickling import receive

if TYPE_CHECKING:
    from loaderpool.cache.setting import Cache
    from loaderpool.memory.layout import BatchForm
    from loaderpool.memory.recorder import Origin
    from loaderpool.transport.payload.record import WorkerPayload
    from loaderpool.transport.reports import Failure, RowFailure

_BYTE = ctypes.c_byte
FIRST_EPOCH = 0  # whose first sample is made as a loader is


def aligned_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """`uint8[nbytes]` at an address that TensorFlow aliases instead of copying."""
    raw = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -address_of(raw) % ALIGNMENT_BYTES
    return raw[start : start + nbytes]


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where an array that is not empty begins, as `array.ctypes.data` does, in a quarter of the time."""
    return ctypes.addressof(_BYTE.from_buffer(array))  # type: ignore[arg-type]  # it is a buffer


def with_classes(form: BatchForm) -> BatchForm:
    """Return a form with the function's own classes, for the trainer; without those that cannot be found there."""
    if not form.classes:
        return form
    try:
        classes = receive(form.classes)
    except Exception as error:
        if is_of_a_handler(error):
            raise
        classes = None
    return dataclasses.replace(form, classes=classes)


@dataclasses.dataclass(slots=True, eq=False)
class Delivery:
    """Batches that came together in one slot. They wait for their turn there, and are handed out with its bytes."""

    first: int  # number of the first one
    count: int  # how many are handed out
    rows: int  # of each (varying batches tell their own)
    slot: int | None = 0  # where it begins; None: there is no such batch, for its lane has ended
    # Makes a new error for each that takes it: a kept exception would keep, through its traceback, all its frames.
    make_error: Callable[[], LoaderpoolError] | None = None
    oversize: tuple[Any, int] | None = None  # mapped memory file and its length
    row_failures: tuple[
        RowFailure, ...
    ] = ()  # rows left out or replaced in those that are handed out
    ticket: int = 0  # one of those whose work the slot holds
    slot_bytes: int = 0
    may_lend: int = 0  # of its run's slots so many may have views
    stored: int = 0  # how many there are, where not all are handed out
    keep: tuple[int, ...] | None = (
        None  # which of them are, in rising order, counted from `first`; None: all
    )
    form: BatchForm = dataclasses.field(init=False)  # how to look at them
    anchor: npt.NDArray[np.uint8] = dataclasses.field(init=False)  # their bytes
    waited_ns: int = 0  # how long the consumer has waited for it
    origin: Origin | None = None  # what is recorded of where it came from; None: nothing is

    def choose(self, keep: Iterable[int]) -> None:
        """Hand out only these of its batches."""
        self.keep, self.stored = tuple(keep), self.stored or self.count
        self.count = len(self.keep)
        self.row_failures = tuple(each for each in self.row_failures if each.batch in self.keep)

    def head(self, count: int) -> Delivery:
        """The first `count` of its batches, in the same memory."""
        head = copy.copy(self)
        head.choose(self._numbers()[:count])
        return head

    def failures(self) -> list[list[Failure]]:
        """For each batch, in order, what failed in it."""
        by_batch: dict[int, list[Failure]] = {number: [] for number in self._numbers()}
        for each in self.row_failures:
            by_batch[each.batch].append(each.failure)
        return list(by_batch.values())

    def _numbers(self) -> Sequence[int]:
        return range(self.count) if self.keep is None else self.keep

    def counts(self) -> Sequence[BatchCounts]:
        """Of each batch that is handed out its rows, and how much of it is padding."""
        if self.form.fixed is not None:
            return [BatchCounts(self.rows, 0, 0)] * self.count
        counts = varying_counts(self.anchor)
        return [counts[at] for at in self._numbers()]

    def numbers(self) -> list[int]:
        """Of the batches that are handed out, counted from their run's first epoch on."""
        return [self.first + at for at in self._numbers()]

    def batches(self) -> Iterator[tuple[int, Sequence[Any]]]:
        """Rows and components of each batch."""
        stored, keep = self.stored or self.count, self.keep
        batches = self.form.read(self.anchor, self.rows, stored)
        return (
            batches
            if keep is None
            else itertools.compress(batches, [at in keep for at in range(stored)])
        )

    def joined(self) -> list[npt.NDArray[Any]]:
        """The components of all batches in one array each, `dtype[count, rows, ...]`; for fixed forms only."""
        assert self.form.fixed is not None
        stored = self.stored or self.count
        arrays = self.form.fixed.arrays(self.anchor, 0, self.rows * stored)
        parts = [array.reshape(stored, self.rows, *array.shape[1:]) for array in arrays]
        return parts if self.keep is None else [part[list(self.keep)] for part in parts]


@dataclasses.dataclass
class DeliveryCounts:
    """How a loader's batches were handed over, and the slots of its latest run. Changed with the pool's lock held."""

    slots: int = 0  # 0 before the first batch
    slot_bytes: int = 0  # of each
    slots_wanted: int = 0  # that it would have, were memory no limit
    largest_chunk: int = 1  # batches of a delivery of a stream
    lent: int = 0
    copied: int = 0
    copied_ns: int = 0  # that this took
    oversize: int = 0


class OrderedBuffer:
    """Where a run's deliveries wait for their turn: in their order. The caller holds the pool's lock.

    Attributes:
        begin_at: the first batch that was not taken.
        front: what arrived and has its turn now; None: that is still to come. It stays until `drop_front`.
    """

    ended: Mapping[int, int] = {}  # lanes of which there are no more batches, and how many each had

    def __init__(self, begin_at: int = 0) -> None:
        self.begin_at = begin_at
        self.front: Delivery | None = None
        self._by_first: dict[int, Delivery] = {}

    @property
    def is_over(self) -> bool:
        """Whether all lanes have ended, and so all their batches were taken."""
        return False

    @property
    def taken(self) -> int:
        """How many batches were taken, counted from the run's first epoch on."""
        return self.begin_at

    @property
    def done_before(self) -> int:
        """All batches before this one were taken, and no worker makes any of them again."""
        return self.begin_at

    def put(self, arrived: Delivery) -> bool:
        """Keep what arrived for its turn; False: all its batches were taken before the run began again."""
        self._by_first[arrived.first] = arrived
        if arrived.first == self.begin_at:
            self.front = arrived
        return True

    def drop_front(self) -> None:
        """What is in front was taken."""
        self.begin_at += self._by_first.pop(self.begin_at).count
        self.front = self._by_first.get(self.begin_at)

    @property
    def waiting(self) -> int:
        """How many slots' batches wait. Runs in: any thread, without the lock."""
        return len(self._by_first)

    def rest(self) -> OrderedBuffer:
        """An empty buffer for what was not taken from this one."""
        return OrderedBuffer(self.begin_at)

    def had(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the batches after `begin_at` that are not to be made, and the lanes that are over."""
        return (), ()


def data_bytes(parts: Sequence[Any]) -> int:
    """Bytes of data in a batch's components; of text its characters."""
    return sum(
        sum(map(len, part.flat))
        if isinstance(part, np.ndarray) and part.dtype.hasobject
        else part.nbytes
        for part in parts
    )


def made_of(error: bytes) -> LoaderpoolError:
    """Return the exception that says what failed, a new one each time."""
    from loaderpool.core.failures import (
        unpack,
    )  # a training in which nothing fails has no use for it

    return unpack(error)


class CheckedArguments(NamedTuple):
    """What a loader's arguments come to; `trainer.arguments.check_arguments` makes it.

    Ownership: a pool's loader lets go of it once its payload has travelled, for that holds function and source.
    """

    config: LoaderConfig  # the settings
    plan: Plan  # which item is when
    unit: UnitKind  # what one call of the function makes
    given_spec: ElementSpec | None  # the user's `element_spec`
    stream: StreamSource | None  # what is read in the trainer, where the source has no index
    payload: WorkerPayload  # what travels to the workers, or is worked with here
    cache: Cache | None = None  # setting of the cache for the results of `fn`
    has_epoch_begin: bool = (
        False  # a hook of the user's runs before an epoch's first sample is made
    )

    @property
    def length(self) -> int | None:
        """Number of items in the source, which the plan counts on; None: it has no length."""
        return len(self.payload.source) if self.stream is None and not self.plan.is_open else None
