"""A node's supervisor: one as ever, but what its batches look like is told by the dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loaderpool.core.messages import Found
from loaderpool.core.supervisor import Supervisor, serve

_NO_LIMIT = 1 << 62  # how much is under way at all nodes together is the dispatcher's to say


class NodeSupervisor(Supervisor):
    """The loop."""

    def _note_free_memory(self) -> None:
        """Do nothing: a run is one ticket here, which would cost a look at the machine each time."""

    def _lay_out(self, number: int, probe: Any, found: tuple[int, Found] | None) -> None:
        """Pass the first sample on: the dispatcher chooses the form, for all nodes the same."""
        if found is not None and self._state.found(*found, None):
            self._main.send(found[1])

    def _take_form(self, message: Found) -> None:
        super()._take_form(message)
        loader = self._state.loaders.get(message.loader)
        if loader is not None and loader.layout is not None:
            loader.layout = loader.layout._replace(limit_bytes=_NO_LIMIT)


def main(start: Mapping[str, Any]) -> None:
    """The process, from the first import to its end."""
    serve(start, NodeSupervisor, "supervisor")
