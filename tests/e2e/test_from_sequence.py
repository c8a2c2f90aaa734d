"""An unchanged Keras `PyDataset` or `Sequence`, or a similar object: batches, hooks, and changes by
the hooks.
"""

from __future__ import annotations

import collections
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.child import run_child
from tests.support.processes import shared_bytes

pytestmark = pytest.mark.corner

BATCHES = 5


class Plain:
    """An object without Keras, with `__len__` and `__getitem__`."""

    def __init__(self, batches: int = BATCHES) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Any:
        x = np.full((2, 3), index, np.float32)
        return x, np.full(2, index, np.int64)


class Counting(Plain):
    """Writes a line to a file for each call of `__getitem__`, in any process."""

    def __init__(self, log: Path, batches: int = BATCHES) -> None:
        super().__init__(batches)
        self.log = str(log)

    def note(self, line: str) -> None:
        with open(
            self.log, "a"
        ) as file:  # a short append is one write, so lines of different processes do not mix
            file.write(line + "\n")

    def __getitem__(self, index: int) -> Any:
        self.note(f"item {index}")
        return super().__getitem__(index)


class Hooked(Counting):
    """Its batches show the state that the hooks have set."""

    def __init__(self, log: Path, batches: int = BATCHES) -> None:
        super().__init__(log, batches)
        self.epoch = 0
        self.order = np.arange(batches)
        self.begun = 0

    def __getitem__(self, index: int) -> Any:
        self.note(f"item {index} of {self.epoch}")
        late = getattr(self, "late", -1)
        return np.array([[self.epoch, self.order[index], self.begun, late]])

    def on_epoch_begin(self) -> None:
        self.note("begin")
        self.begun += 1

    def on_epoch_end(self) -> None:
        self.note("end")
        self.epoch += 1
        self.order[:] = self.order[::-1].copy()  # in place, so no new object shows the change
        if self.epoch == 1:
            self.late = 7
        else:
            self.__dict__.pop("late", None)


def read(log: Path) -> list[str]:
    return log.read_text().split("\n")[:-1]


def first_column(batches: Any) -> list[int]:
    return [int(np.asarray(x)[0, 0]) for x, *_ in batches]


