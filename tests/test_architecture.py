"""The shape of the package: floors, and one home for each outside thing. Read from the source, without running it."""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.child import run_child
from tests.support.imports import Module, find_cycle, read_package

PACKAGE = "loaderpool"
MODULES = read_package(Path(__file__).resolve().parents[1] / PACKAGE)

# Who adds a module or package directly below loaderpool/ says here on which floor, F0 to F5, it stands.
FLOORS = (
    {"checks", "errors", "system"},
    {"cache", "config", "element", "memory", "plan", "sources", "transport"},
    {"worker"},
    {"supervisor"},
    {"trainer"},
    {"adapters", "tools"},
)  # fmt: skip
# The package itself hands out what the trainer's side defines; so it stands on that floor, and nothing below knows it.
ROOT_FLOOR = 4

# Methods that only forward to a higher floor, imported when they are called: from where, to where.
FORWARDS = {("loaderpool.trainer.loader", "loaderpool.adapters")}

# What may be imported besides the standard library, and where.
OUTSIDE_EVERYWHERE = {"cloudpickle", "numpy"}
OUTSIDE_ONLY_IN = {
    "loaderpool.adapters": {"keras", "tensorflow"},
    "loaderpool.tools.cli": {"click", "matplotlib", "rich"},
}
# And there only in functions: who names a source of files does not wait for its library until one is made.
OUTSIDE_WHEN_CALLED = {"loaderpool.sources": {"google_crc32c", "h5py", "pyarrow"}}

LINUX_ONLY_HOMES = {"loaderpool.system.machine"}
LINUX_ONLY_NAMES = {
    "F_GETPIPE_SZ", "F_SETPIPE_SZ", "PR_SET_CHILD_SUBREAPER", "PR_SET_PDEATHSIG", "eventfd", "fallocate",
    "memfd_create", "pidfd_open", "posix_fallocate", "prctl", "splice",
}  # fmt: skip

# Each is a lock, or rests on one, and a lock shared between processes stays locked when its holder dies.
SHARED_LOCKS = {
    "Barrier", "BoundedSemaphore", "Condition", "Event", "JoinableQueue", "Lock", "Manager", "Pool", "Queue", "RLock",
    "Semaphore", "SimpleQueue",
}  # fmt: skip
# Of these the same names mean things within one process.
NOT_SHARED = {"asyncio", "queue", "threading"}

CLOCK_HOMES = {"loaderpool.system.clock"}
CLOCKS = {
    "clock_gettime", "clock_gettime_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns", "time", "time_ns",
}  # fmt: skip


def unit(name: str) -> str:
    """The part of a module's name that has a floor: `loaderpool.memory.layout` -> `memory`; empty for the package."""
    return name.split(".")[1] if "." in name else ""


def floor(name: str) -> int | None:
    """The floor of one of our modules, or None where it has none."""
    if name == PACKAGE:
        return ROOT_FLOOR
    return next((number for number, units in enumerate(FLOORS) if unit(name) in units), None)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def is_ours(name: str) -> bool:
    return is_in(name, PACKAGE)


def allowed_in(packages: dict[str, set[str]], module: Module) -> list[set[str]]:
    return [names for package, names in packages.items() if is_in(module.name, package)]


# -- the rules: each yields what breaks it, as "line: what"


def unassigned(module: Module) -> Iterator[str]:
    if floor(module.name) is None:
        yield f"1: {module.name} has no floor; add {unit(module.name)!r} to FLOORS"


def upward(module: Module) -> Iterator[str]:
    own = floor(module.name)
    for each in module.imports:
        there = floor(each.target) if is_ours(each.target) else None
        if own is None or there is None or there <= own:
            continue
        forwards = any(module.name == source and is_in(each.target, target) for source, target in FORWARDS)
        if not (forwards and each.when != "import"):
            yield f"{each.line}: F{own} imports {each.target} of F{there}"


