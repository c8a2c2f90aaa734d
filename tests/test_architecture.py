"""Structure of the package: its rooms, and one place for each external library. Read from the
source, without running it.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.child import run_child
from tests.support.imports import Module, find_cycle, read_package

PACKAGE = "loaderpool"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE
MODULES = read_package(ROOT)

# Rooms in ascending order. A room imports its own modules and those of earlier rooms. The package
# itself re-exports names of earlier rooms. A new room needs a place here.
ROOMS = (
    "errors", "system", "hints", "checks", "plan", "element", "config", "memory", "sources", "cache",
    "transport", "transport.payload", "worker", "supervisor", "engine", "trainer.explain", "trainer.tracing",
    "trainer.autotune", "trainer", "ray", "", "adapters", "tools",
)  # fmt: skip

# Functions that only forward to a higher room, which they import when they are called: the module,
# and its targets.
FORWARDS = {
    "loaderpool.trainer.loader": {
        "loaderpool.adapters.eager_tensors",
        "loaderpool.adapters.jax_arrays",
        "loaderpool.adapters.keras_fit",
        "loaderpool.adapters.sequence_hooks",
        "loaderpool.adapters.shards",
        "loaderpool.adapters.tensorflow",
        "loaderpool.adapters.torch_tensors",
    },
}

MOST_MODULE_TOKENS = 6_000  # a larger module has a second job
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
# Tokens of code. Comments, docstrings and layout are free, so that dense code gains nothing. A
# number may rise if users gain something, and the commit says what.
MOST_TOKENS = {
    "loaderpool": 293_730,
    "scripts": 56_800,
    "tests": 431_155,
}
MOST_NAMES = 18  # modules directly in the package, without `__init__.py` and `py.typed`

# Modules outside the standard library that may be imported, and the rooms that may.
OUTSIDE_EVERYWHERE = {"cloudpickle", "numpy"}
OUTSIDE_ONLY_IN = {
    "loaderpool.system.annotations": {
        "annotationlib"
    },  # in the standard library from Python 3.14 on
    "loaderpool.adapters": {"jax", "keras", "tensorflow", "torch"},
    "loaderpool.ray": {"ray"},
    "loaderpool.tools": {"click", "rich"},
}
# Libraries that may only be imported in functions. A source of files imports its library when it is
# made. A framework is already imported if there is a tensor of it, or must be imported.
OUTSIDE_WHEN_CALLED = {
    "loaderpool.sources": {"fsspec", "google_crc32c", "h5py", "isal", "pyarrow", "zstandard"},
    "loaderpool.element.structure": {"ml_dtypes", "torch"},
    "loaderpool.transport.payload.pickler": {"jax", "torch"},
}

LINUX_ONLY_HOMES = {"loaderpool.system.machine"}
LINUX_ONLY_NAMES = {
    "F_GETPIPE_SZ", "F_SETPIPE_SZ", "PR_SET_CHILD_SUBREAPER", "PR_SET_PDEATHSIG", "eventfd", "fallocate",
    "memfd_create", "pidfd_open", "posix_fallocate", "prctl", "splice",
}  # fmt: skip

# Each is a lock, or uses one. A lock that processes share stays locked when its holder dies.
SHARED_LOCKS = {
    "Barrier", "BoundedSemaphore", "Condition", "Event", "JoinableQueue", "Lock", "Manager", "Pool", "Queue", "RLock",
    "Semaphore", "SimpleQueue",
}  # fmt: skip
# Modules in which the same names stand for objects within one process.
NOT_SHARED = {"asyncio", "queue", "threading"}

CLOCK_HOMES = {"loaderpool.system.clock"}
CLOCKS = {
    "clock_gettime", "clock_gettime_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns", "time", "time_ns",
}  # fmt: skip


# Places that may drop any exception: other processes or threads, where no handler of the program
# runs; tools; and functions of `interrupts.DROPPED_IN`.
DROPS_ANYTHING = {
    "loaderpool.engine.spawned",
    "loaderpool.errors",
    "loaderpool.ray",
    "loaderpool.system.machine",
    "loaderpool.tools",
    "loaderpool.transport.payload.loaded",
    "loaderpool.worker.bundles",
}


def room(name: str) -> str | None:
    """Return the room of a module, or None if it has none: `loaderpool.memory.layout` ->
    `memory`.
    """
    inner = name.removeprefix(PACKAGE).removeprefix(".")
    return max(
        (each for each in ROOMS if is_in(inner, each) or inner == each), key=len, default=None
    )


def is_in(name: str, package: str) -> bool:
    return name == package or (bool(package) and name.startswith(f"{package}."))


def is_ours(name: str) -> bool:
    return is_in(name, PACKAGE)


def allowed_in(packages: dict[str, set[str]], module: Module) -> list[set[str]]:
    return [names for package, names in packages.items() if is_in(module.name, package)]


def tokens_of(path: Path) -> int:
    """Count the tokens of a module's code, without comments, docstrings and layout."""
    source = path.read_text(encoding="utf-8")
    docstrings = set[int]()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in LAYOUT and token.start[0] not in docstrings for token in tokens)


