"""One running supervisor as the main process has it: its process, its channel, its memory, and who reads for all.

No thread receives in the background. Of the threads that wait for batches one reads, and wakes the others.
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

from loaderpool.core import child_process
from loaderpool.core.channel import Channel, ChannelClosed, LostPacket, Received
from loaderpool.core.child_process import Program, Surroundings
from loaderpool.core.messages import Found, Message, NodeIs, Release, Warn
from loaderpool.errors import PoolBrokenError
from loaderpool.memory import forks
from loaderpool.memory.arena import PAGE_BYTES, Arena, SlotFile
from loaderpool.system import fault_points, interrupts, machine
from loaderpool.system.capacity import START_ADVICE
from loaderpool.system.interrupts import InterruptsAllowed
from loaderpool.system.machine import StopWatch

_CLOSE_S = 1.0  # how long a close waits for the supervisor to end by itself
_LOOK_MS = 200
_BYTE = np.dtype(np.uint8)


class Listener(Protocol):
    """A run, or a version of a loader: the receiver of the messages that carry its number."""

    def hear(self, received: Received) -> None:
        """Process a message from the supervisor, and close its descriptors.

        Called by the thread that reads the session, under the lock.
        """


class SessionOwner(Protocol):
    """A pool, as its session uses it."""

    def turn(self, came: bool) -> None:
        """Do what is due now and then. Called by threads that wait, without a lock, after each look.

        Args:
            came: A message has arrived since the last call.
        """

    def replace(self, lost: Session) -> None:
        """Start another supervisor in place of the lost one. Called by a thread that waits, without a lock.

        Raises:
            PoolBrokenError: Supervisors have crashed too often.
        """

    def hear(self, message: NodeIs | Warn) -> None:
        """Process a message about the pool itself. Under the lock."""


class Session:
    """A supervisor that is running, or has been.

    Attributes:
        is_lost: it is gone.
        lacks_descriptors: a file that it sent could not be received.
        lender: its slots that have views.
        owner: the `WorkerPool`; None: there is none, or it was closed.

    Args:
        arena: what the pool's processes share beside slots.
        around: what its processes find around them.
        news: the pool's lock, on which threads wait for what another one reads.
        program: what is executed in the supervisor's place, with settings as `Pool` makes them.

    Raises:
        PoolBrokenError: no process could be started.
    """

    def __init__(
        self, arena: Arena, around: Surroundings, news: threading.Condition, program: Program
    ) -> None:
        self.is_lost = self.lacks_descriptors = self._is_torn = False
        self.exit_code: int | None = (
            None  # of the supervisor, once it is reaped; minus the number of a signal
        )
        self.listeners: dict[int, Listener] = {}  # by their numbers
        self.owner: SessionOwner | None = None
        self.news = news
        self._reader: int | None = None  # the thread that reads for all
        self._sleepers = 0  # threads that wait for it; an interrupt may leave one too many
        child_process.check_executable()
        try:
            self._open(arena, around, program)
            try:
                fault_points.reach("trainer.launched")
                self.lender = Lender(self.slots, self._channel.send)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise PoolBrokenError(
                f"Could not start the supervisor process: {error}; {START_ADVICE}"
            ) from error

    def _open(self, arena: Arena, around: Surroundings, program: Program) -> None:
        """Start a clean interpreter, never a fork: the main process has threads of its frameworks."""
        self._wake_ends = os.pipe()
        for end in self._wake_ends:
            os.set_blocking(end, False)
        self.slots = SlotFile.create()
        try:
            ours, theirs = Channel.pair()
            with theirs, contextlib.ExitStack() as undo:
                undo.callback(ours.close)
                descriptors = [theirs.fileno(), arena.descriptor, self.slots.descriptor]
                start = dict(zip(("channel", "arena", "slots"), descriptors, strict=True))
                start |= {"arena_bytes": arena.nbytes, "trainer_pid": os.getpid()}
                self._process = child_process.start(program, around, start, descriptors)
                undo.pop_all()
        finally:
            self.slots.close_descriptor()  # the mapping stays
        # Not a method: that would be a cycle, and a closed session would stay until a collection.
        self._channel = Channel(ours, functools.partial(_wait_for_room, self.pid))
        self._stop_watch = StopWatch()
        self._descriptors = self._channel.fileno(), self._wake_ends[0]

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send the supervisor a message; see `Channel.send`."""
        self._channel.send(message, descriptors)

    @property
    def pid(self) -> int:
        """The supervisor's pid; also the number of its process group."""
        return self._process.pid

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"the supervisor process (pid {self.pid})"

    @property
    def is_usable(self) -> bool:
        """Whether it may still say something."""
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
        owner = self.owner  # once: another thread may close the session
        patience = interrupts.waits_told_by
        before = None if patience is None else patience.note_signals()
        while True:
            with self.news:
                if is_ready():
                    return
                if not self.is_usable:
                    break
                is_reader, reader_before = self._elect()
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

    def _elect(self) -> tuple[bool, int | None]:
        """Make this thread the reader if there is none; otherwise sleep until the reader notifies. Under the lock.

        Returns:
            True if this thread is the reader, and the reader before it. That is this thread as well if a signal's
            handler waits while the thread reads.
        """
        me, before = threading.get_ident(), self._reader
        if before in (None, me):
            self._reader = me
            return True, before
        self._sleepers += 1
        self.news.wait(_LOOK_MS / 1000)
        self._sleepers -= 1
        return False, before

    def _read_for_all(
        self, is_ready: Callable[[], bool], reader_before: int | None
    ) -> tuple[bool, bool]:
        """Wait for messages once, process them, and leave the reader's role. Without the lock.

        Returns:
            True if a message has come, and True if `is_ready()` since then.
        """
        came = is_done = False
        try:
            if fault_points.directory is not None:  # each batch passes here
                fault_points.reach("trainer.waiting")
            with InterruptsAllowed():
                came = self._wait_once()
        finally:
            with self.news:
                self._reader = reader_before
                if came:
                    self._take_in()
                    is_done = is_ready()
                if self._sleepers:  # one of them may have to read now
                    self.news.notify_all()
        return came, is_done

    def wake(self) -> None:
        """Have all who wait look again. The lock is held."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_ends[1], b"\0")
        self.news.notify_all()

    def tear(self) -> None:
        """Something could not be said: who waits next has another supervisor begin in this one's place."""
        self._is_torn = True

    def catch_up(self) -> None:
        """Take in what has arrived, without waiting."""
        with self.news:
            self._take_in()

    def _take_in(self) -> None:
        if not self.is_lost:
            self._is_torn = (
                True  # until it is done: an interrupt that falls into it may lose messages
            )
            try:
                while (received := self._channel.receive()) is not None:
                    message: Any = received.message
                    if isinstance(message, (NodeIs, Warn)):
                        if self.owner is not None:
                            self.owner.hear(message)
                        continue
                    # The number of a run or loader comes first in all others but `Found`.
                    listener = self.listeners.get(
                        message.loader if type(message) is Found else message[0]
                    )
                    if listener is not None:
                        listener.hear(received)
                    else:  # of a run that was ended meanwhile: its slots are free
                        for descriptor in received.descriptors:
                            os.close(descriptor)
            except ChannelClosed:
                self.is_lost = True
            except LostPacket:
                self.is_lost = self.lacks_descriptors = True
            self._is_torn = False
            if self._sleepers:
                self.news.notify_all()

    def _wait_once(self) -> bool:
        """Return whether anything came."""
        ctrl_c = interrupts.waits_told_by
        signals = None if ctrl_c is None else ctrl_c.descriptor
        poll = select.poll()  # one for each wait: a signal's handler may wait while its thread does
        for descriptor in self._descriptors if signals is None else (*self._descriptors, signals):
            poll.register(descriptor, select.POLLIN)
        watch = self._stop_watch
        found = poll.poll(watch.look_ms)
        if found or not machine.is_stopped(self.pid):
            if watch.since_ns:
                watch.runs()
        elif watch.is_too_long():  # its death is met as any other
            self.kill()
        for descriptor, _ in found:
            if descriptor == self._wake_ends[0]:
                with contextlib.suppress(BlockingIOError):
                    os.read(descriptor, 4096)
            elif descriptor == signals:
                ctrl_c.note_signals()
        return bool(found)

    def kill(self) -> None:
        """Kill the supervisor and its process group; safe while it is not reaped."""
        child_process.kill_group(self.pid)

    def reap(self) -> str:
        """End what is left of a supervisor that is lost; returns how it ended."""
        self._channel.close()
        code = self.exit_code = child_process.end(self._process, _CLOSE_S)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def __del__(
        self, close: Callable[[int], None] = os.close
    ) -> None:  # by then the module may be gone
        for end in self.__dict__.pop("_wake_ends", ()):
            close(end)

    def close(self) -> None:
        """End the supervisor and its workers, and wait until it is gone. What has views stays valid."""
        self.is_lost = True
        self.reap()
        # These refer to the pool: what is closed, and its descriptors, shall go without the collector of garbage.
        self.owner, self.listeners = None, {}


