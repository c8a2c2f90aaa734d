"""Long lists and dicts that functions hold arrive packed where only elements are read, and else as they are."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import pathlib
import pickle
import random
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

from loaderpool.errors import UnpicklableError
from loaderpool.sources import as_source
from loaderpool.sources.packed_captured import PackedDict, PackedList
from loaderpool.transport.payload import captured, item_packing, references
from loaderpool.transport.payload.plain_data import shorter_form
from loaderpool.transport.payload.ship import Shipment, ship
from loaderpool.transport.payload.unship import unship

N = 3000


@pytest.fixture(autouse=True)
def _small_lists_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_packing, "_LEAST_BYTES", 1 << 10)
    monkeypatch.setattr(captured, "_MUCH_BYTES", 1 << 10)


def records() -> list[dict[str, Any]]:
    return [{"path": f"data/{i}.jpg", "label": i % 7, "box": [i, i / 3]} for i in range(N)]


def loaded(shipment: Shipment) -> dict[str, Any]:
    return unship(shipment.pickled, [memoryview(bytearray(buffer)) for buffer in shipment.buffers])


def variable(function: Any, name: str) -> Any:
    """What a function that has arrived holds under a name."""
    if name in function.__code__.co_freevars:
        return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
    return function.__globals__[name]


def ship_fn(fn: Any, **others: Any) -> Shipment:
    return ship({"fn": fn, "source": range(N), **others})


# -- what is packed


def test_a_closure_variable_that_is_read_by_index_is_packed_and_read_as_it_was() -> None:
    training_set = records()
    shipment = ship_fn(lambda i: training_set[i])
    (data,) = shipment.captured
    name = "fn → closure variable 'training_set' of function test_a_closure_variable"
    assert data.name.startswith(name) and data.length == N and not data.left_because
    fn = loaded(shipment)["fn"]
    assert type(variable(fn, "training_set")) is PackedList
    assert [fn(i) for i in (0, 17, -1, np.int64(5))] == [training_set[i] for i in (0, 17, -1, 5)]
    assert fn(slice(3, 9, 2)) == training_set[3:9:2]


TRAINING_SET: Any = []


def test_a_global_a_default_and_the_argument_of_a_partial_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    training_set = records()
    names: dict[str, Any] = {"__name__": "__main__", "TRAINING_SET": training_set}
    of_global = eval("lambda i: TRAINING_SET[i]", names)

    def of_default(i: int, data: Any = training_set) -> Any:
        return data[i]

    def of_partial(data: Any, i: int, *, others: Any) -> Any:
        return data[i], others[i]

    partial = functools.partial(of_partial, training_set, others=training_set)
    for fn in (of_global, of_default, partial):
        shipment = ship_fn(fn)
        assert [each.left_because for each in shipment.captured] == [""], shipment.captured
        arrived = loaded(shipment)["fn"]
        assert arrived(5) == fn(5)
        assert len(shipment.pickled) < 40_000


class Images:
    """Of a module, as most data sets are."""

    def __init__(self, count: int) -> None:
        self.samples: list[Any] = []
        self._find(count)

    def _find(self, count: int) -> None:
        self.samples.extend({"path": f"{i}.jpg", "label": i} for i in range(count))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self._read(index)

    def _read(self, index: int) -> Any:
        return self.samples[index]["label"]


class ShuffledImages(Images):
    def _read(self, index: int) -> Any:
        random.shuffle(self.samples)
        return self.samples[index]["label"]


class SlottedImages:
    __slots__ = ("labels", "samples")

    def __init__(self, count: int) -> None:
        self.samples = Images(count).samples
        self.labels = {each["path"]: each["label"] for each in self.samples}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.labels[self.samples[index]["path"]]


def test_an_attribute_of_a_data_set_is_packed_whatever_its_constructor_does_with_it() -> None:
    for kind in (Images, SlottedImages):
        data_set: Any = kind(N)
        shipment = ship({"source": as_source(data_set)})
        assert not shipment.captured  # no function: what a reader is sent
        shipment = ship({"source": as_source(data_set), "fn": None})
        assert {each.left_because for each in shipment.captured} == {""}
        assert shipment.captured[0].name.startswith("source → attribute .") and len(shipment.pickled) < 130_000
        source = loaded(shipment)["source"]
        assert type(source.items.samples) is PackedList
        assert type(data_set.samples) is list
        assert [source[i] for i in (0, 9, -1)] == [data_set[i] for i in (0, 9, -1)]
        assert len(source.items) == N
    shipment = ship_fn(Images(N).__getitem__)
    assert loaded(shipment)["fn"](8) == 8 and not shipment.captured[0].left_because


class ImagesThatSaySo(Images):
    def __getstate__(self) -> Any:
        return dict(self.__dict__)


def test_an_object_that_says_how_it_is_pickled_is_left_alone() -> None:
    shipment = ship({"source": as_source(ImagesThatSaySo(N)), "fn": None})
    assert "where its use is not looked into" in shipment.captured[0].left_because
    assert type(loaded(shipment)["source"].items.samples) is list


def test_functions_of_the_user_s_modules_are_looked_into(tmp_path: pathlib.Path) -> None:
    (tmp_path / "their_tools.py").write_text("def shuffled(images): return sorted(images.samples)\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import their_tools  # type: ignore[import-not-found]

        images = Images(N)
        fn = eval("lambda i: (images.samples[i], their_tools.shuffled)", {"images": images, "their_tools": their_tools})
        fn.__module__ = "__main__"
        assert ship_fn(fn).captured[0].left_because.startswith("shuffled (line 1)")
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("their_tools", None)


def test_a_name_that_is_looked_up_by_text_is_not_trusted() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "TRAINING_SET": records()}
    exec("def other(name): return globals()[name]\ndef fn(i): return TRAINING_SET[i], other('TRAINING_SET')", names)
    shipment = ship_fn(names["fn"])
    assert shipment.captured[0].left_because.startswith("other (line 1)")


def test_an_attribute_that_is_used_in_another_way_stays_as_it_is() -> None:
    shipment = ship({"source": as_source(ShuffledImages(N)), "fn": None})
    (data,) = shipment.captured
    assert data.left_because.startswith("_read (line ")
    assert type(loaded(shipment)["source"].items.samples) is list


def test_functions_that_share_a_list_share_the_packed_one() -> None:
    training_set = records()
    table = {"a": 1}

    def setup() -> None:
        table["b"] = len(training_set)

    shipment = ship_fn(lambda i: (training_set[i], table), setup=setup)
    assert len(shipment.captured) == 1
    payload = loaded(shipment)
    assert variable(payload["fn"], "training_set") is variable(payload["setup"], "training_set")
    payload["setup"]()
    assert payload["fn"](3) == (training_set[3], {"a": 1, "b": N})


def test_the_source_may_be_the_captured_list() -> None:
    training_set = records()
    shipment = ship({"fn": lambda item: training_set[item["label"]], "source": training_set})
    payload = loaded(shipment)
    assert shipment.packed_items == N and [each.left_because for each in shipment.captured] == [""]
    assert payload["fn"](payload["source"][9]) == training_set[2]


@pytest.mark.parametrize("kind", ["text", "numbers", "bytes", "tuples"])
def test_a_dict_is_found_by_key_as_it_was(kind: str) -> None:
    make: Any = {
        "text": lambda i: f"key {i}", "numbers": lambda i: i * 7 - 50, "bytes": lambda i: b"%d" % i,
        "tuples": lambda i: (i, f"{i}"),
    }[kind]  # fmt: skip
    table = {make(i): {"i": i, "text": f"{i}" * 3} for i in range(N)}
    shipment = ship_fn(
        lambda key: (table[key], table.get(key), table.get(None, 5), key in table, None in table, len(table))
    )
    assert [each.left_because for each in shipment.captured] == [""]
    fn = loaded(shipment)["fn"]
    assert type(variable(fn, "table")) is PackedDict
    for i in (0, 1, 77, N - 1):
        assert fn(make(i)) == (table[make(i)], table[make(i)], 5, True, False, N)
    with pytest.raises(KeyError, match="nothing"):
        fn("nothing")
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        fn([])
    if kind == "numbers":
        assert fn(6.0)[0] == fn(np.int64(6))[0] == table[6]


def test_text_paths_and_numbers_are_read_without_being_held() -> None:
    paths = [pathlib.PurePosixPath("data") / f"{i}.jpg" for i in range(N)]
    times = [np.datetime64(i, "s") for i in range(N)]
    nested = [(i, (f"{i}", None)) for i in range(N)]
    shipment = ship_fn(lambda i: (paths[i], times[i], nested[i]))
    assert len(shipment.captured) == 3 and not any(each.left_because for each in shipment.captured)
    fn = loaded(shipment)["fn"]
    assert fn(7) == (paths[7], times[7], nested[7])


def test_errors_of_a_wrong_index_are_those_of_a_list() -> None:
    training_set, pairs = records(), tuple((i, "x" * 9) for i in range(N))
    fn = loaded(ship_fn(lambda which, i: training_set[i] if which == "list" else pairs[i]))["fn"]
    for kind, original in (("list", training_set), ("tuple", pairs)):
        for index, error in ((N, IndexError), (-N - 1, IndexError), ("a", TypeError), (1.0, TypeError)):
            with pytest.raises(error) as expected:
                original[index]  # type: ignore[index, call-overload]
            with pytest.raises(error) as found:
                fn(kind, index)
            assert str(found.value) == str(expected.value)


def test_sent_anywhere_else_it_is_a_list_or_a_dict_again() -> None:
    training_set, table = records(), dict(enumerate(records()))
    payload = loaded(ship_fn(lambda i: (training_set[i], table[i])))
    packed = variable(payload["fn"], "training_set")
    assert pickle.loads(pickle.dumps(packed)) == training_set == copy.deepcopy(packed)
    assert packed == training_set and list(packed) == training_set and packed != training_set[1:]
    assert pickle.loads(pickle.dumps(variable(payload["fn"], "table"))) == table


# -- elements are what they would be in a list


def packed_records() -> Any:
    training_set = records()
    return variable(loaded(ship_fn(lambda i: training_set[i]))["fn"], "training_set")


def test_what_is_written_into_an_element_stays() -> None:
    packed = packed_records()
    packed[5]["image"] = "decoded"
    packed[6]["box"].append("nested")
    packed[7]["lock"] = threading.Lock()
    for _ in range(2):
        for i in range(10, N):
            packed[i]["label"]
    assert packed[5]["image"] == "decoded" and packed[6]["box"] == [6, 2.0, "nested"] and "lock" in packed[7]


def test_an_element_is_one_object_for_as_long_as_it_is_referred_to() -> None:
    packed = packed_records()
    kept = packed[5]
    all_kept = [packed[i] for i in range(N)]
    assert kept is packed[5] and all(packed[i] is each for i, each in enumerate(all_kept))
    kept["late"] = True
    del kept, all_kept
    gc.collect()
    for i in range(6, N):
        packed[i]["label"]
    assert packed[5]["late"]


def test_elements_that_were_only_read_are_let_go() -> None:
    packed = packed_records()
    several = [packed[i] for i in range(N)]
    assert len(packed._elements._held) == N
    del several
    for i in (*range(N), *range(N)):
        packed[i]["box"][0]
    assert len(packed._elements._held) < N / 2 and not packed._elements._changed


def test_elements_with_sets_and_paths_are_let_go_too_and_kept_when_changed() -> None:
    rows = [{"tags": {f"{i}", f"{i + 1}", "all"}, "path": pathlib.PurePosixPath(f"{i}")} for i in range(N)]
    packed = variable(loaded(ship_fn(lambda i: rows[i]))["fn"], "rows")
    packed[3]["tags"].add("mine")
    for i in (*range(4, N), *range(4, N)):
        assert packed[i] == rows[i]
    assert list(packed._elements._changed) == [3] and "mine" in packed[3]["tags"]


def test_threads_that_read_the_same_element_get_one_object() -> None:
    packed = packed_records()
    found: list[list[Any]] = [[] for _ in range(4)]

    def read(into: list[Any]) -> None:
        into += (packed[i % 700] for i in range(2000))

    threads = [threading.Thread(target=read, args=(each,)) for each in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len({id(each[at]) for each in found}) == 1 for at in range(2000))


# -- what stays as it is, and what is said of it


def left(fn: Any, name: str = "training_set", **others: Any) -> str:
    """Why the one captured list is not packed; it arrives as it is."""
    shipment = ship_fn(fn, **others)
    (data,) = shipment.captured
    assert data.left_because and data.cure
    assert f"{name!r}" in data.name or f".{name}" in data.name
    return data.left_because


def test_a_list_that_is_passed_on_iterated_or_written_to_stays_a_list() -> None:
    training_set = records()
    reason = left(lambda i: random.choice(training_set))
    line = test_a_list_that_is_passed_on_iterated_or_written_to_stays_a_list.__code__.co_firstlineno + 2
    assert reason == f"<lambda> (line {line}) does not read it element by element, by its index"
    assert "<lambda>" in left(lambda i: sum(each["label"] for each in training_set))
    assert "<lambda>" in left(lambda i: training_set)
    assert "<lambda>" in left(lambda i: (eval("i"), training_set[i]))

    def setup() -> None:
        training_set.append({})

    assert left(lambda i: training_set[i], setup=setup).startswith("setup (line ")
    fn = loaded(ship_fn(lambda i: training_set[i], setup=setup))["fn"]
    assert type(variable(fn, "training_set")) is list


def test_what_is_reached_in_another_way_as_well_stays_as_it_is() -> None:
    training_set = records()
    held = {"train": training_set}
    assert "item 'train' of the dict" in left(lambda i: (training_set[i], held["train"][i]))
    assert "item 0 of the list" in left((lambda both: lambda i: both[0][i])([training_set]), "both")


class Mine(list):  # type: ignore[type-arg]
    pass


def test_subclasses_and_other_containers_stay_what_they_are() -> None:
    for training_set in (Mine(records()), collections.deque(records())):
        assert f"it is a {type(training_set).__name__}, not a plain list" in left(lambda i: training_set[i])  # noqa: B023
    training_set = collections.OrderedDict(enumerate(records()))
    assert "it is a OrderedDict, not" in left(lambda i: training_set[i])


class Thing:
    def __init__(self, i: int) -> None:
        self.i, self.text = i, f"thing {i}"


def test_elements_that_are_no_plain_data_stay_as_they_are() -> None:
    training_set: list[Any] = [Thing(i) for i in range(N)]
    assert left(lambda i: training_set[i]) == f"its elements hold a {__name__}.Thing"
    training_set = [{"i": i, "x": np.arange(9)} for i in range(N)]
    assert left(lambda i: training_set[i]) == "its elements hold a numpy.ndarray"
    shared = ["held", "together"]
    training_set = [{"i": i, "shared": shared, "text": f"{i}" * 4} for i in range(N)]
    assert left(lambda i: training_set[i]) == "its elements hold the same list, dict or set several times"
    training_set = records() * 2
    assert left(lambda i: training_set[i]) == "its elements hold the same list, dict or set several times"


def test_elements_that_another_variable_holds_as_well_stay_the_same_objects() -> None:
    training_set = records()
    first, by_path = training_set[0], {each["path"]: each for each in training_set}
    shipment = ship_fn(lambda i: (training_set[i], by_path[f"data/{i}.jpg"]))
    assert sorted(each.left_because.partition(" of ")[0] for each in shipment.captured) == [
        "closure variable 'by_path'",
        "closure variable 'training_set'",
    ]
    assert all(each.left_because.endswith(" holds some of its elements, too") for each in shipment.captured)
    one, other = loaded(shipment)["fn"](5)
    assert one is other
    assert left(lambda i: (training_set[i], first)) == "another variable holds some of its elements, too"
    held = [[each] for each in training_set]
    reasons = {each.left_because[:30] for each in ship_fn(lambda i: (training_set[i], list(held))).captured}
    assert "closure variable 'held' of func"[:30] in reasons
    paths = {each["path"]: i for i, each in enumerate(training_set)}  # text is no one's own
    shipment = ship_fn(lambda i: (training_set[i], paths[f"data/{i}.jpg"]))
    assert [each.left_because for each in shipment.captured] == ["", ""]


@pytest.mark.slow
def test_tuples_that_hold_each_other_many_times_are_not_followed_each_time() -> None:
    def nested(i: int) -> Any:
        found: Any = (i, f"text {i}")
        for _ in range(40):
            found = (found, found)
        return found

    training_set, others = [nested(i) for i in range(N)], [[nested(i)] for i in range(N)]
    assert left(lambda i: training_set[i]) == "its elements hold large things together"
    shipment = ship_fn(lambda i: (others.index(i), [r for r in training_set]))  # noqa: C416
    assert all(each.left_because for each in shipment.captured)


class Config(NamedTuple):
    held: Any


@pytest.mark.parametrize(
    "hold",
    [
        lambda held: collections.OrderedDict(a=held),
        lambda held: collections.defaultdict(int, a=held),
        Config,
        lambda held: [held] * N,
        lambda held: np.array([held, None], object),
        lambda held: iter([held]),
    ],
)
def test_what_the_search_does_not_look_into_is_noticed_where_it_is_pickled(hold: Any) -> None:
    training_set = records()
    count: Any = lambda: sorted(training_set, key=str)  # noqa: E731
    function, whole, element = hold(count), hold(training_set), hold(training_set[0])
    for fn in (
        lambda i: (training_set[i], function),
        lambda i: (training_set[i], whole),
        lambda i: (training_set[i], element),
    ):
        reasons = [each.left_because for each in ship_fn(fn).captured if "'training_set'" in each.name]
        assert reasons and all(reasons), reasons
        assert type(variable(loaded(ship_fn(fn))["fn"], "training_set")) is list


def test_what_the_classes_of_items_do_with_a_list_counts() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "TRAINING_SET": records()}
    text = """
