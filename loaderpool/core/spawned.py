"""Workers without a fork: processes of `multiprocess`, directed by a thread in a supervisor's place.

    main process' threads <---- two queues ----> supervisor's thread <---- one connection each ----> worker 0 ... n-1

Works on each system: arena and slots are blocks of shared memory with names, each worker loads what it gets tickets
for, and a worker's end is the end of its connection.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import multiprocess
from multiprocess import process as process_of_multiprocess
from multiprocess import spawn

from loaderpool.core.block import Block
from loaderpool.core.channel import Received
from loaderpool.core.connection import Bell, Connected, Queued
from loaderpool.core.launch import Program, Surroundings
from loaderpool.core.memory import SlotFile
from loaderpool.core.messages import Load, Loaded, Message, Update
from loaderpool.core.pool import Pool
from loaderpool.core.processes import Processes, WorkerProcess
from loaderpool.core.records import DropFile, Instruction, ToMain
from loaderpool.core.session import Session
from loaderpool.core.spawned_worker import main
from loaderpool.core.supervisor import Supervisor
from loaderpool.core.watch import HungSample
from loaderpool.errors import PoolBrokenError
from loaderpool.memory.arena import Arena
from loaderpool.system import ctrl_c
from loaderpool.transport.payload.loaded import plain

_NAME = "loaderpool-worker-"
_MOST_MESSAGES = 4096  # queues hold any number: it bounds the slots
_LOOKS = 5  # at a process that has ended, one each 0.2 s: then what it said last has been read
_LOOK_S = 0.2  # a wait ends so often, for a signal's handler to run: on Windows nothing else has it run
# From the end of a worker's connection, and from a kill, to its own end. Longer only in an uninterruptible system call.
_ENDS_S, _KILLED_S = 1.0, 5.0
_spawning = multiprocess.get_context("spawn")
_starting = threading.Lock()


class SpawnedPool(Pool):
    """A pool of such workers."""

    hands_over_files = False

    def _make_arena(self) -> Arena:
        if not sys.executable:  # before the session looks: the block's resource tracker is started with it
            raise PoolBrokenError("sys.executable is empty. Set it to the path of a Python interpreter")
        self._block = Block()
        return self._block.arena

    def _make_session(self, program: Program) -> Session:
        program = Program("", settings={"arena": self._block.name})
        try:
            return SpawnedSession(self.arena, self.workers_wanted, self._restarts, self._around, self._news, program)
        except BaseException:
            _unlink(self._block)
            raise

    def close(self) -> None:
        if not (self.is_closed or self.is_foreign):
            super().close()
            _unlink(self._block)


def _unlink(block: Block) -> None:
    with contextlib.suppress(FileNotFoundError):  # it was before
        block.unlink()


class SpawnedSession(Session):
    """A supervisor that is a thread."""

    name = "the thread that directs the workers"

    def _open(
        self, arena: Arena, workers: int, restarts: tuple[int, float] | None, around: Surroundings, program: Program
    ) -> None:
        self._block = Block()
        slots = self.slots = SlotFile(self._block.arena.descriptor, self._block.arena.map)
        start = {
            **around._asdict(),
            **program.settings,
            "arena_bytes": arena.nbytes,
            "slots": self._block.name,
            "slots_bytes": slots.nbytes,
            "trainer_pid": os.getpid(),
            "workers": workers,
            "max_restarts": restarts,
        }
        ours, theirs = Queued.pair()
        self._channel: Any = ours
        self._bell = ours.bell
        self._supervisor = SpawnedSupervisor(start, theirs, arena, slots)
        self._thread = threading.Thread(target=self._supervisor.serve, name="loaderpool-supervisor", daemon=True)
        self._thread.start()

    def _prepare_to_wait(self) -> None:
        pass

    def _make_poll(self) -> Any:
        return None

    def _wait_once(self, *_: Any) -> bool:
        self._bell.wait(_LOOK_S)
        ctrl_c.note_signals()
        return True

    def wake(self) -> None:
        self._bell.ring()
        self.news.notify_all()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        listener: Any = self.loaders.get(message.loader) if isinstance(message, Load) else None
        self._channel.send(message, content=listener and listener.settings)

    def kill(self) -> None:
        self._supervisor.end_workers()

    def reap(self) -> str:
        self._channel.close()
        if threading.current_thread() is not self._thread:  # a finalizer runs anywhere
            self._thread.join(_KILLED_S)
            if self._thread.is_alive():
                self.kill()
        self.slots.close_descriptor()
        _unlink(self._block)
        return "see the error above"


class SpawnedSupervisor(Supervisor):
    """The loop, on a thread.

    Args:
        start: what a supervisor is told, and its workers are.
        channel: this thread's end.
        arena: of the pool.
        slots: of the session.
    """

    _main_pidfd = None

    def __init__(self, start: Mapping[str, Any], channel: Queued, arena: Arena, slots: SlotFile) -> None:
        given: Any = channel, arena, slots
        self._given, self._bell = given, channel.bell
        self._contents: dict[int, Any] = {}  # oversize batches, by what stands for the descriptor of a file
        super().__init__(start)

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
        self._main, self._arena, self._slots = self._given
        return _MOST_MESSAGES

    def _prepare_to_wait(self) -> None:
        pass

    def _make_workers(self, start: Mapping[str, Any]) -> Any:
        return SpawnedWorkers(self._arena, self._slots, self._payloads, self._forms, start, self._bell)

    def _wait(self) -> None:
        self._bell.wait(self._pause_s())
        self._hear_main()
        for worker in [*self._workers.by_number.values()]:
            self._hear_worker(worker)
            if worker.channel.has_ended or worker.has_ended_long_ago:
                self._dead.append(worker)

    def _listen(self, descriptor: int, handler: Callable[[], None]) -> None:
        pass  # what arrives is an event

    def _ignore(self, descriptor: int) -> None:
        pass

    def _is_orphan(self) -> bool:
        return False

    def _may_fork(self) -> bool:
        return False

    def _load(self, message: Load, received: Received) -> None:
        if received.content is not None:  # else it is closed by now
            self._payloads.loaded[message.loader] = received.content
            self._payloads.places[message.loader] = message.offset, message.nbytes
            self._on_loaded(message.loader, 0.0)

    def _update(self, message: Update) -> None:
        self._payloads.changes[message.loader] = self._payloads.read_change(message.offset, message.nbytes)
        self._main.send(Loaded(message.loader, 0.0))
        self._state.renew()

    def _on_worker(self, number: int, received: Received) -> None:
        if received.content is not None:
            name = max(self._contents, default=0) + 1
            self._contents[name] = received.content
            received = received._replace(descriptors=[name])
        super()._on_worker(number, received)

    def _obey(self, instruction: Instruction) -> None:
        if isinstance(instruction, ToMain) and instruction.descriptor >= 0:
            content = self._contents.pop(instruction.descriptor)
            self._main.send(instruction.message, content=content)  # type: ignore[call-arg]
        elif isinstance(instruction, DropFile):
            del self._contents[instruction.descriptor]
        else:
            super()._obey(instruction)


class SpawnedWorkers(Processes):
    """The workers. Each is started with what loaders there are."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._told, self._bell = arguments[-2:]

    def _launch(self, number: int, cell: int, is_forked: bool) -> WorkerProcess:
        payloads = self._payloads
        own = {"number": number, "cell": cell, "files": {}, "places": dict(payloads.places), "forms": dict(self._forms)}
        told = {**self._told, **own, "changes": plain(payloads.changes)}
        connection, theirs = _spawning.Pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            with contextlib.closing(theirs), _starting, _clean_start(told["environment"]["PYTHONHASHSEED"]):
                process = _spawning.Process(target=main, args=(told, theirs), name=f"{_NAME}{number}", daemon=False)
                process.start()
            undo.callback(process.kill)
            # Its end is ours to see to: `multiprocess` would wait for it when the interpreter exits.
            process_of_multiprocess._children.discard(process)
            worker = SpawnedWorker(number, process, cell, connection, self._bell)
            undo.pop_all()
        return worker

    def bury(self, worker: WorkerProcess) -> int:
        code = super().bury(worker)
        _let_go(worker.process)
        return code

    def end_all(self) -> None:
        super().end_all()
        for worker in list(self.by_number.values()):
            worker.channel.close()
            _let_go(worker.process)

    @property
    def without_pidfd(self) -> list[WorkerProcess]:
        return []  # a thread looks at each


