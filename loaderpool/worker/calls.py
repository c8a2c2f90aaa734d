"""Calls the user's functions for rows of a ticket, each call with its own random streams; on threads, if there are any.

What is made of their results (conversion, the error policy, rows in a slot), and what is said to others, is the main
thread's, and the same as without threads.
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

# How often the main thread, waiting for a call, looks whether there are more tickets whose calls could begin. Longer:
# threads idle where tickets come late; shorter: the looks themselves cost.
_LOOK_S = 0.01
# Results of later tickets that a ticket's own are compared with. More would cost their number for each ticket.
_OTHERS = 2
_Result = TypeVar("_Result")


class Calls:
    """The user's functions, and what each call of them is given.

    A sample is made by a chain of calls: the source gives an item (or the cache what `fn` made of it once), then each
    function is called with what the one before it gave.

    Args:
        payload: what `Loader` shipped.
        cell: of the worker that this is.
        threads: how many make calls at the same time.
        watch: who looks at the global generators, where others look, too.
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
        self._known = payload.generators  # those that functions and source hold
        self.made: list[Pair] = []  # random generators that the hook `setup` has made
        self.captured = seeder(self._known, config)
        self._cached: CachedFunction | None = None
        if payload.cache is not None and payload.fn is not None:
            self._cached = CachedFunction(source, payload.fn, payload.cache, cell, self.captured)
            functions = functions[1:]
        self._first: Callable[[int], Any] = self._cached or self._get
        self._varying = varying(source)
        # `range(n)`: a look-up of each would take a tenth of the time of a batch of tiny samples.
        self._items_are_indices = (
            self._cached is None and type(source) is range and source == range(len(source))
        )
        takes_rng = payload.takes_rng
        chain = [
            (function, name in takes_rng) for name, function in functions if function is not None
        ]
        # Only the last one may write into the batch, and it is called in another way then.
        self.takes_out = payload.takes_out
        self._last: tuple[Callable[..., Any], bool] | None = chain.pop() if self.takes_out else None
        self._chain, self._takes_rng = chain, bool(takes_rng)
        # Where all take an item and nothing else, calls of many rows can follow one another in C.
        self._plain = None if self.takes_out or takes_rng else [function for function, _ in chain]
        self._seed, self._threads = config.seed, threads
        self._of_thread = threading.local()
        self.watch = watch or GlobalsWatch()
        self.is_watched: bool = config.seed_globals == "auto"
        self._seeds_globals: bool = config.seed_globals is True
        # What the probe made in an epoch, each used at its turn instead of a second call; by index of the (first) item.
        self.kept: dict[int, Any] = {}
        self._kept_of = 0
        named = {"batch_fn": payload.batch_fn, "augment": payload.augment, "fn": payload.fn}
        maker = next((name for name, function in named.items() if function is not None), None)
        self.origin = (
            "the source gave" if maker is None else f"{maker} returned"
        )  # begins a message
        self.after_call: Callable[[], None] = end_stray
        # Gives `out` its structure, once the batches' form is known.
        self.unflatten: Callable[[Sequence[Any]], Any] | None = None

    def look_up(self) -> None:
        """Read items by the method that the source's class has now, in the caller's process."""
        self._get = self._payload.source.__getitem__
        if self._cached is None:
            self._first = self._get

    def seed_captured(self, pairs: list[Pair]) -> None:
        """Seed these random generators by these keys from now on, and those that the hook `setup` has made."""
        self._known = pairs
        self.captured = seeder([*pairs, *self.made], self._config)
        if self._cached is not None:
            self._cached.captured = self.captured

    def find_what_setup_made(self) -> None:
        """Add the random generators that the hook `setup` has made to those that are seeded."""
        self.made += made_by_setup(self._payload, [*self._known, *self.made])
        self.seed_captured(self._known)

    @property
    def _streams(self) -> SampleStreams:
        """The random streams of calls, this thread's own."""
        found: SampleStreams | None = getattr(self._of_thread, "streams", None)
        if found is None:
            from loaderpool.plan.sample_streams import (
                SampleStreams,
            )  # slow to import, and most functions need none

            found = self._of_thread.streams = SampleStreams(self._seed)
        return found

    def reader(self, epoch: int) -> Callable[[int], Any] | None:
        """Return the function for `Opened.read`; None if all epochs have the same items."""
        if self._varying is None:
            return None
        read = self._varying.item if self._cached is None else self._cached.of_epoch
        return functools.partial(read, epoch)

    # ---- what the probe made ----

    def keep_only(self, epoch: int) -> None:
        """Drop what is kept of other epochs, which will not be asked for: samples of this one are made now."""
        if self._kept_of != epoch:
            self.kept.clear()
            self._kept_of = epoch

    # ---- the global generators ----

    def watched(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run `work`; once calls are seen to draw from the global generators, seed them and run it again.

        Raises:
            BaseException: whatever `work` raises.
            CacheError: the function cannot have a cache, also where `work` takes that for an error to pass over.
            ArgumentError: they draw, and threads cannot each have a state of these generators.
        """
        runs = 0
        result: _Result
        while self.is_watched:
            result, drew = self.watch.run(work, *arguments)
            if not drew:
                break
            self.kept.clear()
            runs += 1
            if runs == 2:  # the first may have imported what draws on import
                if self._threads > 1:
                    raise ArgumentError(
                        "The function uses the global generator of random, numpy.random or torch, which threads "
                        f"share, so its samples would not be reproducible with threads={self._threads}. Add a "
                        "parameter `rng` and use it, or set threads=1. If samples do not depend on these numbers "
                        "(such as the pause before a retry), pass seed_globals=False."
                    )
                self.is_watched, self._seeds_globals = False, True
        else:
            self.watch.seen = None
            result = work(*arguments)
        if self._cached is not None and self._cached.refusal is not None:
            raise self._cached.refusal
        return result

    # ---- the calls ----

    def unit(self, opened: Opened, start: int, stop: int) -> Any:
        """What one call makes: a sample or whole element for the first row, or a batch of all of them by `batch_fn`."""
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
        """Append what `take` makes of each of these rows' samples; where one raises, `len(results)` tells which."""
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
            results.extend(values)  # in C; what was made stays where one raises
        end_stray()
        if len(results) < len(indices):
            # A StopIteration ended `extend` as if all was well: meet it again, where it is an error like others.
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
        # One for all: the second function goes on where the first has stopped.
        generator: Any = self._streams.generator(epoch, position) if self._takes_rng else None
        value = (opened.read or self._first)(opened.indices[at])
        if self._cached is not None:  # here: `fn` may have been called, or in another epoch
            if self._seeds_globals:
                self._streams.seed_globals(epoch, position)
            if captured is not None:
                captured.begin(SAMPLE, epoch, position)
        for function, takes_rng in self._chain:
            value = function(value, rng=generator) if takes_rng else function(value)
        if self._last is not None:
            out, row = None, opened.ticket.start + at
            if opened.arrays is not None and self.unflatten is not None:
                out = self.unflatten(
                    [array[row, ...] for array in opened.arrays]
                )  # 0-d: an array, too
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


# ---- on threads ----
#
# Calls begin in the order of rows, ticket after ticket. So the call that the main thread waits for has run longest, and
# threads make calls of the next tickets while the last rows of one are waited for. Of a worker that died it is unknown
# which of its tickets was to blame, so each is made again with nothing beside it.


class _Call:
    """One call of the function, which a thread makes."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread = self.started_ns = self.ended_ns = 0
        self.future: Future[None]  # tells whether it was made; canceled, it never begins

    def make(self, calls: Calls, opened: Opened, start: int, stop: int) -> None:
        """Runs in: one of the worker's threads."""
        self.thread, self.started_ns = threading.get_ident(), clock.monotonic_ns()
        try:
            self.result = calls.unit(opened, start, stop)
        except BaseException as error:
            end_stray(error)
            self.error = error
        self.ended_ns = clock.monotonic_ns()


class ThreadCalls:
    """A loader's threads in one worker; to the code that makes rows of results it is as `Calls` is.

    Args:
        calls: what threads call.
        threads: how many there are.
        makes_units: a call makes a whole batch or element.
        progress: is told of calls.
    """

    def __init__(self, calls: Calls, threads: int, makes_units: bool, progress: Progress) -> None:
        from concurrent.futures import (
            Future,
            ThreadPoolExecutor,
            wait,
        )  # 1 ms, and most loaders have no threads

        self._calls, self._makes_units, self._progress = calls, makes_units, progress
        self._wait_for = wait
        self.executor = ThreadPoolExecutor(threads, "loaderpool")
        self._over: Future[None] = (
            Future()
        )  # of calls that no thread makes: the probe has, or none could be started
        self._over.set_result(None)
        self.begun: dict[Ticket, Opened] = {}
        self._look_ahead: Callable[[], bool] | None = None

    def begin(self, opened: Opened) -> None:
        """Have a ticket's calls made, after those of the tickets begun before."""
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
            call.result = self._calls.kept.pop(
                call.index, None
            )  # now: a ticket of another epoch may be begun at once
            if call.result is not None:
                call.future = self._over
                continue
            # As the `setup` hook has left it: `numpy.errstate` and the like are the context's, not the process's.
            run = contextvars.copy_context().run
            try:
                call.future = self.executor.submit(run, call.make, self._calls, opened, start, stop)
            except RuntimeError as error:  # no more threads can be started
                call.error, call.future = error, self._over

    def unit(self, opened: Opened, start: int, stop: int) -> Any:
        """As `Calls.unit`. Blocks: until it was made."""
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
            del error  # its traceback has this frame, and with it what the function held would stay until a collection

    def _wait(self, call: _Call, look_ahead: Callable[[], bool] | None) -> None:
        if call.future.done():
            return
        # It may have begun long ago, while rows before it were waited for.
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
        """Fill a ticket's slot with what threads make. When this returns or raises, none of them is at it any more.

        Args:
            opened: the ticket.
            fill: makes rows of what these calls give.
            look_ahead: called while a call is waited for; it may begin more tickets, and tells whether more may come.

        Raises:
            ArgumentError: the function draws from the global generators, or fills one array again and again.
            BaseException: whatever `fill` raises.
        """
        self._look_ahead = look_ahead
        if opened.ticket not in self.begun:
            self.begin(opened)
        return self._calls.watched(self._fill, opened, fill)

    def _fill(self, opened: Opened, fill: Callable[[Runner, Opened], MadeRows]) -> MadeRows:
        if (
            opened.ticket not in self.begun
        ):  # again, after a draw of any ticket; the others' turns begin them again
            for ticket in list(self.begun):
                self.end(ticket)
            self._look_ahead = None
            self.begin(opened)
        try:
            filled = fill(self, opened)
            if share_memory(self._results(opened), opened.arrays or ()):
                raise ArgumentError(
                    "The function returns the same array, list or dict for several samples, which its threads would "
                    "overwrite. Return a new one from each call, or a read-only array, or set threads=1."
                )
            return filled
        finally:
            self.end(opened.ticket)

    def _results(self, opened: Opened) -> Iterator[Any]:
        """What the ticket's calls gave, and some calls of others, as it may have only one."""
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
        """Begin no further call of a ticket, and wait for those that run: they may be writing into the slot.

        Blocks: until the last of them is over. The board names each, so that one that hangs is found.
        """
        calls = self.begun.pop(ticket).calls
        for call in [call for call in calls.values() if not call.future.cancel()]:
            self._wait(call, None)
        calls.clear()  # an error that was not asked for has a traceback, whose frames have the calls


# ---- with a cache ----


_DREW = (
    "fn used {} for source index {}. With cache=, it is called only once per item, so all epochs would have the same "
    "random numbers. Move the random part to augment=, which gets the result of fn in every epoch, or remove cache="
)


class CachedFunction:
    """Gives what `fn` gives for a source index, in memory of its own.

    What comes out is always what the entry's bytes are read as, also where `fn` was called just now, and where its
    result could not be kept: so a sample does not depend on who has met the item before.

    Attributes:
        refusal: why the function cannot have a cache, once that is known: no matter of a single sample.
    """

    def __init__(
        self,
        source: Any,
        fn: Callable[[Any], Any],
        shared: SharedCache,
        cell: int,
        captured: CapturedGenerators | None,
    ) -> None:
        from loaderpool.cache.setting import Count  # most loaders have no cache

        self._count = Count
        self._source, self._fn, self._shared = source, fn, shared
        self._counts, self._watch = shared.counts_of(cell), GlobalsWatch()
        self.captured = captured  # random generators that the function may not draw from
        self.refusal: CacheError | None = None

    def __call__(self, index: int) -> Any:
        """Return what `fn` gives for this source index; CacheError: it is random, or its result is no pickle."""
        return self._kept(index, index, self._source.__getitem__)

    def of_epoch(self, epoch: int, index: int) -> Any:
        """Return the same for an epoch of a `VaryingSource`, of which each record has one entry."""
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
            # Not to be had now, or damaged: it is made again, and written over.
            self._counts[self._count.NO_ROOM if store is None else self._count.DAMAGED] += 1
        for _ in range(
            2
        ):  # the first call may have imported what draws on import, or another thread may have drawn
            before = self._watch.look()
            states = None if self.captured is None else self.captured.states()
            value = self._fn(get(index))
            end_stray()  # a child that the function has forked shall not write
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
                f"The result of fn for source index {index}, a {type(value).__name__}, cannot be cached: {error}. "
                "A cache stores pickles: return arrays, numbers, strings, or objects of a module, from fn, or "
                "remove cache="
            )
        not_kept = None if store is None else store.put(entry, made)
        if not_kept is not None:
            self._counts[not_kept] += 1
        return value

    def _refuse(self, text: str) -> None:
        self.refusal = CacheError(text)
        raise self.refusal