def outside(module: Module) -> Iterator[str]:
    allowed = OUTSIDE_EVERYWHERE.union(sys.stdlib_module_names, *allowed_in(OUTSIDE_ONLY_IN, module))
    in_functions = set().union(*allowed_in(OUTSIDE_WHEN_CALLED, module))
    for each in module.imports:
        root = each.target.split(".")[0]
        if each.when == "call" and root in in_functions:
            continue
        if root != PACKAGE and root not in allowed and each.when != "types":  # a type's name brings nothing in
            yield f"{each.line}: imports {each.target}"


def linux_only(module: Module) -> Iterator[str]:
    if module.name not in LINUX_ONLY_HOMES:
        yield from _names_used(module, LINUX_ONLY_NAMES, {})


def shared_locks(module: Module) -> Iterator[str]:
    roots = {"multiprocess", "multiprocessing"}
    if not any(each.target.split(".")[0] in roots for each in module.imports):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in roots:
            for alias in node.names:
                if alias.name in SHARED_LOCKS | {"queues", "synchronize", "managers", "pool"}:
                    yield f"{node.lineno}: {alias.name} from {node.module}"
        elif isinstance(node, ast.Attribute) and node.attr in SHARED_LOCKS:
            owner = ast.unparse(node.value)
            if owner.split(".")[0] not in NOT_SHARED:
                yield f"{node.lineno}: {owner}.{node.attr}"


def clocks(module: Module) -> Iterator[str]:
    if module.name in CLOCK_HOMES:
        return
    yield from _names_used(module, {"now", "today", "utcnow"}, {"datetime": "datetime", "date": "datetime"})
    yield from _names_used(module, CLOCKS, {"time": "time"})


def _names_used(module: Module, names: set[str], owners: dict[str, str]) -> Iterator[str]:
    """Uses of names: of anything's attribute, or only of `owners` (with their aliases); imported, or as a string."""
    aliases = set(owners)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name in owners.values()}
        elif isinstance(node, ast.ImportFrom) and (not owners or node.module in owners.values()):
            for alias in node.names:
                if alias.name in names:
                    yield f"{node.lineno}: {alias.name} from {node.module}"
                elif alias.asname and alias.name in owners:
                    aliases.add(alias.asname)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if not owners or ast.unparse(node.value).split(".")[-1] in aliases:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif not owners and isinstance(node, ast.Constant) and node.value in names:
            yield f"{node.lineno}: {node.value!r}"


RULES = (unassigned, upward, outside, linux_only, shared_locks, clocks)


# -- the package keeps them


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[Module], Iterator[str]]) -> None:
    assert MODULES
    broken = [f"{module.name}:{what}" for module in MODULES for what in rule(module)]
    assert not broken, "\n".join(broken)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert find_cycle(MODULES) == []


def test_each_floor_is_named_once() -> None:
    names = [name for units in FLOORS for name in units]
    assert len(names) == len(set(names))


@pytest.mark.corner
def test_importing_the_package_brings_in_no_framework() -> None:
    heavy = ["tensorflow", "keras", "multiprocess", "rich", "click", "matplotlib", "google_crc32c", "h5py", "pyarrow"]
    code = f"import json, sys; import {PACKAGE}; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    assert json.loads(run_child(code).check().stdout) == []


def test_naming_a_source_brings_in_no_library_of_its_format() -> None:
    formats = ["csv", "google_crc32c", "h5py", "pyarrow", "tarfile"]
    code = f"""
        import json, sys
        import {PACKAGE}
        before = [m for m in {formats} if m in sys.modules]
        from {PACKAGE} import HDF5, ParquetRows, TFRecords
        print(json.dumps([before, [m for m in {formats} if m in sys.modules]]))
    """
    assert json.loads(run_child(textwrap.dedent(code)).check().stdout) == [[], []]


# -- the rules find what breaks them

