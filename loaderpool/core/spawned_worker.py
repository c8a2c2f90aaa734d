"""A worker that `multiprocess` has spawned, and the connection by which the supervisor's thread directs it.

A connection is what `multiprocess.Pipe` returns, on each system. A batch that does not fit its slot goes along with its
message. A thread at each end reads all the time, so that neither waits for the other's function or loop.

This module imports no NumPy: a worker imports it before its environment is set.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from multiprocess.shared_memory import SharedMemory

from loaderpool.core.channel import ChannelClosed, Received
from loaderpool.core.messages import Done, Message, decode, encode
from loaderpool.system import machine

_END, _ASK_FOR_STACKS, _STACKS = b"", b"?", b"S"  # what is no message; after the last one are stacks
_LOOK_S = 0.5  # a third process may have the other end, too: then the other process' end is found by a look
_JOIN_S = 1.0
_File = TypeVar("_File")


class Queued:
    """One end of a channel between two threads. Any thread may send, also inside a garbage collection."""

    other: Queued

    def __init__(self) -> None:
        self._arrived, self._rings = collections.deque[Any](), queue.SimpleQueue[None]()

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

    def put(self, received: Any) -> None:
        """Have a message arrive; None: the end."""
        self._arrived.append(received)
        self.ring()

    def receive(self) -> Any:
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
        take: called with this and what has come, None at the end.
    """

    def __init__(
        self, connection: Any, look: Callable[[], object], take: Callable[[Connected, bytes | None], object]
    ) -> None:
        super().__init__()
        self._connection, self._look, self._take, self.fileno = connection, look, take, connection.fileno
        self._turn, self._stacks = threading.Lock(), ""
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
                    self._write(_STACKS + _stacks().encode())
                elif frame[:1] == _STACKS:
                    self._stacks = frame[1:].decode(errors="replace")
                else:
                    self._take(self, frame)
        except (EOFError, OSError, ValueError):  # the last one of a process that was let go of
            pass
        finally:
            self._take(self, None)


def _stacks() -> str:
    """Return what all other threads of this process are at, as faulthandler writes it."""
    stacks = []
    for thread, frame in sys._current_frames().items():
        if thread != threading.get_ident():
            calls = [(call.f_code, line) for call, line in traceback.walk_stack(frame)]
            lines = [f'  File "{code.co_filename}", line {line} in {code.co_name}' for code, line in calls]
            stacks.append("\n".join([f"Thread 0x{thread:016x} (most recent call first):", *lines]))
    return "\n\n".join(stacks)


def attach(make: Callable[..., _File], name: str, nbytes: int) -> _File:
    """Return the arena or the slots in a block of shared memory, as `make` makes them, with a mapping of their own."""
    if os.name == "nt":
        return make(-1, nbytes, name)
    block = SharedMemory(name=name)
    file = make(machine.above_standard(os.dup(block._fd)), nbytes)
    block.close()
    return file


def main(start: dict[str, Any], connection: Any) -> None:
    """Be a worker to the end. The connection is its one way to the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process' to answer
    if hasattr(signal, "pthread_sigmask"):  # blocked since before it began
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if hasattr(os, "setsid"):  # what the function does to its process group is not done to the main process
        os.setsid()
    os.environ.clear()
    os.environ.update(start["environment"])
    if start["directory"] is not None:
        with contextlib.suppress(OSError):  # it was deleted: it stays where the main process is
            os.chdir(start["directory"])
    sys.path[:], sys.argv = start["path"], list(start["argv"])
    _work(start, connection)


def _work(start: dict[str, Any], connection: Any) -> None:
    import faulthandler

    from loaderpool.core.exec_worker import LatePayloads
    from loaderpool.core.worker import Worker
    from loaderpool.memory.arena import Arena, SlotFile
    from loaderpool.memory.layout import VaryingLayout
    from loaderpool.system import process
    from loaderpool.transport.reports import LOST_PIPES_STATUS
    from loaderpool.worker.own_process import serve, settle_process

    def look() -> None:
        if os.getppid() != start["trainer_pid"]:
            raise EOFError

    def take(end: Connected, frame: bytes | None) -> None:
        if frame is None:  # with the main process
            os._exit(0 if machine.file_identity(connection.fileno()) == identity else LOST_PIPES_STATUS)
        end.put(Received(decode(frame)) if frame else None)

    class SpawnedWorker(Worker):
        def _send_batch(self, answer: Done, batch: VaryingLayout) -> None:
            content = bytearray(batch.nbytes)
            with memoryview(content) as view:
                batch.write(view, 0)
            channel.send(answer, [content])

    process.become("worker")
    settle_process()
    if sys.stderr is not None:
        faulthandler.enable(all_threads=False)
    identity = machine.file_identity(connection.fileno())
    channel: Any = Connected(connection, look, take)
    arena = attach(Arena, start["arena"], start["arena_bytes"])
    slots = attach(SlotFile, start["slots"], start["slots_bytes"])
    payloads = LatePayloads(arena, start)
    serve(SpawnedWorker(start["number"], start["cell"], channel, arena, slots, payloads, start["forms"]).run)
