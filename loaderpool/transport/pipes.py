"""Writes to pipes and sockets between processes: workers wait until they can, supervisor and trainer never do."""

from __future__ import annotations

import collections
import enum
import functools
import os
import select
import socket
import weakref
from collections.abc import Callable
from typing import Any

from loaderpool.memory.arena import map_private
from loaderpool.system import machine
from loaderpool.transport.messages import MESSAGE_BYTES, READ_BYTES, Words, decode_all

# More goes into a memory file beside the message: a packet must stay far below the socket's buffer.
_INLINE_BYTES = 32768
_MAX_WRITE_BYTES = 4096  # PIPE_BUF: whole messages or none

# Bytes, or a mapped memory file with the length of its first part and its whole length.
Attachment = tuple[Any, int, int] | bytes | None


class Lost(enum.Enum):
    """Stands for a memory file that could not be received: this process had no descriptor left."""

    LOST = 0


def receive_notice(source: socket.socket) -> tuple[Words, Attachment | Lost] | None:
    """Return the next notice, None where there is none now."""
    try:
        data, descriptors, flags, _ = socket.recv_fds(source, READ_BYTES, 1)
    except (BlockingIOError, ConnectionResetError):
        return None
    if not data:
        return None
    words: Words = next(decode_all(data[:MESSAGE_BYTES]))
    extra = data[MESSAGE_BYTES:]
    if not descriptors:
        return words, Lost.LOST if flags & socket.MSG_CTRUNC else extra
    try:
        nbytes = os.fstat(descriptors[0]).st_size
        # What is in it is whole by now. Private, so that a fork of this process and it do not see each other write.
        return words, (map_private(descriptors[0], 0, nbytes), int.from_bytes(extra, "little"), nbytes)
    finally:
        os.close(descriptors[0])


def read_attachment(attachment: Attachment) -> Any:
    """Return the object of ours that came with a notice."""
    from loaderpool.transport.pickling import receive  # with cloudpickle, which `import loaderpool` shall not wait for

    return receive(content_of(attachment))


def content_of(attachment: Attachment) -> bytes:
    """Return the bytes that came with a notice, without what stands behind a memory file's first part."""
    if isinstance(attachment, tuple):
        mapped, nbytes, _ = attachment
        return bytes(memoryview(mapped)[:nbytes])
    return attachment or b""


# ---- workers wait ----


def write_message(descriptor: int, message: bytes) -> None:
    """Write one message, waiting while the pipe is full. Blocks: only ever a worker."""
    _insist(descriptor, lambda: os.write(descriptor, message))


def send_with_bytes(to: socket.socket, message: bytes, extra: bytes) -> None:
    """Send a message and bytes of any length, waiting while the socket is full. Blocks: only ever a worker."""
    _insist(to, lambda: _try_send_with_bytes(to, message, extra))


def send_descriptor(to: socket.socket, message: bytes, descriptor: int, nbytes: int) -> None:
    """Send a message whose bytes are the first `nbytes` of a memory file. Blocks: only ever a worker."""
    _insist(to, lambda: _try_send_descriptor(to, message, descriptor, nbytes))


def _insist(to: int | socket.socket, send: Callable[[], object]) -> None:
    while True:
        try:
            send()
            return
        except BlockingIOError:
            waiter = select.poll()
            waiter.register(to, select.POLLOUT)
            waiter.poll()


# These send all or nothing, and raise BlockingIOError where the socket is full.


def _try_send_with_bytes(to: socket.socket, message: bytes, extra: bytes) -> None:
    if len(extra) <= _INLINE_BYTES:
        socket.send_fds(to, [message, extra], [])
        return
    descriptor = machine.create_memory_file("message")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(extra)
        _try_send_descriptor(to, message, descriptor, len(extra))
    finally:
        os.close(descriptor)


def _try_send_descriptor(to: socket.socket, message: bytes, descriptor: int, nbytes: int) -> None:
    socket.send_fds(to, [message, nbytes.to_bytes(8, "little")], [descriptor])


# ---- supervisor and trainer never do ----


class Outlet:
    """The write end of a pipe, with what is still to be written to it.

    Ownership: of the leftovers, not of the descriptor.

    Args:
        descriptor: the write end, non-blocking.
        poll: is told to watch the descriptor while something waits.
    """

    def __init__(self, descriptor: int, poll: select.poll) -> None:
        self.descriptor = descriptor
        self._poll = poll
        self._unsent: collections.deque[Callable[[], object]] = collections.deque()  # each writes all or nothing
        self._is_watched = False
        self.is_gone = False  # no process holds the other end any more

    def send(self, messages: bytes) -> None:
        """Write whole messages, in order, now or later."""
        for at in range(0, len(messages), _MAX_WRITE_BYTES):
            piece = messages[at : at + _MAX_WRITE_BYTES]
            self._unsent.append(functools.partial(os.write, self.descriptor, piece))
        self.flush()

    def flush(self) -> None:
        """Write what can be written of what waits."""
        try:
            while self._unsent:
                self._unsent[0]()
                self._unsent.popleft()
        except BlockingIOError:
            self._poll.register(self.descriptor, select.POLLOUT)
            self._is_watched = True
            return
        except OSError:
            self.is_gone = True
            self._unsent.clear()
        self.forget()

    def forget(self) -> None:
        """Have the poll watch it no more; to be called before the descriptor is closed."""
        if self._is_watched:
            self._poll.unregister(self.descriptor)
            self._is_watched = False


class SocketOutlet(Outlet):
    """The socket to the trainer, with what is still to be sent over it.

    Args:
        to: the socket, non-blocking.
        poll: is told to watch it while something waits.
    """

    def __init__(self, to: socket.socket, poll: select.poll) -> None:
        super().__init__(to.fileno(), poll)
        self._socket = to

    def send_with(self, message: bytes, extra: bytes) -> None:
        """Send a message and bytes, now or later."""
        self._unsent.append(functools.partial(_try_send_with_bytes, self._socket, message, extra))
        self.flush()

    def send_file(self, message: bytes, descriptor: int, nbytes: int) -> None:
        """Send a message whose bytes are the first `nbytes` of a memory file. Ownership: takes the descriptor."""
        send = functools.partial(_try_send_descriptor, self._socket, message, descriptor, nbytes)
        weakref.finalize(send, os.close, descriptor).atexit = False  # once it is sent, or never will be
        self._unsent.append(send)
        self.flush()
