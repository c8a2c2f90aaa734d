"""Samples of varied shape, padded or ragged: the open axes of a batch's spec, and advice in
errors.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.batches import Place, assert_same, read

WORKERS = pytest.mark.parametrize("workers", [0, 2])
SIZE = 60


def sequence(index: int) -> Any:
    """Return a sequence of varied length, and ten classes."""
    return np.full((5 + index % 7, 4), index, np.float32), np.eye(10, dtype=np.float32)[index % 10]


def shapes_of(spec: Any) -> Any:
    return (
        {name: each.shape for name, each in spec.items()}
        if isinstance(spec, dict)
        else [s.shape for s in spec]
    )


# ---- open axes ----


@WORKERS
@pytest.mark.parametrize("batch_size", [1, 8, 100])
def test_only_axes_that_are_seen_to_vary_are_open(on: Place, workers: int, batch_size: int) -> None:
    with lp.Loader(range(SIZE), sequence, batch_size=batch_size, pad=True, **on(workers)) as loader:
        assert shapes_of(loader.element_spec) == [(None, None, 4), (None, 10)]
        batches = read(loader)
    assert [batch[0].shape[2] for batch in batches] == [4] * len(batches)
    rows = [row for batch in batches for row in batch[0]]
    for index, row in enumerate(rows):
        assert (
            np.array_equal(row[: 5 + index % 7], sequence(index)[0])
            and not row[5 + index % 7 :].any()
        )


@WORKERS
def test_ragged_leaves_components_alone_that_do_not_vary(on: Place, workers: int) -> None:
    with lp.Loader(range(SIZE), sequence, batch_size=8, ragged=True, **on(workers)) as loader:
        assert [each.ragged for each in loader.element_spec] == [True, False]
        assert shapes_of(loader.element_spec) == [(None, None, 4), (None, 10)]
        batches = read(loader)
    assert all(type(batch[1]) is np.ndarray and batch[1].shape[1:] == (10,) for batch in batches)
    rows = [row for batch in batches for row in batch[0]]
    assert_same(rows, [sequence(index)[0] for index in range(SIZE)])


def alike_at_first(index: int) -> Any:
    return np.zeros((3 if index < 30 else 4, 2)), np.zeros(5)


@WORKERS
def test_where_no_axis_was_seen_to_vary_any_may(on: Place, workers: int) -> None:
    """For example, of sentences cut to one length, most are longer. Then no axis is known to
    vary.
    """
    with lp.Loader(range(SIZE), alike_at_first, batch_size=8, pad=True, **on(workers)) as loader:
        assert shapes_of(loader.element_spec) == [(None, None, None), (None, None)]
        assert {batch[0].shape[1] for batch in loader} == {3, 4}
    with lp.Loader(range(SIZE), alike_at_first, batch_size=8, ragged=True, **on(workers)) as loader:
        assert [each.ragged for each in loader.element_spec] == [True, True]
        assert sum(len(batch[0].values) for batch in loader) == 30 * 3 + 30 * 4


@WORKERS
def test_of_streams_and_generators_the_first_batch_tells(on: Place, workers: int) -> None:
    def make() -> Any:
        yield from map(sequence, range(SIZE))

    how: dict[str, Any] = {"batch_size": 8, "pad": True, **on(workers)}
    for loader in (lp.Loader(make(), **how), lp.Loader.from_generator(make, **how)):
        with loader:
            assert shapes_of(loader.element_spec) == [(None, None, 4), (None, 10)]
            assert sum(len(batch[0]) for batch in loader) == SIZE


# ---- calls ----


class Noting:
    """Logs each call: the index, and a random number that differs between epochs."""

    def __init__(self, log: Path) -> None:
        self.log = str(log)

    def __call__(self, index: int, rng: np.random.Generator) -> Any:
        with open(
            self.log, "a"
        ) as file:  # a short append is one write, so lines of different processes do not mix
            file.write(f"{index} {rng.random()}\n")
        return sequence(index)

    def calls(self) -> collections.Counter[int]:
        return collections.Counter(int(line.split()[0]) for line in self._lines())

    def are_made_once(self) -> bool:
        """Check that all items were read in the first epoch, and that no call was repeated. Some
        calls of the next epoch are allowed.
        """
        lines = self._lines()
        return len(lines) == len(set(lines)) and self.calls().keys() == set(range(SIZE))

    def _lines(self) -> list[str]:
        return Path(self.log).read_text().splitlines()


# Samples that are checked after a small first batch are made again if another worker makes their
# batch.
@pytest.mark.parametrize(
    ("how", "workers"),
    [
        *(({"ragged": True}, workers) for workers in (0, 2)),
        *(({"pad": 1, "threads": 3, "batch_size": 20}, workers) for workers in (0, 2)),
        *(({"pad": True, "batch_size": 1}, workers) for workers in (0, 1)),
        *(
            ({"pad": True, "buckets": lp.Buckets([5 + i % 7 for i in range(SIZE)], [8], [9, 4])}, n)
            for n in (0, 1)
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_no_call_is_made_twice(
    tmp_path: Path, on: Place, how: dict[str, Any], workers: int
) -> None:
    fn = Noting(tmp_path / "log")
    how = {"batch_size": None if "buckets" in how else 8, **how}
    with lp.Loader(range(SIZE), fn, shuffle=True, **how, **on(workers)) as loader:
        _ = loader.element_spec
        list(loader)
    assert fn.are_made_once()


@WORKERS
def test_a_sample_that_fails_tells_nothing_and_fails_in_its_turn(on: Place, workers: int) -> None:
    def fn(index: int) -> Any:
        if index == 3:
            raise KeyError("three")
        return sequence(index)

    with lp.Loader(range(SIZE), fn, batch_size=8, pad=True, **on(workers)) as loader:
        assert shapes_of(loader.element_spec) == [(None, None, 4), (None, 10)]
        with pytest.raises(KeyError, match="index 3"):
            list(loader)
    with lp.Loader(
        range(SIZE), fn, batch_size=8, pad=True, on_error="skip", **on(workers)
    ) as loader:
        assert sum(len(batch[0]) for batch in loader) == SIZE - 1
        assert loader.statistics().skipped_indices == (3,)


# ---- later samples that differ ----


def later(axis: int) -> Any:
    def fn(index: int) -> Any:
        x, y = sequence(index)
        if index == 41:
            x, y = (np.pad(x, ((0, 0), (0, 1))), y) if axis else (x, np.pad(y, (0, 2)))
        return {"x": x, "y": y}

    return fn


@WORKERS
@pytest.mark.parametrize(
    ("how", "axis", "says"),
    [
        (
            {"pad": True},
            1,
            r"component \['x'\] of source index 41: expected float32\[None, 4\], got float32\[11, 5\]",
        ),
        ({"pad": True}, 0, r"component \['y'\] of source index 41: expected float32\[10\]"),
        ({"ragged": True}, 0, r"component \['y'\] of source index 41: expected float32\[10\]"),
    ],
)
def test_an_axis_that_varies_later_is_named_with_a_line_to_paste(
    on: Place, workers: int, how: dict[str, Any], axis: int, says: str
) -> None:
    loader = lp.Loader(range(SIZE), later(axis), batch_size=8, **how, **on(workers))
    with (
        loader,
        pytest.raises(
            lp.SpecMismatchError, match=f"{says}.*To allow it, pass element_spec="
        ) as caught,
    ):
        list(loader)
    spec = pasted(caught.value)
    assert shapes_of(spec) == {
        "x": (None, None, None if axis else 4),
        "y": (None, 10 if axis else None),
    }
    with lp.Loader(
        range(SIZE), later(axis), batch_size=8, element_spec=spec, **how, **on(workers)
    ) as loader:
        assert len(list(loader)) == len(loader)


def pasted(error: BaseException) -> Any:
    """Return the element_spec at the end of a message, evaluated as Python."""
    return eval(str(error).rpartition("element_spec=")[2], {"lp": lp})


Pair = collections.namedtuple("Pair", ["text", "more"])  # noqa: PYI024


def nested_of(index: int) -> Any:
    text = np.array(["a"] * (2 if index < 41 else 3))
    return Pair(text, ((np.zeros((index % 5, 2)),),))


def test_the_line_to_paste_is_of_the_whole_structure(on: Place) -> None:
    how: dict[str, Any] = {"batch_size": 8, "pad": True, "drop_remainder": True, **on(0)}
    with (
        lp.Loader(range(SIZE), nested_of, **how) as loader,
        pytest.raises(lp.SpecMismatchError, match=r"text'?\]? of source index 41") as caught,
    ):
        list(loader)
    code = str(caught.value).rpartition("element_spec=")[2]
    more = "((lp.ArraySpec((8, None, 2), 'float64'),),)"
    assert code == f"Pair(text=lp.ArraySpec((8, None), 'str'), more={more})"
    spec = eval(code, {"lp": lp, "Pair": Pair})
    with lp.Loader(range(SIZE), nested_of, element_spec=spec, **how) as loader:
        assert len(list(loader)) == len(loader)


@pytest.mark.parametrize("how", [{}, {"pad": True}, {"batch_size": None}])
def test_a_fixed_length_of_the_users_spec_has_a_line_too(on: Place, how: dict[str, Any]) -> None:
    """For samples without padding, samples padded to a length, and whole elements."""
    batch = () if "batch_size" in how else (None,)
    given = lp.ArraySpec((*batch, 9, 4), "f4")
    how = {"batch_size": 8, **how, **on(0)}
    numbers = range(4, SIZE)
    with (
        lp.Loader(numbers, lambda index: sequence(index)[0], element_spec=given, **how) as loader,
        pytest.raises(lp.SpecMismatchError, match="element_spec=") as caught,
    ):
        list(loader)
    spec = pasted(caught.value)
    assert spec.shape == (*batch, None, 4)
    if "pad" not in how and batch:
        assert "also set pad=True or ragged=True, and pass element_spec" in str(caught.value)
        how["pad"] = True
    with lp.Loader(numbers, lambda index: sequence(index)[0], element_spec=spec, **how) as loader:
        assert len(list(loader)) == len(loader)


@WORKERS
def test_a_component_that_pad_says_false_for_must_not_vary(on: Place, workers: int) -> None:
    how: dict[str, Any] = {"batch_size": 8, "pad": {"x": 0, "y": False}}
    with lp.Loader(range(40), later(0), **how, **on(workers)) as loader:
        assert shapes_of(loader.element_spec) == {"x": (None, None, 4), "y": (None, 10)}
        assert len(list(loader)) == 5
    with (
        lp.Loader(range(SIZE), later(0), **how, **on(workers)) as loader,
        pytest.raises(
            lp.SpecMismatchError, match=r"\['y'\] of source index 41.*differ in axis 0.*pad is F"
        ) as raised,
    ):
        list(loader)
    assert "None pads with zeros" in str(raised.value) and "element_spec" not in str(raised.value)


# ---- padding to a fixed length ----


def fixed(length: int) -> Any:
    return lp.ArraySpec((None, length, 4), np.float32), lp.ArraySpec((None, 10), np.float32)


@WORKERS
def test_a_number_in_the_spec_is_the_length_that_is_padded_to(on: Place, workers: int) -> None:
    how: dict[str, Any] = {"batch_size": 8, "pad": (-1, False), "element_spec": fixed(12)}
    with lp.Loader(range(SIZE), sequence, **how, **on(workers)) as loader:
        batches = read(loader)
        assert loader.statistics().padding_share > 0
    assert {batch[0].shape[1:] for batch in batches} == {(12, 4)}
    for index, row in enumerate(row for batch in batches for row in batch[0]):
        length = 5 + index % 7
        assert np.array_equal(row[:length], sequence(index)[0]) and (row[length:] == -1).all()


@WORKERS
def test_a_sample_that_is_longer_is_named(on: Place, workers: int) -> None:
    says = (
        r"component \[0\] of source index 5: expected float32\[9, 4\], got float32\[10, 4\]\. Batches are padded to .*"
        r"for axis 0 of a sample\. Set a larger one\. To pad to the longest sample .*, pass element_spec="
    )
    loader = lp.Loader(
        range(SIZE), sequence, batch_size=8, pad=True, element_spec=fixed(9), **on(workers)
    )
    with loader, pytest.raises(lp.SpecMismatchError, match=says):
        list(loader)
