"""The probe: the function's first call, which tells what a sample (or batch) is like before a form is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool import clock
from loaderpool.config import LoaderConfig
from loaderpool.errors import SourceError, SpecMismatchError
from loaderpool.leaves import convert_leaf
from loaderpool.memory.form import UnitKind
from loaderpool.plan.base import BasePlan
from loaderpool.spec import ElementSpec, sample_spec
from loaderpool.worker.calls import Calls
from loaderpool.worker.exclusions import Exclusions
from loaderpool.worker.failures import describe_failure
from loaderpool.worker.items import WorkItems
from loaderpool.worker.jobs import Probe, WorkFailed
from loaderpool.worker.lane import GeneratorRaised
from loaderpool.worker.progress import Progress

__all__ = ["Prober"]

# Samples that the probe tries where errors may be skipped: fewer give up on a bad start, more delay an error that all
# samples have.
_PROBES = 64
# Of Python's own scalars a spec allows other casts than of arrays, so these are kept as they are.
_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes})
_WITHOUT_OUT = " (at the first call, which tells what a sample is like, out is None: return a new array then)"


class Prober:
    """Makes the probe.

    Args:
        calls: the function; keeps the probe's result for its turn.
        config: the loader's settings.
        plan: says which item is at a position.
        items: says which positions are first.
        unit: what one call of the function makes.
        given_spec: the user's element_spec.
        progress: where the probe is noted.
        exclusions: what is not run.
    """

    def __init__(
        self,
        calls: Calls,
        config: LoaderConfig,
        plan: BasePlan,
        items: WorkItems,
        unit: UnitKind,
        given_spec: ElementSpec | None,
        progress: Progress,
        exclusions: Exclusions,
    ) -> None:
        self._calls, self._config, self._plan, self._items, self._unit = calls, config, plan, items, unit
        self._given_spec, self._progress, self._exclusions = given_spec, progress, exclusions

    def probe(self, epoch: int, feed: int) -> Probe:
        """Call the function for the epoch's first sample (or batch), keep the result, and tell what it is like.

        Where failing samples are left out or replaced, the first good one of a few.

        Args:
            epoch: the epoch.
            feed: where a stream's table lies.

        Raises:
            WorkFailed: the function raised, or returned what no batch can be made of.
        """
        action = self._config.on_error.action
        may_try_more = action == "skip" or (action == "replace" and self._unit == "sample")
        first_error: WorkFailed | None = None
        for positions, batch_rows in self._positions(epoch, feed, _PROBES if may_try_more else 1):
            try:
                return self._probe_at(epoch, positions, batch_rows)
            except WorkFailed as error:
                first_error = first_error or error
        raise first_error or self._nothing_there(epoch)

    def _nothing_there(self, epoch: int) -> WorkFailed:
        enough = "" if self._config.batch_size is None or not self._config.drop_remainder else " enough for a batch"
        error = SourceError(f"source is empty: no generator yielded anything{enough}")
        return WorkFailed(describe_failure(error, epoch=epoch, worker=self._progress.worker), error)

    def _positions(self, epoch: int, feed: int, most: int) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
        """What calls would be for, and how many rows their batches have."""
        batches = self._items.first(epoch, most, feed)
        while True:
            try:
                positions = next(batches, None)
            except GeneratorRaised as raised:
                raise self._progress.failed(raised.error, epoch, [raised.position], raised.position) from None
            except self._progress.catches as error:  # of a stream's items; or a generator ends its process
                failure = describe_failure(error, epoch=epoch, worker=self._progress.worker)
                raise WorkFailed(failure, error) from None
            if positions is None:
                return
            if self._unit == "batch":
                yield positions, len(positions)
                continue
            for row in range(min(most, len(positions))):
                yield positions[row : row + 1], len(positions)
            most -= len(positions)
            if most <= 0:
                return

    def _probe_at(self, epoch: int, positions: npt.NDArray[np.int64], batch_rows: int) -> Probe:
        indices = self._plan.indices(epoch, positions)
        excluded = self._exclusions.find(epoch, indices)
        if excluded is not None:
            raise WorkFailed(excluded, RuntimeError(excluded.text))
        progress = self._progress
        words = progress.words
        started = clock.monotonic_ns()
        words[progress.started_word] = started
        words[progress.index_word] = indices[0] + 1
        try:
            result = self._calls.watched(lambda: self._calls.unit(epoch, positions.tolist(), indices))
        except progress.catches as error:
            raise self._failed(error, epoch, indices, int(positions[0])) from None
        elapsed = clock.monotonic_ns() - started
        words[progress.index_word] = 0
        try:
            spec = sample_spec(result, self._given_spec, self._calls.origin)
            leaves = spec.structure.flatten(result)
        except Exception as error:
            raise self._failed(error, epoch, indices, int(positions[0])) from None
        kept = [_kept(leaf, path) for leaf, path in zip(leaves, spec.structure.paths, strict=True)]
        self._calls.keep(epoch, indices[0], spec.structure.pack(kept))
        return Probe(spec, sum(_nbytes(leaf) for leaf in leaves), len(indices), elapsed, batch_rows)

    def _failed(self, error: BaseException, epoch: int, indices: list[int], position: int) -> WorkFailed:
        failed = self._progress.failed(error, epoch, indices, position)
        is_of_none = isinstance(error, (TypeError, AttributeError, SpecMismatchError)) and "None" in failed.failure.text
        if not (self._calls.lacked_out and is_of_none):
            return failed
        return WorkFailed(dataclasses.replace(failed.failure, text=failed.failure.text + _WITHOUT_OUT), error)


def _kept(leaf: Any, path: str) -> Any:
    """The leaf in memory of its own: the function may fill its buffer, be it a list, again before its turn."""
    is_immutable = type(leaf) in _IMMUTABLE or isinstance(leaf, np.generic)
    return leaf if is_immutable else convert_leaf(leaf, path).copy()


def _nbytes(leaf: Any) -> int:
    array = np.asarray(leaf)
    if array.dtype != object:
        return array.nbytes
    return sum(len(piece) + 8 for piece in array.ravel().tolist() if isinstance(piece, (str, bytes)))
