"""Sources with an index, how they are read, and messages for objects without one."""

from __future__ import annotations

import collections
import io
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from loaderpool import Loader
from loaderpool.errors import ArgumentError, LoaderpoolWarning, SourceError
from loaderpool.sources.recognise import as_source
from loaderpool.sources.stream import ReplicatedSource, StreamSource
from tests.support.samples import Point

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
LABELS = np.array([3, 1, 2, 0])


class Items:
    """Counts the calls of its methods."""

    def __init__(self, size: Any = 3) -> None:
        self.size = size
        self.lengths_asked = 0

    def __len__(self) -> int:
        self.lengths_asked += 1
        return self.size  # type: ignore[no-any-return]

    def __getitem__(self, index: int) -> str:
        return f"item {index}"


# ---- sequences ----


@pytest.mark.parametrize(
    "source",
    [
        ["a", "b"],
        range(5),
        ("a.png", "b.png"),
        (("a.png", 1), ("b.png", 2)),
        [ROWS, LABELS],
        ROWS,
        ROWS[:0:-1],
        LABELS,
    ],
    ids=[
        "list",
        "range",
        "tuple of paths",
        "tuple of pairs",
        "list of arrays",
        "array",
        "strided",
        "one axis",
    ],
)
def test_a_sequence_or_array_is_read_as_it_is(source: Any) -> None:
    assert as_source(source) is source


def test_the_length_of_an_object_is_asked_once() -> None:
    items = Items()
    source = as_source(items)
    assert [len(source), len(source)] == [3, 3]
    items.size = 5
    assert len(source) == 3
    assert items.lengths_asked == 1


# ---- columns ----


def test_a_nested_dict_of_columns_is_zipped_by_row() -> None:
    source = as_source({"in": (ROWS, Point(LABELS, ["a", "b", "c", "d"])), "out": LABELS})
    item = source[2]
    assert list(item) == ["in", "out"]
    assert np.array_equal(item["in"][0], ROWS[2])
    assert item["in"][1] == Point(2, "c") and type(item["in"][1]) is Point
    assert item["out"] == 2


def test_columns_may_be_lists_beside_arrays_or_alone() -> None:
    assert as_source((["a", "b"], LABELS[:2]))[1] == ("b", 1)
    assert as_source((["a", "b"], [7, 8]))[1] == ("b", 8)
    assert as_source({"path": ["a", "b"]})[0] == {"path": "a"}
    assert as_source(Point([1, 2], [3, 4]))[1] == Point(2, 4)
    assert as_source(collections.OrderedDict(a=[1, 2]))[1] == {"a": 2}


def test_other_arrays_than_numpys_are_columns() -> None:
    class Stored:  # like h5py's datasets and zarr's arrays
        shape, dtype = (4, 3), ROWS.dtype

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return ROWS[index] * 2

    row, label = as_source((Stored(), LABELS))[3]
    assert np.array_equal(row, ROWS[3] * 2) and label == 0


def test_columns_of_different_length_are_named() -> None:
    with pytest.raises(
        ArgumentError,
        match=r"dict of columns.*same length, but \['x'\] has 4, \['y'\]\[1\] has 3\. Shapes",
    ):
        as_source({"x": ROWS, "y": {1: LABELS[:3]}})
    with pytest.raises(
        ArgumentError, match=r"\[0\] has 4, \[1\] has 3; if each is one item, pass list\(source\)"
    ):
        as_source((ROWS, LABELS[:3]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"lr": 0.1, "x": ROWS},
            r"^source\['lr'\] is a float, not an array.*A dict is read as columns.*list\(source\.items\(\)\)",
        ),
        ({"x": "a.png"}, r"^source\['x'\] is a str.*A dict is read as columns"),
        ({"x": {1, 2}}, r"^source\['x'\] is a set"),
        ({"x": range(3)}, r"^source\['x'\] is a range, not an array or list"),
        ({"x": None}, r"source has None at \['x'\]"),
        ({"x": {}}, r"source has an empty dict at \['x'\]"),
    ],
)
def test_a_dict_of_other_things_is_refused_by_path(source: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        as_source(source)


# ---- pandas ----


@pytest.fixture
def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(
        {"path": ["a", "b", "c"], "label": [1, 2, 3], "weight": [0.5, 1.5, 2.5]}, index=[30, 10, 20]
    )


def test_a_data_frame_is_read_by_position(frame: Any) -> None:
    source = as_source(frame)
    assert len(source) == 3
    assert source[1] == {"path": "b", "label": 2, "weight": 1.5}
    assert as_source(frame[frame["label"] > 1])[0]["path"] == "b"
    assert as_source((frame, frame["weight"]))[2] == ({"path": "c", "label": 3, "weight": 2.5}, 2.5)


def test_values_of_a_data_frame_keep_their_types(frame: Any) -> None:
    row = as_source(frame)[1]
    assert [type(value) for value in row.values()] == [str, np.int64, np.float64]


def test_a_series_or_index_is_read_by_position(frame: Any) -> None:
    assert as_source(frame["label"])[1] == 2
    assert as_source(frame["label"].index)[0] == 30


def test_column_names_of_a_data_frame_may_be_numbers(frame: Any) -> None:
    assert as_source(frame.set_axis([7, 8, 9], axis=1))[1] == {7: "b", 8: 2, 9: 1.5}


def test_an_empty_data_frame_is_refused(frame: Any) -> None:
    with pytest.raises(ArgumentError, match="source is empty"):
        as_source(frame[:0])


def test_a_data_frame_with_repeated_column_names_is_refused(frame: Any) -> None:
    with pytest.raises(ArgumentError, match=r"several columns of one name.*'a'"):
        as_source(frame.set_axis(["a", "a", "b"], axis=1))


# ---- objects that cannot be read ----


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


class OnlyIterable:
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))


