"""Failures counted batch by batch, however the batches come together; no process."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import loaderpool as lp
from loaderpool.config import ErrorPolicy
from loaderpool.core.delivery import Delivery
from loaderpool.errors import LoaderpoolError
from loaderpool.plan.order import Plan
from loaderpool.trainer.epoch_tracker import EpochTracker, IterationLog
from loaderpool.trainer.loader_iterator import Pass
from loaderpool.transport.reports import RowFailure, describe_failure

ROWS = 4
NO_FORM: Any = SimpleNamespace(fixed=SimpleNamespace(row_nbytes=0), may_be_padded=False)


def failures_of(counts: list[int], first: int = 0) -> tuple[RowFailure, ...]:
    """So many failures in each batch; a sample's index says its batch and row."""
    return tuple(
        RowFailure(describe_failure(ValueError(), epoch=0, worker=None, index=(first + batch) * ROWS + row), row, batch)
        for batch, count in enumerate(counts)
        for row in range(count)
    )


def delivery(counts: list[int], first: int = 0, keep: tuple[int, ...] | None = None) -> Delivery:
    arrived = Delivery(first, len(counts), ROWS, row_failures=failures_of(counts, first))
    arrived.form, arrived.anchor = NO_FORM, np.empty(0, np.uint8)
    if keep is not None:
        arrived.choose(keep)
    return arrived


def indices(failures: list[list[Any]]) -> list[list[int]]:
    return [[failure.index for failure in batch] for batch in failures]


def test_a_delivery_tells_the_failures_of_each_batch_it_hands_out() -> None:
    assert indices(delivery([0, 2, 1]).failures()) == [[], [4, 5], [8]]
    kept = delivery([1, 2, 1], keep=(0, 2))  # the other one was handed out before
    assert indices(kept.failures()) == [[0], [8]]
    assert (kept.count, len(kept.row_failures)) == (2, 2)
    assert indices(kept.head(1).failures()) == [[0]]
    head = delivery([1, 2, 1]).head(2)
    assert (head.count, indices(head.failures())) == (2, [[0], [4, 5]])


CONFIG = lp.Loader(range(4), batch_size=ROWS, workers=0).config


def what_arrives(
    counts: list[int], sizes: list[int], budget: int, action: Literal["skip", "replace"] = "skip"
) -> tuple[int, list[int], str]:
    """Batches handed over, indices counted, and the error's text, where deliveries have these sizes."""
    starts = itertools.accumulate([*sizes, *[1] * len(counts)], initial=0)
    deliveries = (delivery(counts[start:stop], start) for start, stop in itertools.pairwise(starts))
    run = SimpleNamespace(take=lambda: next(deliveries), first_epoch=0, outlives_interrupts=True, end=lambda: None)
    engine: Any = SimpleNamespace(form=lambda: None, read_ahead=lambda: 0, begin=lambda *_: run)
    config = CONFIG._replace(on_error=ErrorPolicy(action, budget))
    tracker, batches = EpochTracker(lambda: engine, config, Plan(len(counts) * ROWS, ROWS), None), 0
    one_pass = Pass(tracker, IterationLog(), lambda each: (iter([(ROWS, ())] * each.count), list))
    try:
        while True:
            one_pass.take()
            batches += 1
    except StopIteration:
        text = ""
    except LoaderpoolError as error:
        text = str(error).splitlines()[0] + str(getattr(error, "index", ""))
    return batches, [*tracker.counters.skipped, *tracker.counters.replaced], text


@given(
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 8), max_size=8),
    budget=st.integers(0, 30),
)
def test_how_batches_come_together_does_not_show(counts: list[int], sizes: list[int], budget: int) -> None:
    alone = what_arrives(counts, [], budget)
    assert what_arrives(counts, sizes, budget) == alone
    batches, counted, text = alone
    assert len(counted) == sum(counts[:batches]) <= budget
    assert bool(text) == (sum(counts) > budget)
    if text:
        assert sum(counts[: batches + 1]) > budget


def test_the_error_is_raised_at_once_where_no_batch_comes_before_it() -> None:
    assert what_arrives([1, 0], [2], 0, "replace")[:2] == (0, [])
    assert what_arrives([1, 0], [2], 0, "replace")[2].startswith("1 sample failed in this epoch")
