"""The worker processes: started by `multiprocess`, but not with the script run again; heard by a thread each; ended."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import multiprocess
from multiprocess import process as process_of_multiprocess
from multiprocess import spawn

from loaderpool.memory.arena import Arena
from loaderpool.supervisor.records import LastCell
from loaderpool.supervisor.spawned.main import main
from loaderpool.supervisor.watch import HungSample
from loaderpool.system.machine import StopWatch
from loaderpool.transport.messages import MESSAGE_BYTES, Words, decode_all
from loaderpool.transport.payload.loaded import Change, plain
from loaderpool.transport.pipes import Attachment
from loaderpool.worker.connection import ASK_FOR_STACKS, HELD, NOTICE, REPORT, Connection, received_batch

_NAME = "loaderpool-worker-"
# From the end of a worker's connection, and from a kill, to its own end. Longer only in an uninterruptible system call.
_ENDS_S = 1.0
_KILLED_S = 5.0

_spawning = multiprocess.get_context("spawn")
_starting = threading.Lock()

# What a worker says to its supervisor: its number, and reports; none: it is gone, and all that it has said came before.
News = tuple[int, bytes]


class _Sample(HungSample):
    """A worker whose sample is watched: it is asked and ended without signals."""

    def __init__(self, worker: SpawnedWorker) -> None:
        super().__init__(worker.pid, worker.cell, worker)
        self._worker = worker

    def ask(self) -> None:
        self._worker.send(ASK_FOR_STACKS)

    def kill(self) -> None:
        self._worker.kill()


class SpawnedWorker:
    """A worker as the trainer holds it: the way to it, and what its threads were at when it was asked."""

    stop: StopWatch | None = None  # that it was stopped is not known here
    was_stopped = False

    def __init__(self, number: int, cell: int, process: Any, connection: Connection) -> None:
        self.number, self.cell, self.pid = number, cell, int(process.pid)
        self._process, self._connection = process, connection
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.exit_code = 0  # once it was reaped
        self.answer = ""
        self.tickets = self.stacks = self
        self.sample: HungSample = _Sample(self)

    def run(self, take_in: Callable[[SpawnedWorker, bytes], None], gone: Callable[[SpawnedWorker], None]) -> None:
        """Begin to send it what it is told, and to take in what it says, until it is gone."""

        def hear() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    take_in(self, self._connection.recv_bytes())
            gone(self)

        def tell() -> None:  # on a thread of its own, for C code that keeps the interpreter's lock may keep it waiting
            with contextlib.suppress(OSError, ValueError):
                while messages := self._outbox.get():
                    self._connection.send_bytes(messages)

        for target in (hear, tell):
            self._threads.append(threading.Thread(target=target, name=f"{_NAME}{self.number}", daemon=True))
            self._threads[-1].start()

    def send(self, messages: bytes) -> None:
        """Send it something; where it is dead, its end is told."""
        self._outbox.put(messages)

    def forget(self) -> None:
        """What was answered is of no interest."""
        self.answer = ""

    def read(self) -> str:
        """Return what its threads were at."""
        return self.answer

    close = forget

    def kill(self) -> None:
        """End it, if it runs."""
        with contextlib.suppress(OSError, ValueError):
            self._process.kill()

    def reap(self) -> None:
        """Wait until it has ended, as it will in a moment, and let go of it. Blocks: at most some seconds."""
        self._process.join(_ENDS_S)
        if self._process.exitcode is None:
            self.kill()
            self._process.join(_KILLED_S)
        self.exit_code = self._process.exitcode or 0
        self.cut_if_dead()
        self._outbox.put(b"")
        for thread in self._threads:  # or its descriptor could be another's while a thread uses it
            thread.join(_ENDS_S)
        self._connection.close()
        with contextlib.suppress(ValueError):  # it does not end, in an uninterruptible system call
            self._process.close()

    def cut_if_dead(self) -> None:
        """End the connection of a dead one, where a process that it has forked holds the other end."""
        if os.name == "posix" and self._process.exitcode is not None:  # no process of Windows has what it was not given
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)


class SpawnedWorkers:
    """All workers of a pool.

    Args:
        arena: with their cells and slots.
        common: what all of them are told at their start, by the names that `main` knows.
        events: takes what they report, and when they are gone.
        tell: gives the trainer a notice, on any of our threads.
    """

    def __init__(
        self,
        arena: Arena,
        common: Mapping[str, Any],
        events: queue.SimpleQueue[Any],
        tell: Callable[[Words, Attachment], None],
    ) -> None:
        self._arena, self._common, self._events, self._tell = arena, dict(common), events, tell
        self.by_number: dict[int, SpawnedWorker] = {}
        self.places: dict[int, tuple[int, int]] = {}  # of each loader's payload
        self.changes: dict[int, Change] = {}  # made since to their sources

    def __iter__(self) -> Iterator[SpawnedWorker]:
        return iter(list(self.by_number.values()))

    def start(self, number: int, cell: int) -> SpawnedWorker:
        """Start a worker. Raises OSError where there is no memory, no more processes, or no descriptors."""
        self._arena.board.clear(cell)
        settings = {
            **self._common,
            "number": number,
            "cell": cell,
            "places": [(loader, *place) for loader, place in self.places.items()],
            "changes": plain(self.changes),
        }
        connection, theirs = _spawning.Pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            with contextlib.closing(theirs), _starting, _clean_start():
                process = _spawning.Process(target=main, args=(settings, theirs), name=f"{_NAME}{number}", daemon=False)
                process.start()
            undo.callback(process.kill)
            # Its end is ours to see to: `multiprocess` would wait for it when the interpreter exits.
            process_of_multiprocess._children.discard(process)
            worker = SpawnedWorker(number, cell, process, connection)
            worker.run(self._take_in, lambda worker: self._events.put((worker.number, b"")))
            undo.pop_all()
        self.by_number[number] = worker
        return worker

    def _take_in(self, worker: SpawnedWorker, frame: bytes) -> None:
        """What a worker says. Runs in: a thread of that worker's."""
        kind, behind = frame[:1], 1 + MESSAGE_BYTES
        if kind == REPORT:
            self._events.put((worker.number, frame[1:]))
        elif kind in (NOTICE, HELD):
            attachment = received_batch(frame, behind) if kind == HELD else frame[behind:] or None
            self._tell(next(decode_all(frame[1:behind])), attachment)
        else:
            worker.answer = frame[1:].decode(errors="replace")

    def bury(self, worker: SpawnedWorker) -> None:
        """Reap a worker whose connection has ended, and with that its use."""
        del self.by_number[worker.number]
        worker.reap()

    def last_cell(self, worker: SpawnedWorker) -> LastCell:
        """Return what a buried worker left on the board, which does not change any more."""
        return LastCell.of(self._arena.board, worker.cell, worker.pid, worker.exit_code)

    def end_all(self) -> None:
        """Kill and reap them."""
        workers = list(self)
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.reap()


@contextlib.contextmanager
def _clean_start() -> Iterator[None]:
    """Have a worker that begins now not run the script again: scripts need no guard, and notebooks work.

    Its interpreter reads PYTHONHASHSEED before all, for the order of sets; all else of its environment is set in it.
    """
    prepare, seed = spawn.get_preparation_data, os.environ.get("PYTHONHASHSEED")

    def without_script(name: str) -> dict[str, Any]:
        data: dict[str, Any] = prepare(name)
        if name.startswith(_NAME):
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
            data["sys_argv"] = list(map(str, getattr(sys, "argv", ())))
        return data

    spawn.get_preparation_data = without_script
    if seed in (None, "random"):
        os.environ["PYTHONHASHSEED"] = "0"
    try:
        yield
    finally:
        spawn.get_preparation_data = prepare
        if seed is None:
            os.environ.pop("PYTHONHASHSEED", None)
        else:
            os.environ["PYTHONHASHSEED"] = seed
