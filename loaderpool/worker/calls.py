"""Calls the user's functions for positions of the plan, each call with its own random streams."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt

from loaderpool.cache.setting import Count
from loaderpool.errors import ArgumentError, CacheError
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.worker.after_fork import end_stray
from loaderpool.worker.global_rng import GlobalsWatch, global_states

if TYPE_CHECKING:
    from loaderpool.cache.store import SharedCache, Store
    from loaderpool.plan.sample_streams import SampleStreams

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
        self.watch = (watch or GlobalsWatch()) if config.seed_globals == "auto" else None
        self._seeds_globals: bool = config.seed_globals is True
        # What the probe made, each used at its turn instead of a second call; by epoch and index of the (first) item.
        self._kept: dict[tuple[int, int], Any] = {}
        maker = next((name for name in ("batch_fn", "augment", "fn") if payload[name] is not None), None)
        self.origin = "the source gave" if maker is None else f"{maker} returned"  # begins a message
        self.lacked_out = False  # the latest call of a function that takes `out` was given None
        # Gives `out` its structure, once the batches' form is known.
        self.unflatten: Callable[[Sequence[Any]], Any] | None = None

    def copy(self) -> Calls:
        """Return the same calls for another thread, with random streams of its own. Nothing is kept in it."""
        other = copy.copy(self)
        other.__dict__.pop("_streams", None)
        other._kept = {}
        return other

    @functools.cached_property
    def _streams(self) -> SampleStreams:
        from loaderpool.plan.sample_streams import SampleStreams  # slow to import, and most functions need none

        return SampleStreams(self._seed)

    def read_by(self, get: Callable[[int], Any]) -> None:
        """Have this give the item of a source index from now on. There is no cache."""
        self._get = self._first = get
        self._items_are_indices = False

    @property
    def needs_positions(self) -> bool:
        """Whether calls look at positions at all: only random streams do."""
        return self._takes_rng or self._seeds_globals

    # ---- what the probe made ----

    def keep(self, epoch: int, index: int, result: Any) -> None:
        """Have `result` stand for the next call for this item in this epoch. Results of other epochs are dropped."""
        self.keep_only(epoch)
        self._kept[epoch, index] = result

    def keep_only(self, epoch: int) -> None:
        """Drop what is kept of other epochs, which will not be asked for."""
        if self._kept and any(kept != epoch for kept, _ in self._kept):
            self._kept.clear()

    def take_kept(self, epoch: int, index: int) -> list[Any]:
        """Return what was kept for this item in this epoch: one result, once, or none."""
        return [self._kept.pop((epoch, index))] if (epoch, index) in self._kept else []

    def forget(self) -> None:
        """Drop what was kept: it is not what its turn would give now."""
        self._kept.clear()

    # ---- the global generators ----

    def watched(self, work: Callable[[Calls], _Result]) -> _Result:
        """Run `work` with this; once calls are seen to draw from the global generators, seed them and run it again.

        Raises:
            BaseException: whatever `work` raises.
            CacheError: the function cannot have a cache, also where `work` takes that for an error to pass over.
            ArgumentError: they draw, and threads cannot each have a state of these generators.
        """
        result = self._seeding(work)
        if self._cached is not None and self._cached.refusal is not None:
            raise self._cached.refusal
        return result

    def _seeding(self, work: Callable[[Calls], _Result]) -> _Result:
        watch = self.watch
        if watch is None or self._seeds_globals:
            return work(self)
        for _ in range(2):  # the first may have imported what draws on import
            watch.arm()
            try:
                result = work(self)
            except Exception as error:  # not Ctrl-C: it would be gone with the second run
                end_stray(error)  # `random` is seeded again in a fork, which is no draw
                if is_of_a_handler(error) or not watch.drew():
                    raise
            else:
                if not watch.drew():
                    return result
            self.forget()
        if self._threads > 1:
            raise refuse_draws(self._threads)
        self._seeds_globals = True
        return work(self)

    # ---- the calls ----

    def samples(
        self,
        epoch: int,
        positions: Sequence[int],
        indices: Sequence[int],
        results: list[Any],
        arrays: Sequence[npt.NDArray[Any]] | None = None,
        row: int = 0,
        take: Callable[[Any], Any] | None = None,
    ) -> None:
        """Append the function's result for each index; where it raises, `len(results)` tells for which.

        Args:
            epoch: keys the random streams, with the position.
            positions: global position of each; not looked at unless `needs_positions`.
            indices: source index of each.
            results: the list to append to.
            arrays: the components' arrays, for a function that takes `out`.
            row: the first row in them.
            take: what is done with each result at once.
        """
        if self._kept and not self._kept.keys().isdisjoint((epoch, index) for index in indices):
            for at, (position, index) in enumerate(zip(positions, indices, strict=True)):
                if kept := self.take_kept(epoch, index):
                    results += kept if take is None else map(take, kept)
                else:
                    self.samples(epoch, [position], [index], results, arrays, row + at, take)
        elif self._takes_rng or self._seeds_globals or self.takes_out:
            for position, index in zip(positions, indices, strict=True):
                value = self._sample(epoch, position, index, arrays, row)
                results.append(value if take is None else take(value))
                row += 1
        else:
            self._plain(indices, results, self._functions if take is None else [*self._functions, take])
        end_stray()

    def _sample(
        self, epoch: int, position: int, index: int, arrays: Sequence[npt.NDArray[Any]] | None, row: int
    ) -> Any:
        self.lacked_out = False
        if self._seeds_globals and self._cached is None:
            self._streams.seed_globals(epoch, position)
        # One for all: the second function goes on where the first has stopped.
        generator: Any = self._streams.generator(epoch, position) if self._takes_rng else None
        value = self._first(index)
        if self._seeds_globals and self._cached is not None:  # here: `fn` may have been called, or in another epoch
            self._streams.seed_globals(epoch, position)
        for function, takes_rng in self._chain:
            value = function(value, rng=generator) if takes_rng else function(value)
        if self._last is not None:
            out = None
            if arrays is not None and self.unflatten is not None:
                out = self.unflatten([array[row, ...] for array in arrays])  # 0-d: an array, too
            self.lacked_out = out is None
            function, takes_rng = self._last
            value = function(value, out=out, rng=generator) if takes_rng else function(value, out=out)
            value = out if value is None else value
        return value

    def _plain(self, indices: Sequence[int], results: list[Any], functions: Sequence[Callable[[Any], Any]]) -> None:
        before = len(results)
        values: Iterable[Any] = indices if self._items_are_indices else map(self._first, indices)
        for function in functions:
            values = map(function, values)
        results.extend(values)  # in C; what was made stays where one raises
        if len(results) - before < len(indices):
            end_stray()
            # A StopIteration ended `extend` as if all was well: meet it again, where it is an error like others.
            value = self._first(indices[len(results) - before])
            for function in functions:
                value = function(value)
            raise RuntimeError("the function raised StopIteration once, but not when it was called again")

    def unit(self, epoch: int, positions: Sequence[int], indices: Sequence[int], row: int = 0) -> Any:
        """What one call makes: a sample or whole element for the first index, or a batch of all by `batch_fn`."""
        if self._batch_fn is None:
            results: list[Any] = []
            self.samples(epoch, positions[:1], indices[:1], results)
            return results[0]
        if kept := self.take_kept(epoch, indices[0]):
            return kept[0]
        keywords: dict[str, Any] = {}
        if self._seeds_globals:
            self._streams.seed_globals(epoch, positions[0], batch=True)
        if self._takes_rng:
            keywords["rng"] = self._streams.generator(epoch, positions[0], batch=True)
        items, index = [], indices[0]
        try:
            for index in indices:
                items.append(self._get(index))
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"while source[{index}] was read")
            raise
        batch = self._batch_fn(items, **keywords)
        end_stray()
        return batch


class CachedFunction:
    """Gives what `fn` gives for a source index, in memory of its own.

    What comes out is always what the entry's bytes are read as, also where `fn` was called just now, and where its
    result could not be kept: so a sample does not depend on who has met the item before.

    Attributes:
        refusal: why the function cannot have a cache, once that is known: no matter of a single sample.
    """

    def __init__(self, get: Callable[[int], Any], fn: Callable[[Any], Any], shared: SharedCache, cell: int) -> None:
        from loaderpool.cache.store import dump, load  # most loaders have no cache

        self._get, self._fn, self._shared, self._dump, self._load = get, fn, shared, dump, load
        self._counts = shared.counts_of(cell)
        self._has_none = False
        self.refusal: CacheError | None = None

    def __call__(self, index: int) -> Any:
        """Return what `fn` gives for this source index.

        Raises:
            CacheError: the function is random, or its result is no pickle; see `refusal`.
            BaseException: whatever the source or the function raises; nothing is kept then.
        """
        store = self._store()
        if store is not None:
            try:
                pickled = store.get(index)
                if pickled is not None:
                    found = self._load(pickled)
                    self._counts[Count.HITS] += 1
                    return found
            except Exception:  # damaged, or not to be had now: it is made again, and written over
                self._counts[Count.DAMAGED] += 1
        value, drew = self._call(index)
        if drew:  # once more: the first call may have imported what draws on import, or another thread may have drawn
            value, drew = self._call(index)
        if drew:
            self._refuse(
                f"fn used random or numpy.random for source index {index}. With cache=, it is called only once per "
                "item, so all epochs would have the same random numbers. Move the random part to augment=, which gets "
                "the result of fn in every epoch, or remove cache="
            )
        self._counts[Count.MISSES] += 1
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
            self._counts[Count.BROKEN] += 1
            return None

    def _refuse(self, text: str) -> None:
        self.refusal = CacheError(text)
        raise self.refusal
