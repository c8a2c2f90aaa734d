"""A node's supervisor: one as ever, but what its batches look like is told by the dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loaderpool.core.messages import Found
from loaderpool.core.records import Layout
from loaderpool.core.supervisor import Supervisor, serve
from loaderpool.memory.batch_form import BatchForm

_NO_LIMIT = 1 << 62  # how much is under way at all nodes together is the dispatcher's to say


class NodeSupervisor(Supervisor):
    """The loop."""

    def _note_free_memory(self) -> None:
        """Do nothing: a run is one ticket here, which would cost a look at the machine each time."""

    def _lay_out(self, number: int, probe: Any, found: tuple[int, Found] | None) -> None:
        """Pass the first sample on: the dispatcher chooses the form, for all nodes the same."""
        if found is not None and self._state.found(*found, None):
            self._main.send(found[1])

    def _known_layout(self, form: BatchForm, payload: Mapping[str, Any]) -> Layout:
        return super()._known_layout(form, payload)._replace(limit_bytes=_NO_LIMIT)


def main(start: Mapping[str, Any]) -> None:
    """The process, from the first import to its end."""
    serve(start, NodeSupervisor, "supervisor")
