"""Spawned workers: processes of `multiprocess`, with a thread in the supervisor's place.

    main process <-- two queues --> supervisor's thread <-- one connection each --> worker 0 ... n-1

This works on every operating system. Arena and slots are named blocks of shared memory. Each worker
loads the payloads of the tickets that it gets. The end of a worker's connection is the end of the
worker. The stacks of a worker that was killed for a timeout are not known.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import functools
import os
import queue
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import multiprocess
from multiprocess import spawn
from multiprocess.shared_memory import SharedMemory

from loaderpool.core import child_process
from loaderpool.core.channel import ChannelClosed, Received
from loaderpool.core.delivery import aligned_empty
from loaderpool.core.messages import Done, Load, Message, decode, encode
from loaderpool.core.pool import WorkerPool
from loaderpool.core.processes import LatePayloads, Processes, WorkerProcess
from loaderpool.core.session import Session
from loaderpool.core.supervisor import Supervisor
from loaderpool.core.worker import Worker
from loaderpool.memory.arena import Arena, SlotFile
from loaderpool.system import capacity, interrupts, machine, process
from loaderpool.system.open_files import OpenFile
from loaderpool.transport.payload.modules import ModuleStore, keep
from loaderpool.transport.reports import LOST_PIPES_STATUS
from loaderpool.worker.own_process import serve, settle_process

_NAME = "loaderpool-worker-"
# NumPy reads the environment when it is imported, and this module imports it.
_BOOT = (
    "import os; os.environ.clear(); os.environ.update(start['environment']); "
    "from loaderpool.core.spawned import main; main(start)"
)
_SEED = "PYTHONHASHSEED"  # order of sets; an interpreter reads it at its start
# Longest wait. On Windows, handlers of signals run only after a wait has ended.
_LOOK_S = 0.2
# Seconds after which a worker with an event loop looks for messages. Larger: the worker is idle for
# longer. Smaller: a worker that waits takes more of a CPU.
_IDLE_S = 0.005
# Time for a thread to end, or for a process to exit after the end of its connection. A kill is
# quicker.
_ENDS_S = 5.0
_BLOCK_BYTES = 64 << 20  # the size of a block of shared memory is a multiple of this
_spawning = multiprocess.get_context("spawn")
_starting = threading.Lock()


def _without_script(
    name: str, prepare: Callable[[str], dict[str, Any]] = spawn.get_preparation_data
) -> dict[str, Any]:
    """Return `multiprocess`'s start data, without the script for workers of this package.

    A worker then does not run the script again. So scripts need no `__main__` guard, and notebooks
    work.
    """
    skipped = ("init_main_from_name", "init_main_from_path") if name.startswith(_NAME) else ()
    return {key: value for key, value in prepare(name).items() if key not in skipped}


spawn.get_preparation_data = _without_script


def shared(make: Callable[..., Any], name: str | None = None) -> Any:
    """Return an arena or slots in a block of shared memory.

    If this process is killed, `multiprocess`'s resource tracker unlinks the block.

    Args:
        make: `Arena` or `SlotFile`.
        name: Name of the block; None: create a new one.
    """
    # Windows commits all of a block's memory when it is created, other systems only written pages.
    size = (
        max(1, capacity.available_memory_bytes() // (_BLOCK_BYTES * (4 if os.name == "nt" else 1)))
        * _BLOCK_BYTES
    )
    with contextlib.closing(SharedMemory(name, create=name is None, size=size)) as block:
        if os.name == "nt":
            file = make(-1, block.size, block.name)
        else:
            file = make(machine.above_standard(os.dup(block._fd)), block.size)
    file.name, file.unlink = block.name, block.unlink
    return file


class Queued:
    """One end of a channel between two threads of this process.

    Any thread may send, also inside a garbage collection.

    Args:
        rings: Queue that wakes the receiving thread. Channels read by one thread share it.
    """

    other: Queued

    def __init__(self, rings: queue.SimpleQueue[None]) -> None:
        self._arrived, self.rings = collections.deque[Received | None](), rings

    def ring(self) -> None:
        """Wake the receiving thread, or end its next wait at once."""
        if self.rings.empty():  # otherwise the thread has not handled the last ring yet
            self.rings.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        with contextlib.suppress(queue.Empty):
            self.rings.get(timeout=timeout_s)

    def put(self, received: Received | None) -> None:
        """Add a message for the thread that receives at this end. None marks the end."""
        self._arrived.append(received)
        self.ring()

    def receive(self) -> Received | None:
        if self._arrived and self._arrived[0] is None:
            raise ChannelClosed
        return self._arrived.popleft() if self._arrived else None

    def send(self, message: Message, content: Sequence[Any] = ()) -> None:
        """Send a message as `Channel.send` does. Never waits; carries an object, not a file."""
        self.other.put(Received(message, (), *content))

    def close(self) -> None:
        self.other.put(None)


class Connected(Queued):
    """One end of a connection to another process.

    A thread reads it, so that no process waits for user code in the other one.

    Args:
        connection: Connection of `multiprocess`.
        rings: Queue that wakes the receiving thread, as in `Queued`.
        is_there: Returns True while the other process is running. The end of the connection is not
            enough, because a third process may hold its other end.
        at_end: Called in the reading thread when the connection or the other process has ended;
            None: wake the receiving thread.
    """

    def __init__(
        self, connection: Any, rings: Any, is_there: Callable[[], bool], at_end: Any = None
    ) -> None:
        super().__init__(rings)
        self._connection, self._is_there, self._at_end = connection, is_there, at_end
        self.fileno, self.has_ended = connection.fileno, False
        self._thread = threading.Thread(
            target=self._hear, name="loaderpool-connection", daemon=True
        )
        self._thread.start()

    def send(self, message: Message | None, content: Sequence[Any] = ()) -> None:
        """Send a message as `Channel.send` does. A batch follows its message."""
        with contextlib.suppress(OSError):  # the other process is gone, which `receive` reports
            for frame in (b"" if message is None else encode(message), *content):
                self._connection.send_bytes(frame)

    def end_sending(self) -> None:
        self.send(None)

    def _hear(self) -> None:
        with contextlib.suppress(Exception):  # any error is the end of the connection
            while self._is_there():
                if self._connection.poll(_LOOK_S):
                    frame, batches = self._connection.recv_bytes(), list[Any]()
                    message = decode(frame) if frame else None
                    if isinstance(message, Done) and message.oversize:
                        batches.append(aligned_empty(message.oversize))
                        self._connection.recv_bytes_into(batches[0])
                    self.put(None if message is None else Received(message, batches))
        self.has_ended = True
        (self._at_end or self.ring)()

    def close(self) -> None:
        # Otherwise the descriptor's number could be reused while the thread reads from it.
        self._thread.join(_ENDS_S)
        self._connection.close()


class SpawnedSession(Session):
    """A session whose supervisor is a thread of this process."""

    name = "the thread that directs the workers"

    def _open(self, arena: Arena, around: Any, program: Any) -> None:
        ours, theirs = Queued(queue.SimpleQueue()), Queued(queue.SimpleQueue())
        ours.other, theirs.other = theirs, ours
        self._channel: Any = ours
        self.slots = shared(SlotFile)
        own = {"channel": theirs, "arena": arena, "slots": self.slots, "trainer_pid": os.getpid()}
        self._supervisor = SpawnedSupervisor({**around._asdict(), **program.settings, **own})
        self._thread = threading.Thread(
            target=self._supervisor.run, name="loaderpool-supervisor", daemon=True
        )
        self._thread.start()

    def _wait_once(self) -> bool:
        self._channel.wait(_LOOK_S)
        if interrupts.waits_told_by is not None:
            interrupts.waits_told_by.note_signals()
        return True

    def wake(self) -> None:
        self._channel.ring()
        self.news.notify_all()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        listener: Any = self.listeners.get(message.loader) if isinstance(message, Load) else None
        self._channel.send(message, [listener.settings] if listener is not None else ())

    def reap(self) -> str:
        self._channel.close()
        # A finalizer may run in any thread, also in the supervisor's.
        if threading.current_thread() is not self._thread:
            self._thread.join(_ENDS_S)
            if self._thread.is_alive():
                self._supervisor._workers.end_all()
        self.slots.close_descriptor()
        return "see the error above"


class SpawnedPool(WorkerPool):
    """A pool of spawned workers."""

    hands_over_files = False
    _make_modules = ModuleStore  # in private memory, because workers cannot add modules to it
    _make_session = SpawnedSession

    @staticmethod
    def _make_arena() -> Arena:
        child_process.check_executable()
        child_process.check_spawning(os.fsdecode(spawn.get_executable()))
        arena: Arena = shared(Arena)
        return arena


class SpawnedSupervisor(Supervisor):
    """The supervisor's loop, on a thread of the main process."""

    _main_pidfd = -1  # not needed, because the main process is this one
    _close_file: Any = staticmethod(lambda batch: None)  # batches arrive as arrays, not as files
    _listen: Any = staticmethod(lambda descriptor, handler: None)  # `_wait` checks all channels
    _obstacles: Any = staticmethod(tuple)  # empty, because the missing fork needs no warning

    def _open(self, start: Mapping[str, Any]) -> int:
        self._main, self._arena, self._slots = start["channel"], start["arena"], start["slots"]
        return 4096  # queues hold any number of messages; this only limits the slots

    def _make_workers(self, start: Mapping[str, Any]) -> Any:
        return SpawnedWorkers(self._arena, self._slots, self._payloads, self._forms, start, list)

    def run(self) -> None:
        try:
            # Python prints an internal error, and the pool starts another thread.
            super().run()
        finally:
            self._main.close()

    def _wait(self) -> None:
        self._main.wait(self._wait_s)  # type: ignore[call-arg]
        self._hear_main()
        for worker in [*self._workers.by_number.values()]:
            self._hear_worker(worker, is_all=True)
            if worker.channel.has_ended:
                self._dead.append(worker)

    def _load(self, message: Load, received: Received) -> None:
        if received.content is not None:  # otherwise the loader was closed before the send
            self._payloads.settings[message.loader] = received.content
            self._payloads.places[message.loader] = message.offset, message.nbytes
            self._on_loaded(message.loader)


