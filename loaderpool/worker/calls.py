"""Calls the user's functions for rows of a ticket, each call with its own random streams; on threads, if there are any.

Of the threads each has calls of its own. What is made of their results (conversion, the error policy, rows in a slot),
and what is said to others, is the main thread's, and the same as without threads.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from loaderpool.errors import ArgumentError, CacheError, LoaderpoolWarning
from loaderpool.system import clock
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.worker.after_fork import end_stray
from loaderpool.worker.global_rng import GlobalsWatch, global_states
from loaderpool.worker.jobs import Abandoned, Filled, Job, Opened, Progress
from loaderpool.worker.rows import share_memory

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from loaderpool.cache.store import SharedCache, Store
    from loaderpool.plan.sample_streams import SampleStreams

# How often the main thread, waiting for a call, looks whether there are more tickets whose calls could begin. Longer:
# threads idle where tickets come late; shorter: the looks themselves cost.
_LOOK_S = 0.01
# Results of later tickets that a ticket's own are compared with. More would cost their number for each ticket.
_OTHERS = 2
_Result = TypeVar("_Result")


def refuse_draws(threads: int) -> ArgumentError:
    """Return what is said where a function draws from generators that its threads would share."""
    return ArgumentError(
        "The function uses the global generator of random, numpy.random or torch, which threads share, so its samples "
        f"would not be reproducible with threads={threads}. Add a parameter `rng` and use it, or set threads=1. If "
        "samples do not depend on these numbers (such as the pause before a retry), pass seed_globals=False."
    )


class Calls:
    """The user's functions, and what each call of them is given.

    A sample is made by a chain of calls: the source gives an item (or the cache what `fn` made of it once), then each
    function is called with what the one before it gave.

    Args:
        payload: what `Loader` shipped.
        cell: of the worker that this is.
        threads: how many make calls at the same time, each with a copy of this.
        watch: who looks at the global generators, where others look, too.
    """

    def __init__(
        self, payload: Mapping[str, Any], cell: int = 0, threads: int = 1, watch: GlobalsWatch | None = None
    ) -> None:
        source, config = payload["source"], payload["config"]
        self._get: Callable[[int], Any] = source.__getitem__
        self._batch_fn: Callable[..., Any] | None = payload["batch_fn"]
        names = ["fn", "augment"]
        self._cached: CachedFunction | None = None
        if payload["cache"] is not None:
            self._cached = CachedFunction(self._get, payload["fn"], payload["cache"], cell)
            names.remove("fn")
        self._first: Callable[[int], Any] = self._cached or self._get
        # `range(n)`: a look-up of each would take a tenth of the time of a batch of tiny samples.
        self._items_are_indices = self._cached is None and type(source) is range and source == range(len(source))
        takes_rng: frozenset[str] = payload["takes_rng"]  # the names of those that do
        chain = [(payload[name], name in takes_rng) for name in names if payload[name] is not None]
        self._functions = [function for function, _ in chain]
        # Only the last one may write into the batch, and it is called in another way then.
        self.takes_out: bool = payload["takes_out"]
        self._last: tuple[Callable[..., Any], bool] | None = chain.pop() if self.takes_out else None
        self._chain = chain
        self._takes_rng = bool(takes_rng)
        self._seed, self._threads = config.seed, threads
        self.watch = watch or GlobalsWatch()
        self.is_watched: bool = config.seed_globals == "auto"
        self._seeds_globals: bool = config.seed_globals is True
        # What the probe made, each used at its turn instead of a second call; by epoch and index of the (first) item.
        self.kept: dict[tuple[int, int], Any] = {}
        maker = next((name for name in ("batch_fn", "augment", "fn") if payload[name] is not None), None)
        self.origin = "the source gave" if maker is None else f"{maker} returned"  # begins a message
        self.lacked_out = False  # the latest call of a function that takes `out` was given None
        # Gives `out` its structure, once the batches' form is known.
        self.unflatten: Callable[[Sequence[Any]], Any] | None = None

    def copy(self) -> Calls:
        """Return the same calls for another thread, with random streams of its own. Nothing is kept in it."""
        other = copy.copy(self)
        other.__dict__.pop("_streams", None)
        other.kept = {}
        return other

    @functools.cached_property
    def _streams(self) -> SampleStreams:
        from loaderpool.plan.sample_streams import SampleStreams  # slow to import, and most functions need none

        return SampleStreams(self._seed)

    # ---- what the probe made ----

    def keep_only(self, epoch: int) -> None:
        """Drop what is kept of other epochs, which will not be asked for."""
        if any(kept != epoch for kept, _ in self.kept):
            self.kept.clear()

    def take_kept(self, epoch: int, index: int) -> list[Any]:
        """Return what was kept for this item in this epoch: one result, once, or none."""
        return [self.kept.pop((epoch, index))] if (epoch, index) in self.kept else []

    # ---- the global generators ----

    def watched(self, work: Callable[[], _Result]) -> _Result:
        """Run `work`; once calls are seen to draw from the global generators, seed them and run it again.

        Raises:
            BaseException: whatever `work` raises.
            CacheError: the function cannot have a cache, also where `work` takes that for an error to pass over.
            ArgumentError: they draw, and threads cannot each have a state of these generators.
        """
        watch, runs = self.watch, 0
        seen, watch.seen = watch.seen, None
        while self.is_watched:
            before = seen or watch.look()
            try:
                result = work()
            except Exception as error:  # not Ctrl-C: it would be gone with the second run
                end_stray(error)  # `random` is seeded again in a fork, which is no draw
                if is_of_a_handler(error) or watch.look() == before:
                    raise
            else:
                if watch.look() == before:
                    watch.seen = seen
                    break
            self.kept.clear()
            seen, runs = None, runs + 1
            if runs == 2:  # the first may have imported what draws on import
                if self._threads > 1:
                    raise refuse_draws(self._threads)
                self.is_watched, self._seeds_globals = False, True
        else:
            result = work()
        if self._cached is not None and self._cached.refusal is not None:
            raise self._cached.refusal
        return result

    # ---- the calls ----

    def samples(
        self, opened: Opened, start: int, stop: int, results: list[Any], take: Callable[[Any], Any] | None = None
    ) -> None:
        """Append the function's result for each of these rows; where it raises, `len(results)` tells for which.

        `take` is what is done with each result at once.
        """
        epoch, indices = opened.job.epoch, opened.indices[start:stop]
        if self.kept and not self.kept.keys().isdisjoint((epoch, index) for index in indices):
            for at, index in enumerate(indices, start):
                if kept := self.take_kept(epoch, index):
                    results += kept if take is None else map(take, kept)
                else:
                    self.samples(opened, at, at + 1, results, take)
        elif self._takes_rng or self._seeds_globals or self.takes_out:
            for at, position in enumerate(opened.positions[start:stop].tolist(), start):
                value = self._sample(opened, at, position)
                results.append(value if take is None else take(value))
        else:
            functions = self._functions if take is None else [*self._functions, take]
            self._plain(opened.read or self._first, functions, indices, results)
        end_stray()

    def _sample(self, opened: Opened, at: int, position: int) -> Any:
        self.lacked_out = False
        epoch = opened.job.epoch
        if self._seeds_globals and self._cached is None:
            self._streams.seed_globals(epoch, position)
        # One for all: the second function goes on where the first has stopped.
        generator: Any = self._streams.generator(epoch, position) if self._takes_rng else None
        value = (opened.read or self._first)(opened.indices[at])
        if self._seeds_globals and self._cached is not None:  # here: `fn` may have been called, or in another epoch
            self._streams.seed_globals(epoch, position)
        for function, takes_rng in self._chain:
            value = function(value, rng=generator) if takes_rng else function(value)
        if self._last is not None:
            out, row = None, opened.job.row_start + at
            if opened.arrays is not None and self.unflatten is not None:
                out = self.unflatten([array[row, ...] for array in opened.arrays])  # 0-d: an array, too
            self.lacked_out = out is None
            function, takes_rng = self._last
            value = function(value, out=out, rng=generator) if takes_rng else function(value, out=out)
            value = out if value is None else value
        return value

    def _plain(
        self, first: Callable[[int], Any], functions: list[Callable[[Any], Any]], indices: list[int], results: list[Any]
    ) -> None:
        before = len(results)
        values: Iterable[Any] = indices if self._items_are_indices else map(first, indices)
        for function in functions:
            values = map(function, values)
        results.extend(values)  # in C; what was made stays where one raises
        if len(results) - before < len(indices):
            end_stray()
            # A StopIteration ended `extend` as if all was well: meet it again, where it is an error like others.
            value = first(indices[len(results) - before])
            for function in functions:
                value = function(value)
            raise RuntimeError("the function raised StopIteration once, but not when it was called again")

    def unit(self, opened: Opened, start: int, stop: int) -> Any:
        """What one call makes: a sample or whole element for the first row, or a batch of all of them by `batch_fn`."""
        if self._batch_fn is None:
            results: list[Any] = []
            self.samples(opened, start, start + 1, results)
            return results[0]
        epoch, index = opened.job.epoch, opened.indices[start]
        if kept := self.take_kept(epoch, index):
            return kept[0]
        keywords: dict[str, Any] = {}
        position = int(opened.positions[start])
        if self._seeds_globals:
            self._streams.seed_globals(epoch, position, batch=True)
        if self._takes_rng:
            keywords["rng"] = self._streams.generator(epoch, position, batch=True)
        items, get = [], opened.read or self._get
        try:
            for index in opened.indices[start:stop]:
                items.append(get(index))
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"while source[{index}] was read")
            raise
        batch = self._batch_fn(items, **keywords)
        end_stray()
        return batch


# ---- on threads ----
#
# Calls begin in the order of rows, ticket after ticket. So the call that the main thread waits for has run longest, and
# threads make calls of the next tickets while the last rows of one are waited for. Of a worker that died it is unknown
# which of its tickets was to blame, so each is made again with nothing beside it.


class _Call:
    """One call of the function, which a thread makes."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.future: Future[None] | None = None  # None: the result was there
        # Held until the call was made. Not the future is waited for: this shows no frames of Python's in stacks.
        self.running = threading.Lock()
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread = self.started_ns = self.ended_ns = 0

    def make(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Runs in: one of the worker's threads."""
        self.thread, self.started_ns = threading.get_ident(), clock.monotonic_ns()
        try:
            self.result = work(*arguments)
        except BaseException as error:
            end_stray(error)
            self.error = error
        self.ended_ns = clock.monotonic_ns()
        self.running.release()


class ThreadCalls:
    """A loader's threads in one worker; to the code that makes rows of results it is as `Calls` is.

    Attributes:
        is_one_by_one: threads are not used any more: samples share memory.

    Args:
        calls: each thread has a copy.
        threads: how many there are.
        makes_units: a call makes a whole batch or element.
        progress: is told of calls.
    """

    def __init__(self, calls: Calls, threads: int, makes_units: bool, progress: Progress) -> None:
        self._calls, self._threads, self._makes_units, self._progress = calls, threads, makes_units, progress
        self._executor = _started(threads)
        self._of_thread = threading.local()
        self._begun: dict[Job, tuple[Opened, dict[int, _Call]]] = {}  # calls by the first row that each makes
        self._before: Any = None  # the global generators, when the first of them began
        self._look_ahead: Callable[[], bool] | None = None
        self.is_one_by_one = False

    def opened(self, job: Job) -> Opened | None:
        """Return the ticket's rows, if it was begun."""
        return self._begun[job][0] if job in self._begun else None

    def begin(self, opened: Opened) -> None:
        """Have a ticket's calls made, after those of the tickets begun before."""
        if not self._begun and self._calls.is_watched:
            self._before = self._calls.watch.look()
        calls: dict[int, _Call] = {}
        self._begun[opened.job] = opened, calls
        rows = len(opened.indices)
        for start, stop in opened.bounds() if self._makes_units else zip(range(rows), itertools.count(1)):
            if self._progress.excluded(opened.job.epoch, opened.indices[start:stop]) is not None:
                continue
            call = calls[start] = _Call(opened.indices[start])
            if kept := self._calls.take_kept(opened.job.epoch, call.index):
                call.result = kept[0]
                continue
            call.running.acquire()
            # As the `setup` hook has left it: `numpy.errstate` and the like are the context's, not the process's.
            run = contextvars.copy_context().run
            call.future = self._executor.submit(run, call.make, self._make, opened, start, stop)

    def _make(self, opened: Opened, start: int, stop: int) -> Any:
        """Return what a call gives. Runs in: one of the worker's threads."""
        if self._progress.is_abandoned(opened.job.run):
            raise Abandoned
        calls: Calls | None = getattr(self._of_thread, "calls", None)
        if calls is None:
            calls = self._of_thread.calls = self._calls.copy()
        return calls.unit(opened, start, stop)

    def samples(
        self, opened: Opened, start: int, stop: int, results: list[Any], take: Callable[[Any], Any] | None = None
    ) -> None:
        """As `Calls.samples`. Blocks: until these rows were made."""
        for at in range(start, stop):
            value = self.unit(opened, at, at + 1)
            results.append(value if take is None else take(value))

    def unit(self, opened: Opened, start: int, stop: int) -> Any:
        """As `Calls.unit`. Blocks: until it was made."""
        call = self._begun[opened.job][1][start]
        if call.future is not None:
            self._wait(call, self._look_ahead)
            self._progress.note_call(call.started_ns, call.ended_ns, call.index)
        if call.error is not None:
            raise call.error
        return call.result

    def _wait(self, call: _Call, look_ahead: Callable[[], bool] | None) -> None:
        if not call.running.locked():
            return
        # It may have begun long ago, while rows before it were waited for.
        self._progress.note_thread(call.thread, call.started_ns or clock.monotonic_ns(), call.index)
        while look_ahead is not None and look_ahead():
            if call.running.acquire(timeout=_LOOK_S):
                break
        else:
            call.running.acquire()
        call.running.release()

    def run(
        self,
        opened: Opened,
        fill: Callable[[Calls | ThreadCalls], Filled],
        look_ahead: Callable[[], bool] | None,
    ) -> Filled:
        """Fill a ticket's slot with what threads make. When this returns or raises, none of them is at it any more.

        A function that returns one array again and again has all its threads fill it: where results share memory, the
        ticket and all that follow are made by one thread.

        Args:
            opened: the ticket.
            fill: makes rows of what these calls give.
            look_ahead: called while a call is waited for; it may begin more tickets, and tells whether more may come.

        Raises:
            ArgumentError: the function draws from the global generators.
            BaseException: whatever `fill` raises.
        """
        self._look_ahead = None if opened.job.attempt else look_ahead
        for _ in range(2):  # the first may have imported what draws on import
            if self.is_one_by_one:
                break
            if opened.job not in self._begun:
                self.begin(opened)
            try:
                filled = fill(self)
                self.is_one_by_one = share_memory(self._results(opened.job), opened.arrays or ())
            finally:
                self._end(opened.job)
            drew = self._calls.is_watched and self._calls.watch.look() != self._before
            if not (drew or self.is_one_by_one):
                return filled
            for job in list(self._begun):  # whose draw it was is unknown; their turns will begin them again
                self._end(job)
            self._look_ahead = None
            if self.is_one_by_one:
                warnings.warn(
                    f"The function returns one array, list or dict for several samples, so threads={self._threads} "
                    "are not used. Return a new one from each call, or a read-only array.",
                    LoaderpoolWarning,
                    stacklevel=2,
                )
        if self.is_one_by_one:
            return self._calls.watched(lambda: fill(self._calls))
        raise refuse_draws(self._threads)

    def _results(self, job: Job) -> Iterator[Any]:
        """What the ticket's calls gave, and some calls of others, as it may have only one."""
        others = (call for other, (_, calls) in self._begun.items() if other != job for call in calls.values())
        made = (call.result for call in others if call.result is not None)
        return itertools.chain((call.result for call in self._begun[job][1].values()), itertools.islice(made, _OTHERS))

    def _end(self, job: Job) -> None:
        """Begin no further call of a ticket, and wait for those that run: they may be writing into the slot.

        Blocks: until the last of them is over. The board names each, so that one that hangs is found.
        """
        calls = self._begun[job][1].values()
        for call in [call for call in calls if call.future is not None and not call.future.cancel()]:
            self._wait(call, None)
        del self._begun[job]


def _started(threads: int) -> ThreadPoolExecutor:
    """Return an executor all of whose threads run: one that starts them later would have queued a call that fails.

    Raises:
        RuntimeError: the machine, or a limit, has no thread at all; where it has fewer, they do the work.
    """
    from concurrent.futures import ThreadPoolExecutor  # most loaders have no threads

    while True:
        executor, go, have = ThreadPoolExecutor(threads, "loaderpool"), threading.Event(), 0
        try:
            while have < threads:
                executor.submit(go.wait)
                have += 1
            return executor
        except RuntimeError:
            if not have:
                raise
        finally:
            go.set()
        executor.shutdown()
        threads = have


# ---- with a cache ----


class CachedFunction:
    """Gives what `fn` gives for a source index, in memory of its own.

    What comes out is always what the entry's bytes are read as, also where `fn` was called just now, and where its
    result could not be kept: so a sample does not depend on who has met the item before.

    Attributes:
        refusal: why the function cannot have a cache, once that is known: no matter of a single sample.
    """

    def __init__(self, get: Callable[[int], Any], fn: Callable[[Any], Any], shared: SharedCache, cell: int) -> None:
        from loaderpool.cache.setting import Count  # most loaders have no cache
        from loaderpool.cache.store import dump, load

        self._count = Count
        self._get, self._fn, self._shared, self._dump, self._load = get, fn, shared, dump, load
        self._counts = shared.counts_of(cell)
        self._has_none = False
        self.refusal: CacheError | None = None

    def __call__(self, index: int) -> Any:
        """Return what `fn` gives for this source index; CacheError: it is random, or its result is no pickle."""
        store = self._store()
        if store is not None:
            try:
                pickled = store.get(index)
                if pickled is not None:
                    found = self._load(pickled)
                    self._counts[self._count.HITS] += 1
                    return found
            except Exception:  # damaged, or not to be had now: it is made again, and written over
                self._counts[self._count.DAMAGED] += 1
        value, drew = self._call(index)
        if drew:  # once more: the first call may have imported what draws on import, or another thread may have drawn
            value, drew = self._call(index)
        if drew:
            self._refuse(
                f"fn used random or numpy.random for source index {index}. With cache=, it is called only once per "
                "item, so all epochs would have the same random numbers. Move the random part to augment=, which gets "
                "the result of fn in every epoch, or remove cache="
            )
        self._counts[self._count.MISSES] += 1
        try:
            made = self._dump(value)
            value = self._load(made)
        except Exception as error:
            self._refuse(
                f"The result of fn for source index {index}, a {type(value).__name__}, cannot be cached: {error}. "
                "A cache stores pickles: return arrays, numbers or strings from fn, or remove cache="
            )
        not_kept = None if store is None else store.put(index, made)
        if not_kept is not None:
            self._counts[not_kept] += 1
        return value

    def _call(self, index: int) -> tuple[Any, bool]:
        """Return what the function gives, and whether any code drew from the global generators meanwhile."""
        before = global_states()
        value = self._fn(self._get(index))
        end_stray()  # a child that the function has forked shall not write
        return value, global_states() != before

    def _store(self) -> Store | None:
        if self._has_none:
            return None
        try:
            return self._shared.store()
        except Exception:  # it was deleted, or no descriptor is left for it
            self._has_none = True
            self._counts[self._count.BROKEN] += 1
            return None

    def _refuse(self, text: str) -> None:
        self.refusal = CacheError(text)
        raise self.refusal
