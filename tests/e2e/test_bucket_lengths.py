"""Lengths for buckets may have several forms, and an error names the wrong one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, read
from tests.support.sounds import BUCKETS, BY_LENGTH, load_sound
from tests.support.sounds import LENGTHS as OF_SOUNDS

# ---- lengths ----


class Series:
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(OF_SOUNDS, np.uint16)


@pytest.mark.parametrize(
    "by",
    [tuple(OF_SOUNDS), np.array(OF_SOUNDS, np.int32), Series()],
    ids=lambda by: type(by).__name__,
)
def test_lengths_may_be_given_as_they_are(
    sounds: list[str], two_epochs: list[Any], on: Place, by: Any
) -> None:
    settings = {**BY_LENGTH, "buckets": dataclasses.replace(BUCKETS, by=by)}
    with lp.Loader(sounds, load_sound, **on(2), **settings) as loader:
        assert_same(read(loader), two_epochs[: len(two_epochs) // 2])
        assert len(loader) == len(two_epochs) // 2


# ---- wrong arguments ----

LENGTHS = [1] * 9


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ((LENGTHS, None), r"^Buckets\.boundaries must be a list .* got None"),
        ((LENGTHS, []), "must be 1 to 65535 numbers, got 0"),
        (
            (LENGTHS, [2, 3, 3]),
            r"must increase, but boundaries\[2\]=3 is not above boundaries\[1\]=3",
        ),
        (
            (len, [3]),
            r"lengths of all items, got a function\. Write lp\.Buckets\(\[len\(item\) for item in source",
        ),
        (
            (lambda item: 1, [3]),
            r"numpy\.concatenate\(\[\*lp\.Loader\(source, length, batch_size=1000\)\]\)",
        ),
        ((LENGTHS, [0]), r"^Buckets\.boundaries\[0\] must be at least 1, got 0"),
        ((LENGTHS, [2.5]), r"^Buckets\.boundaries\[0\] must be an integer"),
        ((LENGTHS, {3, 5}), r"^Buckets\.boundaries must be a list"),
        ((LENGTHS, [3], [2]), r"^Buckets\.batch_sizes must have one"),
        ((LENGTHS, [3], [2, 0]), r"^Buckets\.batch_sizes\[1\] must"),
        ((LENGTHS, [3], 4), r"^Buckets\.batch_sizes must be a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} arguments",
)
def test_wrong_buckets_fail_by_name(how: Any, says: str) -> None:
    with pytest.raises(lp.ArgumentError, match=says):
        lp.Buckets(*how)


@pytest.mark.parametrize(
    ("by", "says"),
    [
        (None, r"^Buckets\.by must have .*, got None$"),
        (LENGTHS[1:], r"^Buckets\.by must have the lengths of the 9 items .* got int64\[8\]$"),
        ([*LENGTHS[1:], -2], r"^Buckets\.by\[8\] is -2"),
        ([1.0] * 9, r"^Buckets\.by must have .*, got float64\[9\]"),
        ([[1]] * 9, r"^Buckets\.by must have .*, got int64\[9, 1\]"),
        ([[1], [1, 2]], r"^Buckets\.by must have "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_lengths_that_do_not_go_with_the_source_fail_by_name(by: Any, says: str) -> None:
    with pytest.raises(lp.ArgumentError, match=says):
        lp.Loader(range(9), None, workers=0, buckets=lp.Buckets(by, [3]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda buckets: lp.Loader(range(9), workers=0, buckets=buckets, batch_size=None),
            "needs a batch_size",
        ),
        (
            lambda buckets: lp.Loader(
                range(9), workers=0, buckets=buckets, batch_size=16, drop_remainder=True
            ),
            "^drop_remainder=True leaves no batches",
        ),
        (
            lambda buckets: lp.Loader.from_sequence([np.zeros(3)], buckets=buckets),
            "from_sequence takes no buckets",
        ),
        (
            lambda buckets: lp.Loader(iter(["a"]), workers=0, buckets=buckets),
            "buckets needs a source with __len__ and",
        ),
        (
            lambda buckets: lp.Loader.from_generator(
                lambda: iter(["a"]), workers=0, buckets=buckets
            ),
            "buckets needs a source with __len__ and",
        ),
    ],
)
def test_what_does_not_go_with_buckets_says_why(make: Any, says: str) -> None:
    with pytest.raises(lp.ArgumentError, match=says):
        make(lp.Buckets(LENGTHS, [3]))


def test_batch_sizes_stand_for_batch_size(on: Place) -> None:
    with lp.Loader(
        range(9), None, batch_size=None, buckets=lp.Buckets(range(9), [5], [2, 3]), **on(1)
    ) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [5, 6, 7], [4], [8]]
