"""Calls of the user's functions for rows of a ticket, each with its own random streams.

`concurrent_calls` makes several of them at the same time, on threads or as coroutines. The main
thread does the rest: conversion, the error policy, writing rows to a slot, and messages to other
processes. That code is the same for all kinds of calls.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from loaderpool.checks import is_async
from loaderpool.errors import ArgumentError, CacheError, add_note
from loaderpool.plan.generators import BATCH, SAMPLE, CapturedGenerators
from loaderpool.sources.varying import varying
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.payload.generators import made_by_setup, seeder
from loaderpool.transport.payload.record import Pair, WorkerPayload
from loaderpool.worker.event_loop import EventLoop, by_steps, limited
from loaderpool.worker.own_process import GlobalsWatch, end_stray
from loaderpool.worker.tickets import Opened

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache, Store
    from loaderpool.plan.sample_streams import SampleStreams

_Result = TypeVar("_Result")


class Calls:
    """The user's functions, and the arguments of each call.

    A sample is made by a chain of calls. The source (or the cache, which stores the result of `fn`)
    returns an item. Then each function is called with the result of the previous one.

    Args:
        payload: the loader's functions, source and settings.
        cell: number of this worker's cell.
        threads: number of calls at the same time.
        watch: watches the global generators, if it is shared with other code.
        event_loop: runs the coroutines of async functions. None: a new one.

    Attributes:
        is_async: True if a function is async. Then each call is a coroutine.
        limit_s: time in seconds after which a coroutine is canceled; None: never.
        context: copied for each coroutine, once the `setup` hook has run in the event loop.
    """

    def __init__(
        self,
        payload: WorkerPayload,
        cell: int = 0,
        threads: int = 1,
        watch: GlobalsWatch | None = None,
        event_loop: EventLoop | None = None,
    ) -> None:
        source, config = payload.source, payload.config
        self.is_async = payload.is_async
        self.limit_s: float | None = None
        self.context: contextvars.Context | None = None
        # Notes that a coroutine computes: see `Progress.note_step`.
        self.note_step: Callable[[int], None] = _nothing
        self.event_loop = event_loop or EventLoop()
        self._payload, self._config = payload, config
        self._get: Callable[[int], Any] = source.__getitem__
        self._batch_fn = payload.batch_fn
        functions = [("fn", payload.fn), ("augment", payload.augment)]
        self._known = payload.generators  # generators held by functions and source
        self.made: list[Pair] = []  # random generators that the `setup` hook has made
        self.captured = seeder(self._known, config)
        self._cached: CachedFunction | None = None
        if payload.cache is not None and payload.fn is not None:
            self._cached = CachedFunction(source, payload.fn, payload.cache, cell, self.captured)
            functions = functions[1:]
        self._first: Callable[[int], Any] = self._get
        self._of_epoch: Callable[[int, int], Any] | None = None
        if self._cached is not None:
            cached = self._cached
            self._first = cached.call_async if self.is_async else cached
            self._of_epoch = cached.of_epoch_async if self.is_async else cached.of_epoch
        self._varying = varying(source)
        # True for `range(n)`: looking up each item would take a tenth of the time of a batch of
        # tiny samples.
        self._items_are_indices = (
            self._cached is None and type(source) is range and source == range(len(source))
        )
        takes_rng = payload.takes_rng
        chain = [
            (function, name in takes_rng) for name, function in functions if function is not None
        ]
        # Only the last function may write into the batch. It is then called with `out`.
        self.takes_out = payload.takes_out
        self._last: tuple[Callable[..., Any], bool] | None = chain.pop() if self.takes_out else None
        self._chain, self._takes_rng = chain, bool(takes_rng)
        # Functions whose only argument is an item. Calls of them for many rows can be chained in C.
        self._plain = None if self.takes_out or takes_rng else [function for function, _ in chain]
        self._seed, self._threads = config.seed, threads
        self._of_thread = threading.local()
        # Random streams that no coroutine uses. Each coroutine in work has its own.
        self._free_streams: list[SampleStreams] = []
        self.watch = watch or GlobalsWatch()
        self.is_watched: bool = config.seed_globals == "auto"
        self._seeds_globals: bool = config.seed_globals is True
        # Results of the probe in an epoch, by index of the (first) item. Each is used once, instead
        # of a second call.
        self.kept: dict[int, Any] = {}
        self._kept_of = 0
        named = {"batch_fn": payload.batch_fn, "augment": payload.augment, "fn": payload.fn}
        maker = next((name for name, function in named.items() if function is not None), None)
        # start of messages about a wrong result
        self.origin = "the source gave" if maker is None else f"{maker} returned"
        self.after_call: Callable[[], None] = end_stray
        # Builds `out` from arrays, once the form of the batches is known.
        self.unflatten: Callable[[Sequence[Any]], Any] | None = None

    def look_up(self) -> None:
        """Read items by the current method of the source's class. Called in the main process."""
        self._get = self._payload.source.__getitem__
        if self._cached is None:
            self._first = self._get

    def seed_captured(self, pairs: list[Pair]) -> None:
        """Seed these random generators by their keys from now on, and those of the `setup` hook."""
        self._known = pairs
        self.captured = seeder([*pairs, *self.made], self._config)
        if self._cached is not None:
            self._cached.captured = self.captured

    def find_what_setup_made(self) -> None:
        """Add the random generators that the `setup` hook has made to those that are seeded."""
        self.made += made_by_setup(self._payload, [*self._known, *self.made])
        self.seed_captured(self._known)

    def _streams_of_thread(self) -> SampleStreams | None:
        """Return the random streams of this thread's calls. None if the calls need none."""
        found: SampleStreams | None = getattr(self._of_thread, "streams", None)
        if found is None and (self._takes_rng or self._seeds_globals):
            found = self._of_thread.streams = self._new_streams()
        return found

    def _new_streams(self) -> SampleStreams:
        # imported here: the import is slow, and most functions need no streams
        from loaderpool.plan.sample_streams import SampleStreams

        return SampleStreams(self._seed)

    def _begin(
        self, streams: SampleStreams | None, epoch: int, position: int, batch: bool = False
    ) -> Any:
        """Seed the generators for a call, and return its `rng`. None if no function takes it."""
        if streams is not None and self._seeds_globals:
            streams.seed_globals(epoch, position, batch)
        if self.captured is not None:
            self.captured.begin(BATCH if batch else SAMPLE, epoch, position)
        # One generator for the chain: the second function continues the numbers of the first.
        if streams is not None and self._takes_rng:
            return streams.generator(epoch, position, batch)
        return None

    def reader(self, epoch: int) -> Callable[[int], Any] | None:
        """Return the function that reads an epoch's items; None if epochs have equal items."""
        if self._varying is None:
            return None
        return functools.partial(self._of_epoch or self._varying.item, epoch)

    # ---- results of the probe ----

    def keep_only(self, epoch: int) -> None:
        """Drop the probe's results of other epochs. Samples of this epoch are made now."""
        if self._kept_of != epoch:
            self.kept.clear()
            self._kept_of = epoch

    # ---- global generators ----

    def watched(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run `work`. If calls draw from the global generators, seed these and run `work` again.

        Raises:
            BaseException: an exception that `work` raised.
            CacheError: the function cannot be cached. Raised even if `work` skipped the error.
            ArgumentError: calls draw, and concurrent calls cannot each have their own state of
                these generators.
        """
        runs = 0
        result: _Result
        while self.is_watched:
            result, drew = self.watch.run(work, *arguments)
            if not drew:
                break
            self.kept.clear()
            runs += 1
            if runs == 2:  # The first run may have imported a module that draws on import.
                if self._threads > 1:
                    self._check_cached()
                    share = "concurrent calls" if self.is_async else "threads"
                    raise ArgumentError(
                        "The function uses the global generator of random, numpy.random or torch, "
                        f"which {share} share, so its samples would not be reproducible with "
                        f"threads={self._threads}. Add a parameter `rng` and use it, or set "
                        "threads=1. If samples do not depend on these numbers (such as the pause "
                        "before a retry), pass seed_globals=False."
                    )
                self.is_watched, self._seeds_globals = False, True
        else:
            self.watch.seen = None
            result = work(*arguments)
        self._check_cached()
        return result

    def _check_cached(self) -> None:
        if self._cached is not None and self._cached.refusal is not None:
            raise self._cached.refusal

    # ---- calls ----

    def set_up(self, setup: Callable[[], Any]) -> None:
        """Call the `setup` hook. If it or a function is async, the hook runs in the event loop."""
        if self.is_async or is_async(self._payload.setup):
            self.event_loop.run(self._set_up(setup), None)
        else:
            setup()

    async def _set_up(self, setup: Callable[[], Any]) -> None:
        done = setup()
        if inspect.isawaitable(done):
            await done
        # `numpy.errstate` and the like belong to the context, not to the process.
        self.context = contextvars.copy_context()

    def unit(self, opened: Opened, start: int, stop: int) -> Any:
        """Return the result of one call.

        It is a sample or whole element for row `start`, or a batch of all rows by `batch_fn`.
        """
        if self.kept and (value := self.kept.pop(opened.indices[start], None)) is not None:
            return value
        if self.is_async:
            return self.event_loop.run(self.unit_async(opened, start, stop), self.context)
        position = int(opened.positions[start])
        if self._batch_fn is None:
            value = self._sample(opened, start, position)
        else:
            value = self._batch(
                self._batch_fn, opened, start, stop, position, self._streams_of_thread()
            )
        self.after_call()
        return value

    def block(
        self,
        opened: Opened,
        start: int,
        stop: int,
        results: list[Any],
        take: Callable[[Any], Any] | None,
    ) -> None:
        """Append `take(sample)` for each of these rows to `results`.

        If a call raises, `len(results)` shows which one.
        """
        indices = opened.indices[start:stop]
        are_kept = bool(self.kept) and not self.kept.keys().isdisjoint(indices)
        if are_kept or self._plain is None or self._seeds_globals or self.captured is not None:
            for at, position in enumerate(opened.positions[start:stop].tolist(), start):
                value = (
                    self.unit(opened, at, at + 1)
                    if are_kept
                    else self._sample(opened, at, position)
                )
                results.append(value if take is None else take(value))
        else:
            values: Iterable[Any] = (
                indices if self._items_are_indices else map(opened.read or self._first, indices)
            )
            for function in self._plain if take is None else (*self._plain, take):
                values = map(function, values)
            results.extend(values)  # a loop in C; if a call raises, earlier results stay
        end_stray()
        if len(results) < len(indices):
            # A StopIteration ended `extend` without an error. Call the function again, so that it
            # is raised as an error.
            self._sample(opened, start + len(results), 0)
            raise RuntimeError(
                "the function raised StopIteration once, but not when it was called again"
            )

    def _sample(self, opened: Opened, at: int, position: int) -> Any:
        streams, epoch = self._streams_of_thread(), opened.ticket.epoch
        read, index = opened.read or self._first, opened.indices[at]
        if self._cached is None:
            generator = self._begin(streams, epoch, position)
            value = read(index)
        else:
            # Seeded after `fn`, so that the state does not depend on whether `fn` was called now or
            # earlier.
            value = read(index)
            generator = self._begin(streams, epoch, position)
        for function, takes_rng in self._chain:
            value = function(value, rng=generator) if takes_rng else function(value)
        if self._last is not None:
            (function, takes_rng), out = self._last, self._out(opened, at)
            value = (
                function(value, out=out, rng=generator) if takes_rng else function(value, out=out)
            )
            value = out if value is None else value
        return value

    def _out(self, opened: Opened, at: int) -> Any:
        """Return the arrays into which the last function writes a row. None in the first call."""
        if opened.arrays is None or self.unflatten is None:
            return None
        # With `...`, a 0-d element is an array, too.
        return self.unflatten([array[opened.ticket.start + at, ...] for array in opened.arrays])

    def _batch(
        self,
        batch_fn: Callable[..., Any],
        opened: Opened,
        start: int,
        stop: int,
        position: int,
        streams: SampleStreams | None,
    ) -> Any:
        items, get = [], opened.read or self._get
        generator = self._begin(streams, opened.ticket.epoch, position, batch=True)
        try:
            for index in opened.indices[start:stop]:
                items.append(get(index))
        except Exception as error:
            add_note(error, f"while source[{index}] was read")
            raise
        return batch_fn(items, rng=generator) if self._takes_rng else batch_fn(items)

    # ---- calls of async functions ----

    async def unit_async(self, opened: Opened, start: int, stop: int) -> Any:
        """Return the result of one call, as `unit` does.

        Runs in: the event loop, beside other calls. All functions of the call run there, also those
        that are not async, and the source is read there.

        Raises:
            CallTimeoutError: the call took longer than `limit_s`.
            BaseException: the exception of a function.
        """
        streams = None
        if self._takes_rng or self._seeds_globals:
            streams = self._free_streams.pop() if self._free_streams else self._new_streams()
        try:
            position = int(opened.positions[start])
            if self._batch_fn is None:
                call = self._sample_async(opened, start, position, streams)
            else:
                call = self._batch_async(self._batch_fn, opened, start, stop, position, streams)
            if self.limit_s is not None:
                begin = functools.partial(self.note_step, opened.indices[start])
                call = by_steps(limited(call, self.limit_s), begin, _nothing)
            value = await call
        finally:
            if streams is not None:
                self._free_streams.append(streams)
        self.after_call()
        return value

    async def _sample_async(
        self, opened: Opened, at: int, position: int, streams: SampleStreams | None
    ) -> Any:
        """Return a sample, as `_sample` does."""
        epoch, read, index = opened.ticket.epoch, opened.read or self._first, opened.indices[at]
        if self._cached is None:
            generator = self._begin(streams, epoch, position)
            value = read(index)
        else:
            value = await read(index)
            generator = self._begin(streams, epoch, position)
        for function, takes_rng in self._chain:
            value = function(value, rng=generator) if takes_rng else function(value)
            if inspect.isawaitable(value):  # functions that are not async may be in the chain
                value = await value
        if self._last is not None:
            (function, takes_rng), out = self._last, self._out(opened, at)
            value = (
                function(value, out=out, rng=generator) if takes_rng else function(value, out=out)
            )
            if inspect.isawaitable(value):
                value = await value
            value = out if value is None else value
        return value

    async def _batch_async(self, *arguments: Any) -> Any:
        """Return a batch, as `_batch` does."""
        return await self._batch(*arguments)


def _nothing(_: Any) -> None:
    pass


# ---- calls with a cache ----


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

    Attributes:
        refusal: the reason why the function cannot be cached, once it is known. It applies to all
            samples.
    """

    def __init__(
        self,
        source: Any,
        fn: Callable[[Any], Any],
        shared: SharedCache,
        cell: int,
        captured: CapturedGenerators | None,
    ) -> None:
        from loaderpool.cache.setting import Count  # imported here: most loaders have no cache

        self._count = Count
        self._source, self._fn, self._shared = source, fn, shared
        self._counts, self._watch = shared.counts_of(cell), GlobalsWatch()
        self.captured = captured  # random generators that the function must not draw from
        self.refusal: CacheError | None = None

    def __call__(self, index: int) -> Any:
        """Return the result of `fn` for this source index.

        Raises:
            CacheError: the result is random, or cannot be pickled.
        """
        return self._kept(index, index, self._source.__getitem__)

    def of_epoch(self, epoch: int, index: int) -> Any:
        """Return the result of `fn` for an index in one epoch of a `VaryingSource`. Each record has
        one entry.
        """
        get = functools.partial(self._source.item, epoch)
        return self._kept(self._source.record(epoch, index), index, get)

    async def call_async(self, index: int) -> Any:
        """Return the result of an async `fn`, as `__call__` does."""
        return await self._kept_async(index, index, self._source.__getitem__)

    async def of_epoch_async(self, epoch: int, index: int) -> Any:
        """Return the result of an async `fn`, as `of_epoch` does."""
        get = functools.partial(self._source.item, epoch)
        return await self._kept_async(self._source.record(epoch, index), index, get)

    def _kept(self, entry: int, index: int, get: Callable[[int], Any]) -> Any:
        is_found, found, store = self._look_up(entry)
        if is_found:
            return found
        # The first call may have imported a module that draws on import, or another thread may have
        # drawn.
        for _ in range(2):
            before = self._states()
            value = self._fn(get(index))
            if not self._drew(before, index):
                break
        else:
            self._refuse(_DREW.format("random or numpy.random", index))
        return self._put(store, entry, index, value)

    async def _kept_async(self, entry: int, index: int, get: Callable[[int], Any]) -> Any:
        is_found, found, store = self._look_up(entry)
        if is_found:
            return found
        draws: list[bool] = []

        async def call() -> Any:
            value = self._fn(get(index))
            return await value if inspect.isawaitable(value) else value

        def note(before: tuple[Any, Any]) -> None:
            draws.append(self._drew(before, index))

        for _ in range(2):
            draws.clear()
            value = await by_steps(call(), self._states, note)
            if not any(draws):
                break
        else:
            self._refuse(_DREW.format("random or numpy.random", index))
        return self._put(store, entry, index, value)

    def _look_up(self, entry: int) -> tuple[bool, Any, Store | None]:
        """Return True if a result is stored; the result; and the store, None if unavailable."""
        store: Store | None = None
        try:
            store = self._shared.store()
            pickled = store.get(entry)
            if pickled is not None:
                found = pickle.loads(pickled)
                self._counts[self._count.HITS] += 1
                return True, found, store
        except Exception as error:
            if is_of_a_handler(error):
                raise
            # The entry is unavailable or damaged. Make it again, and overwrite it.
            self._counts[self._count.NO_ROOM if store is None else self._count.DAMAGED] += 1
        return False, None, store

    def _states(self) -> tuple[Any, Any]:
        """Return the states of the global generators, and of those that the function holds."""
        return self._watch.look(), None if self.captured is None else self.captured.states()

    def _drew(self, before: tuple[Any, Any], index: int) -> bool:
        """Return True if `fn` has drawn from the global generators.

        Raises:
            CacheError: it has drawn from a generator that it holds.
        """
        end_stray()  # a child that the function has forked must not write
        of_globals, of_held = self._states()
        if of_held != before[1]:
            self._refuse(_DREW.format("a random number generator that it holds", index))
        return bool(of_globals != before[0])

    def _put(self, store: Store | None, entry: int, index: int, value: Any) -> Any:
        """Store a result. Return it as a separate object."""
        self._counts[self._count.MISSES] += 1
        try:
            made = pickle.dumps(value, 5)
            value = pickle.loads(made)
        except Exception as error:
            if is_of_a_handler(error):
                raise
            self._refuse(
                f"The result of fn for source index {index}, a {type(value).__name__}, cannot be "
                f"cached: {error}. A cache stores pickles: return arrays, numbers, strings, or "
                "objects of a module, from fn, or remove cache="
            )
        not_kept = None if store is None else store.put(entry, made)
        if not_kept is not None:
            self._counts[not_kept] += 1
        return value

    def _refuse(self, text: str) -> None:
        self.refusal = CacheError(text)
        raise self.refusal
