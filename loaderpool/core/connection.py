"""Channels and memory where no descriptors travel: what spawned workers have in place of `Channel` and memory files.

A connection is what `multiprocess.Pipe` returns, on each system. A batch that does not fit its slot goes along with its
message. A thread at each end reads all the time, so that neither waits for the other's function or loop. The memory is
named blocks, which each system has.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from multiprocess.shared_memory import SharedMemory

from loaderpool.core.channel import ChannelClosed, Received
from loaderpool.core.failures import of_sample
from loaderpool.core.messages import Done, Message, decode, encode
from loaderpool.errors import MemoryLimitError
from loaderpool.memory.arena import Arena
from loaderpool.system import capacity, machine
from loaderpool.transport.reports import describe_failure

_END, _ASK_FOR_STACKS, _STACKS = b"", b"?", b"S"  # what is no message; after the last one are stacks
_ALIGNED = 64  # as slots are: TensorFlow copies what is not
_LOOK_S = 0.5  # a third process may have the other end, too: then the other process' end is found by a look
_JOIN_S = 1.0
_LEAST_BYTES = 64 << 20
# Windows promises all of a block's memory when it is made, others only what is written to.
_SHARE = 4 if os.name == "nt" else 1


class Queued:
    """One end of a channel between two threads. Any thread may send, also inside a garbage collection."""

    other: Queued

    def __init__(self) -> None:
        self._arrived, self._rings = collections.deque[Received | None](), queue.SimpleQueue[None]()

    @staticmethod
    def pair() -> tuple[Queued, Queued]:
        """Return both ends."""
        one, two = Queued(), Queued()
        one.other, two.other = two, one
        return one, two

    def ring(self) -> None:
        """End a wait, or the next one."""
        if self._rings.empty():  # else who waits has not begun to look
            self._rings.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it rings, or for so long."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=timeout_s)

    def put(self, received: Received | None) -> None:
        """Have a message arrive; None: the end."""
        self._arrived.append(received)
        self.ring()

    def receive(self) -> Received | None:
        """As `Channel.receive`."""
        if not self._arrived:
            return None
        if self._arrived[0] is None:
            raise ChannelClosed
        return self._arrived.popleft()

    def send(self, message: Message, content: Sequence[Any] = ()) -> None:
        """As `Channel.send`, but never waits, and with an object in place of a file."""
        self.other.put(Received(message, (), *content))

    def close(self) -> None:
        """Let the other end find the end of the messages."""
        self.other.put(None)


class Connected(Queued):
    """One end of a connection; the supervisor's end tells, too, what the other process' threads are at.

    Args:
        connection: this end.
        look: raises EOFError if the other process is gone.
        on_end: called when nothing will come any more.
        ring: called when something has come; None: who waits for this end is woken.
    """

    def __init__(
        self, connection: Any, look: Callable[[], object], on_end: Callable[[], object], ring: Any = None
    ) -> None:
        super().__init__()
        self.ring = ring or self.ring  # type: ignore[method-assign]
        self._connection, self._look, self._on_end, self.fileno = connection, look, on_end, connection.fileno
        self._turn, self._stacks, self.has_ended = threading.Lock(), "", False
        self._thread = threading.Thread(target=self._hear, name="loaderpool-connection", daemon=True)
        self._thread.start()

    def send(self, message: Message, content: Sequence[Any] = ()) -> None:
        """As `Channel.send`, with a batch in place of its file."""
        self._write(b"".join((encode(message), *content)))

    def end_sending(self) -> None:
        """As `Channel.end_sending`."""
        self._write(_END)

    def close(self) -> None:
        """Let go of it; the other process has ended."""
        self._thread.join(_JOIN_S)  # or its descriptor could be another's while the thread uses it
        self._connection.close()

    def ask(self, _: int) -> None:
        """As `StackFile.ask`."""
        self._stacks = ""
        self._write(_ASK_FOR_STACKS)

    def read(self) -> str:
        """As `StackFile.read`."""
        return self._stacks

    def _write(self, frame: bytes) -> None:
        with self._turn, contextlib.suppress(OSError, ValueError):  # it is gone: who reads from it will know
            self._connection.send_bytes(frame)

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
                    self.put(_unpacked(frame) if frame else None)
        except (EOFError, OSError, ValueError):  # the last one of a process that was let go of
            pass
        finally:
            self.has_ended = True
            self._on_end()


def _unpacked(frame: bytes) -> Received:
    message = decode(frame)
    if not isinstance(message, Done) or not message.oversize:
        return Received(message)
    try:
        room = np.empty(message.oversize + _ALIGNED, np.uint8)
    except MemoryError as error:
        return Received(Done(message.ticket, error=of_sample(describe_failure(error, epoch=0, worker=None))))
    content = room[-room.ctypes.data % _ALIGNED :][: message.oversize]
    content[:] = np.frombuffer(frame, np.uint8)[-message.oversize :]
    return Received(message, [content])  # type: ignore[list-item]  # in place of a file


def _stacks() -> bytes:
    """Return what all other threads of this process are at, as faulthandler has it."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return b"\n\n".join(each for each in file.read().split(b"\n\n") if not each.startswith(b"Current"))
    return b""  # no room for a file


class Block:
    """A block that this process has made, its arena, and the name by which others `attach`.

    Ownership: of the name, until `unlink`; where this process is killed, `multiprocess`'s resource tracker unlinks it.
    Raises MemoryLimitError where there is no room for a block of any use.
    """

    def __init__(self) -> None:
        nbytes = max(_LEAST_BYTES, capacity.available_memory_bytes() // _SHARE) // _LEAST_BYTES * _LEAST_BYTES
        while True:
            try:
                self._made = SharedMemory(create=True, size=nbytes)
                break
            except (MemoryError, OSError) as error:
                nbytes //= 2
                if nbytes < _LEAST_BYTES:
                    raise MemoryLimitError(f"Could not create a block of shared memory: {error}") from error
        self.name = self._made.name
        with contextlib.ExitStack() as undo:
            undo.callback(self.unlink)
            self.arena = _arena(self._made, nbytes)
            undo.pop_all()

    def unlink(self) -> None:
        """Give up the name: what maps the block keeps it, and nothing else can."""
        with contextlib.suppress(FileNotFoundError):  # it was before
            self._made.unlink()


def attach(name: str, nbytes: int) -> Arena:
    """Return the arena of a block that another process has made. Runs in: a worker."""
    return _arena(SharedMemory(name=name), nbytes)


def _arena(block: SharedMemory, nbytes: int) -> Arena:
    """Return an arena with a mapping of its own, at which arrays may look for longer than the block is open."""
    if os.name == "nt":
        arena = Arena(-1, nbytes, block.name)
    else:
        arena = Arena(machine.above_standard(os.dup(block._fd)), nbytes)
    block.close()
    return arena
