"""A case: an object of a library that a loader's function or source uses, and its result for
users.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

# Headings of the tables, in the order of the page.
TABLES = {
    "arrays": "Arrays and array files",
    "tables": "Tables and databases",
    "images": "Images and video",
    "sound": "Sound and signals",
    "science": "Medicine, maps and molecules",
    "text": "Text",
    "models": "Models and numbers",
    "loaders": "Data sets of other loaders",
    "tools": "Tools and services",
}

Kind = Literal["works", "without fork", "refused", "fails", "not reproducible"]

# Start of the advice in an `UnpicklableError` for an object without advice of its own.
IN_SETUP = r"Cannot send this to the workers: .* in setup="


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result for users, with workers.

    Attributes:
        kind: "works": workers are forked, and batches are those of `workers=0`. "without fork": the
            same batches, and a warning. "refused": an error of loaderpool. "fails": an error of the
            library, in a worker. "not reproducible": other batches than with `workers=0`.
        names: a pattern for the warning or the error. For an error it matches the advice.
    """

    kind: Kind
    names: str = ""


works = Outcome("works")
refused = Outcome("refused", IN_SETUP)
not_reproducible = Outcome("not reproducible")


def refused_with(names: str) -> Outcome:
    """Return the outcome of an object for which the error advises something else than `setup=`."""
    return Outcome("refused", names)


def fails_with(names: str) -> Outcome:
    """Return the outcome of an object that its library pickles incompletely."""
    return Outcome("fails", names)


def without_fork(names: str) -> Outcome:
    """Return the outcome of an object whose library starts threads. The warning names the
    library.
    """
    return Outcome("without fork", names)


@dataclasses.dataclass
class Trial:
    """Arguments of a loader, and a way to compare its batches.

    Attributes:
        source: items, by default the numbers of 24 samples.
        is_stream: True if the source is a generator function, which `from_generator` reads.
        is_random: True if all samples of two epochs must differ.
        cure: a trial that follows the page's advice, and must work.
        alike: other objects of a row. Each must be refused by itself, too.
    """

    fn: Callable[..., Any] | None
    source: Any = range(24)
    setup: Callable[[], object] | None = None
    is_stream: bool = False
    is_random: bool = False
    cure: Trial | None = None
    alike: Sequence[object] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the page, or a part of one.

    Attributes:
        table: a key of `TABLES`.
        library: the name on the page.
        package: the name on PyPI, "" for Python's own modules.
        what: the object, for the page.
        advice: another way, for the page; "" if none is needed.
        make: makes files in a directory, and returns the trial.
    """

    name: str
    table: str
    library: str
    package: str
    what: str
    outcome: Outcome
    advice: str
    make: Callable[[Path], Trial]


CASES: dict[str, Case] = {}


def case(
    library: str,
    package: str,
    what: str,
    outcome: Outcome,
    advice: str = "",
) -> Callable[[Callable[[Path], Trial]], Callable[[Path], Trial]]:
    """Register a function that makes a trial. The case has the function's name."""

    def register(make: Callable[[Path], Trial]) -> Callable[[Path], Trial]:
        name = make.__name__
        table = make.__module__.rpartition(".")[2]
        assert name not in CASES, f"two cases are named {name}"
        CASES[name] = Case(name, table, library, package, what, outcome, advice, make)
        return make

    return register


def load_cases() -> dict[str, Case]:
    """Return all cases by name, in the order of the page."""
    for table in TABLES:
        importlib.import_module(f"libraries_cases.{table}")
    return CASES


def pins() -> dict[str, str]:
    """Return the versions that scripts/libraries installs, by the packages' names."""
    files = Path(__file__).parent.glob("requirements*.txt")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    found = [re.match(r"([\w.-]+)==([\w.]+)", line) for line in lines]
    return {each[1]: each[2] for each in found if each}


# ---- ways to hold a handle ----

OPENED: dict[str, Any] = {}


def handle(
    open_handle: Callable[[], Any],
    read: Callable[[Any, int], Any],
    source: Sequence[int] = range(24),
    alike: Sequence[object] = (),
) -> Trial:
    """Return a trial that captures an open handle; its cure opens the handle in `setup=`."""
    opened = open_handle()

    def read_captured(item: int) -> Any:
        return read(opened, item)

    cure = opened_in_setup(open_handle, read, source)
    return Trial(read_captured, source, cure=cure, alike=alike)


def opened_in_setup(
    open_handle: Callable[[], Any],
    read: Callable[[Any, int], Any],
    source: Sequence[int] = range(24),
) -> Trial:
    """Return a trial whose workers each open the handle in `setup=`."""

    def setup() -> None:
        OPENED["handle"] = open_handle()

    def read_opened(item: int) -> Any:
        return read(OPENED["handle"], item)

    return Trial(read_opened, source, setup)


def module_in(place: Path, source: str, **values: object) -> ModuleType:
    """Write a module into a directory and import it. `{name}` in its source is replaced by a
    value's repr.
    """
    for name, value in values.items():
        source = source.replace(f"{{{name}}}", repr(value))
    path = place / "opened_on_import.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    sys.path.insert(0, str(place))
    return importlib.import_module("opened_on_import")


def kept_only(objects: Iterable[object]) -> Trial:
    """Return a trial for objects that a sample can only use with a network. They are sent, and not
    used.
    """
    held = list(objects)
    return Trial(lambda item: item + len(held))
