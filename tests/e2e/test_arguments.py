"""A wrong argument fails in the caller's line, by name, as a LoaderpoolError and as the builtin one would expect."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.errors import (
    ArgumentError,
    LoaderpoolError,
    SetupError,
    SpecMismatchError,
    UnpicklableError,
)
from tests.support import leaks


def identity(item: Any) -> Any:
    return item


# ---- settings ----

GROUPS = {"Buckets": "buckets", "Limits": "limits", "Shard": "shard"}


def grouped(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a loader. {"Limits.timeout_s": 3} gives
    `limits=lp.Limits(timeout_s=3)`.
    """
    given = {name: value for name, value in arguments.items() if "." not in name}
    for group, argument in GROUPS.items():
        fields = {
            name.partition(".")[2]: value
            for name, value in arguments.items()
            if name.startswith(f"{group}.")
        }
        if fields:
            given[argument] = getattr(lp, group)(**fields)
    return given


WRONG_VALUES = [
    ({"batch_size": 0}, "batch_size", "0"),
    ({"batch_size": 2**31 + 1}, "batch_size", str(2**31 + 1)),
    ({"workers": -1}, "workers", "-1"),
    ({"workers": "4"}, "workers", "'4'"),
    ({"batch_size": -3.0}, "batch_size", "-3.0"),
    ({"workers": 10**6}, "workers", "1000000"),
    ({"workers": (0, 4)}, "workers[0]", "0"),
    ({"Shard.num_shards": 0, "Shard.index": 0}, "Shard.num_shards", "0"),
    ({"Shard.num_shards": 2, "Shard.index": 2}, "Shard.index", "2"),
    ({"seed": -3}, "seed", "-3"),
    ({"Limits.timeout_s": 0}, "Limits.timeout_s", "0"),
    ({"Limits.timeout_s": float("nan")}, "Limits.timeout_s", "nan"),
    ({"Limits.timeout_s": float("inf")}, "Limits.timeout_s", "None"),
    ({"Limits.timeout_s": 1e11}, "Limits.timeout_s", "1000000000"),
    ({"Limits.memory": 0}, "Limits.memory", "0"),
    ({"Limits.memory": "lots"}, "Limits.memory", "'lots'"),
    ({"on_error": "ignore"}, "on_error", "'ignore'"),
    ({"on_error": ("skip", -1)}, "on_error", "-1"),
    ({"on_error": ("replace", 1.5)}, "on_error", "1.5"),
    ({"on_error": ("skip", float("nan"))}, "on_error", "nan"),
    ({"on_error": ("raise", 3)}, "on_error", "3"),
    ({"Limits.restarts": -1}, "Limits.restarts", "-1"),
    ({"threads": 0}, "threads", "0"),
    ({"threads": 257}, "threads", "257"),
    ({"cache": "Memory"}, "write cache=\"memory\", or a path such as './Memory'", "'Memory'"),
    ({"Limits.restarts_per_item": 1}, "Limits.restarts_per_item must be at least 2", "1"),
]
WRONG_TYPES = [
    ({"batch_size": 2.0}, "batch_size", "2.0"),
    ({"workers": 1.5}, "workers", "1.5"),
    ({"workers": (1, 2, 3)}, "workers", "(1, 2, 3)"),
    ({"Shard.num_shards": 2, "Shard.index": "0"}, "Shard.index", "'0'"),
    ({"seed": None}, "seed", "None"),
    ({"shuffle": 2.5}, "shuffle", "2.5"),
    ({"drop_remainder": "yes"}, "drop_remainder", "'yes'"),
    ({"deterministic": None}, "deterministic", "None"),
    ({"ragged": 1}, "ragged", "1"),
    ({"pad": [0]}, "pad", "[0]"),
    ({"Limits.timeout_s": True}, "Limits.timeout_s", "True"),
    ({"Limits.memory": True}, "Limits.memory", "True"),
    ({"on_error": ("skip", "3")}, "on_error", "'3'"),
    ({"seed_globals": "yes"}, "seed_globals", "'yes'"),
    ({"element_spec": 3}, "element_spec", "int"),
    ({"element_spec": [lp.ArraySpec((None,), "int64")]}, "element_spec", "list"),
    ({"threads": 2.5}, "threads", "2.5"),
    ({"Limits.restarts": (3, None)}, "Limits.restarts[1]", "None"),
    ({"Limits.restarts_per_item": 1.5}, "Limits.restarts_per_item", "1.5"),
    (
        {"limits": 5},
        "limits must be a loaderpool.Limits(memory, timeout_s, restarts, restarts_per_item)",
        "5",
    ),
    (
        {"shard": (2, 0)},
        "shard must be a loaderpool.Shard(num_shards, index)",
        "(2, 0) of type tuple",
    ),
    (
        {"buckets": [3]},
        "buckets must be a loaderpool.Buckets(by, boundaries, batch_sizes)",
        "[3] of type list",
    ),
    ({"fn": 3}, "fn", "3"),
    ({"fn": None, "batch_fn": "f"}, "batch_fn", "'f'"),
    ({"setup": 1}, "setup", "1"),
]


