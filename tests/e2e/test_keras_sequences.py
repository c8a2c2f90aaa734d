"""What Keras promises of a `PyDataset` in `fit`, kept by a loader of the same object, for data of each framework."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp


class Rows:
    """Rows 0 to 63 in batches of 16."""

    def __init__(self, x: Any, y: Any, infinite: bool = False) -> None:
        self.x, self.y = x, y
        self.num_batches = None if infinite else 4

    def __getitem__(self, index: int) -> Any:
        start = index % 4 * 16
        return self.x[start : start + 16], self.y[start : start + 16]


def arrays() -> Any:
    x = np.random.default_rng(0).random((64, 4)).astype("float32")
    return x, np.repeat(np.arange(64, dtype="float32")[:, None], 2, 1)


def check(batches: Any, infinite: bool = False, shuffle: bool = False) -> None:
    x, _ = arrays()
    seen = []
    for bx, by in itertools.islice(batches, 8):
        assert bx.shape == (16, 4) and by.shape == (16, 2)
        bx, by = map(np.asarray, (bx, by))
        assert bx.dtype == by.dtype == np.float32
        rows = by[:, 0].astype(int)
        assert (bx == x[rows]).all()
        seen += rows.tolist()
    straight = list(range(64)) * (2 if infinite else 1)
    assert sorted(seen) == sorted(straight) and (seen != straight) == shuffle, seen


CASES = [(False, False), (False, True), (True, False)]  # infinite, shuffle


def test_the_number_of_workers_is_the_objects_own_where_it_says_one(tf: Any) -> None:
    import keras

    class OfKeras(Rows, keras.utils.PyDataset):  # type: ignore[misc]
        num_batches = 4

        def __init__(self, **settings: Any) -> None:
            keras.utils.PyDataset.__init__(self, **settings)
            self.x, self.y = arrays()

    for own, expected in ((0, 0), (3, 3)):
        with lp.Loader.from_sequence(OfKeras(workers=own)) as loader:
            assert loader.workers == expected
            check(loader)
    with (  # where none is said, Keras' own is 1
        lp.Loader.from_sequence(OfKeras()) as loader,
        lp.Loader(range(4), batch_size=2) as other,
    ):
        assert loader.workers == other.workers
    with lp.Loader.from_sequence(OfKeras(workers=3), workers=1) as loader:
        assert loader.workers == 1


def test_rows_of_tensorflow_come_as_arrays(tf: Any) -> None:
    """The workers have a runtime of TensorFlow for them, so they are not forked."""
    x, y = map(tf.constant, arrays())
    with lp.Pool(1) as pool:
        for (infinite, shuffle), workers in zip((*CASES, CASES[-1]), (0, 0, 0, pool), strict=True):
            with (
                lp.Loader.from_sequence(Rows(x, y, infinite), shuffle=shuffle, seed=1, workers=workers) as loader,
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore", lp.LoaderpoolWarning)
                check(loader, infinite, shuffle)
                check(loader.as_dataset(), infinite, shuffle)
        assert loader.statistics().workers_start == "exec"


def test_a_number_of_batches_is_a_property_a_length_none_or_not_there(tf: Any, pool: lp.Pool) -> None:
    import keras

    class Base(keras.utils.PyDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            return np.full((2, 3), index, np.float32), np.zeros((2, 1), np.float32)

    class Length(Base):
        def __len__(self) -> int:
            return 3

    class Property(Base):
        num_batches = property(lambda self: 3)

    class Endless(Base):
        num_batches = property(lambda self: None)

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for cls, number in ((Length, 3), (Property, 3), (Endless, None), (Base, None)):
        with lp.Loader.from_sequence(cls(), workers=pool) as loader:
            numbers = [int(x[0, 0]) for x, _ in itertools.islice(loader, 7)]
            assert numbers == list(range(number or 7))
            steps = model.fit(loader.as_dataset(), steps_per_epoch=None if number else 5, epochs=2, verbose=0)
            assert model.optimizer.iterations.numpy() == 2 * (number or 5) and len(steps.epoch) == 2
            model.optimizer.iterations.assign(0)


class Noting:
    """Writes down what is called, by whichever process; its batches need what `on_epoch_begin` sets."""

    def __init__(self, log: Path) -> None:
        self.log = str(log)

    def note(self, line: str) -> None:
        with open(self.log, "a") as file:
            file.write(line + "\n")

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        self.note(f"item {index}")
        return np.full((2, 1), index + 10 * self.epoch, np.float32)

    def on_epoch_begin(self) -> None:
        self.note("begin")
        self.epoch = getattr(self, "epoch", 0) + 1

    def on_epoch_end(self) -> None:
        self.note("end")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_spec_that_is_asked_for_first_may_fail_and_the_epoch_does_not(tmp_path: Path, workers: int) -> None:
    """Keras looks at two batches before `on_epoch_begin`, too, on TensorFlow."""
    with lp.Loader.from_sequence(Noting(tmp_path / "log"), workers=workers) as loader:
        with pytest.raises(AttributeError, match="epoch"):
            loader.as_dataset()
        assert [int(batch[0, 0]) for batch in loader] == [10, 11, 12]
        assert loader.as_dataset().element_spec.shape.as_list() == [None, 1]
