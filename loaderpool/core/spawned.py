"""Workers without a fork: processes of `multiprocess`, directed by a thread in a supervisor's place.

    main process' threads <---- two queues ----> supervisor's thread <---- one connection each ----> worker 0 ... n-1

Works on each system: arena and slots are blocks of shared memory with names, each worker loads what it gets tickets
for, and a worker's end is the end of its connection.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import multiprocess
import numpy as np
from multiprocess import process as process_of_multiprocess
from multiprocess import spawn
from multiprocess.shared_memory import SharedMemory

from loaderpool.core.channel import Received
from loaderpool.core.child_process import Program, Surroundings
from loaderpool.core.delivery import aligned_empty
from loaderpool.core.messages import Done, Load, Loaded, Message, decode
from loaderpool.core.pool import WorkerPool
from loaderpool.core.processes import Processes, WorkerProcess
from loaderpool.core.session import Session
from loaderpool.core.spawned_worker import Connected, Queued, attach, main
from loaderpool.core.supervisor import Supervisor
from loaderpool.errors import MemoryLimitError, PoolBrokenError
from loaderpool.memory.arena import Arena, SlotFile
from loaderpool.system import capacity, interrupts
from loaderpool.transport.reports import describe_failure, of_sample

_NAME = "loaderpool-worker-"
_MOST_MESSAGES = 4096  # queues hold any number: it bounds the slots
_LOOK_S = 0.2  # a wait ends so often, for a signal's handler to run: on Windows nothing else has it run
# From the end of a worker's connection, and from a kill, to its own end. Longer only in an uninterruptible system call.
_ENDS_S, _KILLED_S = 1.0, 5.0
_LEAST_BYTES = 64 << 20  # of a block
# Windows promises all of a block's memory when it is made, others only what is written to.
_SHARE = 4 if os.name == "nt" else 1
_spawning = multiprocess.get_context("spawn")
_starting = threading.Lock()


def named(make: Callable[..., Any]) -> Any:
    """Return an arena or slots in a new block of shared memory, which workers `attach` by its name.

    Where this process is killed, `multiprocess`'s resource tracker unlinks it. Raises MemoryLimitError where there is
    no room for it.
    """
    nbytes = max(_LEAST_BYTES, capacity.available_memory_bytes() // _SHARE) // _LEAST_BYTES * _LEAST_BYTES
    try:
        block = SharedMemory(create=True, size=nbytes)
    except (MemoryError, OSError) as error:
        raise MemoryLimitError(f"Could not create a block of shared memory: {error}") from error
    try:
        file = attach(make, block.name, nbytes)
        file.name, file.unlink = block.name, block.unlink
        return file
    except BaseException:
        block.unlink()
        raise
    finally:
        block.close()


class SpawnedPool(WorkerPool):
    """A pool of such workers."""

    hands_over_files = False

    def _make_arena(self) -> Arena:
        if not sys.executable:  # before the session looks: the block's resource tracker is started with it
            raise PoolBrokenError("sys.executable is empty. Set it to the path of a Python interpreter")
        arena: Arena = named(Arena)
        return arena

    def _make_session(self, program: Program) -> Session:
        return SpawnedSession(self.arena, self._around, self._news, program)


class SpawnedSession(Session):
    """A supervisor that is a thread."""

    name = "the thread that directs the workers"

    def _open(self, arena: Arena, around: Surroundings, program: Program) -> None:
        slots = self.slots = named(SlotFile)
        start = {
            **around._asdict(),
            **program.settings,
            "arena": arena.name,
            "arena_bytes": arena.nbytes,
            "slots": slots.name,
            "slots_bytes": slots.nbytes,
            "trainer_pid": os.getpid(),
        }
        channel, theirs = Queued.pair()
        self._channel: Any = channel
        self._supervisor = SpawnedSupervisor(start, theirs, arena, slots)
        self._thread = threading.Thread(target=self._supervisor.serve, name="loaderpool-supervisor", daemon=True)
        self._thread.start()

    def _prepare_to_wait(self) -> None:
        pass

    def _wait_once(self, is_nested: bool) -> bool:
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

    def kill(self) -> None:
        self._supervisor.end_workers()

    def reap(self) -> str:
        self._channel.close()
        if threading.current_thread() is not self._thread:  # a finalizer runs anywhere
            self._thread.join(_KILLED_S)
            if self._thread.is_alive():
                self.kill()
        self.slots.close_descriptor()
        return "see the error above"


class SpawnedSupervisor(Supervisor):
    """The loop, on a thread.

    Args:
        start: what a supervisor is told, and its workers are.
        channel: this thread's end.
        arena: of the pool.
        slots: of the session.
    """

    _main_pidfd = -1  # it is this process
    _close_file: Any = staticmethod(lambda batch: None)  # no file

    def __init__(self, start: Mapping[str, Any], channel: Any, arena: Arena, slots: SlotFile) -> None:
        self._main, self._arena, self._slots = channel, arena, slots
        super().__init__(start)
        self._has_told_of_exec = True  # that workers are no forks its pool knows

    def serve(self) -> None:
        """Be the thread."""
        try:
            if hasattr(signal, "pthread_sigmask"):  # so that Ctrl-C ends no worker that has not begun yet
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            self.run()
        except BaseException:  # a defect of ours: another one goes on, but it is told
            if not sys.is_finalizing():
                traceback.print_exc()
        finally:
            self._main.close()

    def end_workers(self) -> None:
        """Kill them, where this thread does not."""
        self._workers.end_all()

    def _open(self, start: Mapping[str, Any]) -> int:
        return _MOST_MESSAGES

    def _make_workers(self, start: Mapping[str, Any]) -> Any:
        workers = SpawnedWorkers(self._arena, self._slots, self._payloads, self._forms, start, list)
        main: Any = self._main
        workers.tell = lambda *event: main.put(event)
        return workers

    def _hear_frame(self, number: int, _: Connected, frame: bytes | None) -> None:
        """A worker has said something; None: its connection has ended."""
        if frame is None:
            self._dead += [worker for worker in self._workers.by_number.values() if worker.number == number]
            return
        message, batches = decode(frame), []
        if isinstance(message, Done) and message.oversize:
            try:
                batches = [aligned_empty(message.oversize)]
                batches[0][:] = np.frombuffer(frame, np.uint8)[-message.oversize :]
            except MemoryError as error:  # as where a worker finds none
                failure = describe_failure(error, epoch=0, worker=None)
                message = Done(message.ticket, error=of_sample(failure))
        self._on_worker(number, Received(message, batches))  # type: ignore[arg-type]  # in place of a file

    def _wait(self) -> None:
        self._main.wait(self._tick_ms / 1000)  # type: ignore[call-arg]
        while (event := self._main.receive()) is not None:
            if isinstance(event, Received):
                self._on_main(event)
            else:
                self._hear_frame(*event)

    def _listen(self, descriptor: int, handler: Callable[[], None]) -> None:
        pass  # what arrives is an event

    def _forks(self) -> bool:
        return False

    def _load(self, message: Load, received: Received) -> None:
        if received.content is not None:  # else it is closed by now
            self._payloads.loaded[message.loader] = received.content
            self._payloads.places[message.loader] = message.offset, message.nbytes
            self._on_loaded(message.loader, 0.0)

    def _update(self, message: Load) -> None:
        self._payloads.changes[message.loader] = self._payloads.read_change(message.offset, message.nbytes)
        self._main.send(Loaded(message.loader, 0.0))
        self._state.renew()


class SpawnedWorkers(Processes):
    """The workers. Each is started with what loaders there are."""

    tell: Callable[[int, Connected, bytes | None], None]  # the loop what a worker has said, or of its end; any thread

    def _launch(self, number: int, cell: int, is_forked: bool) -> WorkerProcess:
        told = {**self._settings, **self._told(number, cell)}
        connection, theirs = _spawning.Pipe()
        with contextlib.closing(theirs), _starting, _clean_start(told["environment"]["PYTHONHASHSEED"]):
            process = _spawning.Process(target=main, args=(told, theirs), name=f"{_NAME}{number}", daemon=False)
            process.start()
        # Its end is ours to see to: `multiprocess` would wait for it when the interpreter exits.
        process_of_multiprocess._children.discard(process)
        started = SpawnedProcess(process)
        tell = functools.partial(self.tell, number)
        channel: Any = Connected(connection, started.look, tell)
        return WorkerProcess(number, started, cell, channel, channel)


class SpawnedProcess:
    """As `processes.ForkedProcess`, of a process of `multiprocess`, which knows no signals."""

    def __init__(self, process: Any) -> None:
        self._process, self.pid, self.kill = process, process.pid, process.kill
        self.poll: Callable[[], int | None] = lambda: process.exitcode

    def look(self) -> None:
        """Raise EOFError if it has ended."""
        if self._process.exitcode is not None:
            raise EOFError

    def wait(self) -> int | None:
        """Return its exit status once it has ended."""
        self._process.join(_ENDS_S)
        if self._process.exitcode is None:
            self.kill()
            self._process.join(_KILLED_S)
        code: int | None = self._process.exitcode
        return code


@contextlib.contextmanager
def _clean_start(seed: str) -> Iterator[None]:
    """Have a worker that begins now not run the script again: scripts need no guard, and notebooks work.

    Its interpreter reads PYTHONHASHSEED before all, for the order of sets; all else of its environment is set in it.
    """
    prepare, before = spawn.get_preparation_data, os.environ.get("PYTHONHASHSEED")

    def without_script(name: str) -> dict[str, Any]:
        data: dict[str, Any] = prepare(name)
        is_ours = name.startswith(_NAME)
        return {key: value for key, value in data.items() if not (is_ours and key.startswith("init_main_"))}

    spawn.get_preparation_data, os.environ["PYTHONHASHSEED"] = without_script, seed
    try:
        yield
    finally:
        spawn.get_preparation_data = prepare
        del os.environ["PYTHONHASHSEED"]
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before