# -- the rules: each yields its violations, as "line: text". Its docstring explains the fix.


def unassigned(module: Module) -> Iterator[str]:
    """Move the module into a room, or add a room to ROOMS and to the table of docs/internals/architecture.md."""
    if room(module.name) is None:
        yield f"1: {module.name} is in no room"


def upward(module: Module) -> Iterator[str]:
    """A room imports only itself and the rooms before it in ROOMS, also for types and in functions.

    Move the code that is needed into a lower room, pass it in as an argument, or write a Protocol beside its user. Add
    the two modules to FORWARDS only if the function does nothing but call the other one.
    """
    own = room(module.name)
    for each in module.imports:
        there = room(each.target) if is_ours(each.target) else None
        if own is None or there is None or ROOMS.index(there) <= ROOMS.index(own):
            continue
        if each.when != "call" or each.target not in FORWARDS.get(module.name, ()):
            yield f"{each.line}: {own or PACKAGE} imports {each.target}"


def outside(module: Module) -> Iterator[str]:
    """Each library is imported in one room. Move the code there, or add the module to a table of this file.

    OUTSIDE_ONLY_IN allows all imports, OUTSIDE_WHEN_CALLED only those in functions.
    """
    allowed = OUTSIDE_EVERYWHERE.union(
        sys.stdlib_module_names, *allowed_in(OUTSIDE_ONLY_IN, module)
    )
    in_functions = set().union(*allowed_in(OUTSIDE_WHEN_CALLED, module))
    for each in module.imports:
        root = each.target.split(".")[0]
        if each.when == "call" and root in in_functions:
            continue
        if (
            root != PACKAGE and root not in allowed and each.when != "types"
        ):  # an import for types loads nothing
            yield f"{each.line}: imports {each.target}"


def linux_only(module: Module) -> Iterator[str]:
    """Only system/machine.py uses functions that exist only on Linux. Call its functions, or add one there."""
    if module.name not in LINUX_ONLY_HOMES:
        yield from _names_used(module, LINUX_ONLY_NAMES, {})


def shared_locks(module: Module) -> Iterator[str]:
    """If a process dies, a lock that it holds stays locked in others. Send a message, or use the board."""
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
    """Only system/clock.py reads the time. Use its functions."""
    if module.name in CLOCK_HOMES:
        return
    yield from _names_used(
        module, {"now", "today", "utcnow"}, {"datetime": "datetime", "date": "datetime"}
    )
    yield from _names_used(module, CLOCKS, {"time": "time"})


def handlers_dropped(module: Module) -> Iterator[str]:
    """A signal's handler may raise out of any code: `except Exception` must pass that on."""
    if any(is_in(module.name, home) for home in DROPS_ANYTHING):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            body = [each for statement in node.body for each in ast.walk(statement)]
            passes = any(isinstance(each, ast.Raise) and each.exc is None for each in body)
            if "Exception" in _names_in(node.type) and not passes:
                yield f"{node.lineno}: drops what a handler raises: see `is_of_a_handler`"
        elif isinstance(node, ast.Call) and ast.unparse(node).endswith("suppress(Exception)"):
            yield f"{node.lineno}: use `FailuresIgnored`"


def _names_in(tree: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}


def _names_used(module: Module, names: set[str], owners: dict[str, str]) -> Iterator[str]:
    """Yield uses of names: as attributes of `owners` with their aliases, or of any object; in
    imports, or as strings.
    """
    aliases = set(owners)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            aliases |= {
                alias.asname or alias.name for alias in node.names if alias.name in owners.values()
            }
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


RULES = (unassigned, upward, outside, linux_only, shared_locks, clocks, handlers_dropped)


