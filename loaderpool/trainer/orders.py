"""`plan_of`: makes a loader's plan from an order value, such as `Buckets`, `Weighted` or a sampler.

An order is a value: a pure function of the epoch that gives source indices. `_KINDS` has the
function that makes the plan for each kind of value. To add a kind, add its class to
`config.ORDERS`, and its function here.

Runs in: the main process, on the thread that makes the loader. Imported only if a loader has an
order value, because it imports all kinds of plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderpool.config import Blocks, Buckets, LoaderConfig, Packed, TokenBudget, Weighted
from loaderpool.errors import ArgumentError, brief
from loaderpool.plan.batches import Plan
from loaderpool.plan.block_order import BlockOrder
from loaderpool.plan.buckets import BucketPlan, ItemBuckets
from loaderpool.plan.drawn import DrawnBatches
from loaderpool.plan.order import DrawnOrder, Order
from loaderpool.plan.packed import PackedPlan
from loaderpool.plan.weighted_order import WeightedOrder
from loaderpool.sources.blocks import block_starts
from loaderpool.sources.indexing import Indexed
from loaderpool.trainer.draws import (
    BatchLimit,
    ByLength,
    Draws,
    Given,
    Weights,
    generators_of,
    seeded,
)


class Wanted(NamedTuple):
    """An order value, and the loader's items."""

    order: Any
    source: Indexed
    size: int  # number of the source's items; with `samples_per_item`, of their samples
    config: LoaderConfig
    fields: dict[str, Any]  # fields of the plan that do not depend on the order
    is_sized: bool  # True if the user has set `batch_size`

    def plan(self, kind: type[Plan], order: type[Order], **fields: Any) -> Plan:
        """Return a plan of this kind. Its order is new in each epoch."""
        made = order(self.size, True, self.config.seed)
        return kind(made, **self.fields, **fields)

    def drawn(
        self, source: type[Weights | ByLength], plan: Plan, batch_limit: BatchLimit | None = None
    ) -> Draws:
        """Return the draws of an order that this source reads."""
        order = self.order
        read = source(order, self.size, self.config)
        return Draws(read, plan, generators_of(order), batch_limit)


def plan_of(wanted: Wanted) -> Plan | Draws:
    """Make the plan of a loader's order. Called by `check_arguments`.

    Returns:
        The plan; or the object that draws the orders of epochs, which has the plan, too.

    Raises:
        ArgumentError: The order does not fit the source or the settings.
    """
    make = next(make for kind, make in _KINDS if isinstance(wanted.order, kind))
    return make(wanted)


def _buckets(wanted: Wanted) -> Plan:
    size, config = wanted.size, wanted.config
    assert config.buckets is not None
    lengths = _lengths(wanted.order.by, size)
    return BucketPlan(
        Order(size, config.shuffle, config.seed),
        **wanted.fields,
        buckets=ItemBuckets.of(lengths, config.buckets.boundaries),
        batch_sizes=config.buckets.batch_sizes,
    )


def _blocks(wanted: Wanted) -> Plan:
    source, size, config, blocks = wanted.source, wanted.size, wanted.config, wanted.order
    samples = config.samples_per_item
    starts = block_starts(source, blocks.rows) if samples is None else np.arange(0, size, samples)
    if starts is None:
        raise ArgumentError(
            "Blocks.rows must be the rows of a block, because a source of type "
            f"{type(source).__name__} does not say how it stores them: write "
            "loaderpool.Blocks(rows=...)"
        )
    order = BlockOrder(size, True, config.seed, starts=starts, window=blocks.window)
    return Plan(order, **wanted.fields)


def _weighted(wanted: Wanted) -> Draws:
    order = WeightedOrder if wanted.order.replacement else DrawnOrder
    return wanted.drawn(Weights, wanted.plan(Plan, order))


def _token_budget(wanted: Wanted) -> Draws:
    order = wanted.order
    _check_unsized("order=TokenBudget(...)", wanted, ", or set max_rows=")
    rows = () if order.max_rows is None else (order.max_rows,)
    text = "order=lp.TokenBudget(..., max_tokens={}" + ", max_rows={}" * len(rows) + ")"
    plan = wanted.plan(DrawnBatches, DrawnOrder)
    return wanted.drawn(ByLength, plan, (text, (order.max_tokens, *rows)))


def _packed(wanted: Wanted) -> Draws:
    plan = wanted.plan(PackedPlan, DrawnOrder, length=wanted.order.length)
    return wanted.drawn(ByLength, plan)


def _given(wanted: Wanted) -> Draws:
    config, generators = wanted.config, generators_of(wanted.order)
    with seeded(generators, config.seed, 0):
        given = Given(wanted.order, wanted.size)
    batch_limit: BatchLimit | None = ("", ())
    if given.has_batches:
        _check_unsized("order", wanted)
    elif given.batch_size is None:
        batch_limit = None
    elif wanted.is_sized and config.batch_size != given.batch_size:
        raise ArgumentError(
            f"order gives batches of {given.batch_size}, got "
            f"batch_size={config.batch_size}: remove batch_size="
        )
    else:
        wanted = wanted._replace(fields={**wanted.fields, "batch_size": given.batch_size})
    plan = wanted.plan(DrawnBatches if given.has_batches else Plan, DrawnOrder)
    return Draws(given, plan, generators, batch_limit)


_KINDS: tuple[tuple[type, Callable[[Wanted], Plan | Draws]], ...] = (
    (Buckets, _buckets),
    (Blocks, _blocks),
    (Weighted, _weighted),
    (TokenBudget, _token_budget),
    (Packed, _packed),
    (object, _given),  # indices, a function of the epoch, or a sampler
)


def _check_unsized(order: str, wanted: Wanted, more: str = "") -> None:
    """Raise an `ArgumentError` if the user has set `batch_size`. Called if the order gives batches.

    Args:
        order: Name of the order, for the message.
        wanted: The order and the settings.
        more: End of the message, with another fix.
    """
    if wanted.is_sized:
        raise ArgumentError(
            f"{order} gives batches, which cannot be combined with "
            f"batch_size={wanted.config.batch_size}: remove batch_size={more}"
        )


def _lengths(by: object, size: int) -> npt.NDArray[Any]:
    """Return `Buckets.by` as an integer array, with one length per item of the source.

    Raises:
        ArgumentError: It has another shape or dtype, or a negative length.
    """
    try:
        lengths: npt.NDArray[Any] = np.asarray(by)
    except ValueError:
        # For example, a list of lists of different lengths. The check below refuses it.
        lengths = np.empty((), object)
    if lengths.shape != (size,) or (size and lengths.dtype.kind not in "iu"):
        got = f"{lengths.dtype}{list(lengths.shape)}" if lengths.ndim else brief(by)
        raise ArgumentError(
            f"Buckets.by must have the lengths of the {size:,} items of source, as a list or an "
            f"integer array of one axis, got {got}"
        )
    if size and lengths.min() < 0:
        raise ArgumentError(
            f"Buckets.by[{lengths.argmin()}] is {lengths.min()}; lengths must be at least 0"
        )
    return lengths
