"""A stream gives the same batches as a list with the same plan, and is shuffled only within its
window.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loaderpool.plan.batches import Plan
from loaderpool.plan.order import Order
from loaderpool.plan.permutation import MAX_SIZE, shuffled
from loaderpool.sources.stream import StreamSource, read_batches

SIZES = st.integers(0, 300)
WINDOWS = st.integers(1, 60)
SEEDS = st.integers(0, 2**70)


class Counting:
    """The numbers below `size`. Counts the numbers that were read."""

    def __init__(self, size: int) -> None:
        self.size, self.given = size, 0

    def __iter__(self) -> Any:
        self.given = 0
        for number in range(self.size):
            self.given += 1
            yield number


# ---- the window ----


@given(size=SIZES, window=WINDOWS, seed=SEEDS, epoch=st.integers(0, 5))
def test_a_window_permutes_and_lets_nothing_come_early(
    size: int, window: int, seed: int, epoch: int
) -> None:
    order = list(shuffled(iter(range(size)), window, seed, epoch))
    assert sorted(order) == list(range(size))
    assert all(number - at < window for at, number in enumerate(order))
    assert order == list(shuffled(iter(range(size)), window, seed, epoch))
    if window == 1:
        assert order == list(range(size))


@given(size=st.integers(1, 300), window=WINDOWS)
def test_a_window_holds_no_more_items_than_it_says(size: int, window: int) -> None:
    source = Counting(size)
    for taken, _ in enumerate(shuffled(iter(source), window, 0, 0), 1):
        assert source.given <= min(size, window + taken)


@given(size=SIZES, longer=st.integers(0, 50), window=WINDOWS, seed=SEEDS)
def test_what_follows_later_changes_nothing_before_the_window(
    size: int, longer: int, window: int, seed: int
) -> None:
    shorter = list(shuffled(iter(range(size)), window, seed, 0))
    whole = list(shuffled(iter(range(size + longer)), window, seed, 0))
    settled = max(0, size - window)
    assert shorter[:settled] == whole[:settled]


def test_each_item_of_a_window_is_as_likely_to_come_first() -> None:
    window, tries = 8, 4000
    counts = [0] * window
    for seed in range(tries):
        counts[next(iter(shuffled(iter(range(100)), window, seed, 0)))] += 1
    expected = tries / window
    chi_squared = sum((count - expected) ** 2 / expected for count in counts)
    assert chi_squared < 24.3  # 7 degrees of freedom, 0.1 %


# ---- batches ----


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, Plan, Plan]:
    """Return a size, the plan of a stream, which does not know its size, and the plan of a list of
    this size.
    """
    shards = draw(st.integers(1, 4))
    settings = {
        "batch_size": draw(st.none() | st.integers(1, 9)),
        "drop_remainder": draw(st.booleans()),
        "num_shards": shards,
        "shard_index": draw(st.integers(0, shards - 1)),
    }
    size = draw(st.integers(0, 120))
    start = draw(st.integers(0, size))
    stream = Plan(Order(MAX_SIZE), is_open=True, **settings).after(start)  # type: ignore[arg-type]
    return size, stream, Plan(Order(size), **settings).after(start)  # type: ignore[arg-type]


@given(plans(), st.integers(0, 30), st.integers(0, 3))
def test_batches_of_a_stream_are_those_of_a_list(
    made: tuple[int, Plan, Plan], window: int, epoch: int
) -> None:
    size, stream, closed = made
    items = [f"item {number}" for number in range(size)]
    order = list(shuffled(iter(items), window, 7, epoch)) if window else items
    source = StreamSource(Counting(size))
    source.items = iter(items)
    batches = list(read_batches(source, stream, window=window, seed=7, epoch=epoch))
    expected = [
        closed.positions(epoch, batch).tolist() for batch in range(closed.batches_per_epoch)
    ]
    assert [list(range(first, first + len(rows))) for first, rows in batches] == expected
    assert [rows for _, rows in batches] == [
        [order[position] for position in batch] for batch in expected
    ]
    for batch, (first, rows) in enumerate(batches[:-1]):  # known without the size
        assert stream.positions(epoch, batch).tolist() == list(range(first, first + len(rows)))
