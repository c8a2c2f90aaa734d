"""The probe: the function's first calls, which tell what samples (or batches) are like before a form is known.

One call tells all where every sample has one shape. Where they are to be padded, or kept ragged, the samples of the
first batch tell which axes vary; of batches by length, whose samples are of like length, one of another bucket does,
too. Which samples these are hangs on the plan alone, so the form is the same for any number of workers, and after a
resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderpool.config import LoaderConfig, unit_of
from loaderpool.element.spec import ArraySpec, ElementSpec, sample_spec, widened
from loaderpool.element.structure import Structure, convert_leaf
from loaderpool.errors import SourceError, SpecMismatchError
from loaderpool.plan.order import Plan, Ticket
from loaderpool.system import clock
from loaderpool.worker.calls import Calls
from loaderpool.worker.tickets import Abandoned, Opened, PlannedItems, Probe, Progress, StreamedItems, WorkFailed

if TYPE_CHECKING:
    from loaderpool.worker.lanes import LaneItems

# Samples that the probe tries where errors may be skipped: fewer give up on a bad start, more delay an error that all
# samples have.
_PROBES = 64
# Samples of the first batch that are looked at for axes that vary. Fewer: an axis that rarely varies is met later, as
# an error. More: of a large batch of slow samples the other workers would wait for all.
_LOOKS = 64
# Samples that are looked at in any case: of the next batches where the first is smaller, and however many threads would
# have made them at the same time.
_FEWEST_LOOKS = 8
# Of Python's own scalars a spec allows other casts than of arrays, so these are kept as they are.
_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes})
_WITHOUT_OUT = " (in the first call, which determines shapes and dtypes, out is None: return a new array)"


class Prober:
    """Makes the probe; `calls` keep its results for their turns."""

    def __init__(
        self,
        payload: Mapping[str, Any],
        calls: Calls,
        items: PlannedItems | StreamedItems | LaneItems,
        progress: Progress,
    ) -> None:
        self._calls, self._items, self._progress = calls, items, progress
        self._config: LoaderConfig = payload["config"]
        self._plan: Plan = payload["plan"]
        self._given_spec: ElementSpec | None = payload["given_spec"]
        self._unit = unit_of(self._config, payload["batch_fn"])
        may_vary = self._config.pad is not False or self._config.ragged
        self._varies = self._unit == "sample" and self._given_spec is None and may_vary

    def probe(self, epoch: int, feed: int) -> Probe:
        """Make the probe of an epoch.

        Where failing samples are left out or replaced, the first good one of a few. Where axes may vary, for more
        samples; one of these that fails tells nothing, and fails again in its turn.
        """
        action = self._config.on_error.action
        left = _PROBES if action == "skip" or (action == "replace" and self._unit == "sample") else 1
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
        if first_error is not None:
            raise first_error
        from loaderpool.sources.stream import nothing_there  # few loaders have nothing

        raise self._progress.failed(SourceError(nothing_there(self._plan)), epoch)

    def probe_batch(self, epoch: int, batch: int) -> Probe:
        """Make the probe of one batch that a call makes whole."""
        positions = self._plan.positions(epoch, batch)
        return self._probe_at(epoch, positions, len(positions))

    def _look_at_more(self, epoch: int, probe: Probe, positions: npt.NDArray[np.int64]) -> Probe:
        """Return what samples after the first show of the axes: of its batch at these positions, and of others."""
        if not self._varies or not any(component.shape for component in probe.spec.components):
            return probe
        most = max(_FEWEST_LOOKS, _LOOKS // self._config.threads)  # they are made one after the other
        elsewhere = self._elsewhere(epoch, _FEWEST_LOOKS - 1 - len(positions))
        seen, nbytes = probe.spec, probe.nbytes
        here = list(positions[: most - 1])
        for number, position in enumerate([*here, *elsewhere]):
            try:
                other = self._probe_at(epoch, np.array([position]), 1)
            except WorkFailed:  # its turn will tell
                continue
            seen = widened(seen, other.spec)
            nbytes = max(nbytes, other.nbytes) if number < len(here) else nbytes
        if seen == probe.spec:  # nothing tells axes apart, as of sentences all cut to one length: any may vary
            open_axes = (ArraySpec((None,) * len(c.shape), c.dtype, c.text) for c in seen.components)
            seen = ElementSpec(seen.structure, tuple(open_axes))
        return probe._replace(seen=seen, nbytes=nbytes)

    def _elsewhere(self, epoch: int, missing: int) -> list[np.int64]:
        """A sample of the batches after the first, as many as are missing; and of the first one of another bucket."""
        plan = self._plan
        if plan.is_open:  # a stream, of which no other batch need be there; or generators, which stand elsewhere
            return []
        batches = list(range(1, min(1 + max(0, missing), plan.batches_per_epoch)))
        batch = plan.batch_of_another_bucket(epoch)
        if batch is not None and batch not in batches:
            batches.append(batch)
        return [plan.positions(epoch, batch)[0] for batch in batches]

    def _batches(self, epoch: int, feed: int, most: int) -> Iterator[npt.NDArray[np.int64]]:
        """The positions of the first batches: of each lane's; of a stream only the one that is there."""
        plan = self._plan
        count = plan.lanes or min(most, plan.batches_per_epoch)
        for batch in range(1 if isinstance(self._items, StreamedItems) else count):
            try:
                positions = self._items.positions(Ticket(epoch=epoch, batch=batch, stop=plan.most_rows, feed=feed))
            except Abandoned:  # a look that is not answered would be waited for
                raise self._progress.failed(SourceError("the stream's first items are gone"), epoch) from None
            except self._progress.catches as error:  # of a stream's items, or of a generator
                raise self._progress.failed(error, epoch) from None
            if len(positions):
                yield positions

    def _probe_at(self, epoch: int, positions: npt.NDArray[np.int64], batch_rows: int) -> Probe:
        indices = self._plan.indices(epoch, positions)
        excluded = self._progress.excluded(epoch, indices)
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
        self._calls.kept[indices[0]] = spec.structure.unflatten(kept)
        return Probe(spec, spec, sum(map(_nbytes, kept)), len(indices), elapsed, batch_rows)

    def _call(self, epoch: int, positions: npt.NDArray[np.int64], indices: list[int]) -> Any:
        """Make one call, noted on the board."""
        self._calls.keep_only(epoch)
        with self._progress.probing(indices[0]):
            opened = Opened(Ticket(epoch=epoch), positions, indices)
            return self._calls.watched(self._calls.unit, opened, 0, len(indices))

    def _refuse_parts_for_samples(
        self, epoch: int, positions: npt.NDArray[np.int64], indices: list[int], structure: Structure
    ) -> None:
        """Raise SpecMismatchError for tuples that have a part for each sample, where a batch of fewer will come.

        A pair of arrays of two rows only looks so. The function is called for one item less, which tells them apart.
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
