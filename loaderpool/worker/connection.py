"""The ways of a worker that has one connection, and no descriptors that others could share.

A thread of its own takes in what comes, so that the other end never waits for a function; it also ends the worker with
its trainer, and writes down what all threads are at when it is asked.

    trainer ─▶ connection ─▶ [thread] ─▶ queue ─▶ main thread
       ▲                         └ stacks             │ answers
       └──────────────────────────────────────────────┘
"""

from __future__ import annotations

import faulthandler
import os
import queue
import tempfile
import threading
from typing import Any, NamedTuple, Protocol

import numpy as np

from loaderpool.memory.layout import VaryingLayout
from loaderpool.system.machine import file_identity
from loaderpool.transport.reports import LOST_PIPES_STATUS

# A trainer that died is noticed by the end of the connection; where a fork of it holds that, by a look this often.
_LOOK_S = 5.0


# What a worker sends begins with one of these.
REPORT = b"R"  # to the supervisor
NOTICE = b"N"  # to the trainer: a message, and bytes
HELD = b"H"  # to the trainer: a message, 8 bytes with the length of the batch, the batch, and failures
STACKS = b"S"  # what its threads are at
# What it is sent instead of commands.
ASK_FOR_STACKS = b"?"


class Connection(Protocol):
    """One end of what `multiprocess.Pipe` returns."""

    def recv_bytes(self) -> bytes: ...

    def send_bytes(self, buf: bytes | bytearray) -> None: ...

    def poll(self, timeout: float | None) -> bool: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class _Held(NamedTuple):
    batch_bytes: int
    content: bytearray


class ConnectedChannels:
    """A worker's connection; see `Channels`.

    Args:
        connection: its end.
        trainer_pid: of the parent.
    """

    def __init__(self, connection: Connection, trainer_pid: int) -> None:
        self._connection, self._trainer_pid = connection, trainer_pid
        self._turn = threading.Lock()  # two threads send
        self._commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._identity = self._look()
        threading.Thread(target=self._receive, name="loaderpool-commands", daemon=True).start()

    def read(self) -> bytes:
        return self._commands.get()

    def has_more(self) -> bool:
        return not self._commands.empty()

    def report(self, message: bytes) -> None:
        self._send(REPORT, message)

    def complete(self, message: bytes) -> None:
        self._send(NOTICE, message)

    def send(self, message: bytes, extra: bytes) -> None:
        self._send(NOTICE, message, extra)

    def hold(self, layout: VaryingLayout, failures: bytes) -> _Held:
        content = bytearray(layout.nbytes + len(failures))
        with memoryview(content) as view:
            layout.write(view, 0)
            view[layout.nbytes :] = failures
        return _Held(layout.nbytes, content)

    def send_held(self, message: bytes, held: _Held) -> None:
        self._send(HELD, message, held.batch_bytes.to_bytes(8, "little"), held.content)

    def are_intact(self) -> bool:
        return self._look() == self._identity

    def _look(self) -> tuple[int, int] | None:
        if os.name == "nt":  # a handle, of which no function of Python's closes all
            return 0, 0
        return file_identity(self._connection.fileno())

    def _send(self, kind: bytes, *parts: bytes | bytearray) -> None:
        with self._turn:
            self._connection.send_bytes(b"".join((kind, *parts)))

    def _receive(self) -> None:
        """Runs in: a thread of its own."""
        connection = self._connection
        try:
            while True:
                while not connection.poll(_LOOK_S):
                    if os.getppid() != self._trainer_pid:
                        os._exit(0)
                frame = connection.recv_bytes()
                if frame == ASK_FOR_STACKS:
                    self._send(STACKS, stacks())
                else:
                    self._commands.put(frame)
        except (EOFError, OSError):
            os._exit(0 if self.are_intact() else LOST_PIPES_STATUS)


def stacks() -> bytes:
    """Return what all threads of this process are at, as faulthandler has it."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def received_batch(frame: bytes, at: int) -> tuple[Any, int, int]:
    """Return a batch of a HELD frame as an attachment (see `Attachment`). Runs in: the trainer.

    Args:
        frame: as it came.
        at: where it begins behind kind and message.
    """
    batch_bytes = int.from_bytes(frame[at : at + 8], "little")
    content = np.frombuffer(frame, np.uint8, offset=at + 8)
    room = np.empty(content.nbytes + _ALIGNED, np.uint8)
    skipped = -room.ctypes.data % _ALIGNED
    copy = room[skipped : skipped + content.nbytes]
    copy[:] = content
    return copy, batch_bytes, content.nbytes


_ALIGNED = 64  # as slots are: TensorFlow copies what is not
