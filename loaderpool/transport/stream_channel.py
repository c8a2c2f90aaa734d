"""A channel over a stream of bytes, for systems that have no packets and cannot pass descriptors.

A message is a frame: its length in 4 bytes, then its bytes. A batch that did not fit its slot
follows its `Done`. If a process is killed while it sends, the receiver drops the incomplete frame.
Unlike a `Channel` of packets, only one thread may send at each end.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import socket
from collections.abc import Callable, Generator, Sequence
from typing import Any

from loaderpool.memory.layout import aligned_empty
from loaderpool.transport.channel import Channel, ChannelClosed, Received
from loaderpool.transport.messages import Done, Message, decode, encode

_LENGTH_BYTES = 4
# Waits for one socket. Unlike epoll and kqueue, these need no descriptor.
_Selector: type[selectors.BaseSelector] = getattr(
    selectors, "PollSelector", selectors.SelectSelector
)


class StreamChannel(Channel):
    """One end of a channel, with the interface of `Channel`.

    Args:
        end: The socket.
        waits: True if `send` blocks while the channel is full. False: the caller calls `flush`
            later.
    """

    def __init__(self, end: socket.socket, waits: bool = False) -> None:
        end.setblocking(False)
        with contextlib.suppress(OSError):  # the socket is not TCP: only the pairs of Windows are
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._waits, self._owner = end, waits, os.getpid()
        self._unsent = collections.deque[memoryview]()
        self._messages = self._read_messages()

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Return two connected sockets for `StreamChannel`."""
        return socket.socketpair()

    def send(self, message: Message, descriptors: Sequence[Any] = ()) -> None:
        """Send a message as `Channel.send` does. `descriptors` are buffers, which follow it."""
        if os.getpid() == self._owner:
            data = encode(message)
            frame = len(data).to_bytes(_LENGTH_BYTES, "little") + data
            self._unsent += map(memoryview, (frame, *descriptors))
            self.flush()

    def flush(self) -> None:
        """Send what `send` could not, because the channel was full."""
        try:
            while self._unsent:
                rest = self._unsent[0]
                try:
                    self._unsent[0] = rest[self._socket.send(rest) :]
                except BlockingIOError:
                    if not self._waits:
                        return
                    self._wait_for(selectors.EVENT_WRITE)
                if not self._unsent[0]:
                    self._unsent.popleft()
        except ConnectionError:  # the other process is gone, which `receive` reports
            self._unsent.clear()

    def send_contents(self, message: Message, nbytes: int, write: Callable[[Any], object]) -> None:
        """Send a message and its contents as `Channel.send_contents` does."""
        content = bytearray(nbytes)
        write(content)
        self.send(message, [content])

    def receive(self) -> Received | None:
        """Return the next message as `Channel.receive` does. Arrays stand for descriptors."""
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
