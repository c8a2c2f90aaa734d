"""Calls of the user's functions for rows of a ticket, each with its own random streams.

`concurrent_calls` makes several of them at the same time, on threads or as coroutines. The main
thread does the rest: conversion, the error policy, writing rows to a slot, and messages to other
processes. That code is the same for all kinds of calls.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from loaderpool.checks import is_async
from loaderpool.errors import ArgumentError
from loaderpool.plan.generators import torch_generator
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.payload.record import WorkerPayload
from loaderpool.worker.chain import Chain
from loaderpool.worker.event_loop import EventLoop, by_steps, limited
from loaderpool.worker.item_reader import ItemReader
from loaderpool.worker.own_process import GlobalsWatch, end_stray
from loaderpool.worker.seeding import Seeding
from loaderpool.worker.tickets import Opened, Progress

_Result = TypeVar("_Result")


class KeptResults(dict[int, object]):
    """Results of the probe's calls in one epoch. Each is used once, instead of a second call.

    The key is the position of the (first) row.
    """

    _epoch = 0

    def keep_only(self, epoch: int) -> None:
        """Drop the results of other epochs. Samples of this epoch are made now."""
        if self._epoch != epoch:
            self.clear()
            self._epoch = epoch


class DrawWatch:
    """Watches the global generators for draws, until they are seeded for each call.

    Args:
        payload: the loader's settings.
        threads: number of calls at the same time.
        seeding: seeds the generators, once calls have drawn.
        globals_watch: compares the generators. None: a new one.

    Attributes:
        is_on: True while calls are watched.
        globals_watch: compares the generators before and after calls.
        threads: number of calls at the same time.
    """

    def __init__(
        self,
        payload: WorkerPayload,
        threads: int,
        seeding: Seeding,
        globals_watch: GlobalsWatch | None,
    ) -> None:
        self.is_on: bool = payload.config.seed_globals == "auto"
        self.globals_watch = globals_watch or GlobalsWatch()
        self._seeding, self.threads = seeding, threads
        self._shared_by = "concurrent calls" if payload.is_async else "threads"

    def alone(self, call: Callable[..., _Result], *arguments: object) -> _Result:
        """Make one call, whose result other processes may use, and return the result.

        If the call draws from the global generators, seed them and repeat the call. `Calls.watched`
        then repeats the whole ticket.

        Args:
            call: seeds the generators if necessary, and calls the function.
            arguments: arguments of `call`.
        """
        runs = 0
        made: _Result
        while self.is_on and self.threads == 1:
            made, drew = self.globals_watch.run(call, *arguments)
            if not drew:
                return made
            runs += 1
            if runs == 2:  # The first run may have imported a module that draws on import.
                self.seed_from_now_on()
        return self.seeded(call, *arguments)

    def seeded(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Run `work`, whose calls seed the global generators if necessary.

        If it imports torch, run it again, because the generator of torch was not seeded.
        """
        if torch_generator() is not None or not self._seeding.seeds_globals:
            return work(*arguments)
        try:
            result = work(*arguments)
        except Exception as error:
            if torch_generator() is None or is_of_a_handler(error):
                raise
        else:
            if torch_generator() is None:
                return result
        return work(*arguments)

    def seed_from_now_on(self) -> None:
        """Seed the global generators for each call, because calls draw from them.

        Raises:
            ArgumentError: concurrent calls cannot each have their own state of these generators.
        """
        if self.threads > 1:
            raise ArgumentError(
                "The function uses the global generator of random, numpy.random or torch, "
                f"which {self._shared_by} share, so its samples would not be reproducible with "
                f"threads={self.threads}. Add a parameter `rng` and use it, or set "
                "threads=1. If samples do not depend on these numbers (such as the pause "
                "before a retry), pass seed_globals=False."
            )
        self.is_on, self._seeding.seeds_globals = False, True


class TimeLimit(NamedTuple):
    """Cancels each coroutine that takes too long, and notes which one runs."""

    limit_s: float  # seconds after which a coroutine is canceled
    progress: Progress

    def limited(self, call: Awaitable[_Result], index: int) -> Awaitable[_Result]:
        """Return an awaitable for a call that makes the sample of this index."""
        progress = self.progress
        call = limited(call, self.limit_s, progress.allow_for_cleanup, lambda: progress.reading_ns)
        return by_steps(call, functools.partial(progress.begin_step, index), progress.end_step)