def _wait_for_room(supervisor: int, room: Any) -> None:
    """Return when a supervisor has read something, or was killed because it was stopped."""
    watch = StopWatch()
    while not room.poll(watch.look_ms):
        if not machine.is_stopped(supervisor):
            watch.runs()
        elif watch.is_too_long():  # its death is met as any other
            child_process.kill_group(supervisor)


# ---- slots that consumers have views of: each is released when its last view dies
#
# A finalizer may run inside any garbage collection, on any thread, in the middle of anything. The news of a death goes
# into a deque by a call in C, which no Ctrl-C can come between. What follows is done at once in Python, or with the
# next batch where a Ctrl-C came first.


class _Lease(weakref.ref[Any]):
    """A reference to a slot, which knows what to release when that dies."""

    __slots__ = ("lent", "nbytes", "offset", "run", "ticket")

    run: int
    nbytes: int
    ticket: int
    offset: int
    lent: dict[int, None]


class Lender:
    """The slots of one memory file that have views.

    Args:
        slots: the file.
        send: sends the supervisor a message. Never blocks; called in finalizers.
    """

    def __init__(self, slots: SlotFile, send: Callable[[Release], None]) -> None:
        self._slots, self._send = slots, send
        self._leases: dict[
            int, tuple[_Lease, weakref.ref[Any]]
        ] = {}  # by offset; their callbacks release it
        self.returned: collections.deque[_Lease] = collections.deque()
        self._is_lost = False
        forks.guard(self)

    def __len__(self) -> int:
        return len(self._leases)

    def arrays(self) -> list[npt.NDArray[np.uint8]]:
        """Return the slots that have views."""
        slots = [lease() for lease, _ in list(self._leases.values())]
        return [slot for slot in slots if slot is not None]

    def disown(self) -> None:
        """Release nothing of what has views now: a forked child has it as its own."""
        self._leases.clear()  # and with the references what their deaths would call
        self.returned.clear()

    def lend(
        self, run: int, ticket: int, offset: int, nbytes: int, lent: dict[int, None]
    ) -> npt.NDArray[np.uint8]:
        """Return a slot as `uint8[nbytes]`; when it and all views of it are dead the slot is released.

        Args:
            run: whose slot.
            ticket: of those whose work it holds.
            offset: its name.
            nbytes: that are shown.
            lent: notes the offset for as long as it has views.
        """
        slot: npt.NDArray[np.uint8] = np.ndarray(
            (nbytes,), _BYTE, self._slots.map, offset
        )  # as `SlotFile.slot`
        follower = weakref.ref(
            slot, self._on_death
        )  # of two references the younger is called first
        lease = _Lease(slot, self.returned.append)
        lease.run, lease.ticket, lease.offset, lease.nbytes, lease.lent = (
            run,
            ticket,
            offset,
            nbytes,
            lent,
        )
        lent[offset] = None
        self._leases[offset] = lease, follower
        return slot

    def settle(self) -> None:
        """Release the slots whose last views have died."""
        while self.returned:
            try:
                lease = self.returned[0]
            except IndexError:  # another thread has settled it
                return
            self._settle(
                lease
            )  # of several threads, too: a release that is said twice is said once
            with contextlib.suppress(ValueError):  # that other thread has taken it out
                self.returned.remove(lease)

    def _settle(self, lease: _Lease) -> None:
        found = self._leases.get(lease.offset)
        if found is not None and found[0] is lease:
            lease.lent.pop(lease.offset, None)
            self._leases.pop(lease.offset, None)
        if self._is_lost:
            self._slots.return_pages(lease.offset, lease.nbytes)
        else:
            self._send(Release(lease.run, lease.offset, lease.ticket))

    def keep_only_lent(self) -> None:
        """The supervisor is gone: give back all memory but that of slots with views, which give back their own."""
        self._is_lost, end = True, 0
        kept = sorted((lease.offset, lease.nbytes) for lease, _ in list(self._leases.values()))
        for offset, nbytes in [*kept, (self._slots.nbytes, 0)]:
            self._slots.return_pages(end, offset - end)
            end = offset + -(-nbytes // PAGE_BYTES) * PAGE_BYTES

    def _on_death(self, _: Any, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            if (
                not is_finalizing()
            ):  # else modules may be gone already, and no slot is wanted any more
                self.settle()
        except KeyboardInterrupt:  # Python drops what a finalizer raises
            interrupts.send_again()
