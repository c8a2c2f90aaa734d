"""`Session`: one running supervisor, as the main process uses it. `Lender`: slots with views.

No thread receives messages in the background. Of the threads that wait for batches, one reads the
channel and wakes the others. "The lock" is the pool's lock.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loaderpool.errors import PoolBrokenError
from loaderpool.memory import forks
from loaderpool.memory.arena import PAGE_BYTES, Arena, SlotFile
from loaderpool.system import fault_points, interrupts, machine
from loaderpool.system.capacity import START_ADVICE
from loaderpool.system.interrupts import InterruptsAllowed
from loaderpool.system.machine import StopWatch
from loaderpool.transport import child_process
from loaderpool.transport.channel import Channel, ChannelClosed, LostPacket, Received
from loaderpool.transport.child_process import Program, Surroundings
from loaderpool.transport.messages import Found, Message, Release, Warn

_CLOSE_S = 1.0  # time that `close` gives the supervisor to exit by itself
_LOOK_MS = 200  # maximum sleep of a thread that waits for the reader
_BYTE = np.dtype(np.uint8)


class Listener(Protocol):
    """A run, or a version of a loader. It receives the messages that carry its number."""

    def hear(self, received: Received) -> None:
        """Process a message from the supervisor, and close its descriptors.

        Called by the thread that reads the session, under the lock.
        """


class SessionOwner(Protocol):
    """A pool, as its session uses it."""

    def turn(self, came: bool) -> None:
        """Do periodic work. Called by waiting threads after each poll or sleep, without a lock.

        Args:
            came: A message has arrived since the last call.
        """

    def replace(self, lost: Session) -> None:
        """Start another supervisor in place of the lost one.

        Called by a waiting thread, without a lock.

        Raises:
            PoolBrokenError: Supervisors have crashed too often.
        """

    def hear(self, message: Warn) -> None:
        """Process a message about the pool itself. Called under the lock."""


class Readers:
    """Threads that wait on a session: one reads the channel, the others sleep until it notifies.

    Called under the lock.

    Attributes:
        news: Condition on the lock.
        reader: Ident of the thread that reads the channel; None: no thread reads it.
    """

    def __init__(self, news: threading.Condition) -> None:
        self.news = news
        self.reader: int | None = None
        # number of threads that sleep until the reader notifies; after an interrupt, maybe too high
        self._sleepers = 0

    def elect(self) -> tuple[bool, int | None]:
        """Make this thread the reader if there is none; otherwise sleep until the reader notifies.

        Returns:
            True if this thread is the reader; and the reader before it. Both are the same thread if
            a signal handler waits on a thread that reads.
        """
        me, before = threading.get_ident(), self.reader
        if before in (None, me):
            self.reader = me
            return True, before
        self._sleepers += 1
        self.news.wait(_LOOK_MS / 1000)
        self._sleepers -= 1
        return False, before

    def notify(self) -> None:
        """Wake the threads that sleep. One of them may have to become the reader."""
        if self._sleepers:
            self.news.notify_all()


class MessageWait:
    """Waits until a message arrives, a thread calls `wake`, or there is a signal.

    Owns a pipe, whose ends are closed when this object is freed.
    """

    def __init__(self) -> None:
        self._wake_ends = os.pipe()
        for end in self._wake_ends:
            os.set_blocking(end, False)
        self._stop_watch = StopWatch()

    def begin(self, channel: int, supervisor: int) -> None:
        """Set the descriptor of the channel, and the process ID of the supervisor."""
        self._supervisor, self._descriptors = supervisor, (channel, self._wake_ends[0])

    def wait(self) -> bool:
        """Wait once, or for `StopWatch.look_ms`. Called by the reader, without the lock.

        Kills a supervisor that has been stopped too long (SIGSTOP).

        Returns:
            True if something has arrived.
        """
        ctrl_c = interrupts.waits_told_by
        signals = None if ctrl_c is None else ctrl_c.descriptor
        # A new object for each wait, because a signal handler may wait on a thread that waits.
        poll = select.poll()
        for descriptor in self._descriptors if signals is None else (*self._descriptors, signals):
            poll.register(descriptor, select.POLLIN)
        watch = self._stop_watch
        found = poll.poll(watch.look_ms)
        if found or not machine.is_stopped(self._supervisor):
            if watch.since_ns:
                watch.runs()
        elif watch.is_too_long():  # Its end is then handled like that of any lost supervisor.
            child_process.kill_group(self._supervisor)
        for descriptor, _ in found:
            if descriptor == self._wake_ends[0]:
                with contextlib.suppress(BlockingIOError):
                    os.read(descriptor, 4096)
            elif descriptor == signals:
                ctrl_c.note_signals()
        return bool(found)

    def wake(self) -> None:
        """End the present wait, or the next one. Called by any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_ends[1], b"\0")

    # A default argument, because the module's globals may be gone when this is called.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for end in self.__dict__.pop("_wake_ends", ()):
            close(end)


