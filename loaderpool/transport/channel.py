"""A connection between two processes that carries messages.

It is a pair of connected Unix packet sockets (`SOCK_SEQPACKET`). The design needs four properties:

- A packet is sent whole or not at all. A process that is killed leaves no half message.
- A send is one system call without a lock. So any thread may send at any time, also inside a
  garbage collection.
- The messages of a process can still be read after its death. So a worker that was killed after it
  sent `Done` has done the ticket.
- A packet can carry file descriptors. A message of more than 192 bytes is written to a memory file,
  and the packet carries that file.
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

from loaderpool.memory.arena import oversize_file
from loaderpool.system import machine
from loaderpool.transport.messages import KINDS, Message, decode, encode

# Longest message in a packet, in bytes. The kernel charges 768 bytes for a packet of up to 192, and
# 1,280 for the next size.
_PACKET_BYTES = 192
_IN_FILE = b"\0in the file"  # data of a packet whose message is in a file
# Requested size of the send buffer. The kernel grants at most twice `net.core.wmem_max`.
_BUFFER_BYTES = 1 << 20
_MOST_PACKETS = 4096
# Size of the send buffer that `most_messages` fills. Larger: the supervisor starts later, because a
# packet takes some microseconds. Smaller: the result is less exact.
_FILLED_BYTES = 1 << 16
_MOST_DESCRIPTORS = 253  # the kernel's limit for one packet
_ROOM_FOR_DESCRIPTORS = (
    socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS) if hasattr(socket, "CMSG_SPACE") else 0
)
# Flags as plain numbers, because `|` between members of an enum takes longer than the system call.
_RECEIVE = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0)) | int(getattr(socket, "MSG_DONTWAIT", 0))
_DONTWAIT, _CTRUNC = int(getattr(socket, "MSG_DONTWAIT", 0)), int(getattr(socket, "MSG_CTRUNC", 0))
# Errors of a socket whose other end is gone, or which was closed here.
_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.EBADF})
# Time for a process to close a stream or generators and to exit, after the request to stop.
# Smaller: user code that waits at that moment is killed instead of closed. Larger: closing a loader
# may take that long.
GRACE_S = 0.5


class ChannelClosed(Exception):
    """The process at the other end has closed its end or is gone. All its messages were read."""


class LostPacket(Exception):
    """A packet came without its file descriptors, because this process cannot open more of them."""


class Received(NamedTuple):
    """A message and the file descriptors that came with it. Ownership: the receiver closes them."""

    message: Message
    descriptors: Sequence[int] = ()
    content: Any = None  # content of the file, if the channel cannot carry descriptors


class Channel:
    """One end of a channel. Only `wait` blocks, and `send` if `wait_for_room` is given.

    Any thread may send. In a fork of the owner, the channel can neither send nor receive, and
    `close` closes the fork's copy.

    Args:
        end: The socket.
        wait_for_room: Called by `send` while the channel is full, with a poll object that reports
            room. None: a full channel is an error, because it breaks a bound in the table of
            `messages.py`.
    """

    def __init__(
        self,
        end: socket.socket,
        wait_for_room: Callable[[select.poll], None] | None = None,
    ) -> None:
        self._socket, self._wait_for_room, self._owner = end, wait_for_room, os.getpid()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Return two connected sockets for `Channel`, numbered above the standard descriptors."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        first, second = (socket.socket(fileno=machine.above_standard(end.detach())) for end in ends)
        for end in (first, second):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        return first, second

    def fileno(self) -> int:
        """Return the descriptor; -1 after `close`."""
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message. Do nothing if the other process is gone, because `receive` reports that.

        Raises:
            OSError: The message cannot be sent. For example, this process has no descriptors left.
            AssertionError: The channel is full, and `wait_for_room` is None.
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

    def send_contents(self, message: Message, nbytes: int, write: Callable[[Any], object]) -> None:
        """Send a message with contents that fit no packet, in a file.

        Args:
            message: The message.
            nbytes: Size of the contents.
            write: Writes them into a buffer of that size.

        Raises:
            OSError: There is no memory, or no descriptor.
        """
        file = oversize_file(nbytes, write)
        try:
            self.send(message, [file])
        finally:
            os.close(file)

    def receive(self) -> Received | None:
        """Return the next message, or None if there is none yet. Never blocks.

        Raises:
            ChannelClosed: No message will come any more.
            LostPacket: The next message lost a descriptor, and was dropped.
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
                    # The other end closed before it had read all our messages. Its own can still be
                    # read.
                    continue
                if error.errno not in _GONE:
                    raise
                raise ChannelClosed from None
            if control or flags & _CTRUNC:
                return _with_descriptors(data, control, flags)
            if not data:
                raise ChannelClosed
            code, *fields = marshal.loads(data)  # inlined `decode`, which saves a call
            message = tuple.__new__(KINDS[code], fields)
            return tuple.__new__(Received, (message, (), None))

    def wait(self) -> None:
        """Block until a message arrives or the channel ends.

        Interrupts are safe, because it reads nothing.
        """
        self._poll.poll()

    def end_sending(self) -> None:
        """Stop sending. The other process gets `ChannelClosed` after it has read all messages."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end. A thread in `wait` wakes, and its next `receive` raises."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # `close` alone would not wake a thread
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
    """Return a number of packets that a channel surely holds.

    A channel with a smaller buffer is filled, and its packets are scaled by the size of the buffer.
    The result is at most the limit of open files, because each packet may carry one.
    """
    first, second = Channel.pair()
    with first, second:
        buffer = socket.SOL_SOCKET, socket.SO_SNDBUF
        whole_bytes = first.getsockopt(*buffer)
        first.setsockopt(*buffer, _FILLED_BYTES)
        packet, packets, (files, _) = bytes(_PACKET_BYTES), 0, machine.descriptor_limits()
        most = min(_MOST_PACKETS, files) if files > 0 else _MOST_PACKETS
        with contextlib.suppress(BlockingIOError):
            while packets < most:
                first.send(packet, _DONTWAIT)
                packets += 1
        # The last packet may have begun in the last bytes of the buffer.
        return min(most, (packets - 1) * whole_bytes // first.getsockopt(*buffer))
