"""News of nodes leave the main process' channel as much room as all other messages may need."""

from __future__ import annotations

from typing import Any

from loaderpool.ray.dispatch import Dispatcher
from loaderpool.transport.channel import Channel, most_messages
from loaderpool.transport.messages import NodeIs, Release


def test_a_thousand_nodes_never_fill_the_channel() -> None:
    ours, theirs = (Channel(end) for end in Channel.pair())
    dispatcher: Any = object.__new__(Dispatcher)
    dispatcher._main = ours
    dispatcher._untold = {
        number: NodeIs(number, "f" * 56, "192.0.2.255", 8) for number in range(1000)
    }
    told = []
    while dispatcher._untold:
        dispatcher._tell_of_nodes()
        for offset in range(
            most_messages() * 3 // 4
        ):  # what `_open` leaves for all others: no send of these may wait
            ours.send(Release(1, offset, 9))
        while (received := theirs.receive()) is not None:
            if isinstance(received.message, NodeIs):
                told.append(received.message.number)
    assert told == list(range(1000))
    ours.close()
    theirs.close()
