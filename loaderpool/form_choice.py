"""Which form a loader's batches have, by what its function's first call returned."""

from __future__ import annotations

from loaderpool.config import LoaderConfig
from loaderpool.memory.form import BatchForm, UnitKind, batch_form
from loaderpool.plan.base import BasePlan
from loaderpool.spec import ElementSpec
from loaderpool.spec_choice import choose_spec
from loaderpool.worker.jobs import Probe

__all__ = ["choose_form"]


def choose_form(
    probe: Probe, given: ElementSpec | None, config: LoaderConfig, plan: BasePlan, unit: UnitKind
) -> BatchForm:
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
    # A source of fewer items than `batch_size` has no batch as large.
    rows = None if config.batch_size is None else plan.most_rows
    # Of batches of varied rows the sample's own is the usual one: long samples come in smaller batches.
    usual_rows = probe.batch_rows if plan.rows_vary else rows or 1
    return batch_form(
        choose_spec(probe.spec, given, config, unit),
        unit,
        batch_size=rows,
        batch_bytes_seen=probe.nbytes * usual_rows if unit == "sample" else probe.nbytes,
        may_leave_rows_out=config.on_error.action == "skip" or plan.lanes > 0,
        may_replace_rows=config.on_error.action == "replace",
        rows_vary=plan.rows_vary,
    )
