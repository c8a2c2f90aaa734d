"""Calls of the user's functions for rows of a ticket, each with its own random streams, optionally
on threads.

The main thread does the rest: conversion, the error policy, writing rows to a slot, and messages to
other processes. That code is the same with and without threads.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from loaderpool.errors import ArgumentError, CacheError, add_note
from loaderpool.plan.generators import BATCH, SAMPLE, CapturedGenerators
from loaderpool.sources.varying import varying
from loaderpool.system import clock
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.payload.generators import made_by_setup, seeder
from loaderpool.transport.payload.record import Pair, WorkerPayload
from loaderpool.worker.own_process import GlobalsWatch, end_stray
from loaderpool.worker.rows import share_memory
from loaderpool.worker.tickets import MadeRows, Opened, Progress, Ticket

if TYPE_CHECKING:
    from concurrent.futures import Future

    from loaderpool.cache.store import SharedCache, Store
    from loaderpool.plan.sample_streams import SampleStreams
    from loaderpool.worker.contracts import Runner

# Interval in seconds at which the main thread, waiting for a call, checks for new tickets. Larger:
# threads idle if tickets arrive late. Smaller: the checks themselves take time.
_LOOK_S = 0.01
# Results of later tickets that a ticket's own results are compared with. 0: a ticket with one call
# would have none to compare. Larger: more comparisons for each ticket.
_OTHERS = 2
_Result = TypeVar("_Result")


class Calls:
    """The user's functions, and the arguments of each call.

    A sample is made by a chain of calls. The source (or the cache, which stores the result of `fn`)
    returns an item. Then each function is called with the result of the previous one.

    Args:
        payload: the loader's functions, source and settings.
        cell: number of this worker's cell.
        threads: number of threads that make calls.
        watch: watches the global generators, if it is shared with other code.
    """

    def __init__(
        self,
        payload: WorkerPayload,
        cell: int = 0,
        threads: int = 1,
        watch: GlobalsWatch | None = None,
    ) -> None:
        source, config = payload.source, payload.config
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
        self._first: Callable[[int], Any] = self._cached or self._get
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
        self.watch = watch or GlobalsWatch()
        self.is_watched: bool = config.seed_globals == "auto"
        self._seeds_globals: bool = config.seed_globals is True
        # Results of the probe in an epoch, by index of the (first) item. Each is used once, instead
        # of a second call.
        self.kept: dict[int, Any] = {}
        self._kept_of = 0
        named = {"batch_fn": payload.batch_fn, "augment": payload.augment, "fn": payload.fn}
        maker = next((name for name, function in named.items() if function is not None), None)
        # start of a message
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
        """Seed these random generators by these keys from now on, and those that the `setup` hook
        has made.
        """
        self._known = pairs
        self.captured = seeder([*pairs, *self.made], self._config)
        if self._cached is not None:
            self._cached.captured = self.captured

    def find_what_setup_made(self) -> None:
        """Add the random generators that the `setup` hook has made to those that are seeded."""
        self.made += made_by_setup(self._payload, [*self._known, *self.made])
        self.seed_captured(self._known)

    @property
    def _streams(self) -> SampleStreams:
        """The random streams of this thread's calls."""
        found: SampleStreams | None = getattr(self._of_thread, "streams", None)
        if found is None:
            # imported here: the import is slow, and most functions need no streams
            from loaderpool.plan.sample_streams import SampleStreams

            found = self._of_thread.streams = SampleStreams(self._seed)
        return found

    def reader(self, epoch: int) -> Callable[[int], Any] | None:
        """Return the function for `Opened.read`; None if all epochs have the same items."""
        if self._varying is None:
            return None
        read = self._varying.item if self._cached is None else self._cached.of_epoch
        return functools.partial(read, epoch)

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
            ArgumentError: calls draw, and threads cannot each have their own state of these
                generators.
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
                    raise ArgumentError(
                        "The function uses the global generator of random, numpy.random or torch, "
                        "which threads share, so its samples would not be reproducible with "
                        f"threads={self._threads}. Add a parameter `rng` and use it, or set "
                        "threads=1. If samples do not depend on these numbers (such as the pause "
                        "before a retry), pass seed_globals=False."
                    )
                self.is_watched, self._seeds_globals = False, True
        else:
            self.watch.seen = None
            result = work(*arguments)
        if self._cached is not None and self._cached.refusal is not None:
            raise self._cached.refusal
        return result

    # ---- calls ----

    def unit(self, opened: Opened, start: int, stop: int) -> Any:
        """Return the result of one call.

        It is a sample or whole element for row `start`, or a batch of all rows by `batch_fn`.
        """
        if self.kept and (value := self.kept.pop(opened.indices[start], None)) is not None:
            return value
        position = int(opened.positions[start])
        if self._batch_fn is None:
            value = self._sample(opened, start, position)
        else:
            value = self._batch(self._batch_fn, opened, start, stop, position)
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
            results.extend(values)  # in C; if a call raises, earlier results stay
        end_stray()
        if len(results) < len(indices):
            # A StopIteration ended `extend` without an error. Call the function again, so that it
            # is raised as an error.
            self._sample(opened, start + len(results), 0)
            raise RuntimeError(
                "the function raised StopIteration once, but not when it was called again"
            )

    def _sample(self, opened: Opened, at: int, position: int) -> Any:
        epoch, captured = opened.ticket.epoch, self.captured
        if self._seeds_globals and self._cached is None:
            self._streams.seed_globals(epoch, position)
        if captured is not None:
            captured.begin(SAMPLE, epoch, position)
        # One generator for the chain: the second function continues the numbers of the first.
        generator: Any = self._streams.generator(epoch, position) if self._takes_rng else None
        value = (opened.read or self._first)(opened.indices[at])
        # Seeded after `fn`, so that the state does not depend on whether `fn` was called now or
        # earlier.
        if self._cached is not None:
            if self._seeds_globals:
                self._streams.seed_globals(epoch, position)
            if captured is not None:
                captured.begin(SAMPLE, epoch, position)
        for function, takes_rng in self._chain:
            value = function(value, rng=generator) if takes_rng else function(value)
        if self._last is not None:
            out, row = None, opened.ticket.start + at
            if opened.arrays is not None and self.unflatten is not None:
                # With `...`, a 0-d element is an array, too.
                out = self.unflatten([array[row, ...] for array in opened.arrays])
            function, takes_rng = self._last
            value = (
                function(value, out=out, rng=generator) if takes_rng else function(value, out=out)
            )
            value = out if value is None else value
        return value

    def _batch(
        self, batch_fn: Callable[..., Any], opened: Opened, start: int, stop: int, position: int
    ) -> Any:
        epoch, items, get = opened.ticket.epoch, [], opened.read or self._get
        if self._seeds_globals:
            self._streams.seed_globals(epoch, position, batch=True)
        if self.captured is not None:
            self.captured.begin(BATCH, epoch, position)
        generator: Any = (
            self._streams.generator(epoch, position, batch=True) if self._takes_rng else None
        )
        try:
            for index in opened.indices[start:stop]:
                items.append(get(index))
        except Exception as error:
            add_note(error, f"while source[{index}] was read")
            raise
        return batch_fn(items, rng=generator) if self._takes_rng else batch_fn(items)


