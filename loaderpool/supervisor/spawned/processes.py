"""The worker processes: started by `multiprocess`, heard by a thread each, ended.

`multiprocess` runs the script again in what it spawns (`__main__`), and has the trainer's environment there. Workers
are started without the one, so that scripts need no guard and notebooks work, and set the other right themselves.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import multiprocess
from multiprocess import process as process_of_multiprocess
from multiprocess import spawn

from loaderpool.memory.arena import Arena
from loaderpool.supervisor.records import LastCell
from loaderpool.supervisor.spawned.main import main
from loaderpool.supervisor.watch import HungSample, fault_in
from loaderpool.system.stop_watch import StopWatch
from loaderpool.transport.messages import MESSAGE_BYTES, Words, decode_all
from loaderpool.transport.notices import Attachment
from loaderpool.transport.payload.changes import Change
from loaderpool.worker.connection import ASK_FOR_STACKS, HELD, NOTICE, REPORT, Connection, received_batch

_NAME = "loaderpool-worker-"
# From the end of a worker's connection to its own end, and from a kill to it. Longer only for one in an uninterruptible
# system call.
_ENDS_S = 1.0
_KILLED_S = 5.0
_READ_BYTES = 1 << 16
# What a connection surely holds of small messages that nothing reads: on Windows a pipe has 8 KiB. More:
# the one thread that deals could wait. Less: threads begin for workers that have much to do.
_FITS_BYTES = 1 << 12

_spawning = multiprocess.get_context("spawn")
_starting = threading.Lock()


class WorkerReport(NamedTuple):
    """A worker's report to its supervisor."""

    words: Words


class WorkerDeath(NamedTuple):
    """A worker's connection has ended; all that it has said was told before."""

    worker: int


class SpawnedStacks:
    """What a worker's threads were at: as it has answered, or as C code's fault has left it on a pipe."""

    def __init__(self, faults: Any) -> None:
        self.answer = ""
        self._faults = faults

    def forget(self) -> None:
        """What was answered is of no interest."""
        self.answer = ""

    def read(self) -> str:
        """Return the answer; of a dead one its last words, where there are any."""
        if os.name != "posix":  # faulthandler has no way to write to a pipe of Windows
            return self.answer
        last = b""
        with contextlib.suppress(OSError, EOFError):
            while self._faults.poll(0) and (more := os.read(self._faults.fileno(), _READ_BYTES)):
                last += more
        return fault_in(last.decode(errors="replace")) or self.answer

    def close(self) -> None:
        """Close the pipe."""
        self._faults.close()


class _Sample(HungSample):
    """A worker whose sample is watched: it is asked and ended without signals."""

    def __init__(self, worker: SpawnedWorker) -> None:
        super().__init__(worker.pid, worker.cell, worker.stacks)
        self._worker = worker

    def ask(self) -> None:
        self._worker.tickets.send(ASK_FOR_STACKS)

    def kill(self) -> None:
        self._worker.kill()


