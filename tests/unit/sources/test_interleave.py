"""Interleaved files: tf.data's order, the number of open files, and files that cannot be read."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import loaderpool as lp


def read_range(file: range) -> Iterator[int]:
    yield from file


def test_the_order_is_that_of_tf_data(tf: Any) -> None:
    for sizes, cycle_length, block_length in itertools.product(
        [[3], [1, 0, 4, 2], [0, 0, 0], [5, 1, 1, 1, 7, 2, 0, 3], [2, 2, 2, 2]],
        [1, 2, 3, 9],
        [1, 2, 3],
    ):
        starts = tf.constant([100 * number for number in range(len(sizes))], tf.int64)
        stops = starts + tf.constant(sizes, tf.int64)
        dataset = tf.data.Dataset.from_tensor_slices((starts, stops)).interleave(
            tf.data.Dataset.range, cycle_length=cycle_length, block_length=block_length
        )
        files = [range(100 * number, 100 * number + size) for number, size in enumerate(sizes)]
        expected = [int(number) for number in dataset]
        assert list(lp.interleave(files, read_range, cycle_length, block_length)) == expected


def test_no_more_files_are_open_than_asked_for() -> None:
    open_now = most = 0

    def read(file: int) -> Iterator[int]:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        try:
            yield from range(5)
        finally:
            open_now -= 1

    assert len(list(lp.interleave(range(20), read, 4))) == 100
    assert most == 4
    for _ in itertools.islice(lp.interleave(range(20), read, 4), 7):
        pass
    assert not open_now


def test_a_file_that_cannot_be_read() -> None:
    def read(file: str) -> Iterator[str]:
        yield file + "0"
        if file == "b":
            raise OSError("truncated")

    stream = lp.interleave(["a", "b", "c"], read, 2)
    with pytest.raises(OSError, match="truncated") as raised:
        list(stream)
    with (
        lp.Loader(stream, workers=0) as loader,
        pytest.raises(OSError, match="truncated") as of_loader,
    ):
        list(loader)
    if hasattr(raised.value, "add_note"):  # from Python 3.11 on
        assert raised.value.__notes__ == ["while 'b' was read"]
        assert "while 'b' was read" in str(of_loader.value)


def test_it_travels() -> None:
    stream = lp.interleave([range(3), range(5)], read_range, 2)
    assert list(pickle.loads(pickle.dumps(stream))) == list(stream)


def no_argument() -> list[int]:
    return []


def test_mistakes_are_named() -> None:
    files: Any
    for files, options, match in [
        *(
            (wrong, {}, "files must be a sequence of")
            for wrong in ([], "abc", iter([1]), {"a", "b"}, {"a": 1})
        ),
        ([1], {"cycle_length": 0}, "cycle_length must be at least 1"),
        ([1], {"block_length": 0}, "block_length must be at least 1"),
        ([1], {"open_fn": no_argument}, r"open_fn must be callable as open_fn\(file\), but .* is"),
    ]:
        with pytest.raises(lp.ArgumentError, match=match):
            lp.interleave(files, **{"open_fn": read_range, **options})
