"""Which form a loader's batches have, by what its function's first calls returned."""

from __future__ import annotations

import math

from loaderpool.config import LoaderConfig
from loaderpool.element.spec import ArraySpec, ElementSpec
from loaderpool.memory.batch_form import BatchForm, UnitKind, batch_form
from loaderpool.plan.base import BasePlan
from loaderpool.trainer.engine.spec_choice import choose_padding, choose_spec
from loaderpool.worker.jobs import Probe

# What a batch is taken to last until one was timed. Less: the first batches of a slow function would not be cut into
# row ranges, and each would wait for one worker. More: the first ranges of a fast one are shorter than a hand-over.
_UNTIMED_BATCH_NS = 1_000_000_000


def stated_probe(given: ElementSpec | None, config: LoaderConfig, plan: BasePlan, unit: UnitKind) -> Probe | None:
    """What the first call would tell, where `element_spec` says it all; None: it must be made.

    Then nothing need wait for the first sample: one slow read there would hold up all others. Where an axis or a row's
    number varies, or text must be seen to be str or bytes, the first sample tells what the spec does not.
    """
    if given is None or unit != "sample" or plan.is_open or plan.rows_vary or config.pad is not False or config.ragged:
        return None
    if any(c.text is not None or c.ragged or not c.shape or None in c.shape[1:] for c in given.components):
        return None
    rows = [ArraySpec(component.shape[1:], component.dtype) for component in given.components]
    nbytes = sum(math.prod(size or 0 for size in row.shape) * row.dtype.itemsize for row in rows)
    elapsed_ns = _UNTIMED_BATCH_NS // max(1, plan.most_rows)
    spec = ElementSpec(given.structure, tuple(rows))
    return Probe(spec, spec, nbytes, 1, elapsed_ns, plan.most_rows)


def choose_form(
    probe: Probe, given: ElementSpec | None, config: LoaderConfig, plan: BasePlan, unit: UnitKind
) -> BatchForm:
    """The form of a loader's batches.

    Args:
        probe: what the first calls told.
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
    spec = choose_spec(probe, given, config, unit)
    return batch_form(
        spec,
        unit,
        batch_size=rows,
        batch_bytes_seen=probe.nbytes * usual_rows if unit == "sample" else probe.nbytes,
        may_leave_rows_out=config.on_error.action == "skip" or plan.lanes > 0,
        may_replace_rows=config.on_error.action == "replace",
        rows_vary=plan.rows_vary,
        padding=choose_padding(spec, given is not None, config) if unit == "sample" else (),
    )
