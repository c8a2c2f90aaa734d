"""`Delivery`: batches that arrived together in one slot. Also buffers, and a loader's arguments.

Called in the main process.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.config import LoaderConfig, UnitKind
from loaderpool.element.spec import ElementSpec
from loaderpool.errors import LoaderpoolError
from loaderpool.memory.layout import BatchCounts, varying_counts
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

FIRST_EPOCH = 0  # epoch of the first sample, which is made when a loader is created


def with_classes(form: BatchForm) -> BatchForm:
    """Return a form with the user's own classes, as the main process has them.

    If a class cannot be found in the main process, the form has no classes.
    """
    if not (isinstance(form.classes, bytes) and form.classes):
        return form
    try:
        classes = receive(form.classes)
    except Exception as error:
        if is_of_a_handler(error):
            raise
        classes = None
    return dataclasses.replace(form, classes=classes)


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Delivery:
    """Batches that arrived together in one slot, and are delivered together, with the slot's bytes.

    A delivery waits in a buffer for its turn. Its batches stay in the slot meanwhile.
    """

    first: int  # number of the first stored batch
    count: int  # number of batches to deliver
    rows: int  # number of rows of each batch; not used if batches differ
    # offset of the slot in the memory file; None: the lane has ended, and the batch does not exist
    slot: int | None = 0
    # Makes a new error for each caller. A stored exception would keep all frames of its traceback.
    make_error: Callable[[], LoaderpoolError] | None = None
    oversize: tuple[Any, int] | None = None  # mapped memory file and its length in bytes
    # failed rows in the batches to deliver, left out or replaced
    row_failures: tuple[RowFailure, ...] = ()
    ticket: int = 0  # ticket that the slot's `Release` must name: one of those that filled the slot
    slot_bytes: int = 0
    may_lend: int = 0  # maximum number of the run's slots with views, this one included
    stored: int = 0  # number of batches in the slot, if not all are delivered; 0: `count`
    batch_rows: tuple[int, ...] = ()  # rows of each stored batch, as in `Filled`
    # batches to deliver, ascending, relative to `first`; None: all
    keep: tuple[int, ...] | None = None
    form: BatchForm = dataclasses.field(init=False)  # layout and structure of the batches
    anchor: npt.NDArray[np.uint8] = dataclasses.field(init=False)  # bytes of all stored batches
    # components of the only batch, if they are known; they are views of `anchor`
    arrays: Sequence[npt.NDArray[Any]] = ()
    waited_ns: int = 0  # time that the consumer has waited for the delivery
    origin: Origin | None = None  # origin for the flight recorder; None: it is not recorded
    # source indices of the rows of each batch to deliver; None if batches come without them
    indices: list[npt.NDArray[np.int64]] | None = None
    packed: list[BatchCounts] | None = None  # counts of each batch to deliver, of packed rows

    def choose(self, keep: Iterable[int]) -> None:
        """Restrict the delivery to some batches.

        Args:
            keep: Batches, relative to `first`, ascending.
        """
        self.keep, self.stored = tuple(keep), self.stored or self.count
        self.count = len(self.keep)
        self.row_failures = tuple(each for each in self.row_failures if each.batch in self.keep)

    def head(self, count: int) -> Delivery:
        """Return a delivery of the first `count` batches, in the same memory."""
        head = copy.copy(self)
        head.choose(self.stored_numbers()[:count])
        return head

    def failures(self) -> list[list[Failure]]:
        """Return the failures of each batch to deliver, in order."""
        by_batch: dict[int, list[Failure]] = {number: [] for number in self.stored_numbers()}
        for each in self.row_failures:
            by_batch[each.batch].append(each.failure)
        return list(by_batch.values())

    def stored_numbers(self) -> Sequence[int]:
        """Return the numbers of the batches to deliver, counted from `first`."""
        return range(self.count) if self.keep is None else self.keep

    def counts(self) -> Sequence[BatchCounts]:
        """Return the number of rows of each batch to deliver, and the amount of padding in it."""
        if self.packed is not None:
            return self.packed
        if self.batch_rows:
            return [BatchCounts(self.batch_rows[at], 0, 0) for at in self.stored_numbers()]
        if self.form.fixed is not None:
            return [BatchCounts(self.rows, 0, 0)] * self.count
        counts = varying_counts(self.anchor)
        return [counts[at] for at in self.stored_numbers()]

    def count_packed(self, plan: Plan, first: int) -> None:
        """Count rows and padding of packed rows.

        A batch whose samples were all skipped counts as empty.

        Args:
            plan: Plan of the epoch, or of its remainder.
            first: Number of the plan's first batch, counted through all epochs.
        """
        # Imported here, because few loaders need it.
        from loaderpool.plan.packed import PackedPlan

        assert isinstance(plan, PackedPlan) and self.form.fixed is not None
        numbers = [number - first for number in self.numbers()]
        rows, tokens = [self.rows] * self.count, plan.tokens[numbers].tolist()
        for at, number in enumerate(self.stored_numbers() if self.row_failures else ()):
            failed = [each.row for each in self.row_failures if each.batch == number]
            if failed:
                lengths, _ = plan.row_items(0, numbers[at], 1)
                tokens[at] -= int(lengths[failed].sum())
                rows[at] *= len(failed) < len(lengths)
        elements = sum(map(math.prod, self.form.fixed.row_shapes))
        padded, of_token = self.rows * elements, elements // plan.length
        self.packed = [
            BatchCounts(own, padded, padded - count * of_token)
            for own, count in zip(rows, tokens, strict=True)
        ]

    def numbers(self) -> list[int]:
        """Return the numbers of the batches to deliver, counted through all epochs."""
        return [self.first + at for at in self.stored_numbers()]

    def batches(self) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yield rows and components of each batch to deliver."""
        stored, keep = self.stored or self.count, self.keep
        batches: Iterator[tuple[int, Sequence[Any]]]
        if self.arrays:
            batches = iter([(self.rows, self.arrays)])
        else:
            batches = self.form.read(self.anchor, self.rows, stored, self.batch_rows)
        if keep is not None:
            batches = itertools.compress(batches, [at in keep for at in range(stored)])
        if self.packed is not None and self.row_failures:
            own = [each.rows for each in self.packed]
            return ((rows, parts) for rows, (_, parts) in zip(own, batches, strict=True))
        if self.indices is None:
            return batches
        pairs = zip(self.indices, batches, strict=True)
        return ((rows, [indices, *parts]) for indices, (rows, parts) in pairs)

    def joined(self) -> list[npt.NDArray[Any]]:
        """Return each component of all batches as one array, `dtype[count, rows, ...]`.

        Call it only if `form.has_equal_batches` is True.
        """
        assert self.form.fixed is not None
        stored = self.stored or self.count
        arrays = self.form.fixed.arrays(self.anchor, 0, self.rows * stored)
        parts = [array.reshape(stored, self.rows, *array.shape[1:]) for array in arrays]
        parts = parts if self.keep is None else [part[list(self.keep)] for part in parts]
        return parts if self.indices is None else [np.stack(self.indices), *parts]


