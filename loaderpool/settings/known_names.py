"""Arguments by a name that a function does not have: answered before Python says which others are missing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_Returned = TypeVar("_Returned")


def known_names_only(function: Callable[_P, _Returned]) -> Callable[_P, _Returned]:
    """A method that answers names of arguments which it does not have with what was probably meant.

    Python's own answer would be that of the first one that is missing, as of `index` in `Shard(num_shards=2, rank=1)`.
    """
    code = function.__code__
    known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(function)
    def answering(*given: _P.args, **named: _P.kwargs) -> _Returned:
        if unknown := {name: value for name, value in named.items() if name not in known}:
            from loaderpool.settings.foreign_names import unknown_arguments  # `import loaderpool` shall not wait for it

            name = function.__name__
            raise unknown_arguments(type(given[0]).__name__ if name == "__init__" else name, unknown, known)
        return function(*given, **named)

    return answering