# ---- calls on threads ----
#
# Calls start in the order of rows, ticket after ticket. So the main thread always waits for the
# call that has run longest. While it waits for the last rows of a ticket, threads make calls of the
# next tickets. If a worker dies, any of its tickets may be the cause, so each is made again alone.


class _Call:
    """One call of the function, made by a thread."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread = self.started_ns = self.ended_ns = 0
        self.future: Future[None]  # done once the call was made; a canceled call never starts

    def make(self, calls: Calls, opened: Opened, start: int, stop: int) -> None:
        """Make the call, and store its result or error. Called in one of the worker's threads."""
        self.thread, self.started_ns = threading.get_ident(), clock.monotonic_ns()
        try:
            self.result = calls.unit(opened, start, stop)
        except BaseException as error:
            end_stray(error)
            self.error = error
        self.ended_ns = clock.monotonic_ns()


class ThreadCalls:
    """A loader's threads in one worker. It is a `Runner`, as `Calls` is.

    Args:
        calls: the calls that the threads make.
        threads: number of threads.
        makes_units: True if a call makes a whole batch or element.
        progress: records the calls.
    """

    def __init__(self, calls: Calls, threads: int, makes_units: bool, progress: Progress) -> None:
        # imported here: it takes 1 ms, and most loaders have no threads
        from concurrent.futures import Future, ThreadPoolExecutor, wait

        self._calls, self._makes_units, self._progress = calls, makes_units, progress
        self._wait_for = wait
        self.executor = ThreadPoolExecutor(threads, "loaderpool")
        # Future of calls that no thread makes: the probe has made them, or no thread could be
        # started.
        self._over: Future[None] = Future()
        self._over.set_result(None)
        self.begun: dict[Ticket, Opened] = {}
        self._look_ahead: Callable[[], bool] | None = None

    def begin(self, opened: Opened) -> None:
        """Submit the calls of a ticket, after those of earlier tickets. Pairs with `end`."""
        if not self.begun and self._calls.is_watched:
            self._calls.watch.seen = self._calls.watch.look()
        opened.calls = {}
        self.begun[opened.ticket] = opened
        rows = len(opened.indices)
        for start, stop in (
            opened.bounds() if self._makes_units else zip(range(rows), itertools.count(1))
        ):
            if self._progress.excluded(opened.ticket.epoch, opened.indices[start:stop]) is not None:
                continue
            call = opened.calls[start] = _Call(opened.indices[start])
            # Taken now, because the next submitted ticket may be of another epoch.
            call.result = self._calls.kept.pop(call.index, None)
            if call.result is not None:
                call.future = self._over
                continue
            # Calls run in the context that the `setup` hook left: `numpy.errstate` and the like
            # belong to the context, not to the process.
            run = contextvars.copy_context().run
            try:
                call.future = self.executor.submit(run, call.make, self._calls, opened, start, stop)
            except RuntimeError as error:
                # No more threads can be started.
                call.error, call.future = error, self._over

    def unit(self, opened: Opened, start: int, stop: int) -> Any:
        """Return the result of one call, as `Calls.unit` does. Blocks until the call is over."""
        call = opened.calls[start]
        self._wait(call, self._look_ahead)
        if call.future is not self._over:
            self._progress.note_call(call.started_ns, call.ended_ns, call.index)
        error, call.error = call.error, None
        if error is None:
            return call.result
        try:
            raise error
        finally:
            # Its traceback refers to this frame. The cycle would keep the function's objects until
            # a garbage collection.
            del error

    def _wait(self, call: _Call, look_ahead: Callable[[], bool] | None) -> None:
        if call.future.done():
            return
        # The call may have started long ago, while the main thread waited for earlier rows.
        self._progress.note_thread(call.thread, call.started_ns or clock.monotonic_ns(), call.index)
        while look_ahead is not None and look_ahead():
            if self._wait_for([call.future], _LOOK_S).done:
                return
        self._wait_for([call.future])

    def run(
        self,
        opened: Opened,
        fill: Callable[[Runner, Opened], MadeRows],
        look_ahead: Callable[[], bool] | None,
    ) -> MadeRows:
        """Fill a ticket's slot with the results of threads.

        When this returns or raises, no thread works on the ticket any more.

        Args:
            opened: the ticket.
            fill: makes rows of the results.
            look_ahead: called while this waits for a call. It may submit more tickets, and returns
                True if more may come.

        Raises:
            ArgumentError: the function draws from the global generators, or returns one array
                several times.
            BaseException: an exception that `fill` raised.
        """
        self._look_ahead = look_ahead
        if opened.ticket not in self.begun:
            self.begin(opened)
        return self._calls.watched(self._fill, opened, fill)

    def _fill(self, opened: Opened, fill: Callable[[Runner, Opened], MadeRows]) -> MadeRows:
        # A call of some ticket drew from the global generators, so this is the second run. The
        # other tickets are submitted again when `run` gets them.
        if opened.ticket not in self.begun:
            for ticket in list(self.begun):
                self.end(ticket)
            self._look_ahead = None
            self.begin(opened)
        try:
            filled = fill(self, opened)
            if share_memory(self._results(opened), opened.arrays or ()):
                raise ArgumentError(
                    "The function returns the same array, list or dict for several samples, which "
                    "its threads would overwrite. Return a new one from each call, or a read-only "
                    "array, or set threads=1."
                )
            return filled
        finally:
            self.end(opened.ticket)

    def _results(self, opened: Opened) -> Iterator[Any]:
        """Yield the results of the ticket's calls, and of a few calls of others, because a ticket
        may have only one.
        """
        others = (
            call
            for each in self.begun.values()
            if each is not opened
            for call in each.calls.values()
        )
        made = (call.result for call in others if call.result is not None)
        own = (call.result for call in opened.calls.values())
        return itertools.chain(own, itertools.islice(made, _OTHERS))

    def end(self, ticket: Ticket) -> None:
        """Start no more calls of a ticket, and wait for those that run, because they may write into
        the slot.

        Blocks until the last one is over. The board names each of them meanwhile, so that one that
        hangs is found.
        """
        calls = self.begun.pop(ticket).calls
        for call in [call for call in calls.values() if not call.future.cancel()]:
            self._wait(call, None)
        # ^ Breaks a cycle: an error that no `unit` raised has a traceback whose frames refer to the
        # calls.
        calls.clear()