@dataclasses.dataclass(eq=False, repr=False)
class DeliveryCounts:
    """Counts of a loader's delivered batches, and the slots of its latest run.

    Changed under the pool's lock.
    """

    slots: int = 0  # number of slots; 0 before the first batch
    slot_bytes: int = 0  # size of each slot
    slots_wanted: int = 0  # number of slots without a memory limit
    largest_chunk: int = 1  # maximum number of batches in a delivery of a stream
    lent: int = 0  # batches delivered as views of a slot
    copied: int = 0  # batches copied out of a slot
    copied_ns: int = 0  # time spent on these copies
    oversize: int = 0  # batches in files, because they did not fit a slot


class OrderedBuffer:
    """Buffer of a run's deliveries, which are taken in order. The caller holds the pool's lock.

    Attributes:
        begin_at: Number of the first batch that was not taken.
        front: Next delivery; None: it has not arrived. It remains until `drop_front`.
    """

    ended: Mapping[int, int] = {}  # lanes that have ended: number of batches of each

    def __init__(self, begin_at: int = 0) -> None:
        self.begin_at = begin_at
        self.front: Delivery | None = None
        self._by_first: dict[int, Delivery] = {}

    @property
    def is_over(self) -> bool:
        """True if all lanes have ended and all their batches were taken."""
        return False

    @property
    def taken(self) -> int:
        """Count of taken batches plus the number of the run's first batch. Used for streams."""
        return self.begin_at

    @property
    def done_before(self) -> int:
        """Number before which all batches were taken, and none is made again."""
        return self.begin_at

    def put(self, arrived: Delivery) -> bool:
        """Store a delivery until its turn; return False if all its batches were taken before.

        Called when the supervisor reports a full slot. The caller releases a refused slot.
        """
        self._by_first[arrived.first] = arrived
        if arrived.first == self.begin_at:
            self.front = arrived
        return True

    def drop_front(self) -> None:
        """Remove the delivery in front, because it is taken now."""
        self.begin_at += self._by_first.pop(self.begin_at).count
        self.front = self._by_first.get(self.begin_at)

    @property
    def waiting(self) -> int:
        """Number of slots whose batches wait. Called by any thread, without the lock."""
        return len(self._by_first)

    def rest(self) -> OrderedBuffer:
        """Return an empty buffer for the batches that were not taken. For a run that restarts."""
        return OrderedBuffer(self.begin_at)

    def had(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the batches after `begin_at` that must not be made, and the lanes that have ended.

        The lanes are those whose batches were all taken. For the message `Begin`.
        """
        return (), ()


def data_bytes(parts: Sequence[Any]) -> int:
    """Return the bytes of data in a batch's components. For text, its characters are counted."""
    return sum(
        sum(map(len, part.flat))
        if isinstance(part, np.ndarray) and part.dtype.hasobject
        else part.nbytes
        for part in parts
    )


def made_of(error: bytes) -> LoaderpoolError:
    """Return a new exception made from a pickled error."""
    # Imported here, because training without failures does not need it.
    from loaderpool.engine.failures import unpack

    return unpack(error)


class CheckedArguments(NamedTuple):
    """Checked arguments of a loader; made by `trainer.arguments.check_arguments`.

    Ownership: An engine keeps the payload, and with it function and source. A pool's engine pickles
    them again when they have changed.
    """

    config: LoaderConfig  # checked settings of the loader
    plan: Plan  # order of the items, and their batches
    unit: UnitKind  # result of one call of the function
    given_spec: ElementSpec | None  # the user's `element_spec`
    stream: StreamSource | None  # source without an index; None: the source has an index
    payload: WorkerPayload  # objects for the workers, or for the main process if there are none
    cache: Cache | None = None  # setting of the cache for the results of `fn`
    has_epoch_begin: bool = False  # the user's `on_epoch_begin` hook runs before the first sample
    # Draws the order of an epoch, and returns the epoch's plan; None: orders are not drawn.
    draw: Callable[[int], Plan] | None = None

    def plan_of_first(self, plan: Plan | None) -> Plan:
        """Return the plan of the epoch that has the first sample: `plan`, if it is given."""
        if plan is not None or self.draw is None:
            return plan or self.plan
        return self.draw(FIRST_EPOCH)

    @property
    def length(self) -> int | None:
        """Number of items in the source, which determines the plan. None if it has no length."""
        return len(self.payload.source) if self.stream is None and not self.plan.is_open else None
