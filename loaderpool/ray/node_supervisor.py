"""A node's supervisor: one as ever, but what its batches look like is told by the dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loaderpool.config import unit_of
from loaderpool.core import forms
from loaderpool.core.channel import Received
from loaderpool.core.messages import Found
from loaderpool.core.supervisor import Supervisor, serve
from loaderpool.transport.pickling import receive

_NO_LIMIT = 1 << 62  # how much is under way at all nodes together is the dispatcher's to say


class NodeSupervisor(Supervisor):
    """The loop."""

    def _on_main(self, received: Received) -> None:
        if isinstance(received.message, Found):
            self._take_form(received.message)
        else:
            super()._on_main(received)

    def _note_free_memory(self) -> None:
        """Do nothing: a run is one ticket here, which would cost a look at the machine each time."""

    def _lay_out(self, number: int, probe: Any, found: tuple[int, Found] | None) -> None:
        """Pass the first sample on: the dispatcher chooses the form, for all nodes the same."""
        if found is not None and self._state.found(*found, None):
            self._main.send(found[1])

    def _take_form(self, message: Found) -> None:
        payload = self._payloads.loaded.get(message.loader)
        if payload is None:
            return
        form, _ = receive(message.content)
        self._forms[message.loader] = message.content
        for worker in self._workers.by_number.values():
            self._send_to_worker(worker, message)
        config, unit = payload["config"], unit_of(payload["config"], payload["batch_fn"])
        room = forms.room_of(config, payload["plan"].most_rows if unit == "sample" else 1)
        self._state.lay_out(message.loader, forms.layout_of(form, _NO_LIMIT, room), message.seconds)


def main(start: Mapping[str, Any]) -> None:
    """The process, from the first import to its end."""
    serve(start, NodeSupervisor, "supervisor")
