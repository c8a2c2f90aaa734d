"""Which form a loader's batches have, by what its function's first call returned."""

from __future__ import annotations

from loaderpool.config import LoaderConfig
from loaderpool.memory.form import BatchForm, UnitKind, batch_form
from loaderpool.plan.order import Plan
from loaderpool.spec import ElementSpec
from loaderpool.spec_choice import choose_spec
from loaderpool.worker.jobs import Probe

__all__ = ["choose_form"]


def choose_form(probe: Probe, given: ElementSpec | None, config: LoaderConfig, plan: Plan, unit: UnitKind) -> BatchForm:
    """The form of a loader's batches.

    Args:
        probe: what the first call told.
        given: the user's element_spec, of a batch.
        config: the loader's settings.
        plan: the loader's plan.
        unit: what one call of the function makes.

    Raises:
        SpecMismatchError: the given spec has another structure than what the function returns.
    """
    rows = None
    if config.batch_size is not None:
        # The first batch is a largest one; a source of fewer items than `batch_size` has no larger.
        rows = plan.rows(0) if plan.batches_per_epoch else config.batch_size
    return batch_form(
        choose_spec(probe.spec, given, config, unit),
        unit,
        batch_size=rows,
        batch_bytes_seen=probe.nbytes * (rows or 1) if unit == "sample" else probe.nbytes,
        may_leave_rows_out=config.on_error.action == "skip" or plan.lanes > 0,
        may_replace_rows=config.on_error.action == "replace",
    )