@pytest.mark.parametrize("workers", [0, 3])
def test_batches_come_in_order_and_each_is_computed_once(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    with lp.Loader.from_sequence(Counting(log), workers=workers) as loader:
        assert len(loader) == BATCHES
        for _ in range(2):
            batches = list(loader)
            assert first_column(batches) == list(range(BATCHES))
            assert all(y.dtype == np.int64 and y.shape == (2,) for _, y in batches)
        epoch = loader.epoch
    # Batches of a third epoch may have been started. Those of the two epochs were made once.
    calls = read(log)
    assert epoch == 2
    assert all(2 <= calls.count(f"item {i}") <= 3 for i in range(BATCHES))


@pytest.mark.parametrize("workers", [0, 2])
def test_changes_made_by_hooks_are_seen_by_the_next_epoch(tmp_path: Path, workers: int) -> None:
    sequence = Hooked(tmp_path / "log")
    with lp.Loader.from_sequence(sequence, workers=workers) as loader:
        epochs = [[batch[0].tolist() for batch in loader] for _ in range(3)]
    straight, back = list(range(BATCHES)), list(range(BATCHES))[::-1]
    assert epochs == [
        [[0, i, 1, -1] for i in straight],
        [[1, i, 2, 7] for i in back],  # a new attribute
        [[2, i, 3, -1] for i in straight],  # the attribute was deleted
    ]
    assert (sequence.epoch, sequence.begun) == (3, 3)  # the user's own object


@pytest.mark.parametrize("workers", [0, 2])
def test_on_epoch_begin_comes_before_any_index_of_its_epoch(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    with lp.Loader.from_sequence(Hooked(log), workers=workers) as loader:
        assert loader.element_spec.shape == (None, 4)  # this makes a batch
        assert read(log) == ["item 0 of 0"]  # no hook was called for it
        for _ in range(2):
            list(loader)
    lines = read(log)[1:]
    for epoch in range(2):
        part, lines = lines[: BATCHES + 2], lines[BATCHES + 2 :]
        assert part[0] == "begin"
        assert sorted(part[1:-1]) == [f"item {i} of {epoch}" for i in range(BATCHES)]
        assert part[-1] == "end"
    assert not lines


@pytest.mark.parametrize("workers", [0, 2])
def test_an_abandoned_epoch_has_no_end(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "log"
    sequence = Hooked(log)
    with lp.Loader.from_sequence(sequence, workers=workers) as loader:
        for _ in zip(range(BATCHES - 1), loader, strict=False):
            pass
        assert sequence.epoch == 0
        assert [batch[0, 0] for batch in loader] == [0] * BATCHES
        assert sequence.epoch == 1
        assert sequence.begun == 2
    assert read(log).count("end") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_nobody_asked_past_its_last_batch_ends_before_the_next_begins(
    tmp_path: Path, workers: int
) -> None:
    log = tmp_path / "log"
    with lp.Loader.from_sequence(Hooked(log), workers=workers) as loader:
        first = list(itertools.islice(loader, BATCHES))
        assert "end" not in read(log)
        second = [batch[0, 0] for batch in itertools.islice(loader, BATCHES)]
        assert [batch[0, 0] for batch in first] == [0] * BATCHES
        assert second == [1] * BATCHES
        assert [line for line in read(log) if "item" not in line] == ["begin", "end", "begin"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_hooks_run_for_each_epoch_of_one_stream_through_tf_data(
    tf: Any, tmp_path: Path, prefetch: int
) -> None:
    log = tmp_path / "log"
    with lp.Loader.from_sequence(Hooked(log), workers=2) as loader:
        seen = [
            batch.numpy()[0, :2].tolist()
            for batch in loader.as_dataset(epochs=3, prefetch=prefetch)
        ]
    straight = list(range(BATCHES))
    assert seen == [[0, i] for i in straight] + [[1, i] for i in straight[::-1]] + [
        [2, i] for i in straight
    ]
    assert [line for line in read(log) if "item" not in line] == ["begin", "end"] * 3


def test_the_next_epoch_waits_for_a_hook_that_another_thread_still_runs(
    tf: Any, tmp_path: Path
) -> None:
    import time

    class Slow(Hooked):
        def on_epoch_end(self) -> None:
            time.sleep(0.3)  # on tf.data's prefetching thread, when the loop has all its batches
            super().on_epoch_end()

    with lp.Loader.from_sequence(Slow(tmp_path / "log"), workers=2) as loader:
        dataset = loader.as_dataset()
        epochs = []
        for _ in range(3):
            iterator = iter(dataset)  # like fit, take all batches, and never request the end
            epochs.append([int(next(iterator)[0, 0]) for _ in range(BATCHES)])
        del iterator
    assert epochs == [[0] * BATCHES, [1] * BATCHES, [2] * BATCHES]


def test_what_hooks_change_does_not_pile_up_in_shared_memory() -> None:
    from tests.support.batches import (
        supervisor_of,
    )  # otherwise this module would be pickled by value if TensorFlow is loaded

    class Large(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.data = np.zeros(100_000)

        def on_epoch_end(self) -> None:
            self.data = self.data + 1

        def __getitem__(self, index: int) -> Any:
            return self.data[:2]

    with lp.Loader.from_sequence(Large(), workers=1) as loader:
        taken = []
        for epoch in range(5):
            batches = iter(loader)
            assert next(batches).tolist() == [epoch] * 2
            taken.append(shared_bytes(supervisor_of(loader)))
            assert len(list(batches)) == BATCHES - 1
    # Only the latest change is kept for another supervisor.
    assert max(taken[1:]) - min(taken[1:]) < 100_000 * 8
    assert taken[1] - taken[0] < 2 * 100_000 * 8


def test_an_error_in_a_hook_reaches_the_consumer_and_the_next_pass_is_whole(tmp_path: Path) -> None:
    class Failing(Counting):
        fails, more = True, 0

        def on_epoch_end(self) -> None:
            self.more += 100  # this change came before the failure, and is sent
            if self.fails:
                raise KeyError("hook")

        def __getitem__(self, index: int) -> Any:
            return np.full((2, 3), index + self.more), np.zeros(2)

    sequence = Failing(tmp_path / "log")
    with lp.Loader.from_sequence(sequence, workers=2) as loader:
        with pytest.raises(KeyError, match="hook"):
            list(loader)
        assert isinstance(loader.last_error, KeyError)
        sequence.fails = False
        assert first_column(loader) == list(range(100, 100 + BATCHES))


def test_a_hook_that_changes_the_number_of_batches_is_an_error_that_says_so() -> None:
    class Shrinking(Plain):
        def on_epoch_end(self) -> None:
            self.batches -= 1

    loader = lp.Loader.from_sequence(Shrinking(), workers=1)
    with loader, pytest.raises(lp.LoaderpoolError, match="from 5 to 4"):
        list(loader)


def test_hooks_may_set_what_cannot_travel_only_if_it_is_left_out_of_the_pickle() -> None:
    class Opens(Plain):
        handle = None

        def __getstate__(self) -> dict[str, Any]:
            return {name: value for name, value in vars(self).items() if name != "handle"}

        def on_epoch_end(self) -> None:
            self.handle = (i for i in range(3))

    class Carries(Plain):
        def on_epoch_end(self) -> None:
            self.carried = (i for i in range(3))

    first = Opens()
    first.on_epoch_end()
    with lp.Loader.from_sequence(first, workers=1) as loader:
        assert first_column(loader) == first_column(loader)
    named = r"workers: source.* → attribute \.carried of \S*Carries, of type generator"
    with lp.Loader.from_sequence(Carries(), workers=1) as loader:
        assert first_column(loader) == list(range(BATCHES))
        with pytest.raises(lp.UnpicklableError, match=named):
            list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_hooks_may_change_the_items_of_a_list(workers: int) -> None:
    class Batches(list):  # type: ignore[type-arg]
        def on_epoch_end(self) -> None:
            self.reverse()

    class UserBatches(collections.UserList):  # type: ignore[type-arg]
        def on_epoch_end(self) -> None:
            self.reverse()

    batches = [np.array([[0]]), np.array([[1]])]
    for kind in (Batches, UserBatches):
        with lp.Loader.from_sequence(kind(batches), workers=workers) as loader:
            assert [int(batch[0, 0]) for _ in range(3) for batch in loader] == [0, 1, 1, 0, 0, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_hooks_may_change_slots(workers: int) -> None:
    class Slotted:
        __slots__ = ("epoch",)

        def __init__(self) -> None:
            self.epoch = 0

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return np.array([self.epoch])

        def on_epoch_end(self) -> None:
            self.epoch += 1

    with lp.Loader.from_sequence(Slotted(), workers=workers) as loader:
        assert [int(batch[0]) for _ in range(3) for batch in loader] == [0, 0, 1, 1, 2, 2]


def test_hooks_may_change_class_attributes() -> None:
    class Staged(Plain):
        stage = 0

        def __getitem__(self, index: int) -> Any:
            return np.array([self.stage])

        def on_epoch_end(self) -> None:
            type(self).stage += 1

    with lp.Loader.from_sequence(Staged(2), workers=2) as loader:
        assert [int(batch[0]) for _ in range(3) for batch in loader] == [0, 0, 1, 1, 2, 2]


def test_a_changed_object_that_cannot_be_unpickled_in_the_pool_is_an_error_and_not_the_pools_end() -> (
    None
):
    class Breaking(Plain):
        def on_epoch_end(self) -> None:
            self.part = _OnlyHere()

    with lp.Pool(1) as pool, lp.Loader.from_sequence(Breaking(), workers=pool) as loader:
        list(loader)
        with pytest.raises(lp.SetupError, match="nowhere but here"):
            list(loader)
        with lp.Loader.from_sequence(Plain(), workers=pool) as other:
            assert first_column(other) == list(range(BATCHES))


class _OnlyHere:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("nowhere but here")


def test_lists_of_arrays_are_structure_and_lists_of_batches_sequences() -> None:
    batches = [np.full((2, 2), i) for i in range(4)]
    for source in (batches, tuple(batches), np.stack(batches)):
        with lp.Loader.from_sequence(source, workers=0) as loader:
            assert [int(batch[0, 0]) for batch in loader] == [0, 1, 2, 3]
    with lp.Loader.from_sequence([[[x, x + 1], [0, 0]] for x in batches], workers=1) as loader:
        (first, second), labels = next(iter(loader))
    assert np.array_equal(second, first + 1)
    assert labels.tolist() == [0, 0]


class Flow(Plain):
    """Looks like a result of Keras' ImageDataGenerator."""

    def _set_index_array(self) -> None: ...


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: lp.Loader.from_sequence(Plain), TypeError, "instance"),
        (lambda: lp.Loader.from_sequence(object()), TypeError, "__getitem__"),
        (lambda: lp.Loader.from_sequence("abc"), ValueError, "got 'abc'"),
        (lambda: lp.Loader.from_sequence(Plain(), batch_size=4), ValueError, "batch_size"),
        (lambda: lp.Loader.from_sequence(Plain(), fn=len), ValueError, "fn"),
        (
            lambda: lp.Loader.from_sequence(Flow()),
            ValueError,
            "does not take what ImageDataGenerator returns",
        ),
        (lambda: lp.Loader.from_sequence(Plain(0)), ValueError, "empty"),
    ],
)
def test_wrong_arguments_fail_in_the_callers_line(
    make: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(lp.LoaderpoolError, match=text) as caught:
        make()
    assert isinstance(caught.value, error)


# ---- Keras ----


def test_a_sequence_defined_in_a_script_trains_without_a_main_guard(tf: Any) -> None:
    run_child(
        """
        import sys
        import keras, numpy as np
        import loaderpool as lp

        class Batches(keras.utils.PyDataset):
            def __init__(self):
                super().__init__(workers=2, use_multiprocessing=True)
                self.x = np.arange(24, dtype=np.float32).reshape(6, 4, 1)
            def __len__(self):
                return 6
            def __getitem__(self, index):
                assert "tensorflow" not in sys.modules
                return self.x[index], 3 * self.x[index], np.ones(4, np.float32)
            def on_epoch_end(self):
                np.random.shuffle(self.x)

        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
        loader = lp.Loader.from_sequence(Batches())
        history = model.fit(loader.as_dataset(), epochs=3, verbose=0)
        assert len(history.history["loss"]) == 3
        assert loader.epoch == 3
        """,
        imported="tensorflow",
    ).check()


def test_the_number_of_workers_is_the_objects_own_where_it_says_one(tf: Any) -> None:
    import keras

    class OfKeras(Plain, keras.utils.PyDataset):  # type: ignore[misc]
        def __init__(self, **settings: Any) -> None:
            keras.utils.PyDataset.__init__(self, **settings)
            Plain.__init__(self)

    for own, given, expected in ((0, {}, 0), (3, {}, 3), (3, {"workers": 1}, 1)):
        with lp.Loader.from_sequence(OfKeras(workers=own), **given) as loader:
            assert loader.workers == expected
    with lp.Loader.from_sequence(OfKeras()) as loader, lp.Loader(range(4), batch_size=2) as other:
        assert loader.workers == other.workers  # Keras' own default, 1, counts as unset


class OfTensors(Plain):
    def __init__(self, rows: Any) -> None:
        super().__init__(4)
        self.rows = rows

    def __getitem__(self, index: int) -> Any:
        return self.rows[4 * index : 4 * index + 4]


def test_rows_of_tensorflow_come_as_arrays(tf: Any) -> None:
    """Workers need TensorFlow's runtime for them, so they are not forked."""
    rows = np.arange(64, dtype=np.float32).reshape(16, 4)
    with lp.Pool(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", lp.LoaderpoolWarning)
        for workers in (0, pool):
            with lp.Loader.from_sequence(OfTensors(tf.constant(rows)), workers=workers) as loader:
                for batches in (loader, loader.as_dataset()):
                    assert np.array_equal(
                        np.concatenate([np.asarray(batch) for batch in batches]), rows
                    )
                start = loader.statistics().workers_start
    assert start == "exec"


# ---- batches of varied shape ----


class Varied(Counting):
    """Sequences of another length in each batch. Its hook prevents read-ahead of the next epoch."""

    lengths = (20, 31, 7, 31, 50)

    def on_epoch_end(self) -> None:
        pass

    def __getitem__(self, index: int) -> Any:
        self.note(f"item {index}")
        return np.full(
            (8 if index < 4 else 5, self.lengths[index], 3), index, np.float32
        ), np.zeros((8, 1), np.float32)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_may_be_of_any_length_and_the_first_one_tells_the_spec(
    tmp_path: Path, workers: int
) -> None:
    with lp.Loader.from_sequence(Varied(tmp_path / "log"), workers=workers) as loader:
        assert [each.shape for each in loader.element_spec] == [(None, 20, 3), (None, 1)]
        batches = [(batch[0].shape, int(batch[0][0, 0, 0])) for batch in loader]
    assert batches == [
        ((8 if i < 4 else 5, length, 3), i) for i, length in enumerate(Varied.lengths)
    ]
    assert sorted(read(tmp_path / "log")) == [f"item {i}" for i in range(BATCHES)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_names_the_batch_that_its_spec_does_not_allow_and_the_cure(
    tf: Any, tmp_path: Path, workers: int
) -> None:
    class Late(Varied):
        lengths = (20, 20, 7, 20, 20)

    with lp.Loader.from_sequence(Late(tmp_path / "log"), workers=workers) as loader:
        dataset = loader.as_dataset(epochs=1)
        assert dataset.element_spec[0].shape.as_list() == [None, 20, 3]
        with pytest.raises(
            Exception,
            match=r"component \[0\]: expected float32\[None, 20, 3\], got float32\[8, 7, 3\]",
        ):
            list(dataset)
        assert isinstance(loader.last_error, lp.SpecMismatchError)
    spec = lp.ArraySpec((None, None, 3), "f4"), lp.ArraySpec((None, 1), "f4")
    with lp.Loader.from_sequence(
        Varied(tmp_path / "log"), workers=workers, element_spec=spec
    ) as loader:
        assert len(list(loader.as_dataset(epochs=1))) == BATCHES


class Widths(Plain):
    """Batches of several widths, as in Keras' tests of its adapter."""

    shapes = ((16, 4), (16, 5), (2, 6))

    def __init__(self) -> None:
        super().__init__(3)

    def __getitem__(self, index: int) -> Any:
        rows, columns = self.shapes[index % 3]
        return np.full((rows, columns), index, np.float32), np.zeros((rows, 2), np.float32)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("settings", [{}, {"shuffle": True}, {"deterministic": False}], ids=str)
def test_a_dataset_has_open_axes_where_the_first_two_batches_differ(
    tf: Any, workers: int, settings: dict[str, Any]
) -> None:
    with lp.Loader.from_sequence(Widths(), workers=workers, **settings) as loader:
        dataset = loader.as_dataset(epochs=2)
        assert [spec.shape.as_list() for spec in dataset.element_spec] == [[None, None], [None, 2]]
        shapes = sorted(tuple(x.shape) for x, _ in dataset)
    assert shapes == sorted(Widths.shapes * 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_an_epoch_has_open_axes_too(tf: Any, workers: int) -> None:
    with lp.Loader.from_sequence(Widths(), workers=workers) as loader:
        batches = iter(loader)
        next(batches)
        loader.load_state_dict(batches.state_dict())
        dataset = loader.as_dataset(epochs=1)
        assert dataset.element_spec[0].shape.as_list() == [None, None]
        assert [tuple(x.shape) for x, _ in dataset] == [(16, 5), (2, 6)]


def test_an_endless_sequence_has_open_axes_too(tf: Any) -> None:
    class Endless(Widths):
        num_batches = None

    with lp.Loader.from_sequence(Endless(), workers=1) as loader:
        assert [tuple(x.shape) for x, _ in loader.as_dataset().take(4)] == [*Widths.shapes, (16, 4)]


def test_a_second_batch_that_fails_is_an_error_in_its_turn(tf: Any) -> None:
    class Failing(Widths):
        def __getitem__(self, index: int) -> Any:
            if index == 1:
                raise ValueError("no such file")
            return super().__getitem__(index)

    with lp.Loader.from_sequence(Failing(), workers=1) as loader:
        batches = iter(loader.as_dataset(epochs=1))
        assert next(batches)[0].shape == (16, 4)
        with pytest.raises(Exception, match="no such file"):
            next(batches)


def test_batches_of_a_batch_function_have_open_axes_too(tf: Any) -> None:
    def collate(items: list[int]) -> Any:
        return np.zeros((len(items), max(items)), np.float32)

    with lp.Loader(range(1, 9), batch_fn=collate, batch_size=4, workers=1) as loader:
        dataset = loader.as_dataset(epochs=1)
        assert dataset.element_spec.shape.as_list() == [None, None]
        assert [tuple(x.shape) for x in dataset] == [(4, 4), (4, 8)]
