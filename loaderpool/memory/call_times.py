"""Durations of the calls of the user's function, counted per worker and loader in shared memory.

A worker has a cell for each of the last few loaders that it has worked for. Cells follow the board
and survive their workers: a replacement continues the counts. Every cell has one writer. Readers
use no lock, so a reader may see a part of an update.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from loaderpool.config import MAX_WORKERS
from loaderpool.memory.recorder import RECORDED_FROM_NS, WorkerRecorder
from loaderpool.plan.item_names import generated_item, numbered

# Cells of one worker. If more loaders use the worker in turn, the least recently used one loses its
# cell.
_LOADERS = 4
# Number of buckets. Bucket b counts calls of 2**(b-1) to 2**b ns. The last bucket starts at 275 s
# and includes all longer calls.
BUCKETS = 40
SLOWEST = 16
# One in this number of tickets has its calls counted in buckets, so that samples of 0.1 ms are not
# slowed down.
_COUNTED_ONE_IN = 8
# A call is slow if it takes longer than this multiple of the median.
_SLOW_TIMES = 8
# Number of tickets after which the median is computed again.
_MEDIAN_AGAIN = 16 * _COUNTED_ONE_IN
_LEAST_CALLS = 32  # smallest number of counted calls for which there is a median
_NEVER_NS = 1 << 62
# Fields of a cell. _USED is a number that rises with each use of a cell.
_LOADER, _CALLS, _SUM_NS, _SLOW_NS, _USED = range(5)
_BUCKETS_AT = 8
_SLOWEST_AT = _BUCKETS_AT + BUCKETS
_FIELDS_PER_CALL = 3  # duration in ns, 1 + source index, epoch
_CELL = _SLOWEST_AT + SLOWEST * _FIELDS_PER_CALL
CALL_TIMES_BYTES = -(-MAX_WORKERS * _LOADERS * _CELL * 8 // 4096) * 4096


@dataclasses.dataclass(frozen=True)
class SlowItem:
    """Item whose function call was among the slowest."""

    index: int  # Index in the source, or number of the item in its generator.
    epoch: int  # Epoch of the call.
    seconds: float  # Duration of the call in seconds.
    generator: int | None = None  # Number of the generator that yielded it, or `None`.

    @property
    def name(self) -> str:
        """Name of the item in messages, such as `17` or `17 of generator 2`."""
        return numbered(self.index, self.generator)


class CallTimes(NamedTuple):
    """Statistics of a loader's calls."""

    calls: int = 0  # number of counted calls, about an eighth of all calls
    sum_ns: int = 0  # total duration of the counted calls
    # Time beyond the median of all calls (counted or not) that took over eight times the median.
    slow_ns: int = 0
    # Number of counted calls in each bucket b, which is for 2**(b-1) to below 2**b ns.
    buckets: tuple[int, ...] = (0,) * BUCKETS
    slowest: tuple[SlowItem, ...] = ()  # slowest items, the longest call first

    def quantile_ns(self, share: float) -> int:
        """Return the approximate duration that `share` of the calls do not exceed (0: no calls)."""
        return _quantile(self.buckets, share)

    def since(self, before: CallTimes) -> CallTimes:
        """Return the counts since `before`. `slowest` is not a difference: it covers all time."""
        calls, sum_ns, slow_ns = (
            now - then for now, then in zip(self[:3], before[:3], strict=True)
        )
        buckets = tuple(now - then for now, then in zip(self.buckets, before.buckets, strict=True))
        return CallTimes(calls, sum_ns, slow_ns, buckets, self.slowest)


