"""Keeps an error without what its traceback keeps: every frame that it passed, their variables, and so the loader."""

from __future__ import annotations

import traceback
import weakref

from loaderpool.errors import LoaderpoolError


class LastError:
    """The latest error that was noted: itself for as long as it is kept elsewhere, else a copy without its frames."""

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
        """Return the error, or None before there was one."""
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
    from loaderpool.transport.reports import original_of, rebuild  # which `import loaderpool` shall not wait for

    copy = rebuild(type(error), original_of(error))
    vars(copy).update(vars(error))
    return copy