def _let_go(process: Any) -> None:
    with contextlib.suppress(ValueError):  # it does not end, in an uninterruptible system call
        process.close()


class SpawnedWorker(WorkerProcess):
    """A worker, which is asked and ended without signals."""

    def __init__(self, number: int, process: Any, cell: int, connection: Any, bell: Bell) -> None:
        def look() -> None:
            if process.exitcode is not None:
                raise EOFError

        channel: Any = Connected(connection, bell, look, bell.ring)
        super().__init__(number, process, cell, channel, channel)
        self.sample = _Sample(self)
        self._looks = 0  # at it since its end

    @property
    def has_ended_long_ago(self) -> bool:
        """Whether it is gone, and its connection, which a fork of it may have, has not ended."""
        self._looks += self.process.exitcode is not None  # type: ignore[union-attr]
        return self._looks > _LOOKS

    def kill(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.process.kill()  # type: ignore[union-attr]

    def wait(self) -> int | None:
        process: Any = self.process
        if process.exitcode is None:
            process.join(_ENDS_S)
        if process.exitcode is None:
            self.kill()
            process.join(_KILLED_S)
        code: int | None = process.exitcode
        return code


class _Sample(HungSample):
    def __init__(self, worker: SpawnedWorker) -> None:
        super().__init__(worker.pid, worker.cell, worker.stacks)
        self.ask, self.kill = worker.channel.ask, worker.kill  # type: ignore[attr-defined, method-assign]


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
