"""Files that a module opens when it is imported, and in which all forked workers would move one place."""

from __future__ import annotations

import importlib
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loaderpool as lp
from loaderpool.transport.payload.ship import ship

MODULE = """
import functools, io, logging, sys

path = {path!r}
binary = open(path, "rb")
text = open(path)
log = open(path + ".log", "w")
closed = open(path)
closed.close()
in_memory = io.BytesIO(b"abc")
opened_later = None

class Reader:
    def read(self):
        return binary.read(1)

def uses_binary(item): return binary.read(1)
def uses_text(item): return text.readline()
def by_way_of_another(item): return uses_binary(item)
def by_way_of_a_class(item): return Reader().read()
def in_a_nested_function(item): return (lambda: text.read())()
with_arguments = functools.partial(uses_text, 3)

def writes_a_log(item): log.write("x")
def uses_what_is_closed(item): return closed.name
def uses_memory(item): return in_memory.read()
def uses_none(item): return item, sys.stdin, logging.getLogger()
def opens_itself(item):
    with open(path) as file:
        return file.read()
def setup():
    global opened_later
    opened_later = open(path)
def uses_what_setup_opens(item): return opened_later.read()
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "data.txt"
    path.write_text("abc")
    (tmp_path / "opens_files.py").write_text(MODULE.format(path=str(path)))
    sys.path.insert(0, str(tmp_path))
    try:
        loaded = importlib.import_module("opens_files")
        yield loaded
        for name in ("binary", "text", "log"):
            getattr(loaded, name).close()
        if loaded.opened_later is not None:
            loaded.opened_later.close()
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("opens_files", None)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("uses_binary", "fn → global 'binary' used by uses_binary, of type _io.BufferedReader"),
        ("uses_text", "global 'text'"),
        ("by_way_of_another", "global 'binary' used by uses_binary"),
        ("by_way_of_a_class", "global 'binary' used by Reader.read"),
        ("in_a_nested_function", "global 'text'"),
        ("with_arguments", "global 'text'"),
    ],
)
def test_what_the_import_opens_is_refused_by_name(module: Any, function: str, told: str) -> None:
    with pytest.raises(lp.UnpicklableError, match="before the workers are forked") as raised:
        ship({"fn": getattr(module, function), "source": [1]})
    assert told in str(raised.value) and "setup=" in str(raised.value)


@pytest.mark.parametrize(
    "function", ["writes_a_log", "uses_what_is_closed", "uses_memory", "uses_none", "opens_itself"]
)
def test_what_does_no_harm_is_not(module: Any, function: str) -> None:
    ship({"fn": getattr(module, function), "source": [1]})


def test_what_a_function_opens_is_its_own_also_where_it_ran_here(module: Any) -> None:
    module.setup()
    ship({"fn": module.uses_what_setup_opens, "setup": module.setup, "source": [1]})


def test_generators_are_told_where_to_open(module: Any, tmp_path: Path) -> None:
    class Rows:
        def __init__(self, database: Any) -> None:
            self.database = database

        def read(self) -> Iterator[Any]:
            yield from self.database.execute("select 1")

    database = sqlite3.connect(tmp_path / "rows.db")
    with open(tmp_path / "data.txt", "rb") as file:
        for make, told in [
            (Rows(database).read, r"make_generator → .* attribute \.database of .*Rows, of type sqlite3.Connection"),
            (Rows(file).read, r"make_generator → .* of type _io.BufferedReader"),
            (lambda: iter(file), r"make_generator → .*'file' of .* of type _io.BufferedReader"),
        ]:
            with pytest.raises(lp.UnpicklableError, match=told + r".*Open or create it in make_generator: each copy"):
                lp.Loader.from_generator(make, workers=1)
        with pytest.raises(lp.UnpicklableError, match=r"make_generator → global 'binary'.* in make_generator: each"):
            lp.Loader.from_generator(module.uses_binary, shards=[1], workers=1)
        with pytest.raises(lp.UnpicklableError, match="shards → item 1 of the list"):
            lp.Loader.from_generator(lambda shard: 0, shards=[1, file], workers=1)
    database.close()
