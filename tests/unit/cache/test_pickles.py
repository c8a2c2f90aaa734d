"""Values that a cache keeps: what is read back is equal, of the same type and dtype, and nobody else's memory."""

from __future__ import annotations

import dataclasses
import decimal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from loaderpool.cache.store import dump, load
from tests.support.child import run_child


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    name: str
    pixels: Any


VALUES = {
    "number": 3,
    "float": 2.5,
    "text": "häß",
    "bytes": b"\0\xff",
    "none": None,
    "scalar": np.float16(1.5),
    "zero-dimensional": np.array(7),
    "empty": np.empty((0, 3), np.int8),
    "image": np.arange(60, dtype=np.uint8).reshape(4, 5, 3),
    "Fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "transposed": np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
    "reversed": np.arange(10)[::-2],
    "big-endian": np.arange(3, dtype=">i4"),
    "times": np.array(["2020-01-01"], "datetime64[D]"),
    "fields": np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    "texts": np.array(["a", "bc"], object),
    "fixed texts": np.array(["a", "bc"]),
    "nested": {"a": (np.zeros(3), [1, 2]), "b": {"c": Pair(np.ones(2), "x")}},
    "dataclass": Record("a", np.ones((2, 2))),
    "anything": decimal.Decimal("1.5"),
}


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tolist() == other.tolist()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (tuple, list)):
        for left, right in zip(one, other, strict=True):
            same(left, right)
    elif dataclasses.is_dataclass(one):
        same(vars(one), vars(other))
    else:
        assert one == other


@pytest.mark.parametrize("name", VALUES)
def test_what_is_read_back_is_what_was_given(name: str) -> None:
    same(load(dump(VALUES[name])), VALUES[name])
    same(load(memoryview(dump(VALUES[name]))), VALUES[name])


def test_a_read_only_array_stays_one() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert not load(dump(array)).flags.writeable


def test_a_local_class_is_refused_by_name() -> None:
    class Local:
        pass

    with pytest.raises(Exception, match="Local"):
        dump(Local())


SCRIPT = """
import collections, sys
import numpy as np
import loaderpool as lp

Pair = collections.namedtuple("Pair", "left right")

class Thing:
    def __init__(self, item):
        self.item = item

    def doubled(self):
        return 2 * self.item

def fn(item):
    print("made", flush=True)
    return Pair(Thing(item), np.ones(2))

def augment(pair):
    assert type(pair) is Pair and type(pair.left) is Thing, (type(pair), id(Pair))
    return Pair(pair.left.doubled(), pair.right)

with lp.Loader(range(8), fn, batch_size=4, augment=augment, cache="cache", workers=int(sys.argv[1])) as loader:
    for epoch in range(2):
        for batch in loader:
            assert type(batch) is Pair
            assert batch.left.tolist() in ([0, 2, 4, 6], [8, 10, 12, 14])
"""


def test_classes_of_the_script_are_the_scripts_own_in_a_later_run_too(tmp_path: Path) -> None:
    """A worker's class is one that came by value; the next run's is another object of the same name."""
    made = []
    for workers in (2, 2, 0):
        result = run_child(f"import sys; sys.argv = ['x', '{workers}']\n{SCRIPT}", cwd=tmp_path).check()
        made.append(result.stdout.count("made"))
    assert made == [8, 0, 0]
    assert sys.modules.get("cache") is None