class Session:
    """A supervisor process that runs, or that has run.

    Attributes:
        is_lost: True once the supervisor is gone, or was closed.
        lacks_descriptors: True if this process had no descriptor for a file that was sent to it.
        lender: Slots with views.
        owner: The `WorkerPool`; None: there is none, or it was closed.
        exit_code: Exit code of the supervisor; negative: minus the number of the signal that killed
            it. None until it is reaped.
        listeners: Runs and versions, by number.

    Args:
        arena: Shared memory of the pool's processes, besides the slots.
        around: Environment of the new processes.
        news: Condition on the lock. The reader notifies it when it has read messages.
        program: Program of the supervisor, with its settings.

    Raises:
        PoolBrokenError: No process could be started.
    """

    def __init__(
        self, arena: Arena, around: Surroundings, news: threading.Condition, program: Program
    ) -> None:
        self.is_lost = self.lacks_descriptors = self._is_torn = False
        self.exit_code: int | None = None
        self.listeners: dict[int, Listener] = {}
        self.owner: SessionOwner | None = None
        self._readers = Readers(news)
        child_process.check_executable()
        try:
            self._open(arena, around, program)
            try:
                fault_points.reach("trainer.launched")
                self.lender = Lender(self.slots, self._releases.send)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise PoolBrokenError(
                f"Could not start the supervisor process: {error}; {START_ADVICE}"
            ) from error

    def _open(self, arena: Arena, around: Surroundings, program: Program) -> None:
        """Start a new interpreter. A fork could deadlock, because frameworks have threads here."""
        self._message_wait = MessageWait()
        self.slots = SlotFile.create()
        with contextlib.ExitStack() as ends, contextlib.ExitStack() as undo:
            ends.callback(self.slots.close_descriptor)  # the mapping stays
            ours, theirs = Channel.pair()
            undo.callback(ours.close)
            ends.callback(theirs.close)
            releases, their_releases = Channel.pair()
            undo.callback(releases.close)
            ends.callback(their_releases.close)
            start = {
                "channel": theirs.fileno(),
                "releases": their_releases.fileno(),
                "arena": arena.descriptor,
                "slots": self.slots.descriptor,
            }
            descriptors = [*start.values()]
            start |= {"arena_bytes": arena.nbytes, "trainer_pid": os.getpid()}
            self._process = child_process.start(program, around, start, descriptors)
            undo.pop_all()
        # Not a method, which would make a reference cycle. Closed sessions must be freed at once.
        wait_for_room = functools.partial(_wait_for_room, self.pid)
        self._channel = Channel(ours, wait_for_room)
        self._releases = Channel(releases, wait_for_room)
        self._message_wait.begin(self._channel.fileno(), self.pid)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message to the supervisor. Called by any thread; see `Channel.send`."""
        self._channel.send(message, descriptors)

    def release(self, message: Release) -> None:
        """Send a release. The supervisor reads it when it needs slots. Called by any thread."""
        self._releases.send(message)

    @property
    def pid(self) -> int:
        """Process ID of the supervisor, and ID of its process group."""
        return self._process.pid

    @property
    def name(self) -> str:
        """Name of the supervisor in errors."""
        return f"the supervisor process (pid {self.pid})"

    @property
    def is_usable(self) -> bool:
        """True if the supervisor may still send messages, and none was lost."""
        return not (self.is_lost or self._is_torn)

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Return when `is_ready()`, or when another supervisor has replaced this one.

        Called by any thread, without the lock. Of the threads that wait, one reads the channel.

        Args:
            is_ready: Called under the lock.

        Raises:
            PoolBrokenError: This supervisor is lost, and the owner could not replace it.
            KeyboardInterrupt: It came in the wait.
        """
        owner = self.owner  # read once, because another thread may close the session
        patience = interrupts.waits_told_by
        before = None if patience is None else patience.note_signals()
        while True:
            with self._readers.news:
                if is_ready():
                    return
                if not self.is_usable:
                    break
                is_reader, reader_before = self._readers.elect()
            came = False
            if is_reader:
                came, is_done = self._read_for_all(is_ready, reader_before)
                if is_done:
                    return
            if owner is not None:
                owner.turn(came)
            if interrupts.waits_told_by is not None:
                interrupts.waits_told_by.check_patience(before)
        if owner is not None:
            owner.replace(self)

    def _read_for_all(
        self, is_ready: Callable[[], bool], reader_before: int | None
    ) -> tuple[bool, bool]:
        """Wait for messages once, process them, and give up the reader's role. Without the lock.

        Returns:
            True if a message has arrived; and True if `is_ready()` returned True after that.
        """
        came = is_done = False
        try:
            if fault_points.directory is not None:  # checked first, because each batch comes here
                fault_points.reach("trainer.waiting")
            with InterruptsAllowed():
                came = self._wait_once()
        finally:
            with self._readers.news:
                self._readers.reader = reader_before
                if came:
                    self._take_in()
                    is_done = is_ready()
                self._readers.notify()
        return came, is_done

    def wake(self) -> None:
        """Wake all waiting threads, so that they check their conditions. Under the lock."""
        self._message_wait.wake()
        self._readers.news.notify_all()

    def tear(self) -> None:
        """Mark the session as unusable, because a message could not be sent.

        The next thread that waits then requests another supervisor.
        """
        self._is_torn = True

    def catch_up(self) -> None:
        """Process the messages that have arrived, without waiting. Called by any thread."""
        with self._readers.news:
            self._take_in()

    def _take_in(self) -> None:
        if not self.is_lost:
            # Torn until all are processed, because an interrupt in between may lose messages.
            self._is_torn = True
            try:
                while (received := self._channel.receive()) is not None:
                    message = received.message
                    if isinstance(message, Warn):
                        if self.owner is not None:
                            self.owner.hear(message)
                        continue
                    # All other messages except `Found` begin with the number of a run or loader.
                    listener = self.listeners.get(
                        message.loader if type(message) is Found else message[0]
                    )
                    if listener is not None:
                        listener.hear(received)
                    else:  # The run has ended, so its slots are free.
                        for descriptor in received.descriptors:
                            os.close(descriptor)
            except ChannelClosed:
                self.is_lost = True
            except LostPacket:
                self.is_lost = self.lacks_descriptors = True
            self._is_torn = False
            self._readers.notify()

    def _wait_once(self) -> bool:
        """Wait once; return True if something has arrived."""
        return self._message_wait.wait()

    def reap(self) -> str:
        """End what remains of a lost supervisor, and return how it ended, for errors."""
        self._channel.close()
        self._releases.close()
        code = self.exit_code = child_process.end(self._process, _CLOSE_S)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the supervisor and its workers, and wait for that. Slots with views stay valid."""
        self.is_lost = True
        self.reap()
        # The owner and the listeners refer to the pool. Without these references, a closed pool and
        # its descriptors are freed without a garbage collection.
        self.owner, self.listeners = None, {}


def _wait_for_room(supervisor: int, room: select.poll) -> None:
    """Return when a supervisor has read something, or was killed because it was stopped.

    `Channel.send` calls it while the channel is full.

    Args:
        supervisor: Process ID of the supervisor.
        room: Poll object that reports room in the channel.
    """
    watch = StopWatch()
    while not room.poll(watch.look_ms):
        if not machine.is_stopped(supervisor):
            watch.runs()
        elif watch.is_too_long():  # Its end is then handled like that of any lost supervisor.
            child_process.kill_group(supervisor)


# ---- slots with views: each is released when its last view dies ----
#
# A finalizer may run inside any garbage collection, on any thread, at any point of the code. When a
# slot's last view dies, a function in C appends its lease to a deque. A Ctrl-C cannot split that
# call. Python code then releases the slot at once. If a Ctrl-C precedes this code, the next
# `PoolRun.take` releases the slot.


class _Lease(weakref.ref[Any]):
    """Weak reference to a lent slot, with the data that its release needs."""

    __slots__ = ("lent", "nbytes", "offset", "run", "ticket")

    run: int
    nbytes: int
    ticket: int
    offset: int  # start of the slot in the memory file
    lent: dict[int, None]  # tickets of the run's slots with views


class Lender:
    """Slots of a memory file that have views.

    Args:
        slots: The memory file.
        send: Sends a message to the supervisor. Non-blocking; called by finalizers.
    """

    def __init__(self, slots: SlotFile, send: Callable[[Release], None]) -> None:
        self._slots, self._send = slots, send
        # by offset: the lease, and a reference whose callback releases returned slots
        self._leases: dict[int, tuple[_Lease, weakref.ref[Any]]] = {}
        # leases of slots without views, which are not released yet
        self.returned: collections.deque[_Lease] = collections.deque()
        self._is_lost = False
        forks.guard(self)

    def __len__(self) -> int:
        return len(self._leases)

    def arrays(self) -> list[npt.NDArray[np.uint8]]:
        """Return the slots with views. `memory.forks` calls it before a fork and in the child."""
        slots = [lease() for lease, _ in list(self._leases.values())]
        return [slot for slot in slots if slot is not None]

    def disown(self) -> None:
        """Forget all leases, because a forked child has private copies. Called in the child."""
        self._leases.clear()  # without the weak references, their callbacks are not called
        self.returned.clear()

    def lend(
        self, run: int, ticket: int, offset: int, nbytes: int, lent: dict[int, None]
    ) -> npt.NDArray[np.uint8]:
        """Return a slot as `uint8[nbytes]`. It is released when all views of it are dead.

        Called under the lock.

        Args:
            run: Number of the slot's run.
            ticket: Ticket that the slot's `Release` must name.
            offset: Offset of the slot in the memory file, which identifies it.
            nbytes: Number of bytes to show.
            lent: Tickets of the run's slots with views; contains this ticket until the release.
        """
        # This line does the same as `SlotFile.slot`, without a call.
        slot: npt.NDArray[np.uint8] = np.ndarray((nbytes,), _BYTE, self._slots.map, offset)
        # Python calls the callback of the newer weak reference first. So the lease is in
        # `returned` before `_on_death` is called.
        follower = weakref.ref(slot, self._on_death)
        lease = _Lease(slot, self.returned.append)
        lease.run, lease.ticket, lease.offset, lease.nbytes, lease.lent = (
            run,
            ticket,
            offset,
            nbytes,
            lent,
        )
        lent[ticket] = None
        self._leases[offset] = lease, follower
        return slot

    def settle(self) -> None:
        """Release the slots in `returned`. Called by any thread, and by finalizers."""
        while self.returned:
            try:
                lease = self.returned[0]
            except IndexError:  # Another thread has released it.
                return
            # Several threads may release the same slot. A second `Release` has no effect
            # (RELEASE-1).
            self._settle(lease)
            with contextlib.suppress(ValueError):  # Another thread has removed the lease.
                self.returned.remove(lease)

    def _settle(self, lease: _Lease) -> None:
        found = self._leases.get(lease.offset)
        if found is not None and found[0] is lease:
            lease.lent.pop(lease.ticket, None)
            self._leases.pop(lease.offset, None)
        if self._is_lost:
            self._slots.return_pages(lease.offset, lease.nbytes)
        else:
            self._send(Release(lease.run, lease.offset, lease.ticket))

    def keep_only_lent(self) -> None:
        """Return all memory to the system except slots with views.

        Called when the supervisor is gone. The memory of slots with views is returned when these
        are released.
        """
        self._is_lost, end = True, 0
        kept = sorted((lease.offset, lease.nbytes) for lease, _ in list(self._leases.values()))
        for offset, nbytes in [*kept, (self._slots.nbytes, 0)]:
            self._slots.return_pages(end, offset - end)
            end = offset + -(-nbytes // PAGE_BYTES) * PAGE_BYTES

    def _on_death(self, _: object, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            # During finalization, modules may be gone already, and no process needs the slot.
            if not is_finalizing():
                self.settle()
        except KeyboardInterrupt:  # Python drops exceptions of finalizers.
            interrupts.send_again()
