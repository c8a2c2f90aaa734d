"""Messages for common mistakes of new users name the value to write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.element.spec import ArraySpec, fill_value
from loaderpool.sources.tables import import_extra


def loader(fn: Any = None, **settings: Any) -> lp.Loader:
    return lp.Loader(range(3), fn, workers=0, **settings)


def shard_of(s: Any) -> Iterator[Any]:
    yield s


def pad(value: object, dtype: Any, path: str = "") -> object:
    return fill_value(value, ArraySpec((None,), dtype), path)


_KEYS = "keys must be the name of a dataset, or a tuple or dict of names, got"
_IN_MAIN = '(0: load in the main process; "auto": as many as training needs; or a loaderpool.Pool)'
_COLUMNS = (
    'It gets one item. An item of columns in a dict has row["label"], and of columns in a tuple '
    "row[1]"
)


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda: lp.HDF5("a.h5", ["x", "y"]), f"{_KEYS} ['x', 'y']: write ('x', 'y')"),
        (lambda: lp.HDF5("a.h5", ["x"]), f"{_KEYS} ['x']: write 'x'"),
        (lambda: lp.HDF5("a.h5", 3), f"{_KEYS} 3"),
        (
            lambda: lp.HDF5("a.h5", ("x", ["y", "z"])),
            (
                "keys[1] must be the name of a dataset, or a tuple or dict of names, got ['y', 'z']: "
                "write ('y', 'z')"
            ),
        ),
        (lambda: loader().replace(workers=-1), f"workers must be at least 0, got -1 {_IN_MAIN}"),
        (
            lambda: lp.Pool(workers=0),
            'workers must be at least 1, got 0 ("auto": as many as training needs)',
        ),
        (
            lambda: loader().replace(workers=(8, 2)),
            "workers=(8, 2) must be (fewest, most), with most at least 8",
        ),
        (
            lambda: loader().replace(workers=(8, 2000)),
            "workers[1] must be at most 1024, got 2000",
        ),
        (
            lambda: loader(lambda x, y: x),
            "missing a required argument: 'y'. Write def fn(item): x, y = item. " + _COLUMNS,
        ),
        (
            lambda: loader(augment=lambda image, label: image),
            (
                "missing a required argument: 'label'. Write def augment(sample): image, label = "
                "sample"
            ),
        ),
        (
            lambda: lp.Loader.from_generator(shard_of),
            "missing a required argument: 's'. Pass shards=, one value of s for each generator",
        ),
        (
            lambda: lp.Loader(None, workers=0),
            (
                "source is None: pass a sequence, arrays, or range(n) if fn needs only the index. A "
                "generator function goes to Loader.from_generator"
            ),
        ),
        (
            lambda: pad(300, "u1"),
            (
                "the element: the pad value 300 does not fit its dtype uint8 (0 to 255). Return "
                "x.astype('uint16')"
            ),
        ),
        (
            lambda: pad(-1, "u1"),
            (
                "the element: the pad value -1 does not fit its dtype uint8 (0 to 255). Return "
                "x.astype('int16')"
            ),
        ),
        (
            lambda: pad("", "f4"),
            "the element: the pad value '' does not fit its dtype float32. Pass a number",
        ),
        (
            lambda: pad(0, str),
            "the element: the pad value 0 does not fit its type str. Pass a string",
        ),
        (
            lambda: pad(300, "u1", "['x']"),
            (
                "component ['x']: the pad value 300 does not fit its dtype uint8 (0 to 255). Give each "
                "component its own value, such as pad={'x': 0, 'y': -1}"
            ),
        ),
        (
            lambda: loader(seed=None),
            (
                "seed must be an integer, got None of type NoneType (for other numbers in each run, "
                "pass seed=secrets.randbits(32))"
            ),
        ),
        (
            lambda: loader(shuffle=0),
            (
                "shuffle must be at least 1, got 0 (the shuffle window of a stream, in items; "
                "shuffle=False: keep the order)"
            ),
        ),
        (
            lambda: lp.replay(3, index=1),  # type: ignore[arg-type]
            "loader must be a Loader, got 3 of type int",
        ),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(call: Callable[[], Any], advice: str) -> None:
    with pytest.raises(lp.LoaderpoolError) as caught:
        call()
    assert str(caught.value).endswith(advice)


@pytest.mark.parametrize("pad_value", [300, -1])
def test_the_dtype_that_a_message_names_has_the_pad_value(pad_value: int) -> None:
    with pytest.raises(lp.SpecMismatchError) as caught:
        pad(pad_value, "u1")
    named = re.search(r"astype\('(\w+)'\)", str(caught.value))
    assert named is not None
    assert pad(pad_value, named[1]) == np.dtype(named[1]).type(pad_value)


@pytest.mark.parametrize(
    ("where", "advice"),
    [
        ("Memory", 'write cache="memory"'),
        ("ram", 'write cache="memory"'),
        ("mem", 'write cache="memory"'),
        ("Disk", "write a path such as './Disk'"),
    ],
)
def test_a_kind_of_cache_is_no_folder(where: str, advice: str) -> None:
    with pytest.raises(lp.ArgumentError) as caught:
        lp.Cache(where)
    assert str(caught.value).startswith(f"cache={where!r} would be a directory: {advice}")
    assert lp.Cache(f"./{where}").where == lp.Cache(Path(where)).where


def test_a_missing_package_is_named_as_pip_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    # Another test of this process may have imported the package.
    for name in ("google", "google.protobuf", "google.protobuf.descriptor_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"^parse_example needs protobuf, which is not installed"):
        import_extra("google.protobuf.descriptor_pb2", "parse_example")


def test_rows_are_read_from_a_source_with_keys_not_by_name(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("one\ntwo\n")
    with pytest.raises(
        TypeError, match=r"^a source index must be an integer, such as source\[0\], got 'x'"
    ):
        lp.TextLines(file)["x"]  # type: ignore[index]
