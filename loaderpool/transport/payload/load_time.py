"""How long a supervisor takes to load a payload, and which import takes longest in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from loaderpool.system import clock

if TYPE_CHECKING:
    from loaderpool.transport.pickling import Importing

# A load of less is not told of: beside it interpreters take longer to start.
_TOLD_FROM_S = 0.2


class LoadTime(NamedTuple):
    """How long a payload took to load."""

    seconds: float
    module: str  # whose import took longest of that; empty: nothing was imported
    import_s: float  # how long that one took


NOT_TOLD = LoadTime(0.0, "", 0.0)  # it was too short, or is not known


class LoadTimer:
    """Measures one load after another.

    Attributes:
        latest: of the latest load.

    Args:
        importing: the context of each import that has other reasons to be watched.
    """

    def __init__(self, importing: Importing) -> None:
        self._others = importing
        self._slowest: tuple[float, str] = 0.0, ""
        self.latest = NOT_TOLD

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A context for a load."""
        self._slowest, self.latest = (0.0, ""), NOT_TOLD
        begun_s = clock.monotonic_s()
        yield
        seconds = clock.monotonic_s() - begun_s
        if seconds >= _TOLD_FROM_S:
            import_s, module = self._slowest
            self.latest = LoadTime(seconds, module, import_s)

    @contextlib.contextmanager
    def importing(self, module: str) -> Iterator[None]:
        """A context for an import that the payload asks for; those of its module are part of it."""
        begun_s = clock.monotonic_s()
        with self._others(module):
            yield
        self._slowest = max(self._slowest, (clock.monotonic_s() - begun_s, module))
