"""The supervisor as a thread of this process (`supervisor.spawned.loop`), and the session's ways to it: two queues.

Runs in: the trainer. The queues are `SimpleQueue`s, into which finalizers and signals' handlers may put: they take no
lock of Python's.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loaderpool.errors import PoolBrokenError
from loaderpool.supervisor.spawned.block import Block
from loaderpool.supervisor.spawned.loop import SpawnedSupervisor
from loaderpool.trainer.session.launch import Program, Surroundings
from loaderpool.trainer.session.supervisor_handle import (
    ControlPipe,
    KnownProcess,
    Ready,
    SupervisorHandle,
    tickets_after,
)
from loaderpool.transport.messages import Words
from loaderpool.transport.pipes import Attachment

# A wait ends this often, for a signal's handler to run: on Windows nothing else has it run. Longer is felt at Ctrl-C.
_LOOK_S = 0.2
# How long a close waits for the thread to end by itself before workers are killed without it.
_CLOSE_TIMEOUT_S = 5.0

_News = tuple[Words, Attachment]


class QueuePipe:
    """The way to the thread, kept for as long as anything may still return a slot."""

    has_unsent = False

    def __init__(self, events: queue.SimpleQueue[Any]) -> None:
        self._events, self._owner_pid = events, os.getpid()
        self.is_dead = False
        self.on_leftover: Callable[[], None] | None = None

    def renew(self, events: queue.SimpleQueue[Any]) -> None:
        """Lead to another thread from now on."""
        self._events = events

    def release(self, message: bytes) -> None:
        if not self.is_dead and os.getpid() == self._owner_pid:
            self._events.put(message)

    def send(self, message: bytes) -> None:
        self.release(message)

    def flush(self) -> bool:
        return True

    def fileno(self) -> int:
        return -1


class SupervisorThread:
    """One supervisor, from its start to its end; see `SupervisorHandle`.

    Args:
        block: the arena.
        start: its settings.
        news: takes what it tells; None in it wakes who waits.
    """

    name = "the thread that directs the workers"

    def __init__(self, block: Block, start: dict[str, Any], news: queue.SimpleQueue[_News | None]) -> None:
        self.next_tickets = tickets_after(start["first_ticket"])
        self._news = news
        self._arrived: collections.deque[_News] = collections.deque()
        self._has_ended = False
        self._loop = SpawnedSupervisor(block, start, lambda words, attachment: news.put((words, attachment)))
        self.events = self._loop.events
        self._thread = threading.Thread(target=self._run, name="loaderpool-supervisor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException:  # a defect of ours: another one goes on, but it is told
            if not sys.is_finalizing():
                traceback.print_exc()
        finally:
            self._has_ended = True
            self._news.put(None)

    def wait(self, room_in: int | None, timeout_ms: int | None = None) -> Ready:
        has_ended = self._has_ended  # before what it has told until then is taken in
        with contextlib.suppress(queue.Empty):
            if not self._arrived and not has_ended and timeout_ms != 0:
                self._take(self._news.get(timeout=_LOOK_S if timeout_ms is None else timeout_ms / 1000))
            while True:
                self._take(self._news.get_nowait())
        return Ready(completions=False, notices=bool(self._arrived), signal=not self._arrived, ended=has_ended)

    def _take(self, news: _News | None) -> None:
        if news is not None:
            self._arrived.append(news)

    def read(self, inbox: collections.deque[Words]) -> bool:
        return False

    def receive(self) -> _News | None:
        return self._arrived.popleft() if self._arrived else None

    def send_files(self, message: bytes, descriptors: Sequence[int]) -> None:
        raise AssertionError("descriptors are not handed to spawned workers")

    def reap(self) -> str:
        """Return how the thread has ended; its workers ended before it."""
        self._thread.join(_CLOSE_TIMEOUT_S)
        return "see the error above"

    def end_workers(self, workers: Iterable[KnownProcess]) -> None:
        pass

    def end(self) -> None:
        """Wait for the thread, which was told to close; without it where it does not come, or is this one."""
        if threading.current_thread() is self._thread:  # a finalizer runs anywhere
            return
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._loop.end_workers()

    def close(self) -> None:
        pass


class ThreadStarter:
    """Starts supervisors as threads; see `Starter`.

    Args:
        program: which is what stands for a thread.
        max_restarts: deaths of workers that are made good, and within how many seconds; None: any number.

    Raises:
        MemoryLimitError: no room for the arena.
        PoolBrokenError: there is no interpreter to start workers with.
        OSError: no descriptors are left.
    """

    hands_over_files = False

    def __init__(self, program: Program, max_restarts: tuple[int, float] | None) -> None:
        if not sys.executable:
            raise PoolBrokenError("sys.executable is empty. Set it to the path of a Python interpreter")
        self.program, self._max_restarts = program, max_restarts
        self._around = Surroundings.of_now()
        self._news: queue.SimpleQueue[_News | None] = queue.SimpleQueue()
        self._block = Block()
        self.arena = self._block.arena

    def start(self, workers: int, first_ticket: int) -> SupervisorThread:
        start = {
            "workers": workers,
            "max_restarts": self._max_restarts,
            "first_ticket": first_ticket,
            "for_workers": {
                "path": self._around.path,
                "directory": self._around.directory,
                "environment": self._around.environment,
                "trainer_pid": os.getpid(),
            },
        }
        return SupervisorThread(self._block, start, self._news)

    def connect(self, supervisor: SupervisorHandle, pipe: ControlPipe | None) -> QueuePipe:
        assert isinstance(supervisor, SupervisorThread)
        if isinstance(pipe, QueuePipe):
            pipe.renew(supervisor.events)
            return pipe
        return QueuePipe(supervisor.events)

    def wake(self) -> None:
        self._news.put(None)

    def close(self) -> None:
        self.arena.close_descriptor()
        self._block.unlink()
