"""Comparison of the user's modules in the main process with the versions that the workers import.

Called in the main process. Calls no user code.
"""

from __future__ import annotations

import collections
import marshal
import sys
import types
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader

from loaderpool.system import machine, process
from loaderpool.system.interrupts import FailuresIgnored
from loaderpool.system.walk import CODE, walk
from loaderpool.transport.modules import KeptModule, ModuleStore, status_of
from loaderpool.transport.payload.pickler import home_of

_MOST_NAMED = 5  # modules in a warning
# Modules that are checked, nearest first, at 5 us each. Smaller: fewer edited modules are found.
# Larger: in a large project, loaders are created more slowly.
_MOST_MODULES = 100


def note_modules(homes: Iterable[str], store: ModuleStore) -> None:
    """Add the user's modules to the store, for spawned workers, which cannot add their imports."""
    for name, (module, loader) in _users_modules(homes).items():
        if store.find(name) is None:
            with FailuresIgnored():  # the file cannot be compiled now
                status, folders = status_of(loader.path), getattr(module, "__path__", None)
                code = marshal.dumps(loader.get_code(name))
                store.add(KeptModule(name, loader.path, folders and list(folders), status, code))


def version_warnings(homes: Iterable[str], store: ModuleStore) -> list[str]:
    """Return warnings about modules whose version in this process differs from that in the workers.

    Only functions are compared. A file is skipped if it is older than this process and the pool has
    imported its present version.

    Args:
        homes: Modules whose functions and classes are pickled by name.
        store: The pool's store.
    """
    newer: list[str] = []  # modules that are newer in the workers
    older: list[str] = []
    for name, (module, loader) in _users_modules(homes).items():
        status, kept = status_of(loader.path), store.find(name)
        is_older = kept is not None and kept.status != status
        if not is_older and status[0] <= machine.process_started_ns():
            continue
        with FailuresIgnored():  # the file cannot be compiled now
            code = loader.get_code(name) if kept is None else marshal.loads(kept.code)
            if code is not None and _differs(module, loader.path, code):
                (older if is_older else newer).append(f"{name} ({loader.path})")
    texts = []
    if newer:
        texts.append(
            "These files were edited after this process imported them, and the workers import the "
            f"new version: {_shown(newer)}. To have one version, call importlib.reload() or "
            "restart Python, and create the loader again"
        )
    if older:
        texts.append(
            "The workers of this pool have another version of these modules than this process: "
            f"{_shown(older)}. They keep the code that they imported first. To use the new "
            "version, create a new pool"
        )
    return texts


def _shown(modules: list[str]) -> str:
    more = [f"{len(modules) - _MOST_NAMED} more"] if len(modules) > _MOST_NAMED else []
    return ", ".join([*modules[:_MOST_NAMED], *more])


def _users_modules(homes: Iterable[str]) -> dict[str, tuple[types.ModuleType, SourceFileLoader]]:
    """Return the user's source modules of `homes` and those that these refer to, with loaders."""
    found: dict[str, tuple[types.ModuleType, SourceFileLoader]] = {}
    waiting, seen = collections.deque(homes), {"__main__"}
    while waiting and len(found) < _MOST_MODULES:
        name = waiting.popleft()
        if name in seen:
            continue
        seen.add(name)
        module = sys.modules.get(name)
        if type(module) is types.ModuleType and not process.is_library(name):
            waiting += [name.rpartition(".")[0], *map(home_of, list(vars(module).values()))]
            loader = getattr(vars(module).get("__spec__"), "loader", None)
            if type(loader) is SourceFileLoader:
                found[name] = module, loader
    return found


def _differs(module: types.ModuleType, path: str, code: types.CodeType) -> bool:
    """Return True if the module has a function that this code does not define."""

    def enters(value: object) -> bool:
        return (
            isinstance(value, CODE)
            and getattr(value, "__module__", module.__name__) == module.__name__
        )

    defined = {_digest(each) for each in _nested(code)}
    roots = {name: value for name, value in vars(module).items() if enters(value)}
    codes = (
        found.value.__code__
        for found in walk(roots, enters)
        if type(found.value) is types.FunctionType
    )
    return any(each.co_filename == path and _digest(each) not in defined for each in codes)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield each
            yield from _nested(each)


def _digest(code: types.CodeType) -> tuple[object, ...]:
    """Return the parts of code that an edit changes: its instructions and its line."""
    constants = tuple(map(_constant, code.co_consts))
    return code.co_name, code.co_firstlineno, code.co_code, code.co_names, constants


def _constant(value: object) -> object:
    if isinstance(value, types.CodeType):
        return _digest(value)
    return ("frozenset", *sorted(map(repr, value))) if type(value) is frozenset else repr(value)
