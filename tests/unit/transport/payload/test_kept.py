"""Results of a last call that library objects keep are found in bytecode, without other assigned
attributes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from loaderpool.transport.payload.kept import kept_by_calls
from loaderpool.transport.payload.ship import ship
from loaderpool.transport.payload.structure import compare
from tests.support.libraries import make_library

LIBRARY = """
    import functools, random

    class Base:
        def __init__(self, p=1.0):
            self.p, self.params, self.last, self.count, self.steps, self.epoch = p, {}, {"a": 0}, 0, 0, 0
            self.total, self.mode, self.strict_, self.frozen = 0, "a", False, False

        def __call__(self, item):
            if self.frozen:
                return self.apply(item, self.params)
            self.params = {}
            self.count += 1
            self.steps = self.steps + 1
            total = self.total
            total += 1
            self.total = total
            self.randomize(item)
            self.params = {"x": random.random()}
            return self.apply(item, self.params)

        def apply(self, item, params):
            return item

        def randomize(self, item):
            self.last["a"] = item
            self.x, self.y = random.random(), 2
            self.mode = "b"
            self.strict_ = True
            self.epoch = 5

        def set_mode(self, mode):
            self.mode = mode

        @property
        def strict(self):
            return self.strict_

        @strict.setter
        def strict(self, value):
            self.strict_ = value

        def wrapped(function):
            @functools.wraps(function)
            def call(self, epoch):
                return function(self, epoch)
            return call

        @wrapped
        def set_epoch(self, epoch):
            self.epoch = epoch

    class Derived(Base):
        def randomize(self, item):
            super().randomize(item)
            self.last["b"] = 3
            self.offset = 3

    class Settable(Derived):
        def set_last(self, value):
            self.last["a"] = value
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return make_library(tmp_path, monkeypatch, LIBRARY)


def test_attributes_that_only_calls_assign_are_found(library: Any) -> None:
    own = {"params": None, "x": None, "y": None}
    assert kept_by_calls(library.Base) == {**own, "last": {"a"}}
    assert kept_by_calls(library.Derived) == {**own, "offset": None, "last": {"a", "b"}}
    assert kept_by_calls(library.Settable) == {**own, "offset": None, "last": {"b"}}


def test_what_the_users_methods_assign_is_not(library: Any) -> None:
    class Mine(library.Base):  # type: ignore[misc]
        def apply(self, item: Any, params: Any) -> Any:
            self.x, self.mine = 1, 2
            return item

    assert kept_by_calls(Mine) == {"params": None, "y": None, "last": {"a"}}


@pytest.mark.parametrize("kind", [int, list, dict, type, object, Path, pytest.MonkeyPatch])
def test_other_classes_keep_nothing(kind: type) -> None:
    assert kept_by_calls(kind) == {}


def test_a_difference_of_the_last_call_alone_is_told_from_others(library: Any) -> None:
    source = [library.Derived(), 1]
    before = ship({"source": source}).pickled
    source[0](5)
    source[0].__dict__.update(count=0, steps=0, total=0, mode="a", strict_=False, epoch=0)
    source[0].params["array"] = [library.Base(), {1, 2}]
    difference = compare(before, ship({"source": source}).pickled).difference
    assert difference is not None
    assert difference.is_kept
    assert difference.name.startswith("source[0].")
    for change in (
        {"p": 0.5},
        {"frozen": True},
        {"count": 3},
        {"epoch": 1},
        {"last": {"a": 5, "c": 1}},
    ):
        saved = dict(vars(source[0]))
        vars(source[0]).update(change)
        found = compare(before, ship({"source": source}).pickled).difference
        assert found is not None
        assert not found.is_kept
        vars(source[0]).clear()
        vars(source[0]).update(saved)
    source[1] = 2
    found = compare(before, ship({"source": source}).pickled).difference
    assert found is not None
    assert not found.is_kept


def test_a_module_beside_the_users_code_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = make_library(tmp_path, monkeypatch, LIBRARY, folder="mine")
    assert "site-packages" not in str(sys.modules[library.__name__].__file__)
    assert kept_by_calls(library.Base) == {}
