"""How workers and supervisor write to pipes and to the socket that they share."""

from __future__ import annotations

import os
import select
import socket

from loaderpool.system import machine

# More goes into a memory file beside the message: a packet must stay far below the socket's buffer.
_INLINE_BYTES = 32768


def write_message(descriptor: int, message: bytes) -> None:
    """Write one message, waiting while the pipe is full. Blocks: only ever a worker."""
    while True:
        try:
            os.write(descriptor, message)
            return
        except BlockingIOError:
            waiter = select.poll()
            waiter.register(descriptor, select.POLLOUT)
            waiter.poll()


def send_with_bytes(to: socket.socket, message: bytes, extra: bytes) -> None:
    """Send a message and bytes of any length, waiting while the socket is full. Blocks: only ever a worker."""
    while True:
        try:
            try_send_with_bytes(to, message, extra)
            return
        except BlockingIOError:
            _wait_for_room(to)


def try_send_with_bytes(to: socket.socket, message: bytes, extra: bytes) -> None:
    """Send a message and bytes of any length, or nothing.

    Raises:
        BlockingIOError: the socket is full.
    """
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


def send_descriptor(to: socket.socket, message: bytes, descriptor: int, nbytes: int) -> None:
    """Send a message whose bytes are the first `nbytes` of a memory file. Blocks: only ever a worker."""
    while True:
        try:
            _try_send_descriptor(to, message, descriptor, nbytes)
            return
        except BlockingIOError:
            _wait_for_room(to)


def _try_send_descriptor(to: socket.socket, message: bytes, descriptor: int, nbytes: int) -> None:
    socket.send_fds(to, [message, nbytes.to_bytes(8, "little")], [descriptor])


def _wait_for_room(to: socket.socket) -> None:
    waiter = select.poll()
    waiter.register(to, select.POLLOUT)
    waiter.poll()
