"""The probe: the function's first calls, which tell what samples (or batches) are like before a form is known.

And what is made beside a probe that takes long: calls for other batches, whose results are kept as the probe's are.

One call tells all where every sample has one shape. Where they are to be padded, or kept ragged, the samples of the
first batch tell which axes vary; of batches by length, whose samples are of like length, one of another bucket does,
too. Which samples these are hangs on the plan alone, so the form is the same for any number of workers, and after a
resume.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.config import LoaderConfig, UnitKind
from loaderpool.element.leaf import convert_leaf
from loaderpool.element.spec import ArraySpec, ElementSpec, sample_spec, widened
from loaderpool.element.structure import Structure
from loaderpool.errors import SourceError, SpecMismatchError
from loaderpool.plan.base import BasePlan
from loaderpool.system import clock
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.reports import describe_failure
from loaderpool.worker.calls import Calls
from loaderpool.worker.items import WorkItems
from loaderpool.worker.jobs import Exclusions, Probe, WorkFailed
from loaderpool.worker.lanes import GeneratorRaised
from loaderpool.worker.progress import Progress

# Samples that the probe tries where errors may be skipped: fewer give up on a bad start, more delay an error that all
# samples have.
_PROBES = 64
# Samples of the first batch that are looked at for axes that vary. Fewer: an axis that rarely varies is met later, as
# an error. More: of a large batch of slow samples the other workers would wait for all.
_LOOKS = 64
# Samples that are looked at in any case: of the batches behind it where the first is smaller, and however many threads
# would have made them at the same time.
_FEWEST_LOOKS = 8
# Of Python's own scalars a spec allows other casts than of arrays, so these are kept as they are.
_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes})
# What one worker keeps of what it has made early. Less: it idles behind a first sample that takes very long. More: this
# is memory of the worker's own, for which no `Limits.memory` has a place.
_EARLY_BYTES = 64 << 20
# What a result takes beside its data, about: of tiny ones it is more than these.
_OBJECT_BYTES = 512
_WITHOUT_OUT = " (in the first call, which determines shapes and dtypes, out is None: return a new array)"


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
        self._varies = unit == "sample" and given_spec is None and (config.pad is not False or config.ragged)
        self._early_bytes = 0

    def probe(self, epoch: int, feed: int) -> Probe:
        """Call the function for the epoch's first sample (or batch), keep the result, and tell what it is like.

        Where failing samples are left out or replaced, the first good one of a few. Where axes may vary, for more
        samples; one of these that fails tells nothing, and fails again in its turn.

        Args:
            epoch: the epoch.
            feed: where a stream's table lies.

        Raises:
            WorkFailed: the function raised, or returned what no batch can be made of.
        """
        action = self._config.on_error.action
        may_try_more = action == "skip" or (action == "replace" and self._unit == "sample")
        left = _PROBES if may_try_more else 1
        first_error: WorkFailed | None = None
        for positions in self._batches(epoch, feed, left):
            size = len(positions) if self._unit == "batch" else 1
            tried = range(0, len(positions), size)[:left]
            for start in tried:
                try:
                    probe = self._probe_at(epoch, positions[start : start + size], len(positions))
                except WorkFailed as error:
                    first_error = first_error or error
                else:
                    return self._look_at_more(epoch, probe, positions[start + 1 :])
            left -= len(tried)
            if not left:
                break
        raise first_error or self._nothing_there(epoch)

    def probe_batch(self, epoch: int, batch: int) -> Probe:
        """Make the probe of one batch that a call makes whole.

        Raises:
            WorkFailed: the function raised, or returned what no batch can be made of.
        """
        positions = self._plan.positions(epoch, batch)
        return self._probe_at(epoch, positions, len(positions))._replace(batch=batch)

    def make_early(self, epoch: int, batch: int, call: int) -> int | None:
        """Make one of a batch's calls while the probe runs elsewhere, and keep its result for its turn.

        One that fails leaves nothing: it is made again in its turn, and fails there.

        Args:
            epoch: the probe's.
            batch: which one.
            call: which of its calls, from 0.

        Returns:
            How many calls the batch has. 0: nothing was made, for a probe looks at this batch. None: nor shall
            anything more be.
        """
        plan = self._plan
        if plan.is_open or self._calls.takes_out or self._early_bytes >= _EARLY_BYTES:
            return None
        if batch >= plan.batches_per_epoch:
            return None
        if not call and batch in self._looks_at(epoch):
            return 0
        positions = plan.positions(epoch, batch)
        size = len(positions) if self._unit == "batch" else 1
        made = self._try(epoch, positions[call * size : (call + 1) * size])
        if made is not None:
            self._early_bytes += made.nbytes + _OBJECT_BYTES
        return len(positions) // size

    def _looks_at(self, epoch: int) -> Collection[int]:
        """Return the batches behind the first of which a probe makes something."""
        if self._unit != "sample":  # the second one, for a dataset's spec
            return (1,)
        return self._elsewhere(epoch, _FEWEST_LOOKS - self._plan.rows(epoch, 0)) if self._varies else ()

    def _look_at_more(self, epoch: int, probe: Probe, positions: npt.NDArray[np.int64]) -> Probe:
        """Return what other samples show of the axes, where that is asked for: an `element_spec` says it itself.

        Args:
            epoch: the epoch.
            probe: the first sample.
            positions: of the samples behind it in its batch.
        """
        if not self._varies or not any(component.shape for component in probe.spec.components):
            return probe
        seen, nbytes = probe.spec, probe.nbytes
        most = max(_FEWEST_LOOKS, _LOOKS // self._config.threads)  # they are made one after the other
        for each in itertools.islice(positions, most - 1):
            other = self._try(epoch, np.array([each]))
            if other is not None:
                seen, nbytes = widened(seen, other.spec), max(nbytes, other.nbytes)
        elsewhere = self._elsewhere(epoch, _FEWEST_LOOKS - 1 - len(positions))
        for each in elsewhere.values():
            other = self._try(epoch, np.array([each]))
            if other is not None:
                seen = widened(seen, other.spec)
        if seen == probe.spec:  # nothing tells axes apart, as of sentences all cut to one length: any may vary
            open_axes = (ArraySpec((None,) * len(c.shape), c.dtype, c.text) for c in seen.components)
            seen = ElementSpec(seen.structure, tuple(open_axes))
        return probe._replace(seen=seen, nbytes=nbytes, other_batches=tuple(elsewhere))

    def _elsewhere(self, epoch: int, missing: int) -> dict[int, np.int64]:
        """A sample of the batches behind the first, as many as are missing; and of the first one of another bucket."""
        plan = self._plan
        if plan.is_open:  # a stream, of which no other batch need be there; or generators, which stand elsewhere
            return {}
        batches = list(range(1, min(1 + max(0, missing), plan.batches_per_epoch)))
        batch = plan.batch_of_another_bucket(epoch)
        if batch is not None and batch not in batches:
            batches.append(batch)
        return {batch: plan.positions(epoch, batch, 0, 1)[0] for batch in batches}

    def _try(self, epoch: int, positions: npt.NDArray[np.int64]) -> Probe | None:
        """Return what this sample (or batch) is like; None: it fails, and so it will in its turn."""
        try:
            return self._probe_at(epoch, positions, len(positions))
        except WorkFailed:
            return None

    def _nothing_there(self, epoch: int) -> WorkFailed:
        enough = "" if self._config.batch_size is None or not self._config.drop_remainder else " enough for a batch"
        error = SourceError(f"source is empty: no generator yielded anything{enough}")
        return WorkFailed(describe_failure(error, epoch=epoch, worker=self._progress.worker), error)

    def _batches(self, epoch: int, feed: int, most: int) -> Iterator[npt.NDArray[np.int64]]:
        """The positions of the first batches."""
        batches = self._items.first(epoch, most, feed)
        while True:
            try:
                positions = next(batches, None)
            except GeneratorRaised as raised:
                raise self._progress.failed(raised.error, epoch, [raised.position], raised.position) from None
            except self._progress.catches as error:  # of a stream's items; or a generator ends its process
                if is_of_a_handler(error):
                    raise
                failure = describe_failure(error, epoch=epoch, worker=self._progress.worker)
                raise WorkFailed(failure, error) from None
            if positions is None:
                return
            yield positions

    def _probe_at(self, epoch: int, positions: npt.NDArray[np.int64], batch_rows: int) -> Probe:
        indices = self._plan.indices(epoch, positions)
        excluded = self._exclusions.find(epoch, indices)
        if excluded is not None:
            raise WorkFailed(excluded, RuntimeError(excluded.text))
        started = clock.monotonic_ns()
        try:
            result = self._call(epoch, positions, indices)
        except self._progress.catches as error:
            raise self._failed(error, epoch, indices, int(positions[0])) from None
        elapsed = clock.monotonic_ns() - started
        try:
            spec = sample_spec(result, self._given_spec, self._calls.origin)
            leaves = spec.structure.flatten(result)
            self._refuse_parts_for_samples(epoch, positions, indices, spec.structure)
        except Exception as error:
            raise self._failed(error, epoch, indices, int(positions[0])) from None
        kept = [_kept(leaf, path) for leaf, path in zip(leaves, spec.structure.paths, strict=True)]
        self._calls.keep(epoch, indices[0], spec.structure.unflatten(kept))
        return Probe(spec, spec, sum(map(_nbytes, kept)), len(indices), elapsed, batch_rows)

    def _call(self, epoch: int, positions: npt.NDArray[np.int64], indices: list[int]) -> Any:
        """Make one call, noted on the board."""
        progress = self._progress
        progress.numbers[progress.started_field] = clock.monotonic_ns()
        progress.numbers[progress.index_field] = indices[0] + 1
        result = self._calls.watched(lambda calls: calls.unit(epoch, positions.tolist(), indices))
        progress.numbers[progress.index_field] = 0
        return result

    def _refuse_parts_for_samples(
        self, epoch: int, positions: npt.NDArray[np.int64], indices: list[int], structure: Structure
    ) -> None:
        """Refuse tuples that have a part for each sample, where a batch of fewer samples will come.

        A pair of arrays of two rows only looks so. The function is called for one item less, which tells them apart.

        Raises:
            SpecMismatchError: they have.
        """
        rows, plan = len(indices), self._plan
        may_be_shorter = plan.is_open or plan.rows_vary or plan.last_rows < rows
        if self._unit != "batch" or self._config.drop_remainder or not may_be_shorter:
            return
        if rows < 2 or not _has_tuple_of(structure, rows):
            return
        try:
            fewer = Structure.of(self._call(epoch, positions[:-1], indices[:-1]))
        except self._progress.catches:  # its turn will tell
            return
        if fewer != structure and _has_tuple_of(fewer, rows - 1):
            raise SpecMismatchError(
                f"batch_fn returned a tuple of {rows} for {rows} items, and a tuple of {rows - 1} for {rows - 1} of "
                "them. All batches must have one structure, and the last batch may be shorter. Choose one:\n"
                "  drop_remainder=True: leave out the shorter batch\n"
                "  in batch_fn: return arrays with a batch axis (np.stack; pad what varies)\n"
                "  batch_size=None without batch_fn: load single samples, and collate them in the training loop"
            )

    def _failed(self, error: BaseException, epoch: int, indices: list[int], position: int) -> WorkFailed:
        failed = self._progress.failed(error, epoch, indices, position)
        is_of_none = isinstance(error, (TypeError, AttributeError, SpecMismatchError)) and "None" in failed.failure.text
        if not (self._calls.lacked_out and is_of_none):
            return failed
        return WorkFailed(failed.failure._replace(text=failed.failure.text + _WITHOUT_OUT), error)


def _has_tuple_of(structure: Structure, count: int) -> bool:
    is_one = structure.kind == "tuple" and len(structure.children) == count
    return is_one or any(_has_tuple_of(child, count) for child in structure.children)


def _kept(leaf: Any, path: str) -> Any:
    """Return the leaf in memory of its own: the function may fill its buffer, be it a list, again before its turn."""
    is_immutable = type(leaf) in _IMMUTABLE or isinstance(leaf, np.generic)
    return leaf if is_immutable else convert_leaf(leaf, path).copy()


def _nbytes(leaf: Any) -> int:
    array = np.asarray(leaf)
    if array.dtype != object:
        return array.nbytes
    return sum(len(piece) + 8 for piece in array.ravel().tolist() if isinstance(piece, (str, bytes)))