# -- the package follows the rules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[Module], Iterator[str]]) -> None:
    assert MODULES
    broken = [f"{module.name}:{what}" for module in MODULES for what in rule(module)]
    assert not broken, "\n".join([*broken, rule.__doc__ or ""])


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types and in functions count, because a reader of one module of a circle has to
    read all of them.
    """
    assert find_cycle(MODULES, but=FORWARDS) == [], (
        "move what both need into a module of its own, or write a Protocol beside its user"
    )


def test_each_room_is_there_and_says_what_it_is_for() -> None:
    modules = {module.name: module for module in MODULES}
    for each in filter(None, ROOMS):
        tree = modules[f"{PACKAGE}.{each}"].tree
        if (ROOT / each.replace(".", "/")).is_dir():
            text = ast.get_docstring(tree) or ""
            assert "Runs in:" in text and "Open first:" in text, f"the docstring of {each}"


def test_each_support_module_is_in_the_readme() -> None:
    support = Path(__file__).parent / "support"
    text = (support / "README.md").read_text(encoding="utf-8")
    items = "".join(line for line in text.splitlines() if line.startswith("- `"))
    named = set(re.findall(r"`(\w+\.py|\w+/)`", items))
    there = {path.name for path in support.glob("*.py")}
    there |= {f"{path.parent.name}/" for path in support.glob("*/*.py")}
    assert named == there - {"__init__.py"}


def test_the_package_is_fourteen_rooms_and_four_files() -> None:
    names = {path.name for path in ROOT.iterdir()} - {"__pycache__", "__init__.py", "py.typed"}
    assert len(names) <= MOST_NAMES, sorted(names)


def test_no_module_is_too_long() -> None:
    tokens = {str(path.relative_to(ROOT)): tokens_of(path) for path in ROOT.rglob("*.py")}
    assert not {name: count for name, count in tokens.items() if count > MOST_MODULE_TOKENS}, (
        "find the second job of the module, and give it a module of its own"
    )


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="from Python 3.12 on, an f-string is many tokens"
)
@pytest.mark.parametrize("folder", MOST_TOKENS)
def test_no_folder_grows_beyond_its_budget(folder: str) -> None:
    tokens = sum(map(tokens_of, (ROOT.parent / folder).rglob("*.py")))
    assert tokens <= MOST_TOKENS[folder], (
        f"{tokens:,} tokens of {MOST_TOKENS[folder]:,}: take something out, or raise MOST_TOKENS in "
        "tests/test_architecture.py if users gain, and say in the commit what they gain"
    )


@pytest.mark.corner
def test_importing_the_package_brings_in_no_framework() -> None:
    heavy = [
        "tensorflow",
        "keras",
        "multiprocess",
        "rich",
        "click",
        "matplotlib",
        "google_crc32c",
        "h5py",
        "pyarrow",
    ]
    code = f"import json, sys; import {PACKAGE}; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    assert json.loads(run_child(code).check().stdout) == []


def test_naming_a_source_brings_in_no_library_of_its_format() -> None:
    formats = ["fsspec", "google_crc32c", "h5py", "pyarrow", "tarfile"]
    code = f"""
        import json, sys
        import {PACKAGE}
        before = [m for m in {formats} if m in sys.modules]
        from {PACKAGE} import HDF5, ParquetRows, TFRecords
        print(json.dumps([before, [m for m in {formats} if m in sys.modules]]))
    """
    assert json.loads(run_child(textwrap.dedent(code)).check().stdout) == [[], []]


# -- each rule finds a violation

BREAKERS = [
    (handlers_dropped, "loaderpool.engine.run", "try: f()\nexcept Exception: pass", 1),
    (handlers_dropped, "loaderpool.engine.run", "try: f()\nexcept (OSError, Exception): g()", 1),
    (handlers_dropped, "loaderpool.engine.run", "with contextlib.suppress(Exception): f()", 1),
    (handlers_dropped, "loaderpool.engine.run", "with contextlib.suppress(OSError): f()", 0),
    (
        handlers_dropped,
        "loaderpool.engine.run",
        "try: f()\nexcept Exception:\n    if g(): raise",
        0,
    ),
    (handlers_dropped, "loaderpool.tools.top", "try: f()\nexcept Exception: pass", 0),
    (unassigned, "loaderpool.novelty", "", 1),
    (unassigned, "loaderpool.memory.anything", "", 0),
    (upward, "loaderpool.plan.order", "from loaderpool.worker import work", 1),
    (upward, "loaderpool.plan.order", "def f():\n    import loaderpool.trainer.pool", 1),
    (upward, "loaderpool.plan.order", "from ..supervisor import state", 1),
    (
        upward,
        "loaderpool.plan.order",
        "import importlib\nimportlib.import_module('loaderpool.trainer.loader')",
        1,
    ),
    (upward, "loaderpool.config", "from loaderpool import __version__", 1),
    (
        upward,
        "loaderpool.errors",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import loaderpool.plan",
        1,
    ),
    (upward, "loaderpool.trainer.loader", "from loaderpool.adapters import tensorflow", 1),
    (
        upward,
        "loaderpool.trainer.loader",
        "def f():\n    from loaderpool.adapters import tensorflow",
        0,
    ),
    (upward, "loaderpool.trainer.loader", "def f():\n    from loaderpool.tools.cli import main", 1),
    (
        upward,
        "loaderpool.worker.work",
        "import loaderpool.system.machine\nfrom . import rows\nimport numpy",
        0,
    ),
    (outside, "loaderpool.worker.work", "import tensorflow as tf", 1),
    (outside, "loaderpool.tools.tune", "def f():\n    from keras.utils import PyDataset", 1),
    (outside, "loaderpool.trainer.loader", "import pandas.core", 1),
    (outside, "loaderpool.sources.hdf5", "import h5py", 1),
    (outside, "loaderpool.sources.hdf5", "def f():\n    import h5py", 0),
    (outside, "loaderpool.trainer.loader", "def f():\n    import h5py", 1),
    (
        outside,
        "loaderpool.trainer.loader",
        "import typing\nif typing.TYPE_CHECKING:\n    import tensorflow as tf",
        0,
    ),
    (outside, "loaderpool.adapters.keras", "import keras, tensorflow, os.path, numpy.typing", 0),
    (linux_only, "loaderpool.memory.arena", "import os\nos.memfd_create('x')", 1),
    (linux_only, "loaderpool.memory.arena", "from os import pidfd_open", 1),
    (linux_only, "loaderpool.memory.arena", "import os\ngetattr(os, 'posix_fallocate')", 1),
    (linux_only, "loaderpool.system.machine", "import os\nos.memfd_create('x')", 0),
    (
        shared_locks,
        "loaderpool.trainer.pool",
        "import multiprocess\nq = multiprocess.get_context().Queue()",
        1,
    ),
    (shared_locks, "loaderpool.trainer.pool", "import multiprocessing as mp\nmp.Lock()", 1),
    (shared_locks, "loaderpool.trainer.pool", "from multiprocess.synchronize import Event", 1),
    (
        shared_locks,
        "loaderpool.trainer.pool",
        "import multiprocess, threading\nthreading.Lock()",
        0,
    ),
    (clocks, "loaderpool.trainer.pool", "import time\ntime.perf_counter()", 1),
    (clocks, "loaderpool.trainer.pool", "import time as t\nt.monotonic()", 1),
    (clocks, "loaderpool.trainer.pool", "from time import monotonic_ns as now", 1),
    (clocks, "loaderpool.trainer.pool", "import datetime\ndatetime.datetime.now()", 1),
    (
        clocks,
        "loaderpool.trainer.pool",
        "import time\ntime.sleep(1)\nimport loaderpool.system.clock",
        0,
    ),
    (clocks, "loaderpool.system.clock", "import time\ntime.monotonic()", 0),
]


@pytest.mark.parametrize(("rule", "name", "source", "found"), BREAKERS)
def test_a_rule_finds_what_breaks_it(
    rule: Callable[[Module], Iterator[str]], name: str, source: str, found: int
) -> None:
    known = frozenset(each.name for each in MODULES)
    assert len(list(rule(Module.parse(name, source, known=known)))) == found


@pytest.mark.parametrize(
    "last", ["import a", "def f():\n    import a", "if TYPE_CHECKING:\n    import a"]
)
def test_a_circle_is_found_whatever_the_import_is_for(last: str) -> None:
    sources = {"a": "import b", "b": "import c", "c": last}
    modules = [Module.parse(name, source) for name, source in sources.items()]
    assert find_cycle(modules) == ["a", "b", "c", "a"]
    assert find_cycle(modules, but={"c": {"a"}}) == []