BREAKERS = [
    (unassigned, "loaderpool.novelty", "", 1),
    (unassigned, "loaderpool.memory.anything", "", 0),
    (upward, "loaderpool.plan.order", "from loaderpool.worker import loop", 1),
    (upward, "loaderpool.plan.order", "def f():\n    import loaderpool.trainer.pool", 1),
    (upward, "loaderpool.plan.order", "from ..supervisor import state", 1),
    (upward, "loaderpool.plan.order", "import importlib\nimportlib.import_module('loaderpool.trainer.loader')", 1),
    (upward, "loaderpool.config", "from loaderpool import __version__", 1),
    (upward, "loaderpool.errors", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import loaderpool.plan", 1),
    (upward, "loaderpool.trainer.loader", "from loaderpool.adapters import tensorflow", 1),
    (upward, "loaderpool.trainer.loader", "def f():\n    from loaderpool.adapters import tensorflow", 0),
    (upward, "loaderpool.trainer.loader", "def f():\n    from loaderpool.tools.cli import main", 1),
    (upward, "loaderpool.worker.loop", "import loaderpool.system.machine\nfrom . import rows\nimport numpy", 0),
    (outside, "loaderpool.worker.loop", "import tensorflow as tf", 1),
    (outside, "loaderpool.tools.tuning.measure", "def f():\n    from keras.utils import PyDataset", 1),
    (outside, "loaderpool.trainer.loader", "import pandas.core", 1),
    (outside, "loaderpool.sources.hdf5", "import h5py", 1),
    (outside, "loaderpool.sources.hdf5", "def f():\n    import h5py", 0),
    (outside, "loaderpool.trainer.loader", "def f():\n    import h5py", 1),
    (outside, "loaderpool.trainer.loader", "import typing\nif typing.TYPE_CHECKING:\n    import tensorflow as tf", 0),
    (outside, "loaderpool.adapters.keras", "import keras, tensorflow, os.path, numpy.typing", 0),
    (linux_only, "loaderpool.memory.arena", "import os\nos.memfd_create('x')", 1),
    (linux_only, "loaderpool.memory.arena", "from os import pidfd_open", 1),
    (linux_only, "loaderpool.memory.arena", "import os\ngetattr(os, 'posix_fallocate')", 1),
    (linux_only, "loaderpool.system.machine", "import os\nos.memfd_create('x')", 0),
    (shared_locks, "loaderpool.trainer.pool", "import multiprocess\nq = multiprocess.get_context().Queue()", 1),
    (shared_locks, "loaderpool.trainer.pool", "import multiprocessing as mp\nmp.Lock()", 1),
    (shared_locks, "loaderpool.trainer.pool", "from multiprocess.synchronize import Event", 1),
    (shared_locks, "loaderpool.trainer.pool", "import multiprocess, threading\nthreading.Lock()", 0),
    (clocks, "loaderpool.trainer.pool", "import time\ntime.perf_counter()", 1),
    (clocks, "loaderpool.trainer.pool", "import time as t\nt.monotonic()", 1),
    (clocks, "loaderpool.trainer.pool", "from time import monotonic_ns as now", 1),
    (clocks, "loaderpool.trainer.pool", "import datetime\ndatetime.datetime.now()", 1),
    (clocks, "loaderpool.trainer.pool", "import time\ntime.sleep(1)\nimport loaderpool.system.clock", 0),
    (clocks, "loaderpool.system.clock", "import time\ntime.monotonic()", 0),
]


@pytest.mark.parametrize(("rule", "name", "source", "found"), BREAKERS)
def test_a_rule_finds_what_breaks_it(
    rule: Callable[[Module], Iterator[str]], name: str, source: str, found: int
) -> None:
    known = frozenset(each.name for each in MODULES)
    assert len(list(rule(Module.parse(name, source, known=known)))) == found


def test_a_circle_is_found_unless_an_import_waits_for_a_call() -> None:
    def modules(last: str) -> list[Module]:
        sources = {"a": "import b", "b": "import c", "c": last}
        return [Module.parse(name, source) for name, source in sources.items()]

    assert find_cycle(modules("import a")) == ["a", "b", "c", "a"]
    assert find_cycle(modules("def f():\n    import a")) == []
    assert find_cycle(modules("if TYPE_CHECKING:\n    import a")) == []
