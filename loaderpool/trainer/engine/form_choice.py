"""Chooses the spec and the form of a loader's batches: from what the user said, and what the first calls returned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from loaderpool.config import LoaderConfig, UnitKind
from loaderpool.element.spec import ArraySpec, ElementSpec, fill_value, padding_of
from loaderpool.errors import SpecMismatchError, shortened
from loaderpool.memory.batch_form import BatchForm, batch_form
from loaderpool.plan.base import BasePlan
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


def choose_spec(probe: Probe, given: ElementSpec | None, config: LoaderConfig, unit: UnitKind) -> ElementSpec:
    """The spec of a batch, batch axis included.

    Args:
        probe: what the first calls of the function told.
        given: the user's element_spec, of a batch.
        config: the loader's settings.
        unit: what one call of the function makes.

    Raises:
        SpecMismatchError: the given spec or `pad` has another structure than what the function returns.
    """
    if given is not None:
        return _as_function_returns(given, probe.spec, config.static_rows, config, unit)
    if unit != "sample":
        return spec_of_whole_batches(probe.spec)
    return spec_of_batches(
        probe.spec,
        probe.seen,
        padding=() if config.pad is False else padding_of(config.pad, probe.spec.structure),
        ragged=config.ragged,
        static_rows=config.static_rows,
    )


def choose_padding(spec: ElementSpec, is_given: bool, config: LoaderConfig) -> tuple[Any, ...]:
    """What fills up the rows of each component, None for the default; False: they have one shape.

    A length that the user's spec has is what a batch is padded to, whatever its rows are.

    Raises:
        SpecMismatchError: a value does not fit the component, or `pad` is built otherwise than the spec.
    """
    if config.pad is False:
        return ()
    padding = padding_of(config.pad, spec.structure)
    for number, (component, path) in enumerate(zip(spec.components, spec.paths, strict=True)):
        has_open_axis = None in component.shape[1:]
        if component.ragged or not (has_open_axis or (is_given and component.shape[1:])):
            padding[number] = False
        elif has_open_axis and padding[number] is not False:
            fill_value(padding[number], component, path)
    return tuple(padding)


def spec_of_whole_batches(seen: ElementSpec) -> ElementSpec:
    """The spec of what a call makes whole: its first axis is the batch's own, and the last one may be shorter."""
    components = tuple(
        ArraySpec((None, *c.shape[1:]) if c.shape else (), c.dtype, c.text, c.ragged) for c in seen.components
    )
    return ElementSpec(seen.structure, components)


def spec_of_batches(
    sample: ElementSpec, seen: ElementSpec, *, padding: Sequence[Any], ragged: bool, static_rows: int | None
) -> ElementSpec:
    """The batch spec for samples like `sample`.

    Args:
        sample: of the first sample, without a batch axis.
        seen: the same, None for the axes in which others differed.
        padding: for each component what fills it up, or False; empty: none is padded.
        ragged: whether the first axis of a sample may be ragged.
        static_rows: rows of every batch; None: they differ.
    """
    components = []
    for number, (exact, varied) in enumerate(zip(sample.components, seen.components, strict=True)):
        shape: tuple[int | None, ...] = exact.shape
        is_ragged = ragged and varied.shape[:1] == (None,)
        if padding and padding[number] is not False:
            shape = varied.shape
        elif is_ragged:
            shape = (None, *exact.shape[1:])
        components.append(ArraySpec((static_rows, *shape), exact.dtype, exact.text, is_ragged))
    return ElementSpec(sample.structure, tuple(components))


def _as_function_returns(
    given: ElementSpec, seen: ElementSpec, static_rows: int | None, config: LoaderConfig, unit: UnitKind
) -> ElementSpec:
    """The given spec, its batch axis as the loader's batches really have it.

    A `tf.string` does not say whether the NumPy side has str or bytes: what the function returns does. An axis of None
    does not say whether `ragged=True` is meant: that setting does.
    """
    batch_size = config.batch_size if unit == "sample" else None
    try:
        in_given_order: list[ArraySpec] = given.structure.flatten(seen.pack())
    except SpecMismatchError:
        raise SpecMismatchError(
            f"element_spec has the structure {shortened(str(given.structure))}, but the function returns "
            f"{shortened(str(seen.structure))}"
        ) from None
    components = []
    for component, path, actual in zip(given.components, given.paths, in_given_order, strict=True):
        shape = component.shape
        if batch_size is not None:
            if not shape or shape[0] not in (None, batch_size):
                raise SpecMismatchError(
                    f"element_spec{path} is {component}, but a batch has batch_size={batch_size} rows. Use "
                    "None if the last batch may be smaller"
                )
            shape = (static_rows, *shape[1:])
        text = actual.text if component.text is not None and actual.text is not None else component.text
        is_ragged = component.ragged or (config.ragged and shape[1:2] == (None,))
        components.append(ArraySpec(shape, component.dtype, text, is_ragged))
    return ElementSpec(given.structure, tuple(components))
