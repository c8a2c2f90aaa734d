"""Keeps an error without what its traceback keeps: every frame that it passed, their variables, and so the loader."""

from __future__ import annotations

import contextlib
import traceback
import weakref
from typing import Any

from loaderpool.errors import LoaderpoolError

_IS_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made at run time, not one of C's own


class LastError:
    """The latest error that was noted: itself for as long as somebody keeps it, else a copy without its frames."""

    def __init__(self) -> None:
        self._error: weakref.ref[BaseException] | None = None
        self._copy: BaseException | None = None

    def note(self, error: BaseException) -> None:
        """Remember an error."""
        self._copy = _without_frames(error)
        try:
            self._error = weakref.ref(error)
        except TypeError:  # of a class of C's own
            self._error = None

    def get(self) -> BaseException | None:
        """The error, or None before there was one."""
        error = self._error() if self._error is not None else None
        return self._copy if error is None else error


def _without_frames(error: BaseException) -> BaseException:
    """A copy of the same class, arguments, text, attributes and cause; a plain error of that text where that fails."""
    try:
        copy = _copied(error)
        if str(copy) != str(error):
            raise ValueError("it does not say the same")
        if error.__cause__ is not None and error.__cause__.__cause__ is None:
            copy.__cause__ = _copied(error.__cause__)
    except Exception:
        return LoaderpoolError("".join(traceback.format_exception_only(type(error), error)).strip())
    return copy


def _copied(error: BaseException) -> BaseException:
    """Made without calling the class, which may be the user's and do anything."""
    from loaderpool.transport.reports import original_of  # which `import loaderpool` shall not wait for

    cls = type(error)
    builtin: Any = cls
    while builtin.__flags__ & _IS_HEAP_TYPE and builtin.__base__ is not None:
        builtin = builtin.__base__
    original = original_of(error)
    members = original.attributes
    if "derive" in dir(builtin):  # an exception group cannot be without its exceptions
        copy: BaseException = builtin.__new__(cls, members.pop("message"), members.pop("exceptions"))
    else:
        copy = builtin.__new__(cls)
    copy.args = original.args
    vars(copy).update(vars(error))
    for name in members.keys() - vars(copy).keys():  # such as errno and filename, which lie in C structs
        with contextlib.suppress(Exception):  # read-only
            if getattr(copy, name, None) is not members[name]:  # None is not the same there as what was never set
                object.__setattr__(copy, name, members[name])
    return copy