def _generate() -> Iterator[int]:
    yield 1


REFUSED = [
    (None, "is None: pass a sequence"),
    (5, r"is a number: did you mean range\(5\)\?"),
    (np.int64(5), r"did you mean range\(5\)\?"),
    (2.5, "is a float, which has no length"),
    ("images/", "is one str, 'images/': pass a list of paths"),
    (b"images/", "is one bytes, b'images/': pass a list of paths"),
    (pathlib.PurePosixPath("images"), "is one PurePosixPath, .*pass a list of paths"),
    (Items, "is a type, which has no length"),
    ({1, 2}, r"is a set, which cannot be indexed: pass sorted\(source\)"),
    (frozenset({1}), r"is a frozenset, which cannot be indexed"),
    ({1: 2}.keys(), r"is a dict_keys, .*list\(source\)"),
    ({1: 2}.values(), r"is a dict_values, .*list\(source\)"),
    (_generate, r"is a generator function: use Loader\.from_generator\(_generate, shards="),
    (Endless(), "is a Endless, which has no length"),
    (object(), "is a object, which has no length"),
]


@pytest.mark.parametrize(
    ("source", "message"), REFUSED, ids=[str(number) for number in range(len(REFUSED))]
)
def test_what_cannot_be_read_by_index_is_refused_with_advice(source: Any, message: str) -> None:
    with pytest.raises(SourceError, match=f"^source .*{message}"):
        as_source(source)


@pytest.mark.parametrize(
    "source", [_generate(), iter([1]), zip([1], [2], strict=True), OnlyIterable()]
)
def test_what_can_only_be_iterated_is_a_stream(source: Any) -> None:
    stream = as_source(source)
    assert isinstance(stream, StreamSource)
    assert stream.items is source
    assert stream.is_one_shot is not isinstance(source, OnlyIterable)