class SpawnedWorkers(Processes):
    """The spawned workers. Each gets the present loaders at its start."""

    def _launch(self, number: int, cell: int, files: Sequence[OpenFile] | None) -> WorkerProcess:
        ours, theirs = _spawning.Pipe()
        own = {"channel": theirs, "arena": self._arena.name, "slots": self._slots.name}
        own["modules"] = self._settings["modules"].frames()
        told = {**self._settings, **self._told(number, cell), **own}
        started = _spawning.Process(
            target=exec, args=(_BOOT, {"start": told}), name=f"{_NAME}{number}", daemon=False
        )
        with theirs, _starting:
            before = os.environ.get(_SEED)
            os.environ[_SEED] = told["environment"][_SEED]
            try:
                started.start()
            finally:
                del os.environ[_SEED]
                os.environ.update({} if before is None else {_SEED: before})
        # The pool ends its workers. Otherwise `multiprocess` would wait for them at exit.
        multiprocess.process._children.discard(started)
        kill, wait = started.kill, functools.partial(_end, started)
        running = types.SimpleNamespace(
            pid=started.pid, poll=lambda: started.exitcode, kill=kill, wait=wait
        )
        channel: Any = Connected(
            ours, self._settings["channel"].rings, lambda: started.exitcode is None
        )
        # In place of a `StackFile`, with methods that do nothing.
        no_stacks: Any = types.SimpleNamespace(ask=id, read=str, close=int)
        return WorkerProcess(number, running, cell, channel, no_stacks)