class Kind(type):
    def __len__(cls):
        return len(TRAINING_SET + [])

class Item(metaclass=Kind):
    def load(self):
        return sorted(TRAINING_SET, key=str)

    def of(self, holder):
        return list(holder.training_set)

class Holder:
    def __init__(self):
        self.training_set = TRAINING_SET

item, holder = Item(), Holder()
items = [item] * 3000
functions = [lambda: holder.training_set.copy() for _ in range(2000)]
"""
    exec(text, names)
    reads = eval("lambda i: (TRAINING_SET[i], item)", names)
    of_items = eval("lambda item: TRAINING_SET[0]", names)
    of_attribute = eval("lambda i: (holder.training_set[i], functions)", names)
    for shipment in (ship_fn(reads), ship_fn(of_items, source=names["items"]), ship_fn(of_attribute)):
        assert shipment.captured and all(each.left_because for each in shipment.captured), shipment.captured


def test_a_constructor_counts_where_its_class_is_named() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "records": records()}
    text = """
import dataclasses

@dataclasses.dataclass
class Config:
    samples: list

class Index:
    def __init__(self, config):
        self.numbers = config.samples.copy()

config = Config(records)
"""
    exec(text, names)
    reads, constructs = eval("lambda i: config.samples[i], lambda i: (config.samples[i], Index(config))", names)
    assert [each.left_because for each in ship_fn(reads).captured] == [""]
    assert "__init__ (line" in left(constructs, "samples")


def test_what_has_arrived_packed_shows_itself_as_what_it_was() -> None:
    training_set, lines = records(), {f"key {i}": [i] for i in range(N)}
    fn = loaded(ship_fn(lambda i: (training_set[i], lines[f"key {i}"])))["fn"]
    assert type(variable(fn, "training_set")) is PackedList and type(variable(fn, "lines")) is PackedDict
    assert repr(variable(fn, "training_set")) == repr(training_set) and repr(variable(fn, "lines")) == repr(lines)


def test_keys_that_are_found_by_identity_stay_objects() -> None:
    training_set = {Thing(i): f"value {i}" for i in range(N)}
    assert left(lambda key: training_set[key]).startswith("its keys are not all text")
    numbers = {i / 3: f"value {i}" for i in range(N)}
    assert left(lambda key: numbers[key], "numbers").startswith("its keys are not all text")


def test_little_is_neither_packed_nor_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    training_set = records()
    monkeypatch.setattr(item_packing, "_LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(captured, "_MUCH_BYTES", 8 << 20)
    shipment = ship_fn(lambda i: (training_set[i], random.choice(training_set)))
    assert not shipment.captured and type(variable(loaded(shipment)["fn"], "training_set")) is list
    few = records()[: item_packing.LEAST_ITEMS - 1]
    assert not ship_fn(lambda i: few[i]).captured


def test_a_captured_list_of_ints_is_to_be_a_range_or_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = list(range(5, 5 + 3 * N, 3))
    (data,) = ship_fn(lambda i: numbers.index(i)).captured
    assert data.cure == f"make it range(5, {5 + 3 * N}, 3), which all workers share"
    assert shorter_form([0, 1, 2], "x") == "range(3)" and shorter_form([3, 4], "x") == "range(3, 5)"
    assert shorter_form([3, 2, 1], "x") == "range(3, 0, -1)" and shorter_form([3, 3, 4], "x") == "np.array(x)"
    monkeypatch.setattr(captured, "_MANY_INTS", N)
    (hint,) = ship({"source": list(range(N)), "fn": None}).hints
    assert hint == "source is a list of 3,000 ints, which are pickled one by one: make it range(3000)"
    assert not ship({"source": [*range(N - 1), 0.5], "fn": None}).hints
    shipment = ship_fn(lambda i: numbers[i])
    assert [each.left_because for each in shipment.captured] == [""]
    assert shipment.hints[0].startswith("fn → closure variable 'numbers' of")
    assert loaded(shipment)["fn"](-1) == numbers[-1]


def test_what_cannot_be_pickled_in_a_captured_list_is_named_as_ever() -> None:
    training_set: list[Any] = records()
    training_set[17]["lock"] = threading.Lock()
    with pytest.raises(UnpicklableError, match=r"variable 'training_set' .* → item 17 of the list → item 'lock'"):
        ship_fn(lambda i: training_set[i])


@pytest.mark.slow
def test_what_is_nested_too_deep_is_named_as_ever() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for at in (0, 99):
        training_set: list[Any] = [[f"text {i}"] for i in range(N)]
        training_set[at] = deep
        with pytest.raises(UnpicklableError, match=r"variable 'training_set' .*nested too deeply"):
            ship_fn(lambda i: training_set[i])  # noqa: B023


class Proxy:
    """Raises what proxies raise outside of their context."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no context")

    def __reduce__(self) -> Any:
        return Proxy, ()


def test_objects_that_must_not_be_asked_are_left_alone() -> None:
    training_set, proxy = records(), Proxy()
    shipment = ship_fn(lambda i: (training_set[i], proxy))
    assert [each.left_because for each in shipment.captured] == [""]


def test_a_large_graph_of_objects_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "_MOST_OBJECTS", 100)
    training_set, many = records(), [Thing(i) for i in range(200)]
    shipment = ship_fn(lambda i: (training_set[i], many))
    assert not shipment.captured and type(variable(loaded(shipment)["fn"], "training_set")) is list


def test_a_progress_bar_is_named_with_its_variable() -> None:
    import tqdm

    progress = tqdm.tqdm(total=N, disable=True)

    def fn(i: int) -> int:
        progress.update()
        return i

    message = r"fn → closure variable 'progress' .*, of type tqdm.*batches are used: for batch in tqdm\(loader\)"
    with pytest.raises(UnpicklableError, match=message):
        ship_fn(fn)
    ship_fn(lambda i: sum(tqdm.tqdm(range(i))))
