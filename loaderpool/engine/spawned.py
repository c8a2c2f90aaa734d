"""Spawned workers: started without a fork, with a thread in the supervisor's place.

    main process <-- two queues --> supervisor's thread <-- one stream each --> worker 0 ... n-1

This works on every operating system. `child_process` starts the workers, as it starts those of a
supervisor process that must not fork. The stacks of a worker that was killed for a timeout are not
known.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loaderpool.engine.pool import WorkerPool
from loaderpool.engine.session import Session
from loaderpool.engine.version import Version
from loaderpool.memory.arena import Arena, SlotFile
from loaderpool.supervisor.processes import Processes, StackFile
from loaderpool.supervisor.supervisor import Supervisor, Ticks
from loaderpool.system import interrupts
from loaderpool.transport import child_process
from loaderpool.transport.channel import ChannelClosed, Received
from loaderpool.transport.child_process import Program, Surroundings
from loaderpool.transport.messages import Load, Message
from loaderpool.transport.modules import ModuleStore
from loaderpool.transport.stream_channel import StreamChannel

# Longest wait. On Windows, handlers of signals run only after a wait has ended. Without pidfds, the
# supervisor checks this often which workers have ended.
_LOOK_S = 0.2
_ENDS_S = 5.0  # time for the supervisor's thread to end


class Queued:
    """One end of a channel between two threads of this process.

    Any thread may send, also inside a garbage collection.

    Args:
        ring: Wakes the thread that receives at this end.
    """

    other: Queued

    def __init__(self, ring: Callable[[], object]) -> None:
        self._arrived = collections.deque[Received | None]()
        self.ring = ring

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


class SpawnedSession(Session):
    """A session whose supervisor is a thread of this process."""

    name = "the thread that directs the workers"

    def _open(self, arena: Arena, around: Surroundings, program: Program) -> None:
        rings = self._rings = queue.SimpleQueue[None]()
        heard, bell = socket.socketpair()
        for end in (heard, bell):
            end.setblocking(False)

        def ring() -> None:
            if rings.empty():  # otherwise the reader has not handled the last ring yet
                rings.put(None)

        def ring_supervisor() -> None:
            # the supervisor has not handled earlier rings, or has ended
            with contextlib.suppress(OSError):
                bell.send(b"\0")

        ours, theirs = Queued(ring), Queued(ring_supervisor)
        ours.other, theirs.other = theirs, ours
        self._channel: Any = ours
        self._releases: Any = ours
        self.slots = SlotFile.create()
        own = {"channel": theirs, "arena": arena, "slots": self.slots, "trainer_pid": os.getpid()}
        own |= {"around": around, "bell": (heard, bell)}
        self._supervisor = SpawnedSupervisor({**program.settings, **own})
        self._thread = threading.Thread(
            target=self._supervisor.run, name="loaderpool-supervisor", daemon=True
        )
        self._thread.start()

    def _wait_once(self) -> bool:
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=_LOOK_S)
        if interrupts.waits_told_by is not None:
            interrupts.waits_told_by.note_signals()
        return True

    def wake(self) -> None:
        self._channel.ring()
        self._readers.news.notify_all()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        listener = self.listeners.get(message.loader) if isinstance(message, Load) else None
        self._channel.send(message, [listener.settings] if isinstance(listener, Version) else ())

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
        child_process.check_spawning(sys.executable)
        return Arena.create()


class SpawnedSupervisor(Supervisor):
    """The supervisor's loop, on a thread of the main process."""

    sends_files = False
    _main_pidfd = -1  # not needed, because the main process is this one

    @staticmethod
    def _close_file(file: int) -> None:
        """Do nothing, because batches arrive as arrays, not as files."""

    def _obstacles(self) -> Sequence[str]:
        return ["the main process has threads"]

    def _open(self, start: Mapping[str, Any]) -> int:
        self._main, self._arena, self._slots = start["channel"], start["arena"], start["slots"]
        self._bell = start["bell"]
        self._listen(self._bell[0].fileno(), self._read_bell)
        return 4096  # queues hold any number of messages; this only limits the slots

    def _make_workers(self, start: Mapping[str, Any]) -> SpawnedWorkers:
        self._ticks = Ticks(min(self._ticks.longest_ms, int(_LOOK_S * 1000)))
        self._has_told_of_exec = True  # the missing fork needs no warning
        return SpawnedWorkers(self._arena, self._slots, self._payloads, self._forms, start, list)

    def run(self) -> None:
        try:
            # Python prints an internal error, and the pool starts another thread.
            super().run()
        finally:
            self._main.close()
            self._selector.close()
            for end in self._bell:
                end.close()

    def _on_tick(self) -> None:
        super()._on_tick()
        for worker in self._workers.by_number.values():
            assert isinstance(worker.channel, StreamChannel)
            worker.channel.flush()

    def _update_release_listener(self) -> None:
        """Do nothing, because releases arrive with the other messages."""

    def _read_release(self) -> bool:
        return False  # releases arrive with the other messages

    def _read_bell(self) -> None:
        self._bell[0].recv(4096)  # before the messages are read, so that no ring is lost
        self._read_main()

    def _load(self, message: Load, received: Received) -> None:
        if received.content is not None:  # otherwise the loader was closed before the send
            self._payloads.settings[message.loader] = received.content
            self._payloads.places[message.loader] = message.offset, message.nbytes
            self._on_loaded(message.loader)


class SpawnedWorkers(Processes):
    """The spawned workers. Each gets the present loaders at its start."""

    _channel_type = StreamChannel
    _is_spawned = True

    @staticmethod
    def _make_stacks() -> StackFile:
        return StackFile(-1)

    def _surroundings(self) -> Surroundings:
        around: Surroundings = self._settings["around"]
        return around
