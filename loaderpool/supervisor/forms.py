"""Choose the form of a loader's batches and the layout of its slots from the first sample.

Runs in: the supervisor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loaderpool.config import LoaderConfig, UnitKind
from loaderpool.element.spec import ArraySpec, ElementSpec, fill_value, padding_of
from loaderpool.errors import MemoryLimitError, SpecMismatchError, readable_bytes, shortened
from loaderpool.memory.arena import HEADROOM_BYTES
from loaderpool.memory.layout import BatchForm, FixedLayout, batch_form
from loaderpool.plan.batches import Plan
from loaderpool.supervisor.records import MOST_TICKETS, Layout
from loaderpool.supervisor.slots import LEAST_SLOTS, chunk_within, in_pages
from loaderpool.system import capacity, ranks

if TYPE_CHECKING:
    from loaderpool.transport.payload.record import LoaderSettings
    from loaderpool.worker.tickets import Probe

# Default limit of the memory for a loader's slots. It is also limited to one part in
# `_SHARE_OF_FREE` of the free memory, divided by the training's processes on this machine.
_DEFAULT_BYTES = 2 << 30
_SHARE_OF_FREE = 4
# Calls that each thread of a worker has queued. Smaller: threads idle while one call takes much
# longer than others. Larger: more slots are needed.
_CALLS_AHEAD = 8
_MOST_ROOM = 256  # greatest number of tickets of a worker with threads


def choose(probe: Probe, settings: LoaderSettings, workers: int) -> tuple[BatchForm, Layout, float]:
    """Return the form of a loader's batches, the layout of its slots, and the seconds for a row.

    Raises:
        SpecMismatchError: The given spec and the function's results differ in structure.
        MemoryLimitError: Two batches do not fit the limit or the machine.
    """
    config, plan = settings.config, settings.plan
    form = choose_form(probe, settings.given_spec, config, plan, settings.unit)
    free = max(0, capacity.available_memory_bytes() - HEADROOM_BYTES)
    limit = memory_limit(config)
    most = chunk_within(limit, form.slot_bytes, form.max_chunk, workers, _room_of(form, settings))
    form = with_batches(form, 1 if plan.lanes else most)
    layout = _layout_of(form, settings, limit)
    least = layout.slot_bytes * LEAST_SLOTS
    large = (
        f"one batch takes {layout.slot_bytes:,} bytes, and at least {LEAST_SLOTS} batch buffers "
        "are needed"
    )
    if least > free and form.max_chunk == 1:
        raise MemoryLimitError(
            f"{large}, but this machine (or its cgroup) has only {free:,} bytes for them. Lower "
            f"{settings.batch_argument}, or return smaller samples, such as uint8."
        )
    if limit < least:
        memory = config.limits.memory
        setting = (
            f"Limits(memory={memory:,})"
            if memory is not None
            else f"the default of {limit:,} bytes"
        )
        raise MemoryLimitError(
            f"{setting} is too small: {large}. Set Limits(memory={least}) "
            f"({readable_bytes(least)}) or more, or lower {settings.batch_argument}."
        )
    call_s = probe.elapsed_ns / 1e9 / max(1, probe.rows)
    return form, layout, call_s / min(config.threads, _calls_of(form))


def known_layout(form: BatchForm, settings: LoaderSettings) -> Layout:
    """Return the layout of slots for a form of batches that was chosen before."""
    return _layout_of(form, settings, memory_limit(settings.config))


def _layout_of(form: BatchForm, settings: LoaderSettings, limit: int) -> Layout:
    range_rows = settings.rows_together if form.can_split else 0
    rows = None if form.fixed is None or form.has_equal_batches else form.fixed
    pages = in_pages(form.slot_bytes)
    return Layout(pages, form.max_chunk, range_rows, limit, _room_of(form, settings), rows)


def memory_limit(config: LoaderConfig) -> int:
    """Return the limit in bytes for the slots of a loader."""
    limit = config.limits.memory
    return min(_DEFAULT_BYTES, ranks.memory_bytes() // _SHARE_OF_FREE) if limit is None else limit


def _room_of(form: BatchForm, settings: LoaderSettings) -> int:
    """Return the number of tickets that a worker may have."""
    threads = settings.config.threads
    if threads == 1:
        return MOST_TICKETS
    room = max(MOST_TICKETS, 1 - (-_CALLS_AHEAD * threads // _calls_of(form)))
    if settings.rows_together > 1:  # so that each thread can read for a different batch
        room = max(room, 1 + threads)
    return min(_MOST_ROOM, room)


def _calls_of(form: BatchForm) -> int:
    return form.batch_rows if form.unit == "sample" else 1


def with_batches(form: BatchForm, most: int) -> BatchForm:
    """Return the form with slots for `most` batches. `most` is at most `form.max_chunk`."""
    if form.fixed is None:
        return dataclasses.replace(
            form, max_chunk=most, slot_bytes=form.slot_bytes // form.max_chunk * most
        )
    fixed, rows = form.fixed, form.batch_rows * most
    if fixed.capacity_rows is not None:
        fixed = FixedLayout(fixed.row_shapes, fixed.dtypes, rows)
    return dataclasses.replace(form, max_chunk=most, fixed=fixed, slot_bytes=fixed.bytes_of(rows))


def choose_form(
    probe: Probe, given: ElementSpec | None, config: LoaderConfig, plan: Plan, unit: UnitKind
) -> BatchForm:
    """Return the form of a loader's batches from the results of the first calls.

    Raises:
        SpecMismatchError: `element_spec` or `pad`, and the function's results, differ in structure.
    """
    if plan.packed_length:
        return dataclasses.replace(_packed_form(probe, config, plan), classes=probe.classes)
    padding: tuple[Any, ...] = ()
    # If the order determines the batches, they differ in their numbers of rows.
    is_of_order = plan.order.is_drawn and plan.rows_vary
    rows = None if is_of_order else config.static_rows
    if given is not None:
        batch_size = None if is_of_order else config.batch_size
        spec = _as_function_returns(given, probe.spec, config, unit, batch_size, rows)
    elif unit != "sample":
        spec = spec_of_whole_batches(probe.spec)
    else:
        padded = () if config.pad is False else padding_of(config.pad, probe.spec.structure)
        spec = spec_of_batches(
            probe.spec, probe.seen, padding=padded, ragged=config.ragged, static_rows=rows
        )
    if unit == "sample" and config.pad is not False:
        padding = _padding_of(spec, given is not None, config)
    # If a source has fewer items than `batch_size`, all its batches are smaller.
    most_rows = None if config.batch_size is None else plan.most_rows
    # If the rows of batches vary, take the rows of the first sample's batch as usual. Batches of
    # long samples are smaller.
    usual_rows = probe.batch_rows if plan.rows_vary else most_rows or 1
    form = batch_form(
        spec,
        unit,
        batch_size=None if config.batch_size is None else usual_rows,
        batch_bytes_seen=probe.nbytes * usual_rows if unit == "sample" else probe.nbytes,
        may_leave_rows_out=config.on_error.action == "skip" or plan.lanes > 0,
        may_replace_rows=config.on_error.action == "replace",
        rows_vary=plan.rows_vary,
        padding=padding,
    )
    return dataclasses.replace(form, classes=probe.classes)


def _packed_form(probe: Probe, config: LoaderConfig, plan: Plan) -> BatchForm:
    """Return the form of batches of packed rows.

    Raises:
        SpecMismatchError: The samples cannot be packed, or `pad` does not fit them.
    """
    # Imported here, because few loaders need it.
    from loaderpool.element.packed import item_spec, packed_spec

    assert config.batch_size is not None
    spec, place = packed_spec(
        probe.spec, config.batch_size if config.drop_remainder else None, plan.packed_length
    )
    # Packed rows are always padded, so pad=False means the default fill value.
    padding = [
        None if each is False else each for each in padding_of(config.pad, probe.spec.structure)
    ]
    padding[place:place] = [None] * (len(spec.components) - len(padding))
    for component, path, value in zip(spec.components, spec.paths, padding, strict=True):
        fill_value(value, component, path)  # only checks that the value fits
    form = batch_form(
        spec,
        "sample",
        batch_size=config.batch_size,
        batch_bytes_seen=0,  # not used, because the layout is fixed
        may_leave_rows_out=False,  # the place of a sample that is left out is padded
        may_replace_rows=False,
    )
    return dataclasses.replace(
        form,
        can_split=False,
        padding=tuple(padding),
        item_spec=item_spec(probe.spec),
        packed_at=place,
    )


def _padding_of(spec: ElementSpec, is_given: bool, config: LoaderConfig) -> tuple[Any, ...]:
    """Return the padding value of each component: None for the default, False for no padding.

    A component is padded if its rows vary in shape. If the user's spec gives a length, batches are
    padded to that length, whatever the length of their rows.
    """
    padding = padding_of(config.pad, spec.structure)
    for number, (component, path) in enumerate(zip(spec.components, spec.paths, strict=True)):
        has_open_axis = None in component.shape[1:]
        if component.ragged or not (has_open_axis or (is_given and component.shape[1:])):
            padding[number] = False
        elif has_open_axis and padding[number] is not False:
            fill_value(padding[number], component, path)  # raises if the value does not fit
    return tuple(padding)


def spec_of_whole_batches(seen: ElementSpec) -> ElementSpec:
    """Return the spec of batches that one call makes whole.

    The first axis is the batch axis. It is None, because the last batch may be shorter.
    """
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
    """Return the spec of batches that are stacked from samples.

    Args:
        sample: Spec of the first sample.
        seen: The same spec, with None for axes in which other samples differed.
        padding: Padding value of each component, or False; empty: no component is padded.
        ragged: True: components whose first axis varies become ragged.
        static_rows: Rows of each batch; None: the number varies.
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
    given: ElementSpec,
    seen: ElementSpec,
    config: LoaderConfig,
    unit: UnitKind,
    batch_size: int | None,
    rows: int | None,
) -> ElementSpec:
    """Return the given spec, completed from the first results and the settings.

    - The batch axis comes from the loader's batches.
    - A `tf.string` may stand for str or bytes in NumPy arrays. The results show which.
    - An axis of None may belong to a ragged component. The setting `ragged=True` shows this.

    Args:
        given: The user's spec.
        seen: Spec of the first results.
        config: Checked settings.
        unit: Result of one call of the function.
        batch_size: Rows that a spec may state for a batch of samples; None: it must state none.
        rows: Rows of each batch; None: the number varies.

    Raises:
        SpecMismatchError: The spec and the results differ in structure, or the spec has another
            batch size.
    """
    try:
        in_given_order: list[ArraySpec] = given.structure.flatten(seen.pack())
    except SpecMismatchError:
        raise SpecMismatchError(
            f"element_spec has the structure {shortened(str(given.structure))}, but the function "
            f"returns {shortened(str(seen.structure))}"
        ) from None
    components = []
    for component, path, actual in zip(given.components, given.paths, in_given_order, strict=True):
        shape = component.shape
        if unit == "sample":
            if not shape or shape[0] not in (None, batch_size):
                has = "any number of rows" if batch_size is None else f"{batch_size=} rows"
                raise SpecMismatchError(
                    f"element_spec{path} is {component}, but a batch has {has}. Use None if the "
                    "last batch may be smaller"
                )
            shape = (rows, *shape[1:])
        text = (
            actual.text
            if component.text is not None and actual.text is not None
            else component.text
        )
        is_ragged = component.ragged or (config.ragged and shape[1:2] == (None,))
        components.append(ArraySpec(shape, component.dtype, text, is_ragged))
    return ElementSpec(given.structure, tuple(components))