# ---- calls with a cache ----


_DREW = (
    "fn used {} for source index {}. With cache=, it is called only once per item, so all epochs "
    "would have the same random numbers. Move the random part to augment=, which gets the result "
    "of fn in every epoch, or remove cache="
)


class CachedFunction:
    """Returns the result of `fn` for a source index, as a separate object.

    The result is always unpickled from the entry's bytes, even if `fn` was called just now or the
    result could not be stored. So a sample does not depend on whether a worker has met the item
    before.

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

    def _kept(self, entry: int, index: int, get: Callable[[int], Any]) -> Any:
        store: Store | None = None
        try:
            store = self._shared.store()
            pickled = store.get(entry)
            if pickled is not None:
                found = pickle.loads(pickled)
                self._counts[self._count.HITS] += 1
                return found
        except Exception as error:
            if is_of_a_handler(error):
                raise
            # The entry is unavailable or damaged. Make it again, and overwrite it.
            self._counts[self._count.NO_ROOM if store is None else self._count.DAMAGED] += 1
        # The first call may have imported a module that draws on import, or another thread may have
        # drawn.
        for _ in range(2):
            before = self._watch.look()
            states = None if self.captured is None else self.captured.states()
            value = self._fn(get(index))
            end_stray()  # a child that the function has forked must not write
            if self.captured is not None and self.captured.states() != states:
                self._refuse(_DREW.format("a random number generator that it holds", index))
            if self._watch.look() == before:
                break
        else:
            self._refuse(_DREW.format("random or numpy.random", index))
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
