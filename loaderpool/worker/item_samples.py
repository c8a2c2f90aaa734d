"""`ItemSamples`: samples of items, if `fn` returns a list of n samples for each item.

Sample k of item i has the number i * n + k. The plan orders these numbers. `fn` is called once for
an item. All its samples are kept until another item replaces them. The workers of one supervisor
share the samples: the first worker that needs an item calls `fn`. If another worker needs the same
item meanwhile, it first makes other items of its ticket, and then waits.

Samples are kept as pickles. So each use gets a separate object, and a sample from another process
equals one that was made here.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from loaderpool.config import DEFAULT_WINDOW
from loaderpool.errors import SpecMismatchError, UnpicklableError, counted
from loaderpool.memory.samples import Pass, StoredSample
from loaderpool.plan.block_order import BlockOrder
from loaderpool.plan.stream_kinds import ITEM
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.payload.record import WorkerPayload
from loaderpool.worker.bundles import Bundle, packed, unpacked
from loaderpool.worker.own_process import end_stray
from loaderpool.worker.rows import copy_of
from loaderpool.worker.seeding import Seeding
from loaderpool.worker.tickets import Progress, WorkFailed

# Number of windows of items whose samples are kept. Smaller: a slow worker calls `fn` again,
# because others have replaced the samples. Larger: more memory.
_KEPT_WINDOWS = 2
_MOST_PLACES = 1 << 16
_COUNT = struct.Struct("<Q")  # number of large arrays, in front of a sample's pickle
_NOT_NOTED: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Cached(Protocol):
    """Cache of samples that also calls `fn`. `item_reader.CachedFunction` implements it."""

    def look_up(
        self, entry: int, load: Callable[[memoryview], Any], is_claimed: bool = False
    ) -> tuple[bool, Any]:
        """Return True if an entry is stored; the result of `load` for its bytes."""

    def claimed(self, entry: int) -> contextlib.AbstractContextManager[None]:
        """Claim an entry in the `with` block. Blocks while another process has the claim."""

    def has(self, entry: int) -> bool:
        """Return True if the entry with this number is stored."""

    def made(self, index: int, get: Callable[[], object]) -> object:
        """Call `fn` for the item that `get` returns. Raises CacheError if the result is random."""

    def pickled(self, index: int, value: object) -> tuple[bytes, object]:
        """Return the pickle of a sample, and the unpickled copy. Raises CacheError."""

    def keep(self, entry: int, parts: Sequence[bytes]) -> bool:
        """Store pickles in consecutive entries, from `entry` on. Return True if all are stored."""


class ItemSamples:
    """Reads samples by their numbers. Calls `fn` for items whose samples are not kept.

    Args:
        payload: the loader's function and source.
        seeding: the random generators of the calls.
        cached: calls `fn`, and keeps the samples for later epochs. None: there is no cache.

    Attributes:
        samples: number of samples of each item.
    """

    def __init__(self, payload: WorkerPayload, seeding: Seeding, cached: Cached | None) -> None:
        assert payload.fn is not None and payload.config.samples_per_item is not None
        self.samples = payload.config.samples_per_item
        self._fn, self._source, self._plan = payload.fn, payload.source, payload.plan
        self._takes_rng = "fn" in payload.takes_rng
        self._seeding, self._cached, self._shared = seeding, cached, payload.samples
        self._loader = payload.loader
        # True if failures are kept. Then other samples of a failed item fail without a new call.
        self._keeps_failures = payload.config.on_error.action != "raise"
        order = payload.plan.order
        self._order = order if isinstance(order, BlockOrder) else None
        window = DEFAULT_WINDOW if self._order is None else self._order.window
        self._places = min(_KEPT_WINDOWS * window, _MOST_PLACES)
        # Rounded up to whole windows: the first window of an epoch has other places than the last
        # one of the epoch before.
        self._items_of_epoch = -(-order.size // (self.samples * window)) * window
        # Samples that this process has made, by pass and item. If processes share samples, only
        # the latest item's are here.
        self._kept: dict[tuple[Pass, int], tuple[list[bytes], bool]] = {}
        self._most_kept = self._places if self._shared is None else 1
        # Locks of places between the threads of this process, which share the kernel's locks.
        self._locks: dict[int, threading.RLock] = {}
        self._held: set[int] = set()  # places whose kernel lock this process holds
        # True if this class notes its calls in `progress`. With concurrent calls, the main thread
        # notes the call that it waits for.
        self._is_noted = payload.config.threads == 1
        self._progress: Progress
        self._watched: Callable[..., object]

    def attend(self, progress: Progress, watched: Callable[..., object]) -> None:
        """Connect this object to the process's progress notes and to its watch for random draws.

        `Work` calls this method before the first ticket.

        Args:
            progress: progress notes of this process.
            watched: `DrawWatch.alone`, which makes each call of `fn`.
        """
        self._progress, self._watched = progress, watched

    def forget(self) -> None:
        """Drop the samples that only this process keeps, because data may have changed."""
        self._kept.clear()

    def reader(self, epoch: int, run: int, numbers: Sequence[int]) -> Callable[[int], object]:
        """Return a function that returns a sample by its number.

        Args:
            epoch: the epoch.
            run: number of the run.
            numbers: numbers of all samples of the ticket. Their items may be made in any order.
        """
        return functools.partial(self._read, Pass(epoch, run), numbers)

    def _read(self, of: Pass, numbers: Sequence[int], number: int) -> object:
        item, at = divmod(number, self.samples)
        found = self._find(of, item, at) or self._make_once(of, item, at, numbers)
        if found.has_failed:
            failure = pickle.loads(found.content)
            raise WorkFailed(failure, RuntimeError(failure.text))
        if self._cached is not None:
            return pickle.loads(found.content)
        (buffers,) = _COUNT.unpack_from(found.content)
        content = memoryview(found.content)[_COUNT.size :]
        return unpacked(content, Bundle(0, len(content), buffers, 0), self._loader)

    # ---- kept samples ----

    def _place(self, epoch: int, item: int) -> int:
        """Return the place of an item in the sample file.

        In a `BlockOrder`, items that batches need at the same time have different places. In other
        orders, two such items may share a place. Then `fn` is called for them again.
        """
        rank = item if self._order is None else self._order.rank(epoch, item)
        return (epoch * self._items_of_epoch + rank) % self._places

    def _entry(self, epoch: int, item: int) -> int:
        """Return the number of an item's first sample in the cache."""
        return self._plan.record(epoch, item) * self.samples

    def _find(self, of: Pass, item: int, at: int) -> StoredSample | None:
        if self._cached is not None:
            is_found, content = self._cached.look_up(self._entry(of.epoch, item) + at, bytes)
            if is_found:
                return StoredSample(content, False)
        kept = self._kept.get((of, item))
        if kept is not None:
            parts, has_failed = kept
            return StoredSample(parts[0 if has_failed else at], has_failed)
        if self._shared is not None:
            with contextlib.suppress(OSError):  # the user's code has closed the descriptor
                return self._shared.read(self._place(of.epoch, item), of, item, at)
        return None

    def _has(self, of: Pass, item: int) -> bool:
        if (of, item) in self._kept:
            return True
        if self._cached is not None and self._cached.has(self._entry(of.epoch, item)):
            return True
        if self._shared is not None:
            with contextlib.suppress(OSError):
                return self._shared.has(self._place(of.epoch, item), of, item)
        return False

    def _keep(self, of: Pass, item: int, parts: list[bytes], has_failed: bool) -> None:
        for old in [*self._kept][: len(self._kept) + 1 - self._most_kept]:
            self._kept.pop(old, None)
        self._kept[of, item] = parts, has_failed
        place = self._place(of.epoch, item)
        if self._shared is not None and place in self._held:
            # The samples may be too large, or the descriptor may be closed.
            with contextlib.suppress(OSError):
                self._shared.write(place, of, item, parts, has_failed)

    def _claim(self, place: int, of: Pass, item: int) -> None:
        """Let the first pass use the samples of the probe, so that they are not made again."""
        kept = self._kept.pop((of._replace(run=0), item), None)
        if kept is not None:
            self._kept[of, item] = kept
        if self._shared is not None and place in self._held:
            with contextlib.suppress(OSError):
                self._shared.claim(place, of, item)

    # ---- locks ----

    def _lock(self, place: int, waits: bool) -> bool:
        """Acquire the lock of a place. Return False if another thread or process has it.

        Call `_unlock` after a call that returns True.
        """
        lock = self._locks.setdefault(place, threading.RLock())
        if not lock.acquire(blocking=waits):
            return False
        if self._shared is not None:
            # If the kernel refuses to wait (EDEADLK), or the descriptor was closed, this process
            # calls `fn` without the kernel's lock, and does not share the samples.
            with contextlib.suppress(OSError):
                if not self._shared.lock(place, waits):
                    lock.release()
                    return False
                self._held.add(place)
        return True

    def _unlock(self, place: int) -> None:
        if self._shared is not None and place in self._held:
            self._held.discard(place)
            with contextlib.suppress(OSError):
                self._shared.unlock(place)
        self._locks[place].release()

    # ---- calls of `fn` ----

    def _make_once(self, of: Pass, item: int, at: int, numbers: Sequence[int]) -> StoredSample:
        """Return a sample of an item that is not kept. Only one process makes it at a time."""
        place = self._place(of.epoch, item)
        if not self._lock(place, waits=False):
            if found := self._make_others(of, item, at, numbers):
                return found
            with self._progress.waiting() if self._is_noted else _NOT_NOTED:
                self._lock(place, waits=True)
        try:
            self._claim(place, of, item)
            return self._find(of, item, at) or self._make(of, item, at)
        finally:
            self._unlock(place)

    def _make_others(
        self, of: Pass, item: int, at: int, numbers: Sequence[int]
    ) -> StoredSample | None:
        """Make other items of the ticket, while another process or thread makes this one.

        Returns:
            The sample of this item. None if it is still not made when all other items are.
        """
        for other in dict.fromkeys(number // self.samples for number in numbers):
            place = self._place(of.epoch, other)
            if other == item or self._has(of, other) or not self._lock(place, waits=False):
                continue
            try:
                self._claim(place, of, other)
                if not self._has(of, other):
                    self._make(of, other, 0)
            except self._progress.failures.catches as error:
                # Ignore errors of `fn`, because they are raised when this item's row is made.
                if is_of_a_handler(error):
                    raise
            finally:
                self._unlock(place)
            if found := self._find(of, item, at):
                return found
        return None

    def _make(self, of: Pass, item: int, at: int) -> StoredSample:
        """Call `fn` for an item, keep all its samples, and return one of them.

        If there is a cache and another process makes the item, wait for its samples instead.
        """
        if self._cached is None:
            return self._called(of, item, at)
        entry = self._entry(of.epoch, item)
        with self._cached.claimed(entry):
            is_found, content = self._cached.look_up(entry + at, bytes, is_claimed=True)
            return StoredSample(content, False) if is_found else self._called(of, item, at)

    def _called(self, of: Pass, item: int, at: int) -> StoredSample:
        failures, has_failed = self._progress.failures, False
        with self._progress.calling(item) if self._is_noted else _NOT_NOTED:
            try:
                parts = self._pickled(of.epoch, item)
            except failures.catches as error:
                if not self._keeps_failures:
                    raise
                failure = failures.of(error, of.epoch, [item]).failure
                parts, has_failed = [pickle.dumps(failure, 5)], True
        if (
            self._cached is None
            or has_failed
            or not self._cached.keep(self._entry(of.epoch, item), parts)
        ):
            self._keep(of, item, parts, has_failed)
        return StoredSample(parts[0 if has_failed else at], has_failed)

    def _pickled(self, epoch: int, item: int) -> list[bytes]:
        """Call `fn` for an item, and return the pickles of its samples.

        Raises:
            SpecMismatchError: the result is not a list of `samples_per_item` samples.
            UnpicklableError: a sample cannot be pickled.
            BaseException: an exception of the function or of the source.
        """
        get = functools.partial(self._source.__getitem__, self._plan.record(epoch, item))
        if self._cached is not None:
            made = self._cached.made(item, get)
        else:
            made = self._watched(self._call, epoch, item, get)
        if type(made) is not list or len(made) != self.samples:
            advice = ""
            if type(made) is list:
                got = counted(len(made), "sample")
            else:
                got = f"an object of type {type(made).__name__}"
                if isinstance(made, (tuple, np.ndarray, Iterator)):
                    advice = ". Convert it with list(...)"
            raise SpecMismatchError(
                f"fn must return a list of {counted(self.samples, 'sample')} for each item "
                f"(samples_per_item={self.samples}), but it returned {got} for source index {item}"
                f"{advice}"
            )
        # Copy views, because the pickle of a view may contain the whole array or tensor.
        samples = map(copy_of, made)
        if self._cached is not None:
            return [self._cached.pickled(item, sample)[0] for sample in samples]
        try:
            frames = [packed(sample, 0, 1) for sample in samples]
            return [b"".join([_COUNT.pack(each.buffers), *each.parts]) for each in frames]
        except Exception as error:
            if is_of_a_handler(error):
                raise
            raise UnpicklableError(
                f"a sample that fn returned for source index {item} cannot be pickled: "
                f"{type(error).__name__}: {error}. With samples_per_item=, return arrays, numbers "
                "or strings, or objects that can be pickled"
            ) from error

    def _call(self, epoch: int, item: int, get: Callable[[], object]) -> object:
        generator = self._seeding.begin(epoch, item, ITEM)
        value = get()
        made = self._fn(value, rng=generator) if self._takes_rng else self._fn(value)
        end_stray()
        return made