class _Tickets:
    """The way to a worker. It always reads; but not where C code that a function calls keeps the interpreter's lock.

    Then what does not surely fit the connection is sent by a thread, for the one that sends else must never wait.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unheard_bytes = 0  # sent since the worker has said something
        self._late: queue.SimpleQueue[bytes] | None = None
        self._sends_late: threading.Thread

    def send(self, messages: bytes) -> None:
        """Send it something; where it is dead, its end is told."""
        if self._late is None:
            self._unheard_bytes += len(messages)
            if self._unheard_bytes <= _FITS_BYTES:
                self._send(messages)
                return
            self._late = queue.SimpleQueue()
            self._sends_late = threading.Thread(
                target=self._send_late, args=(self._late,), name=f"{_NAME}late", daemon=True
            )
            self._sends_late.start()
        self._late.put(messages)

    def heard(self) -> None:
        """Note that the worker has said something."""
        self._unheard_bytes = 0

    def end(self) -> None:
        """Have the thread end, when the connection is cut. Blocks: for a moment."""
        if self._late is not None:
            self._late.put(b"")
            self._sends_late.join(_ENDS_S)

    def _send_late(self, late: queue.SimpleQueue[bytes]) -> None:
        while messages := late.get():
            self._send(messages)

    def _send(self, messages: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._connection.send_bytes(messages)


class SpawnedWorker:
    """A worker as the trainer holds it."""

    stop: StopWatch | None = None  # that it was stopped is not known here
    was_stopped = False

    def __init__(self, number: int, cell: int, process: Any, connection: Connection, stacks: SpawnedStacks) -> None:
        self.number, self.cell, self.connection = number, cell, connection
        self._process = process
        self.pid: int = process.pid
        self.exit_code = 0  # once it was reaped
        self.hears: threading.Thread  # takes in what it says
        self.tickets, self.stacks = _Tickets(connection), stacks
        self.sample: HungSample = _Sample(self)

    @property
    def has_ended(self) -> bool:
        """Whether it is dead."""
        return self._process.exitcode is not None

    def kill(self) -> None:
        """End it, if it runs."""
        with contextlib.suppress(OSError, ValueError):
            self._process.kill()

    def reap(self) -> None:
        """Wait until it has ended, as it will in a moment, and let go of it. Blocks: at most some seconds."""
        self._process.join(_ENDS_S)
        if not self.has_ended:
            self.kill()
            self._process.join(_KILLED_S)
        self.exit_code = self._process.exitcode or 0
        self.cut()
        self.tickets.end()
        self.hears.join(_ENDS_S)  # or its descriptor could be another's while that thread reads
        self.connection.close()
        with contextlib.suppress(ValueError):  # it does not end, in an uninterruptible system call
            self._process.close()

    def cut(self) -> None:
        """End the connection, where a process that the worker has forked holds its other end."""
        if os.name == "posix":  # no process of Windows has what it was not given
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)


class SpawnedWorkers:
    """All workers of a pool.

    Args:
        arena: with their cells and slots.
        common: what all of them are told at their start, by the names that `main` knows.
        events: takes what they report, and when they are gone.
        tell: gives the trainer a notice. Runs in: any of our threads.
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
        self.changes: Callable[[], Iterable[Change]] = tuple  # made since to their sources, the oldest first

    def __iter__(self) -> Iterator[SpawnedWorker]:
        return iter(list(self.by_number.values()))

    def start(self, number: int, cell: int) -> SpawnedWorker:
        """Start a worker; it will load what it gets tickets for.

        Raises:
            OSError: no memory, no more processes, or no descriptors.
        """
        self._arena.board.clear(cell)
        settings = {
            **self._common,
            "number": number,
            "cell": cell,
            "places": [(loader, *place) for loader, place in self.places.items()],
            # Not as objects: these would be unpickled before the worker's environment is what it shall be.
            "changes": pickle.dumps([tuple(change) for change in self.changes()], protocol=5),
        }
        with contextlib.ExitStack() as undo:
            connection, theirs = _spawning.Pipe()
            undo.callback(connection.close)
            faults, fault_end = _spawning.Pipe(duplex=False)
            undo.callback(faults.close)
            try:
                process = _spawning.Process(
                    target=main, args=(settings, theirs, fault_end), name=f"{_NAME}{number}", daemon=False
                )
                with _starting, _one_order_of_sets():
                    process.start()
            finally:
                theirs.close()
                fault_end.close()
            # Its end is ours to see to: `multiprocess` would wait for it when the interpreter exits.
            process_of_multiprocess._children.discard(process)
            worker = SpawnedWorker(number, cell, process, connection, SpawnedStacks(faults))
            undo.callback(worker.kill)
            worker.hears = threading.Thread(target=self._hear, args=(worker,), name=f"{_NAME}{number}", daemon=True)
            worker.hears.start()
            undo.pop_all()
        self.by_number[number] = worker
        return worker

    def _hear(self, worker: SpawnedWorker) -> None:
        """Take in what a worker says, until it is gone. Runs in: a thread of its own."""
        connection, events = worker.connection, self._events
        try:
            while True:
                frame = connection.recv_bytes()
                worker.tickets.heard()
                kind = frame[:1]
                if kind == REPORT:
                    events.put(WorkerReport(*decode_all(frame[1:])))
                elif kind == NOTICE:
                    words: Words = next(decode_all(frame[1 : 1 + MESSAGE_BYTES]))
                    self._tell(words, frame[1 + MESSAGE_BYTES :] or None)
                elif kind == HELD:
                    words = next(decode_all(frame[1 : 1 + MESSAGE_BYTES]))
                    self._tell(words, received_batch(frame, 1 + MESSAGE_BYTES))
                else:
                    worker.stacks.answer = frame[1:].decode(errors="replace")
        except (EOFError, OSError):
            pass
        finally:
            events.put(WorkerDeath(worker.number))

    def look(self) -> None:
        """Cut the connections of workers that have ended, where something else holds their ends."""
        for worker in self:
            if worker.has_ended:
                worker.cut()

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
            worker.stacks.close()


@contextlib.contextmanager
def _one_order_of_sets() -> Iterator[None]:
    """Have an interpreter that begins now give sets of str the same order as every other worker has.

    It reads this before it runs anything; all else of its environment is set right in it.
    """
    before = os.environ.get("PYTHONHASHSEED")
    if before not in (None, "random"):
        yield
        return
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def _prepared(prepare: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = prepare(name)
        if name.startswith(_NAME):
            for main in ("init_main_from_name", "init_main_from_path"):
                data.pop(main, None)
            data["sys_argv"] = [str(argument) for argument in getattr(sys, "argv", ())]
        return data

    return get_preparation_data


# Called by `Process.start`, of all processes of the package; what it says of any other than ours stays what it is.
spawn.get_preparation_data = _prepared(spawn.get_preparation_data)