class Calls:
    """The calls of a loader's functions, one after the other.

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
        seeding: the random generators of the calls.
        reader: reads the items.
        chain: the functions.
        draws: watches the global generators.
        kept: results of the probe.
        event_loop: runs the coroutines.
        context: copied for each coroutine, once the `setup` hook has run in the event loop.
        limit: time limit of each coroutine; None: there is none.
        after_call: called after each call.
    """

    def __init__(
        self,
        payload: WorkerPayload,
        cell: int = 0,
        threads: int = 1,
        watch: GlobalsWatch | None = None,
        event_loop: EventLoop | None = None,
    ) -> None:
        self.is_async = payload.is_async
        self._is_set_up_async = self.is_async or is_async(payload.setup)
        self.seeding = Seeding(payload)
        self.reader = ItemReader(payload, cell, self.seeding)
        self.chain = Chain(payload, self.seeding, self.reader.calls_fn)
        self.draws = DrawWatch(payload, threads, self.seeding, watch)
        self.kept = KeptResults()
        self.event_loop = event_loop or EventLoop()
        self.context: contextvars.Context | None = None
        self.limit: TimeLimit | None = None
        self.after_call: Callable[[], None] = end_stray

    # ---- global generators ----

    def watched(self, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Run `work`. If calls draw from the global generators, seed these and run `work` again.

        Raises:
            BaseException: an exception that `work` raised.
            CacheError: the function cannot be cached. Raised even if `work` skipped the error.
            SourceError: `__getitems__` did not return one item for each row. Raised even if `work`
                skipped the error.
            ArgumentError: calls draw, and concurrent calls cannot each have their own state of
                these generators.
        """
        draws, runs = self.draws, 0
        result: _Result
        while draws.is_on:
            result, drew = draws.globals_watch.run(work, *arguments)
            if not drew:
                break
            self.kept.clear()
            runs += 1
            if runs == 2:  # The first run may have imported a module that draws on import.
                if draws.threads > 1:
                    self._check_cached()
                draws.seed_from_now_on()
        else:
            draws.globals_watch.seen = None
            result = draws.seeded(work, *arguments)
        self._check_cached()
        return result

    def _check_cached(self) -> None:
        cached, refusal = self.reader.cached, self.reader.refusal
        if refusal is None and cached is not None:
            refusal = cached.refusal
        if refusal is not None:
            raise refusal

    @property
    def can_reuse_probe(self) -> bool:
        """True if the result of the probe may be used for the ticket that has its row.

        The probe reads its row alone. In a read of many rows, a random source would return another
        item, because its generators are seeded for each read. If no function is called, such a read
        returns the item anyway, in the form of the others.
        """
        seeding = self.seeding
        if self.reader.reads_many and self.chain.plain == []:
            return False
        is_random = seeding.seeds_globals or seeding.captured is not None
        return not (is_random and self.reader.seeds_reads and self.chain.batch_fn is None)

    # ---- calls ----

    def set_up(self, setup: Callable[[], object]) -> None:
        """Call the `setup` hook. If it or a function is async, the hook runs in the event loop."""
        if self._is_set_up_async:
            self.event_loop.run(self._set_up(setup), None)
        else:
            setup()

    async def _set_up(self, setup: Callable[[], object]) -> None:
        done = setup()
        if inspect.isawaitable(done):
            await done
        # `numpy.errstate` and the like belong to the context, not to the process.
        self.context = contextvars.copy_context()

    def unit(self, opened: Opened, start: int, stop: int) -> object:
        """Return the result of one call.

        It is a sample or whole element for row `start`, or a batch of all rows by `batch_fn`.
        """
        if self.kept and (value := self.kept.pop(opened.positions[start], None)) is not None:
            return value
        if self.is_async:
            return self.event_loop.run(self.unit_async(opened, start, stop), self.context)
        chain = self.chain
        if chain.batch_fn is None:
            value = chain.sample(opened, start, int(opened.positions[start]))
        else:
            value = chain.batch(opened, start, stop)
        self.after_call()
        return value

    def block(
        self,
        opened: Opened,
        start: int,
        stop: int,
        results: list[object],
        take: Callable[[object], object] | None,
    ) -> None:
        """Append `take(sample)` for each of these rows to `results`.

        If a call raises, `len(results)` shows which one.
        """
        chain, seeding, kept = self.chain, self.seeding, self.kept
        are_kept = bool(kept) and not kept.keys().isdisjoint(opened.positions[start:stop])
        if are_kept or chain.plain is None or seeding.seeds_globals or seeding.captured is not None:
            for at, position in enumerate(opened.positions[start:stop].tolist(), start):
                value = (
                    self.unit(opened, at, at + 1)
                    if are_kept
                    else chain.sample(opened, at, position)
                )
                results.append(value if take is None else take(value))
        else:
            values = self.reader.values(opened, start, stop)
            for function in chain.plain if take is None else (*chain.plain, take):
                values = map(function, values)
            results.extend(values)  # a loop in C; if a call raises, earlier results stay
        end_stray()
        if len(results) < stop - start:
            # A StopIteration ended `extend` without an error. Call the function again, so that it
            # is raised as an error.
            chain.sample(opened, start + len(results), 0)
            raise RuntimeError(
                "the function raised StopIteration once, but not when it was called again"
            )

    async def unit_async(self, opened: Opened, start: int, stop: int) -> object:
        """Return the result of one call, as `unit` does.

        Runs in: the event loop, beside other calls. All functions of the call run there, also those
        that are not async, and the source is read there.

        Raises:
            CallTimeoutError: the call took longer than `limit`.
            BaseException: the exception of a function.
        """
        chain, streams = self.chain, self.seeding.borrow_streams()
        try:
            if chain.batch_fn is None:
                position = int(opened.positions[start])
                call: Awaitable[object] = chain.sample_async(opened, start, position, streams)
            else:
                call = chain.batch_async(opened, start, stop, streams)
            if self.limit is not None:
                call = self.limit.limited(call, opened.indices[start])
            value = await call
        finally:
            self.seeding.give_back(streams)
        self.after_call()
        return value
