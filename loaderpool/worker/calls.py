"""Calls the user's function for positions of the plan, each call with its own random streams."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy.typing as npt

from loaderpool.plan.randomness import GlobalsWatch, SampleStreams
from loaderpool.worker.strays import end_stray

__all__ = ["Calls"]

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class _Kept:
    """The probe's result, used when its turn comes instead of a second call."""

    epoch: int
    index: int  # source index of its (first) item
    result: Any


class Calls:
    """The user's function, and what each call of it is given.

    Args:
        payload: what `Loader` shipped: source, fn, batch_fn, config, takes_rng, takes_out.
    """

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self._get: Callable[[int], Any] = payload["source"].__getitem__
        self._fn: Callable[..., Any] | None = payload["fn"]
        self._batch_fn: Callable[..., Any] | None = payload["batch_fn"]
        self._takes_rng: bool = payload["takes_rng"]
        self.takes_out: bool = payload["takes_out"]
        config = payload["config"]
        self._streams = SampleStreams(config.seed)
        self._watch = GlobalsWatch() if config.seed_globals == "auto" else None
        self._seeds_globals: bool = config.seed_globals is True
        self._kept: _Kept | None = None
        # Gives `out` its structure, once the batches' form is known.
        self.pack_out: Callable[[Sequence[Any]], Any] | None = None

    @property
    def needs_positions(self) -> bool:
        """Whether calls look at positions at all: only random streams do."""
        return self._takes_rng or self._seeds_globals

    def keep(self, epoch: int, index: int, result: Any) -> None:
        """Have `result` stand for the next call for this item in this epoch."""
        self._kept = _Kept(epoch, index, result)

    def forget(self) -> None:
        """What was kept is not what its turn would give now."""
        self._kept = None

    def watched(self, work: Callable[[], _Result]) -> _Result:
        """Run `work`; once calls are seen to draw from the global generators, seed them and run it once more.

        Raises:
            BaseException: whatever `work` raises.
        """
        watch = self._watch
        if watch is None or self._seeds_globals:
            return work()
        watch.arm()
        try:
            result = work()
        except Exception as error:  # not Ctrl-C: it would be gone with the second run
            end_stray(error)  # `random` is seeded anew in a fork, which is no draw
            if not watch.drew():
                raise
        else:
            if not watch.drew():
                return result
        self._seeds_globals = True
        self._kept = None
        return work()

    def samples(
        self,
        epoch: int,
        positions: Sequence[int],
        indices: Sequence[int],
        results: list[Any],
        arrays: Sequence[npt.NDArray[Any]] | None = None,
        row: int = 0,
    ) -> None:
        """Append the function's result for each index; where it raises, `len(results)` tells for which.

        Args:
            epoch: keys the random streams, with the position.
            positions: global position of each; not looked at unless `needs_positions`.
            indices: source index of each.
            results: the list to append to.
            arrays: the components' arrays, for a function that takes `out`.
            row: the first row in them.
        """
        kept = self._kept
        if kept is not None and len(indices) and kept.index == indices[0] and kept.epoch == epoch:
            self._kept = None
            results.append(kept.result)
            positions, indices, row = positions[1:], indices[1:], row + 1
        if not (self.needs_positions or self.takes_out):
            self._plain(indices, results)
            end_stray()
            return
        get, fn = self._get, self._fn
        for position, index in zip(positions, indices, strict=True):
            keywords: dict[str, Any] = {}
            if self._seeds_globals:
                self._streams.seed_globals(epoch, position)
            if self._takes_rng:
                keywords["rng"] = self._streams.generator(epoch, position)
            item = get(index)
            if fn is None:
                results.append(item)
                continue
            if not self.takes_out:
                results.append(fn(item, **keywords))
                continue
            out = None
            if arrays is not None and self.pack_out is not None:
                out = self.pack_out([array[row, ...] for array in arrays])  # 0-d: an array, too
            result = fn(item, out=out, **keywords)
            results.append(out if result is None else result)
            row += 1
        end_stray()

    def unit(self, epoch: int, positions: Sequence[int], indices: Sequence[int]) -> Any:
        """What one call makes: a sample or whole element for the first index, or a batch of all by `batch_fn`."""
        if self._batch_fn is None:
            results: list[Any] = []
            self.samples(epoch, positions[:1], indices[:1], results)
            return results[0]
        kept = self._kept
        if kept is not None and kept.index == indices[0] and kept.epoch == epoch:
            self._kept = None
            return kept.result
        keywords: dict[str, Any] = {}
        if self._seeds_globals:
            self._streams.seed_globals(epoch, positions[0], batch=True)
        if self._takes_rng:
            keywords["rng"] = self._streams.generator(epoch, positions[0], batch=True)
        get = self._get
        batch = self._batch_fn([get(index) for index in indices], **keywords)
        end_stray()
        return batch

    def _plain(self, indices: Sequence[int], results: list[Any]) -> None:
        get, fn = self._get, self._fn
        before = len(results)
        items = map(get, indices)
        results.extend(items if fn is None else map(fn, items))  # in C; what was made stays where one raises
        if len(results) - before < len(indices):
            end_stray()
            # A StopIteration ended `extend` as if all was well: meet it again, where it is an error like others.
            item = get(indices[len(results) - before])
            if fn is not None:
                fn(item)
            raise RuntimeError("the function raised StopIteration once, and not when it was called again")
