"""A connection between two processes that carries messages.

A pair of connected Unix sockets of packets (`SOCK_SEQPACKET`). Four properties carry the whole design:

- A packet is sent whole or not at all: a process that is killed leaves no half message.
- Sending is one system call, so any thread may send at any time, also inside a garbage collection, without a lock.
- What a process sent before its death can still be read. So a worker that was killed after it said `Done` has done it.
- A packet can carry file descriptors. A message longer than a packet should be travels in a memory file of its own.
"""

from __future__ import annotations

import array
import contextlib
import errno
import marshal
import os
import select
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from loaderpool.core.messages import KINDS, Message, decode, encode
from loaderpool.system import machine

# Bytes of a message within a packet. The kernel counts 768 for packets of up to 192 bytes, and 1,280 for the next size.
_PACKET_BYTES = 192
_IN_FILE = b"\0in the file"
# Asked for; the kernel grants twice `net.core.wmem_max` at most.
_BUFFER_BYTES = 1 << 20
_MOST_PACKETS = 4096
_MOST_DESCRIPTORS = 253  # in one packet; the kernel's own limit
_ROOM_FOR_DESCRIPTORS = (
    socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS) if hasattr(socket, "CMSG_SPACE") else 0
)
# As plain numbers: an operator between members of an enum takes longer than the system call that they are for.
_RECEIVE = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0)) | int(getattr(socket, "MSG_DONTWAIT", 0))
_DONTWAIT, _CTRUNC = int(getattr(socket, "MSG_DONTWAIT", 0)), int(getattr(socket, "MSG_CTRUNC", 0))
_GONE = frozenset(
    {errno.EPIPE, errno.ECONNRESET, errno.EBADF}
)  # the other end is gone; or ours was closed
# How long a process may take, once it is not wanted any more, to let go of a stream or of generators, and to end.
# Smaller: the user's code that happens to wait is killed instead of closed. Larger: the loader's end waits as long.
GRACE_S = 0.5


class ChannelClosed(Exception):
    """The process at the other end has closed its end, or is gone; all that it sent has been read."""


class LostPacket(Exception):
    """A packet came without its file descriptors: this process can have no more of them."""


class Received(NamedTuple):
    """A message, and file descriptors that came with it. Ownership: whoever receives them closes them."""

    message: Message
    descriptors: Sequence[int] = ()
    content: Any = None  # what a file would hold, where no descriptors travel


class Channel:
    """One end. Blocks in `wait` only, and in `send` if it may wait for room.

    A process that was forked from the one that has it can neither send nor receive; `close` in it closes its copy.

    Args:
        end: the socket.
        wait_for_room: called by `send` while the channel is full, with a poll object for room. None: a
            full channel is a broken bound (the table in `messages.py`).
    """

    def __init__(
        self,
        end: socket.socket,
        wait_for_room: Callable[[Any], None] | None = None,
    ) -> None:
        self._socket, self._wait_for_room, self._owner = end, wait_for_room, os.getpid()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Return two connected ends, for `Channel`, above the standard descriptors."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        first, second = (socket.socket(fileno=machine.above_standard(end.detach())) for end in ends)
        for end in (first, second):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        return first, second

    def fileno(self) -> int:
        """Return the descriptor; -1: it was closed."""
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message. Nothing happens if the other process is gone: whoever reads from it will know.

        Raises:
            OSError: it cannot be sent: the process has no descriptors left, say.
            AssertionError: the channel is full.
        """
        if os.getpid() != self._owner:
            return
        data, file = encode(message), -1
        try:
            if len(data) > _PACKET_BYTES:
                file = _file_of(data)
                data, descriptors = _IN_FILE, [file, *descriptors]
            while True:
                try:
                    if descriptors:
                        rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors)
                        self._socket.sendmsg([data], [rights], _DONTWAIT)
                    else:
                        self._socket.send(data, _DONTWAIT)
                    return
                except BlockingIOError:
                    if self._wait_for_room is None:
                        raise AssertionError(
                            "there are more messages on their way than there can be"
                        ) from None
                    room = select.poll()
                    room.register(self._socket, select.POLLOUT)
                    self._wait_for_room(room)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        finally:
            if file >= 0:
                os.close(file)

    def receive(self) -> Received | None:
        """Return the next message, or None if there is none now.

        Raises:
            ChannelClosed: there will be none any more.
            LostPacket: a descriptor of the next message was lost, and so was the message.
        """
        if os.getpid() != self._owner:
            raise ChannelClosed
        while True:
            try:
                data, control, flags, _ = self._socket.recvmsg(
                    _PACKET_BYTES, _ROOM_FOR_DESCRIPTORS, _RECEIVE
                )
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno == errno.ECONNRESET:
                    continue  # the other end closed before it read all that we sent; what it sent is still to be read
                if error.errno not in _GONE:
                    raise
                raise ChannelClosed from None
            if control or flags & _CTRUNC:
                return _with_descriptors(data, control, flags)
            if not data:
                raise ChannelClosed
            code, *fields = marshal.loads(data)  # as `decode`: one call less for each
            return Received(tuple.__new__(KINDS[code], fields))

    def wait(self) -> None:
        """Return when there is something to receive, or the end. Takes nothing, so it may be interrupted."""
        self._poll.poll()

    def end_sending(self) -> None:
        """Let the other process find the end of the messages, once it has read those that were sent."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end. A thread that waits for it wakes, and finds it closed."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # closing alone would not wake it
        self._socket.close()


def _file_of(data: bytes) -> int:
    file = machine.create_memory_file("message")
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
    except BaseException:
        os.close(file)
        raise
    return file


def _with_descriptors(data: bytes, control: list[tuple[int, int, bytes]], flags: int) -> Received:
    found = array.array("i")
    for level, kind, rights in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(rights[: len(rights) - len(rights) % found.itemsize])
    descriptors = found.tolist()
    if flags & _CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise LostPacket
    if data == _IN_FILE:
        with open(descriptors.pop(0), "rb") as file:
            file.seek(0)
            data = file.read()
    return Received(decode(data), descriptors)


def most_messages() -> int:
    """Return how many packets a channel holds, by filling one; no more than files may be on their way."""
    first, second = Channel.pair()
    with first, second:
        packet, packets, (files, _) = bytes(_PACKET_BYTES), 0, machine.descriptor_limits()
        with contextlib.suppress(BlockingIOError):
            while packets < min(_MOST_PACKETS, files) if files > 0 else packets < _MOST_PACKETS:
                first.send(packet, _DONTWAIT)
                packets += 1
        return packets