def _end(started: Any) -> Any:
    """Wait for the exit of a process whose connection has ended, and return its exit status.

    Kills the process if it does not exit in time.
    """
    started.join(_ENDS_S)
    started.kill()
    started.join(_ENDS_S)
    return started.exitcode


class SpawnedWorker(Worker):
    """A worker that sends large batches over the connection, not in files."""

    def _wait(self) -> None:
        if self._event_loop.is_created:
            # Another thread reads the channel, so its descriptor does not show a message.
            self._event_loop.turn(_IDLE_S)
        else:
            self._channel.wait()

    def _send_batch(self, answer: Done, batch: Any) -> None:
        content = bytearray(batch.nbytes)
        batch.write(content, 0)
        self._channel.send(answer, [content])  # type: ignore[list-item]  # bytes, not a file


def main(start: dict[str, Any]) -> None:
    """Run a worker until its end. Called in the new process. Its only link is the connection.

    Args:
        start: Settings of the worker, by name.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    # A new session, so that signals of the user's function to its process group do not reach the
    # main process.
    if hasattr(os, "setsid"):
        os.setsid()
    # If the directory was deleted, the worker keeps the main process' current one.
    with contextlib.suppress(OSError, TypeError):
        os.chdir(start["directory"])
    sys.path[:], sys.argv = start["path"], list(start["argv"])
    process.become("worker")
    machine.wake_when_orphaned()
    settle_process()
    faulthandler.enable(sys.stderr or os.open(os.devnull, os.O_WRONLY), all_threads=False)
    # Called if the main process has ended, or if the user's function has closed the connection.
    ends = functools.partial(os._exit, LOST_PIPES_STATUS)
    channel: Any = Connected(
        start["channel"], queue.SimpleQueue(), lambda: os.getppid() == start["trainer_pid"], ends
    )
    keep(ModuleStore(frames=start["modules"]))
    arena, slots = shared(Arena, start["arena"]), shared(SlotFile, start["slots"])
    payloads = LatePayloads(arena, start)
    serve(
        SpawnedWorker(
            start["number"], start["cell"], channel, arena, slots, payloads, start["forms"]
        ).run
    )
