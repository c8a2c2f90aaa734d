"""Channels where no descriptors travel (see `channel.Channel`): between two threads, and over a connection.

A connection is what `multiprocess.Pipe` returns, on each system. A batch that does not fit its slot goes along behind
its message. A thread at each end reads all the time, so that neither waits for the other's function or loop.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loaderpool.core.channel import ChannelClosed, Received
from loaderpool.core.messages import Done, Message, decode, encode

_END, _ASK_FOR_STACKS, _STACKS = b"", b"?", b"S"  # what is no message; behind the last one are stacks
_ALIGNED = 64  # as slots are: TensorFlow copies what is not
_LOOK_S = 0.5  # where another process has the other end, too, a process' death is found by a look
_JOIN_S = 1.0
_NAME = "loaderpool-connection"


class Inbox:
    """What has arrived, in its order. Any thread may put, also inside a garbage collection; one takes.

    Args:
        ring: called behind each message; None: `wait` is to return.
    """

    def __init__(self, ring: Callable[[], object] | None = None) -> None:
        self._arrived: collections.deque[Received | None] = collections.deque()
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ring = ring or self.wake

    def put(self, received: Received | None) -> None:
        """Put a message; None: the end."""
        self._arrived.append(received)
        self._ring()

    def receive(self) -> Received | None:
        """As `Channel.receive`."""
        if not self._arrived:
            return None
        if self._arrived[0] is None:
            raise ChannelClosed
        return self._arrived.popleft()

    def wake(self) -> None:
        """End a wait, or the next one."""
        if self._rings.empty():  # else who waits has not begun to look
            self._rings.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        """As `Channel.wait`; or return after so long."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=timeout_s)


class QueueChannel:
    """One end of a channel between two threads: what arrives here, and what does at the other end."""

    def __init__(self, inbox: Inbox, other: Inbox) -> None:
        self.receive, self._other = inbox.receive, other

    def send(self, message: Message, descriptors: Sequence[int] = (), content: Any = None) -> None:
        """As `Channel.send`, but never waits, and with an object in place of descriptors."""
        self._other.put(Received(message, descriptors, content))

    def close(self) -> None:
        """Let the other end find the end of the messages."""
        self._other.put(None)


class Connected:
    """One end of a connection.

    Args:
        connection: this end.
        inbox: for what arrives.
        look: raises EOFError if the other process is gone.
        on_end: called when nothing will come any more.
        may_wait: `send` may wait until all is written; else another thread writes.
    """

    def __init__(
        self, connection: Any, inbox: Inbox, look: Callable[[], object], on_end: Callable[[], object], may_wait: bool
    ) -> None:
        self._connection, self._inbox, self._look, self._on_end = connection, inbox, look, on_end
        self.receive, self.wait, self.fileno = inbox.receive, inbox.wait, connection.fileno
        self._turn, self._stacks, self.has_ended = threading.Lock(), "", False
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._write: Callable[[bytes], object] = self._write_now if may_wait else self._outbox.put
        self._threads = [threading.Thread(target=each, name=_NAME, daemon=True) for each in (self._hear, self._tell)]
        for thread in self._threads[: 1 if may_wait else 2]:
            thread.start()

    def send(self, message: Message, content: bytes | bytearray = b"") -> None:
        """As `Channel.send`, with a batch in place of its file."""
        self._write(b"".join((encode(message), content)))

    def end_sending(self) -> None:
        """As `Channel.end_sending`."""
        self._write(_END)

    def close(self) -> None:
        """Let go of it; the other process has ended."""
        self._outbox.put(None)
        for thread in self._threads:  # or its descriptor could be another's while a thread uses it
            thread.join(_JOIN_S)
        self._connection.close()

    def ask(self) -> None:
        """Have the other process tell what its threads are at."""
        self._stacks = ""
        self._write(_ASK_FOR_STACKS)

    def read(self) -> str:
        """Return what it has told since."""
        return self._stacks

    def _write_now(self, frame: bytes) -> None:
        with self._turn:
            self._connection.send_bytes(frame)

    def _tell(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (frame := self._outbox.get()) is not None:
                self._write_now(frame)

    def _hear(self) -> None:
        try:
            while True:
                while not self._connection.poll(_LOOK_S):
                    self._look()
                frame = self._connection.recv_bytes()
                if frame == _ASK_FOR_STACKS:
                    self._write(_STACKS + _stacks())
                elif frame[:1] == _STACKS:
                    self._stacks = frame[1:].decode(errors="replace")
                else:
                    self._inbox.put(_unpacked(frame) if frame else None)
        except (EOFError, OSError, ValueError):  # the last one of a process that was let go of
            pass
        finally:
            self.has_ended = True
            self._on_end()


def _unpacked(frame: bytes) -> Received:
    message, content = decode(frame), None
    if isinstance(message, Done) and message.oversize:
        room = np.empty(message.oversize + _ALIGNED, np.uint8)
        content = room[-room.ctypes.data % _ALIGNED :][: message.oversize]
        content[:] = np.frombuffer(frame, np.uint8)[-message.oversize :]
    return Received(message, (), content)


def _stacks() -> bytes:
    """Return what all other threads of this process are at, as faulthandler has it."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return b"\n\n".join(each for each in file.read().split(b"\n\n") if not each.startswith(b"Current"))