@pytest.mark.parametrize(
    ("kind", "arguments", "name", "shown"),
    [(ValueError, *row) for row in WRONG_VALUES] + [(TypeError, *row) for row in WRONG_TYPES],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_names_the_argument_and_the_present_value(
    kind: type[Exception], arguments: dict[str, Any], name: str, shown: str
) -> None:
    with pytest.raises(ArgumentError) as raised:
        lp.Loader(range(8), **{"fn": identity, "workers": 0, **grouped(arguments)})
    assert isinstance(raised.value, kind) and isinstance(raised.value, LoaderpoolError)
    assert name in str(raised.value) and shown in str(raised.value)


def test_settings_go_by_name() -> None:
    with pytest.raises(TypeError, match="takes only source and fn without a name"):
        lp.Loader(range(8), None, 32)  # type: ignore[misc]


def test_a_wrong_argument_is_raised_in_the_callers_line() -> None:
    try:
        lp.Loader(range(8), identity, batch_size=0)
    except ArgumentError as error:
        frames = traceback.extract_tb(error.__traceback__)
        assert frames[0].filename == __file__
        assert frames[0].line is not None
        assert "batch_size=0" in frames[0].line
    else:
        pytest.fail("nothing was raised")


def test_a_wrong_argument_starts_no_process() -> None:
    before = leaks.take_snapshot()
    for arguments in ({"batch_size": 0}, {"source": []}, {"fn": 3}, {"element_spec": 3}):
        with pytest.raises(LoaderpoolError):
            lp.Loader(**{"source": range(8), "fn": identity, "workers": 2, **arguments})
    assert leaks.take_snapshot().left_since(before) == []


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"fn": identity, "batch_fn": identity}, ["fn", "batch_fn"]),
        ({"fn": identity, "pad": True, "ragged": True}, ["pad", "ragged"]),
        ({"fn": identity, "pad": True, "batch_size": None}, ["pad", "batch_size"]),
        ({"fn": identity, "ragged": True, "batch_size": None}, ["ragged", "batch_size"]),
        ({"batch_fn": identity, "batch_size": None}, ["batch_fn", "batch_size"]),
        ({"batch_fn": identity, "pad": 3}, ["pad", "batch_fn"]),
        ({"batch_fn": identity, "ragged": True}, ["ragged", "batch_fn"]),
        (
            {"fn": identity, "batch_size": 16, "drop_remainder": True},
            ["drop_remainder", "batch_size=16"],
        ),
    ],
)
def test_contradictory_arguments_name_both(arguments: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ArgumentError) as raised:
        lp.Loader(range(8), workers=0, **arguments)
    for name in names:
        assert name in str(raised.value)


@pytest.mark.parametrize("workers", [0, -1])
def test_a_pool_needs_a_worker(pool: lp.Pool, workers: int) -> None:
    with pytest.raises(ArgumentError, match=f"at least 1, got {workers}"):
        lp.Pool(workers)
    with pytest.raises(ArgumentError, match=f"at least 1, got {workers}"):
        pool.resize(workers)
    assert pool.workers == 2


def test_resize_of_a_loader_without_workers_says_what_to_do_instead() -> None:
    with (
        lp.Loader(range(8), identity, workers=0) as loader,
        pytest.raises(ArgumentError, match="replace"),
    ):
        loader.resize(2)


def test_a_wrong_epoch_leaves_the_old_one() -> None:
    with lp.Loader(range(8), identity, workers=0) as loader:
        loader.epoch = 3
        for wrong_value in (-1, 2**62 + 1, 2**64):
            with pytest.raises(ArgumentError, match=rf"epoch.*{wrong_value}"):
                loader.epoch = wrong_value
        for wrong in (1.0, "1", None, True):
            with pytest.raises(ArgumentError, match="epoch"):
                loader.epoch = wrong  # type: ignore[assignment]
        assert loader.epoch == 3


