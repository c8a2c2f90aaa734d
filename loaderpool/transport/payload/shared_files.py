"""Finds files that a function reads through what its module has opened on import, before the workers were forked.

What a function captures cannot be pickled then, and is refused for that. What its module opens travels by name: the
supervisor's import opens it once, and each forked worker that reads moves the others' place in the file. So it is
looked for here, in the globals that the function's code names. One that a function assigns (a `setup`, or a cache that
opens its file when it is first asked) is opened here, and will be there, by a call and not by the import. Of HDF5 files
and databases `open_handles` knows more. Runs in: the trainer.
"""

from __future__ import annotations

import dis
import io
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from cloudpickle import cloudpickle as internals

# Functions and classes that are looked through. More: a function that calls half a package is looked at for longer
# than it takes to pickle it.
_MOST_LOOKED_AT = 200


def find_shared_file(functions: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the first such file that the functions use by a global name: the way to it, and it itself.

    Of what they call, functions and classes of their own modules are looked through, too.

    Args:
        functions: by the names that an error gives.
    """
    for name, function in functions.items():
        start = _function_of(function)
        if start is None:
            continue
        modules, seen, waiting = {start.__module__}, {id(start)}, [start]
        while waiting and len(seen) < _MOST_LOOKED_AT:
            for function, variable, value in _globals_used(waiting.pop()):
                if _is_read(value) and not _is_assigned_in_functions(function.__module__, variable):
                    return f"{name} → global {variable!r} used by {function.__qualname__}", value
                code_of = _function_of(value)
                if code_of is not None and id(code_of) not in seen and code_of.__module__ in modules:
                    seen.add(id(code_of))
                    waiting.append(code_of)
    return None


def _function_of(value: Any) -> Any:
    """Return what holds the code: a function, or a class of the user's; None for anything else."""
    value = getattr(value, "func", value)  # of a partial
    value = getattr(value, "__func__", value)  # of a method
    value = getattr(value, "__wrapped__", value)
    return value if isinstance(value, (types.FunctionType, type)) else None


def _functions_in(looked_at: Any) -> Iterator[types.FunctionType]:
    members = [looked_at] if isinstance(looked_at, types.FunctionType) else map(_function_of, vars(looked_at).values())
    yield from (member for member in members if isinstance(member, types.FunctionType))


def _globals_used(looked_at: Any) -> Iterator[tuple[types.FunctionType, str, Any]]:
    for function in _functions_in(looked_at):
        for name in internals._extract_code_globals(function.__code__):
            if name in function.__globals__ and function.__module__ != "__main__":  # that is never imported
                yield function, name, function.__globals__[name]


def _is_assigned_in_functions(module: str, variable: str) -> bool:
    """Whether any function of a module has the variable as a `global` that it sets."""

    def sets(code: types.CodeType) -> bool:
        if any(each.opname == "STORE_GLOBAL" and each.argval == variable for each in dis.get_instructions(code)):
            return True
        return any(sets(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))

    there = map(_function_of, list(vars(sys.modules[module]).values())) if module in sys.modules else ()
    own = (each for each in there if each is not None and each.__module__ == module)
    return any(sets(function.__code__) for each in own for function in _functions_in(each))


def _is_read(value: Any) -> bool:
    if not isinstance(value, io.IOBase) or value in (sys.stdin, sys.stdout, sys.stderr) or value.closed:
        return False
    try:  # a place in a file that all would move; where nothing is read (a log), there is no harm
        return value.fileno() >= 0 and value.readable() and value.seekable()
    except (OSError, ValueError):  # in memory
        return False
