"""Long lists of objects arrive item by item, equal to the original. Objects that must be pickled
normally are.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loaderpool.errors import UnpicklableError
from loaderpool.sources.packed import PackedList
from loaderpool.sources.recognise import as_source
from loaderpool.system import capacity
from loaderpool.transport.payload import packing
from loaderpool.transport.payload.pickler import LEAST_ITEMS, OUT_OF_BAND_BYTES
from loaderpool.transport.payload.ship import ship
from loaderpool.transport.pickling import receive
from tests.support.shipping_child import in_child

N = 3000


@pytest.fixture(autouse=True)
def _small_lists_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_LEAST_BYTES", 1 << 10)


@dataclasses.dataclass
class Sample:
    """A class of a module, so it is pickled by name."""

    path: str
    box: tuple[int, ...]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Plain:
    """ReaderMessage apart by identity alone."""

    def __init__(self, value: Any) -> None:
        self.value = value


def round_trip(source: Any, **others: Any) -> Any:
    shipment = ship({"source": as_source(source), **others})
    copies = [memoryview(bytearray(buffer)) for buffer in shipment.buffers]
    return receive(shipment.pickled, copies)["source"]


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        if one.dtype == object:
            return is_equal(one.tolist(), other.tolist())
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, (list, tuple)):
        return (
            type(one) is type(other) and len(one) == len(other) and all(map(is_equal, one, other))
        )
    return type(one) is type(other) and bool(one == other)


MAKERS: dict[str, Callable[[int], Any]] = {
    "dicts": lambda i: {"path": f"data/{i}.jpg", "label": i % 7, "weights": [i / 3, float("inf")]},
    "tuples": lambda i: (i, None, f"{i}", (i, b"\x00\xff")),
    "strings": lambda i: f"ä/{i}/\ud800",
    "ints": lambda i: i**9 - 5,
    "paths": lambda i: pathlib.PurePosixPath("a") / f"{i}.png",
    "dataclasses": lambda i: Sample(f"{i}", (i, i + 1)),
    "enums": lambda i: (Colour(i % 2 + 1), i, "x" * 9),
    "scalars": lambda i: (np.float32(i), np.datetime64(i, "s")),
    "small arrays": lambda i: np.arange(i % 50, dtype=np.int16).reshape(-1, 1),
    "builtins": lambda i: {
        "f": len,
        "g": "abc".upper,
        "module": np.linalg,
        "dtype": np.dtype("f4"),
        "i": i,
    },
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("container", [list, tuple])
def test_items_of_any_kind_arrive_equal_and_in_order(kind: str, container: Any) -> None:
    if (kind, container) == ("small arrays", tuple):
        return  # these are columns
    items = [MAKERS[kind](i) for i in range(N)]
    arrived = round_trip(container(items))
    assert isinstance(arrived, PackedList) and len(arrived) == N
    for index in (*range(100), N - 1):
        if kind == "builtins":
            assert arrived[index]["g"]() == "ABC" and arrived[index]["f"] is len
            assert arrived[index]["module"] is np.linalg and arrived[index]["i"] == index
        else:
            assert is_equal(arrived[index], items[index])
    for index in (-N - 1, N):
        with pytest.raises(IndexError):
            arrived[index]


def test_what_an_item_holds_twice_is_one_object_in_it() -> None:
    def item(i: int) -> Any:
        inner: list[Any] = [i]
        cyclic: dict[str, Any] = {"a": inner, "b": inner}
        cyclic["self"] = cyclic
        return cyclic

    arrived = round_trip([item(i) for i in range(N)])
    first, again = arrived[5], arrived[5]
    assert first["a"] is first["b"] and first["self"] is first
    first["a"].append("changed")
    assert again["a"] == [5]


def test_large_arrays_in_items_lie_in_shared_memory_and_one_that_many_hold_lies_there_once() -> (
    None
):
    large = np.arange(OUT_OF_BAND_BYTES, dtype=np.int32)
    fortran = np.asfortranarray(np.random.default_rng(0).normal(size=(200, 300)))
    fixed = np.ones(OUT_OF_BAND_BYTES, np.uint8)
    fixed.flags.writeable = False
    kinds: list[Any] = [large, fortran, fixed, None]
    shipment = ship({"source": [(i, kinds[i % 4]) for i in range(N)]})
    assert sum(buffer.nbytes for buffer in shipment.buffers) < 2 << 20
    memory = [memoryview(bytearray(buffer)) for buffer in shipment.buffers]
    arrived = receive(shipment.pickled, memory)["source"]
    assert isinstance(arrived, PackedList)
    for index in range(8):
        number, array = arrived[index]
        assert number == index
        if index % 4 != 3:
            assert (
                is_equal(array, kinds[index % 4])
                and array.flags.f_contiguous == kinds[index % 4].flags.f_contiguous
            )
            assert array.flags.writeable == (index % 4 != 2)
    assert np.shares_memory(arrived[0][1], arrived[4][1])


def test_columns_are_packed_each_by_itself() -> None:
    texts = [f"text {i}" * 3 for i in range(N)]
    objects = np.array([{"i": i, "x": "y"} for i in range(N)], object)
    numbers = np.arange(N)
    arrived = round_trip({"a": texts, "b": (objects, numbers)})
    assert [arrived[i] for i in (0, 9, N - 1)] == [
        {"a": texts[i], "b": (objects[i], numbers[i])} for i in (0, 9, N - 1)
    ]
    shipment = ship({"source": as_source({"a": texts, "b": (objects, numbers)})})
    assert shipment.packed_items == 2 * N


@pytest.mark.parametrize("kind", ["few", "few bytes", "list subclass", "two-dimensional", "range"])
def test_what_is_small_or_is_no_plain_list_stays_as_it_is(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(list):  # type: ignore[type-arg]
        pass

    if kind == "few bytes":
        monkeypatch.setattr(packing, "_LEAST_BYTES", 1 << 20)
    sources: dict[str, Any] = {
        "few": [{"i": i} for i in range(LEAST_ITEMS - 1)],
        "few bytes": [{"i": i} for i in range(N)],
        "list subclass": Mine({"i": i} for i in range(N)),
        "two-dimensional": np.full((N, 2), "text", object),
        "range": range(N),
    }
    source = sources[kind]
    shipment = ship({"source": as_source(source)})
    assert shipment.packed_items == 0
    arrived = receive(shipment.pickled, shipment.buffers)["source"]
    assert [is_equal(arrived[i], source[i]) for i in range(0, len(source), 97)].count(False) == 0


# -- objects that items share


def test_items_that_hold_one_large_thing_together_are_not_multiplied() -> None:
    dataset = Plain([f"row {i}" for i in range(1000)])
    shipment = ship({"source": [(dataset, i) for i in range(N)]})
    assert shipment.packed_items == 0 and len(shipment.pickled) < 100_000
    loaded = receive(shipment.pickled, shipment.buffers)["source"]
    assert loaded[0][0] is loaded[N - 1][0]


def test_a_list_that_its_items_refer_to_is_not_multiplied() -> None:
    items: list[Any] = []
    items += ({"all": items, "i": i} for i in range(N))
    loaded = round_trip(items)
    assert loaded[7]["all"] is loaded


def test_items_that_hold_things_in_groups_are_given_up_when_they_outgrow_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = [
        Plain("x" * 5000 + str(i)) for i in range(200)
    ]  # each value occurs once among the first items that are checked
    items = [(groups[i * 200 // 20_000], i) for i in range(20_000)]
    monkeypatch.setattr(capacity, "resident_bytes", lambda: 10 << 20)
    shipment = ship({"source": items})
    assert shipment.packed_items == 0 and len(shipment.pickled) < 3 << 20


def test_an_object_that_the_function_knows_too_stays_the_same_object() -> None:
    cameras = [Plain(i) for i in range(50)]
    names = {camera: f"camera {camera.value}" for camera in cameras}
    source = [{"camera": cameras[i % 50], "i": i} for i in range(N)]
    shipment = ship({"source": source, "fn": lambda item: names[item["camera"]]})
    loaded = receive(shipment.pickled, shipment.buffers)
    assert [loaded["fn"](loaded["source"][i]) for i in (0, 51)] == ["camera 0", "camera 1"]


def test_functions_of_the_items_own_are_not_torn_from_what_they_capture() -> None:
    def item(i: int) -> Any:
        data = [i]
        return {"data": data, "get": lambda: data}

    loaded = round_trip([item(i) for i in range(N)])
    assert loaded[3]["get"]() is loaded[3]["data"] and loaded[3]["data"] == [3]


def test_a_memmap_in_items_is_opened_once_and_not_at_each_reading(tmp_path: pathlib.Path) -> None:
    np.arange(N, dtype=np.int64).tofile(tmp_path / "data")
    whole = np.memmap(tmp_path / "data", np.int64, "r")
    loaded = round_trip([{"row": whole[i : i + 1], "i": i} for i in range(N)])
    assert type(loaded) is list and loaded[8]["row"].tolist() == [8]


# -- code


def test_classes_of_the_script_are_the_function_s_own() -> None:
    @dataclasses.dataclass
    class Item:
        i: int

    shipment = ship(
        {"source": [Item(i) for i in range(N)], "fn": lambda item: type(item) is Item and item.i}
    )
    assert shipment.packed_items == N and len(shipment.pickled) < 20 * N
    assert in_child(shipment, f"(fn(source[7]), fn(source[{N - 1}]))")[0] == (7, N - 1)


def test_modules_of_the_items_are_imported_with_the_payload_and_not_by_the_first_item(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "their_module.py").write_text(
        "class Thing:\n    def __init__(self, i): self.i = i\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import their_module  # type: ignore[import-not-found]

        shipment = ship({"source": [their_module.Thing(i) for i in range(N)]})
        assert shipment.packed_items == N
        del sys.modules["their_module"]
        loaded = receive(shipment.pickled, shipment.buffers)
        assert "their_module" in sys.modules
        assert loaded["source"][4].i == 4
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("their_module", None)


# -- errors


@pytest.mark.parametrize("at", [0, 1, 1234, N - 1])
def test_an_item_that_cannot_be_pickled_is_named_by_its_index(at: int) -> None:
    items: list[Any] = [{"i": i, "text": "text"} for i in range(N)]
    items[at]["lock"] = threading.Lock()
    with pytest.raises(
        UnpicklableError,
        match=rf"source → item {at} of the list → item 'lock' of the dict, of type",
    ):
        ship({"source": items, "fn": len})
    with pytest.raises(
        UnpicklableError, match=rf"source → .* → item {at} of the list → item 'lock' of the dict"
    ):
        ship({"source": as_source({"a": items, "b": np.arange(N)})})