def test_replace_refuses_a_name_that_is_no_argument() -> None:
    with (
        lp.Loader(range(8), identity, workers=0) as loader,
        pytest.raises(TypeError, match="batchsize"),
    ):
        loader.replace(batchsize=3)


# ---- the function's signature ----


def without_arguments() -> int:
    return 1


def with_two(item: int, label: int) -> int:
    return item + label


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (without_arguments, "without_arguments()"),
        (with_two, "label"),
        (lambda *, item: item, "item"),
    ],
)
@pytest.mark.parametrize("name", ["fn", "batch_fn"])
def test_a_function_that_does_not_take_one_item_is_refused(
    function: Any, says: str, name: str
) -> None:
    with pytest.raises(ArgumentError) as raised:
        lp.Loader(range(8), workers=0, **{name: function})
    assert f"{name} must be callable as {name}(" in str(raised.value)
    assert says in str(raised.value)


def with_generator(item: int, generator: Any) -> Any:
    return generator.random() + item


def test_a_parameter_for_random_numbers_is_to_be_named_rng() -> None:
    with pytest.raises(
        ArgumentError, match=r"'generator'\. Name a parameter rng to get a random number generator$"
    ):
        lp.Loader(range(8), with_generator, workers=0)
    with pytest.raises(ArgumentError, match=r"argument: 'label'\. Write def fn\(item\): "):
        lp.Loader(range(8), with_two, workers=0)


def test_a_setup_hook_that_needs_an_argument_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"setup must be callable as setup\(\)"):
        lp.Loader(range(8), identity, workers=0, setup=identity)


def test_out_is_not_for_whole_batches() -> None:
    with pytest.raises(
        ArgumentError, match=r"batch_fn must be callable as batch_fn\(list_of_items\).*'out'"
    ):
        lp.Loader(range(8), batch_fn=lambda items, out: out, batch_size=4, workers=0)


# ---- what the function returns ----