class CallClock:
    """Measures the calls of one worker for one loader.

    It records the slowest of all calls, and counts the durations of a part of the calls.

    Runs in: a worker, on the thread that makes the calls. With concurrent calls, on the thread that
    notes a call, one thread at a time.

    Attributes:
        begun_ns: start time of the running call, or of the ticket.
        kept_from_ns: duration above which `keep` has to be called.
        begins: start times of this ticket's calls; None: the ticket is not counted.
    """

    def __init__(
        self, numbers: memoryview, worker_cell: int, loader: int, recorder: WorkerRecorder
    ) -> None:
        self._numbers, self.recorder = numbers, recorder
        self._base = _take_cell(numbers, worker_cell, loader)
        self._median_ns, self._slow_from_ns = 0, _NEVER_NS  # values until enough calls are counted
        self._epoch = self._tickets = 0
        self.begun_ns, self.kept_from_ns = 0, self._least_kept()
        self.begins: list[int] | None = None

    def begin_ticket(self, now_ns: int, epoch: int) -> None:
        """Start a ticket whose calls follow each other without a gap. Pairs with `end_ticket`."""
        self._epoch, self.begun_ns = epoch, now_ns
        self.begins = [] if self._tickets % _COUNTED_ONE_IN == 0 else None
        self._tickets += 1

    def end_ticket(self, now_ns: int, number: int) -> None:
        """Finish a ticket: note its last call, and count its calls if the ticket is counted.

        Args:
            now_ns: end of the last call.
            number: 1 + source index of the last call.
        """
        if now_ns - self.begun_ns > self.kept_from_ns:
            self.keep(now_ns - self.begun_ns, number)
        if self.begins:
            ends = (*self.begins[1:], now_ns)
            self._count(
                [
                    (end_ns - begun_ns).bit_length()
                    for begun_ns, end_ns in zip(self.begins, ends, strict=True)
                ]
            )
            self._numbers[self._base + _SUM_NS] += now_ns - self.begins[0]
            # Here `_tickets` is 1 after a multiple of `_COUNTED_ONE_IN`, because only such tickets
            # are counted.
            if not self._median_ns or self._tickets % _MEDIAN_AGAIN == 1:
                self._find_median()

    def subtract_time(self, ns: int) -> None:
        """Subtract `ns` nanoseconds from the duration of the running call."""
        self.begun_ns += ns
        if self.begins is not None:
            self.begins = [begun_ns + ns for begun_ns in self.begins]

    def note(self, begun_ns: int, ns: int, index: int) -> None:
        """Note a finished call that ran while other threads made other calls."""
        if ns > self.kept_from_ns:
            self.begun_ns = begun_ns
            self.keep(ns, index + 1)
        if self.begins is not None:
            self._count([ns.bit_length()])
            self._numbers[self._base + _SUM_NS] += ns

    def _count(self, buckets: list[int]) -> None:
        numbers, base = self._numbers, self._base
        for bucket in set(buckets):
            numbers[base + _BUCKETS_AT + min(bucket, BUCKETS - 1)] += buckets.count(bucket)
        numbers[base + _CALLS] += len(buckets)

    def _find_median(self) -> None:
        at = self._base + _BUCKETS_AT
        buckets = self._numbers[at : at + BUCKETS].tolist()
        if sum(buckets) >= _LEAST_CALLS:
            self._median_ns = _quantile(buckets, 0.5)
            self._slow_from_ns = _SLOW_TIMES * self._median_ns or _NEVER_NS
            self.kept_from_ns = self._least_kept()

    def keep(self, ns: int, number: int) -> None:
        """Record a call of a millisecond or more, add up slow time, and update the slowest calls.

        The slowest calls have one entry for each item: its longest call of all epochs.

        Args:
            ns: duration since `begun_ns`, more than `kept_from_ns`.
            number: 1 + source index; 0: the time before a ticket's first call, which is ignored.
        """
        if not number:
            return
        if ns >= RECORDED_FROM_NS:
            self.recorder.note_call(self.begun_ns, self.begun_ns + ns, number - 1)
            if ns <= self._slowest_from_ns:
                return
        numbers = self._numbers
        if ns > self._slow_from_ns:
            numbers[self._base + _SLOW_NS] += ns - self._median_ns
        places = [self._slow(number) for number in range(SLOWEST)]
        at = next((place for place in places if numbers[place + 1] == number), None)
        if at is None:
            at = min(places, key=numbers.__getitem__)
        if ns > numbers[at]:
            # SYNC: zero first, so that no reader combines the old time with the new item; pairs
            # with read_call_times.
            numbers[at] = 0
            numbers[at + 1], numbers[at + 2] = number, self._epoch
            numbers[at] = ns
        self.kept_from_ns = self._least_kept()

    def _least_kept(self) -> int:
        least_ns = min(self._numbers[self._slow(number)] for number in range(SLOWEST))
        self._slowest_from_ns = min(self._slow_from_ns, least_ns)
        return min(self._slowest_from_ns, RECORDED_FROM_NS)

    def _slow(self, number: int) -> int:
        return self._base + _SLOWEST_AT + number * _FIELDS_PER_CALL


def read_call_times(numbers: memoryview, worker_cells: Iterable[int], loader: int) -> CallTimes:
    """Return the statistics of a loader's calls in these workers. Runs in: any process."""
    cells = np.frombuffer(numbers, np.uint64).reshape(-1, _LOADERS, _CELL)[list(worker_cells)]
    found = cells[cells[:, :, _LOADER] == loader]
    sums = found.sum(axis=0).tolist()
    records = found[:, _SLOWEST_AT:].reshape(-1, _FIELDS_PER_CALL)
    slowest: dict[int, SlowItem] = {}
    for ns, number, epoch in records[records[:, 0].argsort()[::-1]].tolist():
        if not ns or len(slowest) == SLOWEST:
            break
        if number not in slowest:
            generator, index = generated_item(number - 1) or (None, number - 1)
            slowest[number] = SlowItem(index, epoch, ns / 1e9, generator)
    buckets = tuple(sums[_BUCKETS_AT:_SLOWEST_AT])
    return CallTimes(sums[_CALLS], sums[_SUM_NS], sums[_SLOW_NS], buckets, tuple(slowest.values()))


def _take_cell(numbers: memoryview, worker_cell: int, loader: int) -> int:
    """Return the offset of the loader's cell.

    If the loader has no cell, clear the least recently used cell and assign it to the loader.
    """
    first = worker_cell * _LOADERS * _CELL
    bases = range(first, first + _LOADERS * _CELL, _CELL)
    latest = max(numbers[base + _USED] for base in bases)
    base = next((base for base in bases if numbers[base + _LOADER] == loader), None)
    if base is None:
        base = min(bases, key=lambda each: numbers[each + _USED])
        numbers[base + _LOADER] = 0
        numbers[base : base + _CELL] = memoryview(array.array("Q", bytes(8 * _CELL)))
        numbers[base + _LOADER] = loader
    numbers[base + _USED] = latest + 1
    return base


def _quantile(buckets: Sequence[int], share: float) -> int:
    wanted, seen = share * sum(buckets), 0
    for bucket, count in enumerate(buckets):
        if count and seen + count >= wanted:
            least = 1 << max(0, bucket - 1)
            return int(least * (1 + (wanted - seen) / count))
        seen += count
    return 0
