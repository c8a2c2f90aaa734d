"""A worker's ways to the others: its commands come in, completions and reports go out.

`WorkerChannels` are pipes and a socket, of which it has descriptors. Another kind of pool has others, with the same
methods (worker/connection.py).
"""

from __future__ import annotations

import mmap
import os
import select
import socket
from typing import Any, NamedTuple, Protocol

from loaderpool.memory.layout import VaryingLayout
from loaderpool.system import machine
from loaderpool.transport.messages import READ_BYTES
from loaderpool.transport.pipes import send_descriptor, send_with_bytes, write_message


class Channels(Protocol):
    """What the loop asks of them. Runs in: a worker, on its main thread."""

    def read(self) -> bytes:
        """Return commands, whole ones; empty: there is no supervisor any more. Blocks until there are some."""

    def has_more(self) -> bool:
        """Whether `read` would not block."""

    def report(self, message: bytes) -> None:
        """Tell the supervisor."""

    def complete(self, message: bytes) -> None:
        """Tell the trainer that a ticket was answered."""

    def send(self, message: bytes, extra: bytes) -> None:
        """Tell the trainer something, with bytes of any length."""

    def hold(self, layout: VaryingLayout, failures: bytes) -> Any:
        """Put a batch that does not fit its slot, and failures behind it, where `send_held` finds them.

        Raises:
            MemoryLimitError: the machine has no room for it.
            OSError: there is no descriptor for it.
        """

    def send_held(self, message: bytes, held: Any) -> None:
        """Send a message with what is held. Ownership: takes it."""

    def are_intact(self) -> bool:
        """Whether they still lead where they led at the beginning (rule 10)."""


class _Held(NamedTuple):
    """A memory file with a batch."""

    descriptor: int
    batch_bytes: int


class WorkerChannels:
    """The descriptors that a worker of the supervisor's owns.

    Args:
        tickets: read end of its pipe.
        reports: write end, shared by all workers.
        completions: write end, shared by all workers and the supervisor.
        to_trainer: the trainer has the other end.
    """

    def __init__(self, tickets: int, reports: int, completions: int, to_trainer: socket.socket) -> None:
        self._tickets, self._reports, self._completions, self._socket = tickets, reports, completions, to_trainer
        self._poll = select.poll()
        self._poll.register(tickets, select.POLLIN)
        mine = (tickets, reports, completions, to_trainer.fileno())
        self._identities = [(descriptor, machine.file_identity(descriptor)) for descriptor in mine]

    def read(self) -> bytes:
        return os.read(self._tickets, READ_BYTES)

    def has_more(self) -> bool:
        return bool(self._poll.poll(0))

    def report(self, message: bytes) -> None:
        write_message(self._reports, message)

    def complete(self, message: bytes) -> None:
        write_message(self._completions, message)

    def send(self, message: bytes, extra: bytes) -> None:
        send_with_bytes(self._socket, message, extra)

    def hold(self, layout: VaryingLayout, failures: bytes) -> _Held:
        descriptor = machine.create_memory_file("oversize")
        try:
            nbytes = layout.nbytes + len(failures)
            os.ftruncate(descriptor, nbytes)
            machine.reserve(descriptor, 0, nbytes)
            with mmap.mmap(descriptor, nbytes) as view:
                layout.write(view, 0)
                view[layout.nbytes :] = failures
        except BaseException:
            os.close(descriptor)
            raise
        return _Held(descriptor, layout.nbytes)

    def send_held(self, message: bytes, held: _Held) -> None:
        try:
            send_descriptor(self._socket, message, held.descriptor, held.batch_bytes)
        finally:
            os.close(held.descriptor)

    def are_intact(self) -> bool:
        return all(machine.file_identity(descriptor) == identity for descriptor, identity in self._identities)
