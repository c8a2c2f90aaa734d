"""Writes to a pipe without ever blocking: what it cannot take now waits for the next turn of the loop.

So no two processes wait in a write to each other (rule 4, docs/explanation/rules.md).
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
from typing import Generic, TypeVar

from loaderpool.transport.pipes import try_send_with_bytes

_MAX_WRITE_BYTES = 4096  # PIPE_BUF: whole messages or none


_Piece = TypeVar("_Piece")


class _Leftovers(Generic[_Piece]):
    """What is still to be written to a descriptor. Ownership: of that, not of the descriptor."""

    def __init__(self, descriptor: int, poll: select.poll) -> None:
        self.descriptor = descriptor
        self._poll = poll
        self._unsent: collections.deque[_Piece] = collections.deque()
        self.is_gone = False  # nobody holds the other end any more

    def _write(self, piece: _Piece) -> None:
        """Write a piece, whole or not at all. Raises OSError."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write what can be written of what waits."""
        while self._unsent:
            try:
                self._write(self._unsent[0])
            except BlockingIOError:
                self._poll.register(self.descriptor, select.POLLOUT)
                return
            except OSError:
                self.is_gone = True
                self._unsent.clear()
                break
            self._unsent.popleft()
        self.forget()

    def forget(self) -> None:
        """Have the poll watch it no more; to be called before the descriptor is closed."""
        with contextlib.suppress(KeyError):
            self._poll.unregister(self.descriptor)


class Outlet(_Leftovers[bytes]):
    """The write end of a pipe, with what is still to be written to it.

    Ownership: of the leftovers, not of the descriptor.

    Args:
        descriptor: the write end, non-blocking.
        poll: is told to watch the descriptor while something waits.
    """

    def send(self, messages: bytes) -> None:
        """Write whole messages, in order, now or later."""
        if not self._unsent and len(messages) <= _MAX_WRITE_BYTES:
            try:
                os.write(self.descriptor, messages)
                return
            except BlockingIOError:
                pass
            except OSError:
                self.is_gone = True
                return
        pieces = (messages[at : at + _MAX_WRITE_BYTES] for at in range(0, len(messages), _MAX_WRITE_BYTES))
        self._unsent.extend(pieces)
        self.flush()

    def _write(self, piece: bytes) -> None:
        os.write(self.descriptor, piece)


class SocketOutlet(_Leftovers[tuple[bytes, bytes]]):
    """The socket to the trainer, with what is still to be sent over it.

    Args:
        to: the socket, non-blocking.
        poll: is told to watch it while something waits.
    """

    def __init__(self, to: socket.socket, poll: select.poll) -> None:
        super().__init__(to.fileno(), poll)
        self._socket = to

    def send(self, message: bytes, extra: bytes) -> None:
        """Send a message and bytes, now or later."""
        self._unsent.append((message, extra))
        self.flush()

    def _write(self, piece: tuple[bytes, bytes]) -> None:
        try_send_with_bytes(self._socket, *piece)
