"""From what the first sample was like to the form of all batches and the layout of their slots. In the supervisor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from loaderpool.config import LoaderConfig, unit_of
from loaderpool.core.records import MOST_TICKETS, Layout
from loaderpool.core.space import slots_of
from loaderpool.errors import MemoryLimitError
from loaderpool.memory.arena import HEADROOM_BYTES
from loaderpool.memory.batch_form import BatchForm
from loaderpool.memory.layout import FixedLayout
from loaderpool.plan.base import BasePlan
from loaderpool.system import capacity
from loaderpool.trainer.engine.form_choice import choose_form, stated_probe
from loaderpool.worker.jobs import Probe

_DEFAULT_BYTES = 2 << 30  # of a run's slots; no more than
_SHARE_OF_FREE = 4  # ... this part of what is free
_LEAST_SLOTS = 2  # one is filled while the consumer has views of another
_CALLS_AHEAD = 8  # for each thread. Less: threads idle while one call takes much longer than others
_MOST_ROOM = 256  # tickets of a worker with threads


def stated(payload: Mapping[str, Any]) -> Probe | None:
    """Return what the first sample would show, if `element_spec` says it all; None: it must be made."""
    config, plan = payload["config"], payload["plan"]
    return stated_probe(payload["given_spec"], config, plan, unit_of(config, payload["batch_fn"]))


def choose(probe: Probe, payload: Mapping[str, Any], workers: int) -> tuple[BatchForm, Layout, float]:
    """Return the form of a loader's batches, the layout of its slots, and the seconds that a row is taken to last.

    Args:
        probe: the first sample.
        payload: of the loader.
        workers: of the pool.

    Raises:
        SpecMismatchError: the given spec has another structure than what the function returns.
        MemoryLimitError: two batches do not fit the limit, or the machine.
    """
    config: LoaderConfig = payload["config"]
    plan: BasePlan = payload["plan"]
    unit = unit_of(config, payload["batch_fn"])
    form = choose_form(probe, payload["given_spec"], config, plan, unit)
    calls = plan.most_rows if unit == "sample" else 1
    room = room_of(config, calls)
    free = capacity.available_memory_bytes()
    limit = _limit_of(config)
    wanted = slots_of(form.slot_bytes, form.max_chunk, workers, room, 1 << 62)
    most = 1 if plan.lanes else max(1, min(form.max_chunk, form.max_chunk * limit // (form.slot_bytes * wanted)))
    form = with_batches(form, most)
    layout = layout_of(form, limit, room)
    _check_room(form, layout.slot_bytes, config.limits.memory, limit, max(0, free - HEADROOM_BYTES))
    row_s = probe.elapsed_ns / 1e9 / max(1, probe.rows) * form.batch_rows / min(config.threads, calls) / plan.most_rows
    return form, layout, row_s


def room_of(config: LoaderConfig, calls: int) -> int:
    """Return how many tickets a worker may have, with so many calls of the function for each batch."""
    if config.threads == 1:
        return MOST_TICKETS
    return min(_MOST_ROOM, max(MOST_TICKETS, 1 - (-_CALLS_AHEAD * config.threads // max(1, calls))))


def known_layout(form: BatchForm, payload: Mapping[str, Any]) -> Layout:
    """Return the layout of slots for batches of a form that was chosen before."""
    config, plan = payload["config"], payload["plan"]
    calls = plan.most_rows if unit_of(config, payload["batch_fn"]) == "sample" else 1
    return layout_of(form, _limit_of(config), room_of(config, calls))


def _limit_of(config: LoaderConfig) -> int:
    limit = config.limits.memory
    return min(_DEFAULT_BYTES, capacity.available_memory_bytes() // _SHARE_OF_FREE) if limit is None else limit


def layout_of(form: BatchForm, limit: int, room: int) -> Layout:
    """Return the layout of slots for batches of this form."""
    return Layout(-(-form.slot_bytes // 4096) * 4096, form.max_chunk, form.can_split, limit, room)


def with_batches(form: BatchForm, most: int) -> BatchForm:
    """Return the form with slots for at most so many batches."""
    if most == form.max_chunk:
        return form
    if form.fixed is None:
        return dataclasses.replace(form, max_chunk=most, slot_bytes=form.slot_bytes // form.max_chunk * most)
    fixed = FixedLayout(form.fixed.row_shapes, form.fixed.dtypes, form.batch_rows * most)
    return dataclasses.replace(form, max_chunk=most, fixed=fixed, slot_bytes=fixed.slot_bytes)


def _check_room(form: BatchForm, slot_bytes: int, memory: int | None, limit: int, room: int) -> None:
    least = slot_bytes * _LEAST_SLOTS
    if least > room and form.max_chunk == 1:
        rows = 0 if form.unit == "element" else form.batch_rows
        dtype = _largest_dtype(form)
        raise MemoryLimitError(capacity.batch_advice(least, rows, form.unit == "sample", dtype, limit, room))
    if limit < least:
        setting = f"Limits(memory={memory:,})" if memory is not None else f"the default of {limit:,} bytes"
        raise MemoryLimitError(
            f"{setting} is too small: one batch takes {slot_bytes:,} bytes, and at least {_LEAST_SLOTS} batch "
            f"buffers are needed. Set Limits(memory={least}) ({least / 2**20:.1f} MiB) or more, or lower batch_size."
        )


def _largest_dtype(form: BatchForm) -> np.dtype[Any]:
    """Return the dtype of the component that has most bytes; of varying ones, of the largest items."""
    sizes = form.fixed.row_bytes if form.fixed is not None else [item.dtype.itemsize for item in form.spec.components]
    return form.spec.components[max(range(len(sizes)), key=sizes.__getitem__)].dtype
