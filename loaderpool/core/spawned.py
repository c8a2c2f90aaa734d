"""Workers without a fork: processes of `multiprocess`, directed by a thread in a supervisor's place.

    main process' threads <---- two queues ----> supervisor's thread <---- one connection each ----> worker 0 ... n-1

Works on each system: arena and slots are blocks of shared memory with names, each worker loads what it gets tickets
for, and a worker's end is the end of its connection. Of a sample that is ended no stacks are known.
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
_SEED = "PYTHONHASHSEED"  # an interpreter reads it before all else, for the order of sets
_LOOK_S = 0.2  # a wait ends so often: on Windows nothing else has a signal's handler run
_ENDS_S = (
    5.0  # of a thread, or from the end of a connection to that of its process; kills are quicker
)
_BLOCK_BYTES = 64 << 20  # a block of shared memory has a multiple
_spawning = multiprocess.get_context("spawn")
_starting = threading.Lock()


def _without_script(
    name: str, prepare: Callable[[str], dict[str, Any]] = spawn.get_preparation_data
) -> dict[str, Any]:
    """Have a worker of ours that begins not run the script again: scripts need no guard, and notebooks work."""
    skipped = ("init_main_from_name", "init_main_from_path") if name.startswith(_NAME) else ()
    return {key: value for key, value in prepare(name).items() if key not in skipped}


spawn.get_preparation_data = _without_script


def shared(make: Callable[..., Any], name: str | None = None) -> Any:
    """Return an arena or slots in the block of shared memory with this name; None: in a new one.

    Where this process is killed, `multiprocess`'s resource tracker unlinks it.
    """
    # Windows promises all of a block's memory when it is made, others only what is written to.
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
    """One end of a channel between two threads. Any thread may send, also inside a garbage collection."""

    other: Queued

    def __init__(self, rings: queue.SimpleQueue[None]) -> None:
        self._arrived, self.rings = (
            collections.deque[Received | None](),
            rings,
        )  # one for all at which a thread waits

    def ring(self) -> None:
        """End a wait, or the next one."""
        if self.rings.empty():  # else who waits has not begun to look
            self.rings.put(None)

    def wait(self, timeout_s: float | None = None) -> None:
        with contextlib.suppress(queue.Empty):
            self.rings.get(timeout=timeout_s)

    def put(self, received: Received | None) -> None:
        """Have a message arrive; None: the end."""
        self._arrived.append(received)
        self.ring()

    def receive(self) -> Received | None:
        if self._arrived and self._arrived[0] is None:
            raise ChannelClosed
        return self._arrived.popleft() if self._arrived else None

    def send(self, message: Message, content: Sequence[Any] = ()) -> None:
        """As `Channel.send`, but never waits, and with an object in place of a file."""
        self.other.put(Received(message, (), *content))

    def close(self) -> None:
        self.other.put(None)


class Connected(Queued):
    """One end of a connection to another process. A thread reads it: neither process waits for the other's function.

    `at_end` is called when it ends, or `is_there()` says that the other process has: a third one may have its end.
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
        """As `Channel.send`; a batch follows its message."""
        with contextlib.suppress(OSError):  # it is gone: who reads from it will know
            for frame in (b"" if message is None else encode(message), *content):
                self._connection.send_bytes(frame)

    def end_sending(self) -> None:
        self.send(None)

    def _hear(self) -> None:
        with contextlib.suppress(Exception):  # no more can be read, for whatever reason
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
        self._thread.join(_ENDS_S)  # or its descriptor could be another's while the thread uses it
        self._connection.close()


class SpawnedSession(Session):
    """A supervisor that is a thread."""

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
        if threading.current_thread() is not self._thread:  # a finalizer runs anywhere
            self._thread.join(_ENDS_S)
            if self._thread.is_alive():
                self._supervisor._workers.end_all()
        self.slots.close_descriptor()
        return "see the error above"


class SpawnedPool(WorkerPool):
    """A pool of such workers."""

    hands_over_files = False
    _make_modules = ModuleStore  # workers cannot add to it
    _make_session = SpawnedSession

    @staticmethod
    def _make_arena() -> Arena:
        child_process.check_executable()
        child_process.check_spawning(os.fsdecode(spawn.get_executable()))
        arena: Arena = shared(Arena)
        return arena


class SpawnedSupervisor(Supervisor):
    """The loop, on a thread."""

    _main_pidfd = -1  # it is this process
    _close_file: Any = staticmethod(lambda batch: None)  # no file
    _listen: Any = staticmethod(lambda descriptor, handler: None)  # `_wait` hears all
    _obstacles: Any = staticmethod(tuple)  # there is no fork, and that needs no warning

    def _open(self, start: Mapping[str, Any]) -> int:
        self._main, self._arena, self._slots = start["channel"], start["arena"], start["slots"]
        return 4096  # queues hold any number: it bounds the slots

    def _make_workers(self, start: Mapping[str, Any]) -> Any:
        return SpawnedWorkers(self._arena, self._slots, self._payloads, self._forms, start, list)

    def run(self) -> None:
        try:
            super().run()  # what it raises is a defect of ours, which Python prints; another thread goes on
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
        if received.content is not None:  # else it is closed by now
            self._payloads.settings[message.loader] = received.content
            self._payloads.places[message.loader] = message.offset, message.nbytes
            self._on_loaded(message.loader)


class SpawnedWorkers(Processes):
    """The workers. Each is started with what loaders there are."""

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
        # Its end is ours to see to: `multiprocess` would wait for it when the interpreter exits.
        multiprocess.process._children.discard(started)
        kill, wait = started.kill, functools.partial(_end, started)
        running = types.SimpleNamespace(
            pid=started.pid, poll=lambda: started.exitcode, kill=kill, wait=wait
        )
        channel: Any = Connected(
            ours, self._settings["channel"].rings, lambda: started.exitcode is None
        )
        no_stacks: Any = types.SimpleNamespace(
            ask=id, read=str, close=int
        )  # in place of a `StackFile`
        return WorkerProcess(number, running, cell, channel, no_stacks)


def _end(started: Any) -> Any:
    """Return the exit status of a process whose connection has ended, or which was killed."""
    started.join(_ENDS_S)
    started.kill()
    started.join(_ENDS_S)
    return started.exitcode


class SpawnedWorker(Worker):
    """A worker that has no files to send."""

    def _send_batch(self, answer: Done, batch: Any) -> None:
        content = bytearray(batch.nbytes)
        batch.write(content, 0)
        self._channel.send(answer, [content])  # type: ignore[list-item]  # in place of a file


def main(start: dict[str, Any]) -> None:
    """Be a worker to the end. The connection is its one way to the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process' to answer
    if hasattr(
        os, "setsid"
    ):  # what the function does to its process group is not done to the main process
        os.setsid()
    with contextlib.suppress(
        OSError, TypeError
    ):  # it was deleted: it stays where the main process is
        os.chdir(start["directory"])
    sys.path[:], sys.argv = start["path"], list(start["argv"])
    process.become("worker")
    machine.wake_when_orphaned()
    settle_process()
    faulthandler.enable(sys.stderr or os.open(os.devnull, os.O_WRONLY), all_threads=False)
    ends = functools.partial(
        os._exit, LOST_PIPES_STATUS
    )  # after the main process, or as the function has closed it
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