def odd_one(odd: Any) -> Callable[[int], Any]:
    def fn(item: int) -> Any:
        return (
            odd if item == 5 else {"image": np.zeros((2, 3), np.float32), "label": np.int64(item)}
        )

    return fn


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        pytest.param(
            {"image": np.zeros((2, 4), np.float32), "label": np.int64(1)},
            ["['image']", "2, 3", "2, 4", "pad=True"],
            id="shape",
        ),
        pytest.param(
            {"image": np.zeros((2, 3), np.float64), "label": np.int64(1)},
            ["['image']", "float32", "float64", "astype"],
            id="dtype",
        ),
        pytest.param({"image": np.zeros((2, 3), np.float32)}, ["label"], id="missing key"),
        pytest.param(
            (np.zeros((2, 3), np.float32), np.int64(1)),
            ["(ndarray, int64)", "{'image'"],
            id="structure",
        ),
        pytest.param(None, ["None"], id="none"),
    ],
)
def test_a_sample_unlike_the_first_names_component_index_and_both_sides(
    odd: Any, says: list[str], made_in: dict[str, Any]
) -> None:
    with lp.Loader(range(8), odd_one(odd), batch_size=2, **made_in) as loader:
        batches = iter(loader)
        assert [next(batches)["label"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(SpecMismatchError) as raised:
            next(batches)
        assert "index 5" in str(raised.value)
        for piece in says:
            assert piece in str(raised.value)
        assert str(loader.last_error) == str(raised.value)


def none_at(index: int, other: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda item: None if item == index else other(item)


def numbers_with_none(shard: int) -> Iterator[Any]:
    yield from (0, 1, 2, None)


def refusal(loader: lp.Loader) -> str:
    with loader, pytest.raises(SpecMismatchError) as raised:
        list(loader)
    return str(raised.value)


FORGOT = "Did you forget a return statement?"
LEAVE_OUT = "leave it out, or use a value such as 0 or NaN instead"


@pytest.mark.parametrize("index", [0, 7])
@pytest.mark.parametrize(
    ("other", "settings"),
    [
        (lambda item: item, {}),
        (lambda item: (item, item), {}),
        (lambda item: {"x": item}, {}),
        (np.ones, {"pad": True}),
        (lambda item: np.ones(3), {"element_spec": lp.ArraySpec((None, 3), "f8")}),
    ],
    ids=["number", "tuple", "dict", "padded", "spec"],
)
def test_none_for_a_sample_names_its_index(
    other: Any, settings: dict[str, Any], index: int, made_in: dict[str, Any]
) -> None:
    for name in ("fn", "augment"):
        function = {name: none_at(index, other)}
        told = refusal(lp.Loader(range(20), batch_size=4, **function, **settings, **made_in))
        assert told.startswith(f"{name} returned None for source index {index}. {FORGOT}")


@pytest.mark.parametrize("index", [0, 8])
def test_none_for_a_batch_names_its_first_index(index: int, made_in: dict[str, Any]) -> None:
    batch_fn = lambda items: None if items[0] == index else np.stack(items)  # noqa: E731
    told = refusal(lp.Loader(range(20), batch_fn=batch_fn, batch_size=4, **made_in))
    batch = f"the batch that begins with source index {index}"
    assert told.startswith(f"batch_fn returned None for {batch}. {FORGOT}")


def test_none_from_a_source_or_a_generator_names_the_item(made_in: dict[str, Any]) -> None:
    told = refusal(lp.Loader([0, 1, None], batch_size=2, **made_in))
    assert told.startswith(f"the source gave None for source index 2: {LEAVE_OUT}")
    made = lp.Loader.from_generator(numbers_with_none, shards=[5], batch_size=2, **made_in)
    assert refusal(made).startswith(f"the source gave None for item 3 of generator 0: {LEAVE_OUT}")


# ---- objects that cannot be pickled ----


def test_a_loader_in_the_function_is_named(pool: lp.Pool) -> None:
    inner = lp.Loader(range(8), identity, workers=0)
    with pytest.raises(UnpicklableError, match=r"'inner'.*Loader"):
        lp.Loader(range(8), lambda item: len(inner), workers=pool)


def test_a_function_that_cannot_travel_leaves_no_process_and_the_pool_usable(pool: lp.Pool) -> None:
    lock = threading.Lock()
    with leaks.guard():
        for _ in range(3):
            with pytest.raises(UnpicklableError):
                lp.Loader(range(8), lambda item: lock, workers=1)
    with lp.Loader(range(8), identity, workers=pool) as loader:
        assert sum(len(batch) for batch in loader) == 8


class Unwilling:
    """Can be pickled, but not unpickled in another process."""

    def __reduce__(self) -> Any:
        return _refuse, (os.getpid(),)


def _refuse(trainer: int) -> None:
    if os.getpid() != trainer:
        raise LookupError("the licence server knows the trainer only")


def test_an_item_that_cannot_be_unpickled_is_an_error_of_the_setup(pool: lp.Pool) -> None:
    with lp.Loader([1, Unwilling()], lambda item: 1, workers=pool) as loader:
        for _ in range(2):
            with pytest.raises(SetupError, match="LookupError: the licence server") as raised:
                next(iter(loader))
        assert isinstance(raised.value, RuntimeError)
        assert "Traceback in the supervisor" in str(raised.value)
        assert "in _refuse" in str(raised.value)
    with lp.Loader(range(8), identity, workers=pool) as loader:  # the pool still works
        assert sum(len(batch) for batch in loader) == 8


# ---- mistakes of a newcomer ----


LOADED = """
import os
if "LOADERPOOL_ROLE" in os.environ:
    {line}
else:
    def fn(item):
        return item
"""


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "import no_such_module",
            r"The module 'no_such_module'.*on sys\.path, or define.*sys\.path is",
        ),
        ("from os import no_such_name", r"raised ImportError\. .*no_such_name"),
        ("raise OSError('no disk')", r"raised OSError\. Modules are imported again there.*no disk"),
        ("pass", r"raised AttributeError\. Modules are imported again there"),
    ],
)
def test_what_workers_cannot_load_is_told_with_advice(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(LOADED.format(line=line))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "only_here", raising=False)  # and again after the test
    module = importlib.import_module("only_here")
    with (
        lp.Loader(range(8), module.fn, workers=1) as loader,
        pytest.raises(SetupError, match=f"(?s){says}") as raised,
    ):
        next(iter(loader))
    assert "only_here" in str(raised.value)


@pytest.mark.parametrize(("ragged", "shape"), [("no", (None, None)), (True, (None,))])
def test_a_ragged_axis_is_one_behind_the_first(ragged: Any, shape: Any) -> None:
    with pytest.raises(ArgumentError, match="ragged"):
        lp.ArraySpec(shape, "f4", ragged=ragged)


@pytest.mark.parametrize("labels", [list(range(1_000_000)), np.zeros(3), (1, 2, 3)], ids=type)
def test_two_columns_as_for_fit_are_answered_with_one_source(labels: Any) -> None:
    with pytest.raises(lp.ArgumentError, match=r"pass one source: Loader\(\(x, y\)\)") as raised:
        lp.Loader(np.zeros((3, 2)), labels)
    assert len(str(raised.value)) < 400