class OwnIterator(Items):
    """Has items by index, and is its own iterator."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError

    def __next__(self) -> str:
        raise AssertionError


def test_an_iterator_with_items_by_index_is_read_by_index() -> None:
    source = as_source(OwnIterator())
    assert [source[index] for index in range(len(source))] == ["item 0", "item 1", "item 2"]


REFUSALS = [TypeError, NotImplementedError, KeyError, io.UnsupportedOperation]


@pytest.mark.parametrize("error", REFUSALS)
def test_an_iterator_that_refuses_indices_is_a_stream(error: type[Exception]) -> None:
    class Refusing(OwnIterator):
        def __getitem__(self, index: int) -> str:
            raise error("only in order")

    class Unsized(OwnIterator):
        def __len__(self) -> int:
            raise error("unknown")

    for source in (Refusing(), Unsized()):
        assert isinstance(as_source(source), StreamSource)


def test_an_iterator_whose_first_item_fails_is_still_indexed() -> None:
    class Unmounted(OwnIterator):
        def __getitem__(self, index: int) -> str:
            raise OSError("not mounted yet")

    assert len(as_source(Unmounted())) == 3


def test_an_iterable_dataset_with_items_by_index_is_indexed() -> None:
    home = "torch.utils.data.dataset"
    kind = type("IterableDataset", (Items,), {"__module__": home, "__iter__": lambda self: self})
    source = as_source(type("StreamingDataset", (kind,), {})())
    assert [len(source), source[2]] == [3, "item 2"]


@pytest.mark.parametrize(
    ("home", "library"),
    [("torch.utils.data", "PyTorch"), ("datasets.iterable_dataset", "Hugging Face Datasets")],
)
def test_an_iterable_dataset_is_named_with_advice(home: str, library: str) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    methods = {"__iter__": never, "__getitem__": never}
    kind = type("IterableDataset", (), {"__module__": home, **methods})
    for source in (kind(), type("OfUser", (kind,), {})()):
        name = f"{type(source).__name__}, an IterableDataset of {library}"
        with pytest.raises(SourceError, match=rf"^source is a {name}, .*__iter__, copies=1\)"):
            as_source(source)
        with pytest.raises(ArgumentError, match=rf"got {name}: pass its method __iter__, with"):
            ReplicatedSource(source, None, None)


LONG = np.zeros((1000, 2)), np.zeros(1000)


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ([LONG[1], LONG[1]], {}),
        ([LONG[0], LONG[0]], {}),
        ([np.zeros((1000, 3072)), np.zeros((1000, 10))], {}),
        ([*LONG], {}),
        ([*LONG], {"fn": len}),
        ([*LONG], {"batch_fn": len, "batch_size": 2}),
        ([LONG[1]] * 4, {}),
    ],
)
def test_a_list_of_columns_is_warned_about(source: Any, settings: dict[str, Any]) -> None:
    count = len(source)
    told = (
        f"source is a list of {count} arrays of 1,000 rows, so it has {count} items. For rows, "
        "pass tuple(source), such as (X, y)"
    )
    with pytest.warns(LoaderpoolWarning, match=re.escape(told)) as warned:
        Loader(source, workers=0, **settings)
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ([np.zeros((64, 64))] * 3, {}),  # small images
        ([np.zeros((224, 224))] * 2, {}),
        ([np.zeros((224, 300, 3)), np.zeros((224, 200, 3))], {"pad": True}),
        ([np.zeros((224, 224, 3))] * 3, {}),  # images
        ([LONG[1]] * 5, {}),
        ([LONG[1]] * 3, {"fn": len}),  # recordings of one length
        ([LONG[1], np.zeros(900)], {}),
        ([LONG[1]] * 3, {"batch_size": None}),  # batches
        ([LONG[1]], {}),
        ([[0.0] * 1000] * 2, {}),
        ((LONG[0], LONG[1]), {}),
        (LONG[0], {}),
    ],
)
def test_a_list_of_samples_brings_no_warning(source: Any, settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loader(source, workers=0, **settings)


def data_loader(home: str, **attributes: Any) -> Any:
    never = {"__iter__": lambda self: pytest.fail("it was read"), "__len__": lambda self: 3}
    kind = type("DataLoader", (), {"__module__": home, **never, **attributes})
    return type("OfUser", (kind,), {})()


def default_collate(items: list[Any]) -> Any:
    return items


def own_collate(items: list[Any]) -> Any:
    return items


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        (
            data_loader(
                "torch.utils.data.dataloader", batch_size=8, collate_fn=staticmethod(own_collate)
            ),
            "batch_size=8, batch_fn=loader.collate_fn",
        ),
        (
            data_loader("torch.utils.data", batch_size=8, collate_fn=staticmethod(default_collate)),
            "batch_size=8",
        ),
        (
            data_loader("torchdata.stateful_dataloader", batch_size=None, collate_fn=None),
            "batch_size=n",
        ),
    ],
    ids=["own collate", "default collate", "batch sampler"],
)
def test_a_data_loader_is_refused_for_its_dataset(source: Any, arguments: str) -> None:
    with pytest.raises(SourceError) as raised:
        as_source(source)
    assert str(raised.value) == (
        f"source is a OfUser, whose items are batches: pass its dataset, "
        f"Loader(loader.dataset, {arguments})"
    )


@pytest.mark.parametrize(
    "source",
    [[], (), {}, range(0), np.zeros((0, 3)), Items(0), (ROWS[:0], LABELS[:0]), {"x": []}],
    ids=lambda source: repr(source).partition(" at 0x")[0],
)
def test_an_empty_source_is_refused(source: Any) -> None:
    with pytest.raises(ArgumentError, match="source is empty"):
        as_source(source)


def test_tensorflows_objects_are_refused_with_advice(tf: Any) -> None:
    refused = [
        (tf.data.Dataset.range(3), r"^source is a tf\.data\.Dataset.*as_numpy_iterator"),
        (tf.constant([1, 2]), r"^source is a TensorFlow EagerTensor: pass its \.numpy\(\)"),
        (tf.Variable([1, 2]), r"^source is a TensorFlow ResourceVariable: pass its \.numpy\(\)"),
        ((tf.constant([1, 2]), LABELS[:2]), r"^source\[0\] is a EagerTensor, not an array"),
        ({"x": tf.constant([1, 2])}, r"^source\['x'\] is a EagerTensor, not an array"),
    ]
    for source, message in refused:
        with pytest.raises(SourceError, match=message):
            as_source(source)


# ---- on the way to the workers ----
