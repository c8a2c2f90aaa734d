"""Source indices that come with each batch, for `Loader(batch_indices=True)`.

The main process computes the indices from the plan when batches arrive. So workers neither store
nor send them. Consumers get each batch as a pair `(indices, batch)`.

Runs in: the main process, on the thread that takes batches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderpool.element.spec import ArraySpec, ElementSpec
from loaderpool.element.structure import Structure
from loaderpool.memory.layout import BatchForm

if TYPE_CHECKING:
    from loaderpool.config import LoaderConfig
    from loaderpool.engine.delivery import Delivery
    from loaderpool.trainer.epoch_tracker import EpochTracker
    from loaderpool.trainer.pass_log import PassLog
    from loaderpool.transport.reports import RowFailure


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class IndexedForm(BatchForm):
    """Form of pairs `(indices, batch)`. Slots contain only the batches, in the form `inner`."""

    inner: BatchForm = dataclasses.field(kw_only=True)

    @functools.cached_property
    def rebuild(self) -> Callable[[Sequence[Any]], Any]:
        rebuild = self.inner.rebuild
        return lambda parts: (parts[0], rebuild(parts[1:]))

    @functools.cached_property
    def may_be_padded(self) -> bool:
        return self.inner.may_be_padded

    def read(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[int, Sequence[Any]]]:
        return self.inner.read(*arguments, **keywords)


def indexed_form(tracker: EpochTracker, form: BatchForm) -> BatchForm:
    """Return the form of pairs `(indices, batch)`. Equal calls return the same object."""
    found = tracker.indexed_form
    if isinstance(found, IndexedForm) and found.inner is form:
        return found
    plan = tracker.plan
    rows = 1 if form.unit == "element" else tracker.config.static_rows
    if plan.order.is_drawn and plan.rows_vary:  # an order of batches
        rows = None
    spec = ElementSpec(
        Structure("tuple", (0, 1), (Structure("leaf"), form.spec.structure)),
        (ArraySpec((rows,), np.int64), *form.spec.components),
    )
    fields = {each.name: getattr(form, each.name) for each in dataclasses.fields(BatchForm)}
    made = tracker.indexed_form = IndexedForm(**{**fields, "spec": spec}, inner=form)
    return made


def add_indices(tracker: EpochTracker, log: PassLog, delivery: Delivery) -> None:
    """Add source indices to all batches of a delivery."""
    plan, epoch = log.plan, log.epoch
    numbers = [number - log.first for number in delivery.numbers()]
    first, count = numbers[0], numbers[-1] - numbers[0] + 1
    found = plan.order.take(epoch, plan.positions(epoch, first, count))
    ends = np.cumsum([plan.rows(epoch, batch) for batch in range(first, first + count)])
    by_batch = np.split(found, ends[:-1])
    delivery.indices = [by_batch[number - first] for number in numbers]
    if delivery.row_failures:
        own = dict(zip(delivery.stored_numbers(), range(delivery.count), strict=True))
        for batch, at in own.items():
            failures = [each for each in delivery.row_failures if each.batch == batch]
            if failures:
                delivery.indices[at] = _of_good_rows(
                    delivery.indices[at], failures, tracker.config, delivery.form
                )
    delivery.form = indexed_form(tracker, delivery.form)


def _of_good_rows(
    indices: npt.NDArray[np.int64],
    failures: list[RowFailure],
    config: LoaderConfig,
    form: BatchForm,
) -> npt.NDArray[np.int64]:
    """Return the source indices of a batch in which some rows failed."""
    if form.unit != "sample":  # the batch's only call failed
        return indices[:0]
    is_good = np.ones(len(indices), bool)
    is_good[[each.row for each in failures]] = False
    if config.on_error.action == "skip":
        return indices[is_good]
    # Each failed row is replaced by the next good row. After the last good row, by that row.
    good = np.flatnonzero(is_good)
    replacements = good[good.searchsorted(np.arange(len(indices))).clip(max=len(good) - 1)]
    replaced: npt.NDArray[np.int64] = indices[replacements]
    return replaced
