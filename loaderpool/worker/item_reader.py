"""`ItemReader`: reads the items of a source, or the results of `fn` that a cache stores."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import operator
import pickle
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from loaderpool.cache.setting import Count
from loaderpool.errors import CacheError, SourceError
from loaderpool.plan.stream_kinds import BATCH
from loaderpool.sources.blocks import forget_blocks
from loaderpool.sources.indexing import Keys, MixRecords
from loaderpool.sources.many_rows import checked_rows, getitems_of
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.messages import Ticket
from loaderpool.transport.payload.record import WorkerPayload
from loaderpool.worker.event_loop import by_steps
from loaderpool.worker.fetching import Fetched
from loaderpool.worker.own_process import GlobalsWatch, Picture, end_stray
from loaderpool.worker.seeding import Seeding
from loaderpool.worker.tickets import Opened, Progress

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache, Store
    from loaderpool.plan.block_order import BlockOrder
    from loaderpool.sources.indexing import Indexed
    from loaderpool.worker.item_samples import ItemSamples

# Number of latest epochs that are remembered. A ticket of another one drops all kept blocks.
# Smaller: concurrent passes decode blocks again. Larger: no effect.
_EPOCHS = 8
# Number of rows of a mix from which their sources are found together. Smaller: tiny batches take
# longer. Larger: each row of a larger batch is read by a call of Python code.
_MANY_KEYS = 64


class ItemReader:
    """Reads the arguments of a sample's first function: items, or results of `fn` if they are kept.

    Args:
        payload: the loader's source, and its cache.
        cell: number of this worker's cell.
        seeding: the random generators of the calls.

    Attributes:
        cached: reads the results of `fn`. None: there is no cache, and items are read.
        samples: reads samples by number, if `fn` returns several for an item. None: it returns one.
        calls_fn: True if this reader calls `fn`, because its results are kept.
        are_indices: True for `range(n)`, and a mix of its parts: looking up each item would take a
            tenth of the time of a batch of tiny samples.
        reads_many: True if the source reads many rows with one call.
        seeds_reads: True if these calls are seeded, because they may draw random numbers.
        progress: notes the reads of many rows. None: this is the main process.
        stops_at_errors, through_cache: see `fetching.RowsReader`.
        refusal: the error of a source that breaks the protocol of these reads, once it is known. It
            applies to all samples.
    """

    def __init__(self, payload: WorkerPayload, cell: int, seeding: Seeding) -> None:
        source = self._source = payload.source
        self._plan, self._seeding, self._unit = payload.plan, seeding, payload.unit
        self._getitems = getitems_of(source) if payload.has_getitems else payload.blocks_reader
        self.reads_many, self.seeds_reads = self._getitems is not None, payload.has_getitems
        self._epochs: collections.deque[tuple[int, int]] = collections.deque(maxlen=_EPOCHS)
        if hasattr(payload.plan.order, "window"):
            # Imported here, because few loaders need it.
            from loaderpool.sources.decoded import reserve

            reserve(self, cast("BlockOrder", payload.plan.order))
        self.stops_at_errors = self._unit == "batch" or payload.config.on_error.action == "raise"
        self.progress: Progress | None = None
        self.refusal: Exception | None = None
        self.through_cache: Callable[..., object] | None = None
        self.cached: CachedFunction | None = None
        self._read: Callable[..., object] = source.__getitem__
        if payload.cache is not None and payload.fn is not None:
            cached = self.cached = CachedFunction(source, payload.fn, payload.cache, cell, seeding)
            self._read = self.through_cache = cached.call_async if payload.is_async else cached
        self.samples: ItemSamples | None = None
        if payload.config.samples_per_item is not None:
            # Imported here, because few loaders need it.
            from loaderpool.worker.item_samples import ItemSamples

            self.samples = ItemSamples(payload, seeding, self.cached)
        self.calls_fn = self.cached is not None or self.samples is not None
        self.are_indices = not self.calls_fn and (
            source.are_indices
            if isinstance(source, MixRecords)
            else type(source) is range and source == range(len(source))
        )

    def look_up(self) -> None:
        """Look up the source's methods again, and drop kept samples and blocks.

        Called in the main process, because the user may have changed the source.
        """
        if self.samples is not None:
            self.samples.forget()
        if self.cached is None:
            self._read = self._source.__getitem__
        if self.seeds_reads:
            self._getitems = getitems_of(self._source) or self._getitems
        forget_blocks(self._source)

    def open(
        self,
        ticket: Ticket,
        positions: npt.NDArray[np.int64],
        indices: list[int],
        batch_rows: tuple[int, ...] = (),
        keys: Keys | None = None,
    ) -> Opened:
        """Return the rows of a ticket, whose items this reader reads.

        Args:
            ticket: the ticket.
            positions: position of each row.
            indices: source index of each row; with `samples_per_item`, the number of its sample.
            batch_rows: number of rows of each batch, if batches differ.
            keys: what `keys_of` returns for the indices. None: not known.
        """
        epoch = ticket.run, ticket.epoch  # several epochs may have the same run
        if epoch not in self._epochs:
            self._epochs.append(epoch)
            forget_blocks(self._source)
        if self.samples is not None:
            count = self.samples.samples
            # After a worker's death, items are made in the order of rows, so that the cause is
            # found.
            others = () if ticket.deaths else indices
            read = self.samples.reader(ticket.epoch, ticket.run, others)
            items = [number // count for number in indices]
            return Opened(ticket, positions, items, read, batch_rows, indices, samples=count)
        read = self._read
        if keys is None:
            keys = self.keys_of(ticket.epoch, np.array(indices))
        if self.cached is not None and len(keys):
            read = functools.partial(read, indices=dict(zip(keys, indices, strict=True)))
        opened = Opened(ticket, positions, indices, read, batch_rows, keys)
        if self.reads_many:
            # After a death, rows are read one by one to find the cause. With `batch_fn` this is
            # useless, because a whole batch is retried or fails.
            is_alone = ticket.deaths > 0 and self._unit == "sample"
            opened.fetched = Fetched(
                self, ticket.epoch, positions, indices, opened.bounds(), is_alone
            )
        return opened

    def keys_of(self, epoch: int, indices: npt.NDArray[np.int64]) -> Keys:
        """Return the argument of `read` for each row, as in `Opened.keys`."""
        if self._plan.mix is None or self.samples is not None:
            return ()
        records = self._plan.records(epoch, indices)
        return records if self.cached is None else records.tolist()

    def values(self, opened: Opened, start: int, stop: int) -> Iterable[object]:
        """Return the items of several rows. Each is read when it is needed."""
        if opened.fetched is not None:
            return opened.fetched.values(start, stop)
        keys = opened.keys[start:stop]
        if isinstance(keys, np.ndarray):
            if len(opened.keys) >= _MANY_KEYS and not self.are_indices:
                if opened.parts is None:
                    opened.parts = cast(MixRecords, self._source).parts(opened.keys)
                sources, places = opened.parts
                return map(operator.getitem, sources[start:stop], places[start:stop])
            keys = keys.tolist()
        return keys if self.are_indices else map(opened.read, keys)

    # ---- many rows with one call: see `fetching.RowsReader` ----

    def read_many(self, indices: list[int]) -> list[object]:
        assert self._getitems is not None
        rows = self._getitems(indices[:])  # a copy, because the source may change its argument
        end_stray()
        try:
            return checked_rows(rows, len(indices))
        except SourceError as error:
            self.refusal = error
            raise

    def begin_rows(self, epoch: int, position: int) -> None:
        # The results of `fn` in a cache are not random, and a `batch_fn` was seeded before.
        if self.seeds_reads and self._unit == "sample" and self.cached is None:
            self._seeding.begin(epoch, position, BATCH)

    def noting_read(self, index: int, rows: int) -> contextlib.AbstractContextManager[None]:
        # The call of a `batch_fn` includes the reads of its items.
        if self.progress is None or self._unit == "batch":
            return contextlib.nullcontext()
        return self.progress.fetching(index, rows)

    def rows_to_read(self, epoch: int, row: int, indices: Sequence[int]) -> Sequence[int]:
        failures = None if self.progress is None else self.progress.failures
        rows: Sequence[int] = range(len(indices))
        if failures is not None and failures.has_excluded and self._unit == "sample":
            rows = [at for at in rows if failures.excluded(epoch, [indices[at]]) is None]
        if self.cached is not None:
            has = self.cached.has
            rows = [at for at in rows if at == row or (at > row and not has(indices[at]))]
        return rows


# ---- items with a cache ----

# Pauses between two checks of an entry that another process makes. The kernel has no wait for a
# lock that also ends when the owner is stopped. Shorter first pause: more calls of the kernel.
# Longer: a waiting process starts its next call later. Each pause is longer than the last one, and
# at most a fifth of the time waited so far.
_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.02
_LONGER = 1.25

# Source indices that are equal to their keys.
_SAME: Mapping[int, int] = {}

# Snapshots of the global generators, and of those that the function holds.
_States = tuple[Picture, object]

_DREW = (
    "fn used {} for source index {}. With cache=, it is called only once per item, so all epochs "
    "would have the same random numbers. Move the random part to augment=, which gets the result "
    "of fn in every epoch, or remove cache="
)


class CachedFunction:
    """Returns the result of `fn` for a source index, as a separate object.

    The result is always unpickled from the entry's bytes, even if `fn` was called just now or the
    result could not be stored. So a sample does not depend on whether its result was in the
    cache.

    Only one process makes a result at a time. Others that need the same result wait for it.

    Attributes:
        refusal: the reason why the function cannot be cached, once it is known. It applies to all
            samples.
        noting_wait: returns a context manager that notes a wait on the board while it runs.
    """

    def __init__(
        self,
        source: Indexed,
        fn: Callable[[Any], object],
        shared: SharedCache,
        cell: int,
        seeding: Seeding,
    ) -> None:
        self._source, self._fn, self._shared = source, fn, shared
        self._counts, self._watch = shared.counts_of(cell), GlobalsWatch()
        self._seeding = seeding  # the function must not draw from the generators that it holds
        self.refusal: CacheError | None = None
        self.noting_wait: Callable[[], contextlib.AbstractContextManager[None]]
        self.noting_wait = contextlib.nullcontext

    def __call__(
        self,
        key: int,
        get: Callable[[int], object] | None = None,
        indices: Mapping[int, int] = _SAME,
    ) -> object:
        """Return the result of `fn` for an item.

        Args:
            key: number by which the item is read.
            get: returns the item. None: it is read from the source.
            indices: source indices of keys, for messages. Others are their keys.

        Raises:
            CacheError: the result is random, or cannot be pickled.
        """
        is_found, found = self.look_up(key)
        if not is_found:
            with self.claimed(key):
                is_found, found = self.look_up(key, is_claimed=True)
                if not is_found:
                    index = indices.get(key, key)
                    read = functools.partial(get or self._source.__getitem__, key)
                    found = self._put(key, index, self.made(index, read))
        return found

    def has(self, key: int) -> bool:
        """Return True if the cache has an entry for this key. It may be damaged."""
        try:
            return self._shared.store().has(key)
        except (OSError, ValueError, struct.error):
            return False

    @contextlib.contextmanager
    def claimed(self, entry: int) -> Iterator[None]:
        """Claim an entry in the `with` block. Wait for another process or thread that has the
        claim.

        Its call has begun before, so the wait takes no longer than a call of `fn` here.
        """
        store, owner = self._open(), object()
        try:
            for pause_s in self._pauses(store, entry, owner):
                time.sleep(pause_s)
            yield
        finally:
            self._release(store, entry, owner)

    def _pauses(self, store: Store | None, entry: int, owner: object) -> Iterator[float]:
        """Yield the length of each pause in seconds, until the owner has the claim."""
        if store is not None and not store.claim(entry, owner):
            with self.noting_wait():
                pause_s = _FIRST_PAUSE_S
                while not store.claim(entry, owner):
                    yield pause_s
                    pause_s = min(_LONGER * pause_s, _LONGEST_PAUSE_S)

    def _release(self, store: Store | None, entry: int, owner: object) -> None:
        if store is not None:
            store.release(entry, owner)

    def _open(self) -> Store | None:
        """Return the store, or None if it is unavailable. `look_up` counts this failure."""
        with contextlib.suppress(OSError, ValueError):
            return self._shared.store()
        return None

    def made(self, index: int, get: Callable[[], object]) -> object:
        """Call `fn` for the item that `get` returns, and return its result.

        Raises:
            CacheError: the result is random.
        """
        # The first call may have imported a module that draws on import, or another thread may have
        # drawn.
        for _ in range(2):
            before = self._states()
            value = self._fn(get())
            if not self._drew(before, index):
                break
        else:
            self._refuse(_DREW.format("random or numpy.random", index))
        return value

    async def call_async(
        self,
        key: int,
        get: Callable[[int], object] | None = None,
        indices: Mapping[int, int] = _SAME,
    ) -> object:
        """Return the result of an async `fn`, as `__call__` does."""
        is_found, found = self.look_up(key)
        if is_found:
            return found
        # Imported here, as in `event_loop`.
        import asyncio

        store, owner = self._open(), object()
        try:
            for pause_s in self._pauses(store, key, owner):
                await asyncio.sleep(pause_s)
            is_found, found = self.look_up(key, is_claimed=True)
            if is_found:
                return found
            index = indices.get(key, key)
            read = functools.partial(get or self._source.__getitem__, key)
            return self._put(key, index, await self._made_async(index, read))
        finally:
            self._release(store, key, owner)

    async def _made_async(self, index: int, get: Callable[[], object]) -> object:
        draws: list[bool] = []

        async def call() -> object:
            value = self._fn(get())
            return await value if inspect.isawaitable(value) else value

        def note(before: _States) -> None:
            draws.append(self._drew(before, index))

        for _ in range(2):
            draws.clear()
            value = await by_steps(call(), self._states, note)
            if not any(draws):
                break
        else:
            self._refuse(_DREW.format("random or numpy.random", index))
        return value

    def look_up(
        self,
        entry: int,
        load: Callable[[memoryview], Any] = pickle.loads,
        is_claimed: bool = False,
    ) -> tuple[bool, Any]:
        """Return True if a result is stored; the result.

        Args:
            entry: number of the entry.
            load: converts an entry's bytes to the result.
            is_claimed: True if the caller has the claim. Then failures are counted.
        """
        store: Store | None = None
        try:
            store = self._shared.store()
            pickled = store.get(entry)
            if pickled is not None:
                found = load(pickled)
                self._counts[Count.HITS] += 1
                return True, found
        except Exception as error:
            if is_of_a_handler(error):
                raise
            # The entry is unavailable or damaged. Make it again, and overwrite it.
            if is_claimed:
                self._counts[Count.NO_ROOM if store is None else Count.DAMAGED] += 1
        return False, None

    def _states(self) -> _States:
        """Return the states of the global generators, and of those that the function holds."""
        captured = self._seeding.captured
        return self._watch.look(), None if captured is None else captured.states()

    def _drew(self, before: _States, index: int) -> bool:
        """Return True if `fn` has drawn from the global generators.

        Raises:
            CacheError: it has drawn from a generator that it holds.
        """
        end_stray()  # a child that the function has forked must not write
        of_globals, of_held = self._states()
        if of_held != before[1]:
            self._refuse(_DREW.format("a random number generator that it holds", index))
        return of_globals != before[0]

    def _put(self, entry: int, index: int, value: object) -> object:
        """Store a result. Return it as a separate object."""
        self._counts[Count.MISSES] += 1
        made, copied = self.pickled(index, value)
        self._store(self._open(), entry, made)
        return copied

    def keep(self, entry: int, parts: Sequence[bytes]) -> bool:
        """Store the samples of an item in consecutive entries. Return True if all are stored."""
        self._counts[Count.MISSES] += 1
        store = self._open()
        stored = [self._store(store, number, part) for number, part in enumerate(parts, entry)]
        return all(stored)

    def _store(self, store: Store | None, entry: int, made: bytes) -> bool:
        not_kept = None if store is None else store.put(entry, made)
        if not_kept is not None:
            self._counts[not_kept] += 1
        return store is not None and not_kept is None

    def pickled(self, index: int, value: object) -> tuple[bytes, object]:
        """Return the pickle of a result, or of one of its samples, and the unpickled copy.

        Raises:
            CacheError: the result cannot be pickled and unpickled.
        """
        try:
            made = pickle.dumps(value, 5)
            copied: object = pickle.loads(made)
        except Exception as error:
            if is_of_a_handler(error):
                raise
            self._refuse(
                f"The result of fn for source index {index}, a {type(value).__name__}, cannot be "
                f"cached: {error}. A cache stores pickles: return arrays, numbers, strings, or "
                "objects of a module, from fn, or remove cache="
            )
        return made, copied

    def _refuse(self, text: str) -> NoReturn:
        self.refusal = CacheError(text)
        raise self.refusal
