"""A channel over a stream of bytes, for systems that have no packets and cannot pass descriptors.

A message is a frame: its length in 4 bytes, then its bytes. A batch that did not fit its slot
follows its `Done`. A process that is killed while it sends leaves a part of a frame, which the
other one drops. Unlike a `Channel` of packets, only one thread may send at each end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
from collections.abc import Callable, Generator, Sequence
from typing import Any

from loaderpool.core.channel import BUFFER_BYTES, Channel, ChannelClosed, Received
from loaderpool.core.delivery import aligned_empty
from loaderpool.core.messages import Done, Message, decode, encode

_LENGTH_BYTES = 4
# Waits for one socket. Unlike epoll and kqueue, these need no descriptor.
_Selector: Any = getattr(selectors, "PollSelector", selectors.SelectSelector)


class StreamChannel(Channel):
    """One end of a channel, as `Channel`.

    Args:
        end: The socket.
        waits: True if `send` blocks while the channel is full. False: a full channel is an error.
    """

    def __init__(self, end: socket.socket, waits: bool = False) -> None:
        end.setblocking(False)
        self._socket, self._waits, self._owner = end, waits, os.getpid()
        self._messages = self._read_messages()

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Return two connected sockets for `StreamChannel`."""
        ends = socket.socketpair()
        for end in ends:
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES)
        return ends

    def send(self, message: Message, descriptors: Sequence[Any] = ()) -> None:
        """Send a message as `Channel.send` does. `descriptors` are buffers, which follow it."""
        if os.getpid() != self._owner:
            return
        data = encode(message)
        with contextlib.suppress(ConnectionError):  # `receive` reports it
            for part in (len(data).to_bytes(_LENGTH_BYTES, "little") + data, *descriptors):
                self._send_part(memoryview(part))

    def _send_part(self, rest: memoryview) -> None:
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                if not self._waits:
                    # A part may have been sent, so the channel cannot be used any more.
                    raise OSError(errno.ENOBUFS, "the channel is full") from None
                self._wait_for(selectors.EVENT_WRITE)

    def send_batch(self, message: Message, nbytes: int, write: Callable[[Any], object]) -> None:
        """Send a message and a batch as `Channel.send_batch` does."""
        content = bytearray(nbytes)
        write(content)
        self.send(message, [content])

    def receive(self) -> Received | None:
        """Return the next message as `Channel.receive` does. Its descriptors are arrays."""
        if os.getpid() == self._owner:
            for received in self._messages:
                return received
        raise ChannelClosed

    def _read_messages(self) -> Generator[Received | None, None, None]:
        """Yield the messages until the end, and None while the next one has not arrived."""
        with contextlib.suppress(EOFError):
            while True:
                length = yield from self._read(bytearray(_LENGTH_BYTES))
                message = decode(
                    (yield from self._read(bytearray(int.from_bytes(length, "little"))))
                )
                batches = []
                if isinstance(message, Done) and message.oversize:
                    batches.append((yield from self._read(aligned_empty(message.oversize))))
                yield Received(message, batches)

    def _read(self, buffer: Any) -> Generator[None, None, Any]:
        """Fill a buffer, and return it. Yield while its bytes have not arrived.

        Raises:
            EOFError: The channel ended before.
        """
        rest = memoryview(buffer)
        while rest:
            try:
                count = self._socket.recv_into(rest)
            except BlockingIOError:
                yield
                continue
            except OSError:  # the other process was killed, or this end was closed
                count = 0
            if not count:
                raise EOFError
            rest = rest[count:]
        return buffer

    def wait(self) -> None:
        """Block until a message arrives or the channel ends."""
        self._wait_for(selectors.EVENT_READ)

    def _wait_for(self, event: int) -> None:
        with _Selector() as selector:
            selector.register(self._socket, event)
            selector.select()
