"""`HandingOver`: decides if a worker makes the rows of a generator's items itself.

A lane of generators is read by one worker. If there are more workers than lanes, and the calls of
the function take long, this worker only reads the items. Other workers then make the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderpool.system import clock
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.worker.bundles import Bundle, Frame, packed, unpacked

if TYPE_CHECKING:
    from loaderpool.worker.tickets import Opened

# Calls of a batch must take at least this long. Smaller: messages and files cost as much as the
# calls. Larger: batches of middling cost stay with one worker.
_LEAST_NS = 2_000_000
# Calls must take at least this times as long as pickling the items, because the other worker also
# copies and unpickles them.
_TIMES = 4


class HandingOver:
    """Measures what the calls of a batch cost, and what it costs to send their items.

    Attributes:
        calls_ns: Time of the calls for the latest batch that was made here.
    """

    def __init__(self) -> None:
        self.calls_ns = 0
        self._packing_ns = 0  # time to pickle the items of the latest batch that was sent
        self._can_be_sent: bool | None = None  # None: unknown, because no items were sent yet

    def frame(self, opened: Opened) -> Frame | None:
        """Return the items of a ticket for another worker, or None if the rows are made here."""
        is_worth_it = self.calls_ns >= max(_LEAST_NS, _TIMES * self._packing_ns)
        if self._can_be_sent is False or not is_worth_it:
            return None
        items = [opened.read(index) for index in opened.indices]
        begun_ns = clock.monotonic_ns()
        try:
            frame = packed((opened.indices, items), 0, len(items))
            self._packing_ns = clock.monotonic_ns() - begun_ns
            if self._can_be_sent is None:
                # Some objects can be pickled, but not unpickled.
                content = memoryview(bytearray(frame.nbytes))
                frame.write_into(content)
                unpacked(content, Bundle(0, frame.nbytes, frame.buffers, 0), opened.ticket.loader)
                self._can_be_sent = True
        except Exception as error:
            if is_of_a_handler(error):
                raise
            self._can_be_sent = False
            # A second read from the lane would make the items again.
            opened.read = dict(zip(opened.indices, items, strict=True)).__getitem__
            return None
        return frame
