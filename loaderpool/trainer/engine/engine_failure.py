"""Why an engine makes no batches any more."""

from __future__ import annotations

from collections.abc import Callable

from loaderpool.errors import LoaderpoolError

__all__ = ["EngineFailure"]


class EngineFailure:
    """The error that all of a loader's passes end with; none at first. What changes it holds the session's lock."""

    def __init__(self) -> None:
        # Makes the error anew for each who meets it: a kept exception would keep, through its traceback, every frame
        # that it passed, and so the loader itself.
        self._make_error: Callable[[], LoaderpoolError] | None = None
        self._may_pass = self._was_told = False

    @property
    def is_there(self) -> bool:
        """Whether the whole loader has failed."""
        return self._make_error is not None

    def note(self, make_error: Callable[[], LoaderpoolError], *, may_pass: bool = False) -> None:
        """The loader fails with this error; `may_pass`: what led to it is tried again once somebody was told."""
        self._make_error, self._may_pass, self._was_told = make_error, may_pass, False

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self._make_error is not None:
            self._was_told = True
            raise self._make_error()

    def pass_over(self) -> bool:
        """Forget an error that may pass and that somebody was told of; whether there was one."""
        if not (self._may_pass and self._was_told):
            return False
        self._make_error, self._may_pass, self._was_told = None, False, False
        return True
