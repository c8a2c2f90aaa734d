"""Mixing several sources: weights that are hit, every record by size, how far it goes, what is refused."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import threading
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.plan.shares import BLOCK, Shares
from loaderpool.sources import as_source

SMALL, LARGE = [f"small {i}" for i in range(50)], [f"large {i}" for i in range(500)]

# Chi-squared of one degree of freedom exceeds this once in 10,000 times; of `k` degrees see `limit`. Seeds are fixed.
ONCE_IN_10_000 = 15.14


def limit(degrees: int) -> float:
    """What chi-squared exceeds once in 10,000 times (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


def chi_squared(counts: Any, expected: Any) -> float:
    return float(((np.asarray(counts) - expected) ** 2 / np.asarray(expected)).sum())


def origins(mixed: Any) -> list[tuple[int, int]]:
    return [mixed.origin(index) for index in range(len(mixed))]


# ---- by size ----


def test_by_size_every_record_comes_exactly_once_and_in_its_sources_order() -> None:
    for stop in ("first", "all"):
        for seed in range(20):
            items = list(lp.mix([SMALL, LARGE], seed=seed, stop=stop))
            assert [item for item in items if item.startswith("small")] == SMALL
            assert [item for item in items if item.startswith("large")] == LARGE


def test_by_size_every_record_is_equally_likely_at_every_place() -> None:
    """50 records beside 500: over many seeds, which record is at a place is even over all 550."""
    seeds = 1500
    for place in (0, 100, 256, 549):
        source = Counter(lp.mix([range(50), range(500)], seed=seed).origin(place)[0] for seed in range(seeds))
        assert chi_squared([source[0], source[1]], [seeds / 11, seeds * 10 / 11]) < ONCE_IN_10_000, place


def test_by_size_a_window_of_records_has_its_share() -> None:
    """No long range of one file: any 64 items in a row have about 64 / 11 of the small one."""
    which = np.array([source for source, _ in origins(lp.mix([SMALL, LARGE], seed=5))])
    windows = np.lib.stride_tricks.sliding_window_view(which == 0, 64).sum(axis=1)
    assert windows.min() >= 1 and windows.max() <= 16


# ---- by weight ----


def test_given_weights_are_hit_at_every_place_over_the_seeds() -> None:
    weights = np.array([0.01, 0.3, 0.69])
    for place in (0, 77, 300):
        counts = np.zeros(3)
        for seed in range(1500):
            counts[lp.mix([range(9)] * 3, weights, seed, stop=512).origin(place)[0]] += 1
        assert chi_squared(counts, weights * counts.sum()) < limit(2), place


def test_given_weights_are_hit_better_than_by_throwing_dice() -> None:
    weights = np.array([1, 2, 3.5, 0.25])
    which = np.array([source for source, _ in origins(lp.mix([range(7)] * 4, weights, stop=20_000))])
    counts = np.bincount(which, minlength=4)
    assert np.abs(counts - 20_000 * weights / weights.sum()).max() < 3
    for start in range(0, 20_000 - BLOCK, BLOCK):
        part = np.bincount(which[start : start + BLOCK], minlength=4)
        assert np.abs(part - BLOCK * weights / weights.sum()).max() < 4


def test_places_within_a_block_are_random() -> None:
    """Neighbours are of the same source as often as by chance, and no place prefers one."""
    which = np.array([source for source, _ in origins(lp.mix([range(9)] * 2, [1, 1], stop=BLOCK * 400))])
    same = int((which[1:] == which[:-1]).sum())
    pairs = len(which) - 1
    assert chi_squared([same, pairs - same], [pairs * 127 / 255, pairs * 128 / 255]) < ONCE_IN_10_000
    by_place = which.reshape(-1, BLOCK).sum(axis=0)
    assert chi_squared(by_place, np.full(BLOCK, 200)) + chi_squared(400 - by_place, np.full(BLOCK, 200)) < limit(BLOCK)


def test_weights_are_proportions_in_any_unit_and_type() -> None:
    expected = list(lp.mix([SMALL, LARGE], [1, 3], seed=7, stop=400))
    huge = [10**400, 3 * 10**400]
    for weights in ((0.25, 0.75), np.array([1, 3], np.float32), [Fraction(1, 7), Fraction(3, 7)], huge):
        assert list(lp.mix([SMALL, LARGE], weights, seed=7, stop=400)) == expected


def test_a_weight_of_zero_leaves_a_source_out() -> None:
    for stop in ("first", "all"):
        assert list(lp.mix([SMALL, LARGE, SMALL], [0, 1, 0], stop=stop)) == LARGE


# ---- how far ----


def test_first_ends_before_any_record_comes_again() -> None:
    mixed = lp.mix([SMALL, LARGE], [1, 1])
    items = list(mixed)
    assert len(items) == len(set(items)) == len(mixed)
    assert items.count("small 49") == 1
    assert {len(items) - 100, Counter(item[:5] for item in items)["large"] - 50} <= {0, 1}


def test_all_ends_when_each_source_has_been_gone_through_and_shorter_ones_begin_again() -> None:
    mixed = lp.mix([SMALL, LARGE], [1, 1], seed=3, stop="all")
    items = list(mixed)
    small = [item for item in items if item.startswith("small")]
    assert [item for item in items if item.startswith("large")] == LARGE
    assert len(small) in (499, 500, 501)
    assert small == (SMALL * 11)[: len(small)]


def test_a_number_is_so_many_items() -> None:
    assert len(lp.mix([SMALL, LARGE], stop=7)) == len(list(lp.mix([SMALL, LARGE], stop=7))) == 7
    items = list(lp.mix([SMALL, LARGE], stop=1100))
    assert Counter(items) == Counter(SMALL * 2 + LARGE * 2)


# ---- any item at once ----


def test_an_item_of_a_huge_mix_is_read_without_those_before_it() -> None:
    mixed = lp.mix([range(10**12), range(10**13)])
    assert len(mixed) == 11 * 10**12
    source, record = mixed.origin(10**13)
    assert abs(record - 10**13 * (1, 10)[source] // 11) < BLOCK
    assert len(mixed._order._blocks) == 1


def test_what_is_kept_of_a_mix_is_bounded() -> None:
    mixed = lp.mix([range(10**9)] * 3)
    for index in range(0, len(mixed), len(mixed) // 700):
        mixed.origin(index)
    assert len(mixed._order._blocks) <= 512


def test_negative_indices_and_ends_are_those_of_a_list() -> None:
    mixed = lp.mix([SMALL, LARGE])
    assert mixed[-1] == mixed[np.int64(549)] and mixed[-550] == mixed[0]
    for index in (550, -551):
        with pytest.raises(IndexError, match="550 items"):
            mixed[index]
    with pytest.raises(TypeError):
        mixed[1:3]  # type: ignore[misc]


def test_the_order_is_set_by_the_seed_and_never_changes() -> None:
    """Written down: a change here gives every user another order of the same seed."""
    which = "".join(str(source) for source, _ in origins(lp.mix([range(10), range(20), range(30)], seed=1)))
    assert which == "212221102222212021222201120211102012211111110222222212002021"
    assert origins(lp.mix([SMALL, LARGE], seed=1)) != origins(lp.mix([SMALL, LARGE], seed=2))


def test_another_process_and_other_threads_get_the_same_items() -> None:
    made = "m = lp.mix([range(40), range(7)], [2, 1.5], 9, 'all')"
    code = f"import loaderpool as lp; {made}; print([m.origin(i) for i in range(len(m))])"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    mixed = lp.mix([range(40), range(7)], [2, 1.5], 9, "all")
    assert there == f"{origins(mixed)}\n"
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(origins(mixed))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [origins(mixed)] * 4


def test_a_mix_travels_without_what_it_remembers() -> None:
    mixed = lp.mix([SMALL, np.arange(500)], [1, 2], seed=4)
    mixed[90]
    there = pickle.loads(pickle.dumps(mixed))
    assert list(there) == list(mixed) and len(there) == len(mixed)
    assert not pickle.loads(pickle.dumps(mixed))._order._blocks
    assert repr(there) == f"<mix of 2 sources: {len(mixed)} items>"


def test_mixes_of_mixes_and_of_columns_are_sources() -> None:
    inner = lp.mix([range(10), range(10, 30)], seed=1)
    columns = {"x": np.arange(30, 40), "y": np.arange(10)}
    mixed = as_source(lp.mix([inner, columns], seed=2))
    assert len(mixed) == 40
    numbers = [item["x"] if isinstance(item, dict) else item for item in (mixed[i] for i in range(40))]
    assert sorted(numbers) == list(range(40))


# ---- shares ----


def test_shares_of_many_sources_are_within_a_few_items_of_their_weights() -> None:
    weights = np.random.default_rng(0).integers(1, 100, 1000)
    for seed in range(3):
        shares = Shares(weights.tolist(), seed)
        for stop in (1000, 12345):
            counts = np.array(shares.counts(stop))
            assert counts.sum() == stop
            assert np.abs(counts - stop * weights / weights.sum()).max() < 3
        assert shares.counts(3 * int(weights.sum())) == (3 * weights).tolist()


# ---- refused ----


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((),), lp.ArgumentError, "sources is empty"),
        (({"a": SMALL},), lp.ArgumentTypeError, "sources must be a list or tuple of sources, got a dict"),
        (("ab",), lp.ArgumentTypeError, "got a str"),
        (([SMALL, []],), lp.ArgumentError, r"sources\[1\]: source is empty: a list of length 0"),
        (([SMALL, "x.txt"],), lp.SourceError, r"sources\[1\]: source is one str, 'x.txt'"),
        (([SMALL, iter("ab")],), lp.SourceError, r"sources\[1\]: source is a str_?(ascii_)?iterator"),
        (([SMALL], 1), lp.ArgumentTypeError, "weights must be one number for each source, or None, got 1"),
        (([SMALL], {"a": 1}), lp.ArgumentTypeError, "weights must be one number for each source"),
        (([SMALL], [1, 2]), lp.ArgumentError, "there are 1 sources and 2 weights"),
        (([SMALL], ["1"]), lp.ArgumentTypeError, r"weights\[0\] must be a number, got '1' of type str"),
        (([SMALL], [True]), lp.ArgumentTypeError, r"weights\[0\] must be a number, got True"),
        (([SMALL, LARGE], [1, -0.5]), lp.ArgumentError, r"weights\[1\] must be finite and not negative, got -0.5"),
        (([SMALL, LARGE], [1, math.nan]), lp.ArgumentError, r"weights\[1\] must be finite"),
        (([SMALL, LARGE], [math.inf, 1]), lp.ArgumentError, r"weights\[0\] must be finite"),
        (([SMALL, LARGE], [0, 0.0]), lp.ArgumentError, "weights are all 0"),
        (([SMALL, LARGE], [1, 1e-30], 0, "all"), lp.ArgumentError, r"weights are so far apart .* 2\*\*62 items"),
        (([SMALL], None, -1), lp.ArgumentError, "seed must be at least 0, got -1"),
        (([SMALL], None, 1.5), lp.ArgumentTypeError, "seed must be a whole number, got 1.5"),
        (([SMALL], None, True), lp.ArgumentTypeError, "seed must be a whole number, got True"),
        (
            ([SMALL], None, 0, "last"),
            lp.ArgumentError,
            'stop must be "first", "all" or a number of items, got \'last\'',
        ),
        (([SMALL], None, 0, 0), lp.ArgumentError, "stop must be at least 1, got 0"),
        (([SMALL], None, 0, 2.0), lp.ArgumentTypeError, "stop must be a whole number, got 2.0"),
        (([SMALL], None, 0, None), lp.ArgumentTypeError, "stop must be a whole number, got None"),
        (([SMALL], None, 0, 2**70), lp.ArgumentError, r"stop must be at most 2\*\*62 items"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lp.mix(*arguments)
