"""From what the first sample was like to the form of all batches and the layout of their slots. In the supervisor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loaderpool.config import LoaderConfig, UnitKind
from loaderpool.core.records import MOST_TICKETS, Layout
from loaderpool.core.slots import slots_of
from loaderpool.element.spec import ArraySpec, ElementSpec, fill_value, padding_of
from loaderpool.errors import MemoryLimitError, SpecMismatchError, shortened
from loaderpool.memory.arena import HEADROOM_BYTES
from loaderpool.memory.layout import BatchForm, FixedLayout, batch_form
from loaderpool.plan.batches import Plan
from loaderpool.system import capacity, ranks

if TYPE_CHECKING:
    from loaderpool.transport.payload.record import LoaderSettings
    from loaderpool.worker.tickets import Probe

_DEFAULT_BYTES = 2 << 30  # of a run's slots; no more than
_SHARE_OF_FREE = (
    4  # ... this part of what is free, divided by the processes of the training on this machine
)
_RUNS = (
    4  # for so many at the same time the limit has all slots that they want, if batches are tiny
)
_LEAST_SLOTS = 2  # one is filled while the consumer has views of another
_CALLS_AHEAD = 8  # for each thread. Less: threads idle while one call takes much longer than others
_MOST_ROOM = 256  # tickets of a worker with threads


def choose(probe: Probe, settings: LoaderSettings, workers: int) -> tuple[BatchForm, Layout, float]:
    """Return the form of a loader's batches, the layout of its slots, and the seconds that a row is taken to last.

    Raises:
        SpecMismatchError: the given spec has another structure than what the function returns.
        MemoryLimitError: two batches do not fit the limit, or the machine.
    """
    config, plan = settings.config, settings.plan
    form = choose_form(probe, settings.given_spec, config, plan, settings.unit)
    free = max(0, capacity.available_memory_bytes() - HEADROOM_BYTES)
    limit = memory_limit(config)
    wanted = slots_of(form.slot_bytes, form.max_chunk, workers, _room_of(form, config))
    most = form.max_chunk * limit // (form.slot_bytes * wanted * _RUNS)
    most = 1 if plan.lanes else max(1, min(form.max_chunk, most))
    form = with_batches(form, most)
    layout = _layout_of(form, config, limit)
    least = layout.slot_bytes * _LEAST_SLOTS
    large = f"one batch takes {layout.slot_bytes:,} bytes, and at least {_LEAST_SLOTS} batch buffers are needed"
    if least > free and form.max_chunk == 1:
        raise MemoryLimitError(
            f"{large}, but this machine (or its cgroup) has only {free:,} bytes for them. Lower batch_size, or return "
            "smaller samples, such as uint8."
        )
    if limit < least:
        memory = config.limits.memory
        setting = (
            f"Limits(memory={memory:,})"
            if memory is not None
            else f"the default of {limit:,} bytes"
        )
        raise MemoryLimitError(
            f"{setting} is too small: {large}. Set Limits(memory={least}) ({least / 2**20:.1f} MiB) or more, or lower "
            "batch_size."
        )
    call_s = probe.elapsed_ns / 1e9 / max(1, probe.rows)
    return form, layout, call_s / min(config.threads, _calls_of(form))


def known_layout(form: BatchForm, config: LoaderConfig) -> Layout:
    """Return the layout of slots for batches of a form that was chosen before."""
    return _layout_of(form, config, memory_limit(config))


def _layout_of(form: BatchForm, config: LoaderConfig, limit: int) -> Layout:
    pages = -(-form.slot_bytes // 4096) * 4096
    return Layout(pages, form.max_chunk, form.can_split, limit, _room_of(form, config))


def memory_limit(config: LoaderConfig) -> int:
    """Return how many bytes the slots of a run may have."""
    limit = config.limits.memory
    return min(_DEFAULT_BYTES, ranks.memory_bytes() // _SHARE_OF_FREE) if limit is None else limit


def _room_of(form: BatchForm, config: LoaderConfig) -> int:
    """Return how many tickets a worker may have."""
    if config.threads == 1:
        return MOST_TICKETS
    return min(
        _MOST_ROOM, max(MOST_TICKETS, 1 - (-_CALLS_AHEAD * config.threads // _calls_of(form)))
    )


def _calls_of(form: BatchForm) -> int:
    return form.batch_rows if form.unit == "sample" else 1


def with_batches(form: BatchForm, most: int) -> BatchForm:
    """Return the form with slots for at most so many batches."""
    if form.fixed is None:
        return dataclasses.replace(
            form, max_chunk=most, slot_bytes=form.slot_bytes // form.max_chunk * most
        )
    fixed = FixedLayout(form.fixed.row_shapes, form.fixed.dtypes, form.batch_rows * most)
    return dataclasses.replace(form, max_chunk=most, fixed=fixed, slot_bytes=fixed.slot_bytes)


def choose_form(
    probe: Probe, given: ElementSpec | None, config: LoaderConfig, plan: Plan, unit: UnitKind
) -> BatchForm:
    """The form of a loader's batches, of which the first calls told this.

    Raises:
        SpecMismatchError: `element_spec` or `pad` has another structure than what the function returns.
    """
    padding: tuple[Any, ...] = ()
    if given is not None:
        spec = _as_function_returns(given, probe.spec, config, unit)
    elif unit != "sample":
        spec = spec_of_whole_batches(probe.spec)
    else:
        padded = () if config.pad is False else padding_of(config.pad, probe.spec.structure)
        rows = config.static_rows
        spec = spec_of_batches(
            probe.spec, probe.seen, padding=padded, ragged=config.ragged, static_rows=rows
        )
    if unit == "sample" and config.pad is not False:
        padding = _padding_of(spec, given is not None, config)
    # A source of fewer items than `batch_size` has no batch as large.
    most_rows = None if config.batch_size is None else plan.most_rows
    # Of batches of varied rows the sample's own is the usual one: long samples come in smaller batches.
    usual_rows = probe.batch_rows if plan.rows_vary else most_rows or 1
    form = batch_form(
        spec,
        unit,
        batch_size=most_rows,
        batch_bytes_seen=probe.nbytes * usual_rows if unit == "sample" else probe.nbytes,
        may_leave_rows_out=config.on_error.action == "skip" or plan.lanes > 0,
        may_replace_rows=config.on_error.action == "replace",
        rows_vary=plan.rows_vary,
        padding=padding,
    )
    return dataclasses.replace(form, classes=probe.classes)


def _padding_of(spec: ElementSpec, is_given: bool, config: LoaderConfig) -> tuple[Any, ...]:
    """What fills up the rows of each component, None for the default; False: they have one shape.

    A length that the user's spec has is what a batch is padded to, whatever its rows are.
    """
    padding = padding_of(config.pad, spec.structure)
    for number, (component, path) in enumerate(zip(spec.components, spec.paths, strict=True)):
        has_open_axis = None in component.shape[1:]
        if component.ragged or not (has_open_axis or (is_given and component.shape[1:])):
            padding[number] = False
        elif has_open_axis and padding[number] is not False:
            fill_value(padding[number], component, path)  # raises where it does not fit
    return tuple(padding)


def spec_of_whole_batches(seen: ElementSpec) -> ElementSpec:
    """The spec of what a call makes whole: its first axis is the batch's own, and the last one may be shorter."""
    components = tuple(
        ArraySpec((None, *c.shape[1:]) if c.shape else (), c.dtype, c.text, c.ragged)
        for c in seen.components
    )
    return ElementSpec(seen.structure, components)


def spec_of_batches(
    sample: ElementSpec,
    seen: ElementSpec,
    *,
    padding: Sequence[Any],
    ragged: bool,
    static_rows: int | None,
) -> ElementSpec:
    """The batch spec for samples like `sample`, with None in `seen` for the axes in which others differed.

    `padding` says for each component what fills it up, or False; empty: none is padded.
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
    given: ElementSpec, seen: ElementSpec, config: LoaderConfig, unit: UnitKind
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
            shape = (config.static_rows, *shape[1:])
        text = (
            actual.text
            if component.text is not None and actual.text is not None
            else component.text
        )
        is_ragged = component.ragged or (config.ragged and shape[1:2] == (None,))
        components.append(ArraySpec(shape, component.dtype, text, is_ragged))
    return ElementSpec(given.structure, tuple(components))
