"""The process that reads a stream, pass after pass: a clean interpreter with the user's iterable in it.

    main thread   waits for a pass, reads the iterable, pickles batches of items, writes them to the socket or the arena
    watch reads the trainer's commands, and ends the process when the trainer dies, whatever the main thread does

It may have two threads, for it never forks. What it writes the trainer's thread reads when there is room, so that the
socket's buffer is all that it can be ahead.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import io
import os
import pickle
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from loaderpool.memory.arena import Arena
from loaderpool.sources.stream import StreamSource, read_batches
from loaderpool.system import fault_points, machine, malloc, process
from loaderpool.trainer.stream.reader.messages import COMMAND, HEADER, LARGE_BYTES, ReaderCommand, ReaderMessage
from loaderpool.transport.payload.loaded import Payloads, ReceivedDescriptors, describe_load_error
from loaderpool.transport.pickling import Frame, frames
from loaderpool.transport.reports import describe_failure, what_ended
from loaderpool.worker.after_fork import end_stray, look_for_strays, settle_libraries

# Without pidfds the trainer is looked for this often.
_LOOK_MS = 200
# More parts than this do not fit one call (IOV_MAX is 1,024).
_MOST_PARTS = 512


class _Cancelled(BaseException):
    """The trainer abandoned the rest of the pass."""


class _Pass(NamedTuple):
    number: int
    epoch: int
    start: int


class _Commands:
    """What the trainer says; one thread reads it, another asks.

    Args:
        channel: the socket.
        trainer_pid: whose end is ours, too.
    """

    def __init__(self, channel: socket.socket, trainer_pid: int) -> None:
        self._channel, self._trainer_pid = channel, trainer_pid
        self._passes: collections.deque[_Pass | None] = collections.deque()
        self._has_pass = threading.Semaphore(0)
        self._rooms: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()  # pass and offset
        self.cancelled = -1  # the latest pass that was
        self.is_over = False
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._trainer = machine.open_pidfd(trainer_pid) if os.getppid() == trainer_pid else None
        if self._trainer is not None:
            self._poll.register(self._trainer, select.POLLIN)
        if os.getppid() != trainer_pid:  # it died before we looked
            os._exit(1)
        threading.Thread(target=self._watch, name="loaderpool-reader-watch", daemon=True).start()

    def next_pass(self) -> _Pass | None:
        """What is to be read next; None: the process shall end. Blocks."""
        self._has_pass.acquire()
        return self._passes.popleft()

    def check(self, number: int) -> None:
        """Raise where the rest of this pass was abandoned."""
        if self.cancelled >= number or self.is_over:
            raise _Cancelled

    def wait_for_room(self, number: int) -> int:
        """Where in the arena the bundle may go that was told of. Blocks: while the trainer has no room for it."""
        while True:
            self.check(number)
            of, offset = self._rooms.get()
            if of == number:
                return offset

    def _watch(self) -> None:
        """Runs in: the watching thread."""
        try:
            unread = b""
            while True:
                ready = {descriptor for descriptor, _ in self._poll.poll(_LOOK_MS if self._trainer is None else None)}
                if self._trainer in ready or os.getppid() != self._trainer_pid:
                    _end_group()  # the main thread may be in the user's code, for ever
                if ready:
                    unread += self._read()
                while len(unread) >= COMMAND.size:
                    self._obey(*COMMAND.unpack_from(unread))
                    unread = unread[COMMAND.size :]
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _read(self) -> bytes:
        try:
            data = self._channel.recv(4096)
        except ConnectionError:
            data = b""
        if not data:
            self.is_over = True  # the trainer waits for our end, and kills us where the user's code delays it
            self._poll.unregister(self._channel)
            self._passes.append(None)
            self._has_pass.release()
            self._rooms.put((-1, 0))  # who waits for room looks again
        return data

    def _obey(self, kind: int, number: int, epoch: int, start: int) -> None:
        if kind == ReaderCommand.CANCEL:
            self.cancelled = max(self.cancelled, number)
            self._rooms.put((-1, 0))
        elif kind == ReaderCommand.ROOM:
            self._rooms.put((number, epoch))
        else:
            self._passes.append(_Pass(number, epoch, start))
            self._has_pass.release()


class _CheckedStream(StreamSource):
    """Looks before each item whether the pass goes on."""

    def __init__(self, items: Any, commands: _Commands, number: int) -> None:
        super().__init__(items)
        self._commands, self._number = commands, number

    def open(self) -> Iterator[Any]:
        commands, number = self._commands, self._number
        for item in super().open():
            commands.check(number)
            yield item


class _Reader:
    def __init__(self, start: Mapping[str, Any], channel: socket.socket, commands: _Commands) -> None:
        self._channel, self._commands = channel, commands
        self._arena = Arena(start["arena"], start["arena_bytes"])
        payloads = Payloads(self._arena, ReceivedDescriptors(None, {0: list(start["files"])}))
        fault_points.reach("reader.loading")
        payloads.load(0, *start["place"])
        payload = payloads.loaded[0]
        self._items, self._plan, self._config = payload["source"], payload["plan"], payload["config"]

    def serve(self, wanted: _Pass) -> None:
        """Read one pass and send it."""
        fault_points.reach("reader.pass_taken")
        stream = _CheckedStream(self._items, self._commands, wanted.number)
        config, plan = self._config, self._plan.after(wanted.start)
        batches = read_batches(stream, plan, window=config.shuffle_window, seed=config.seed, epoch=wanted.epoch)
        answer, extra = ReaderMessage.END, b""
        try:
            with contextlib.closing(frames(batches)) as read:
                for frame in read:
                    end_stray()
                    fault_points.reach("reader.before_sending")
                    self._send_frame(frame, wanted.number)
                    fault_points.reach("reader.after_sending")
                    del frame  # its items need not be held while the next ones are read
            end_stray()
        except _Cancelled:
            pass
        except BaseException as error:  # of the socket, too: then the next line meets it again
            end_stray(error)
            answer, extra = ReaderMessage.FAILED, pickle.dumps(what_ended(error, wanted.epoch))
        fault_points.reach("reader.before_end")
        _send(self._channel, [HEADER.pack(answer, 0, 0, 0, len(extra)), extra])
        fault_points.reach("reader.after_end")

    def _send_frame(self, frame: Frame, number: int) -> None:
        nbytes = frame.nbytes
        is_large = nbytes >= LARGE_BYTES
        told = ReaderMessage.LARGE if is_large else ReaderMessage.BATCH
        header = HEADER.pack(told, frame.buffers, frame.first, frame.rows, nbytes)
        if not is_large:
            _send(self._channel, [header, *frame.parts])
            return
        _send(self._channel, [header])
        offset = self._commands.wait_for_room(number)
        with memoryview(self._arena.map) as whole, whole[offset : offset + nbytes] as room:
            frame.write_into(room)
        _send(self._channel, [HEADER.pack(ReaderMessage.WRITTEN, 0, 0, 0, 0)])


def _send(channel: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Write all of it. Blocks: while the trainer has no room."""
    waiting = collections.deque(memoryview(part).cast("B") for part in parts)
    while waiting:
        sent = channel.sendmsg([waiting[at] for at in range(min(len(waiting), _MOST_PARTS))])
        while waiting and sent >= waiting[0].nbytes:
            sent -= waiting.popleft().nbytes
        if sent:
            waiting[0] = waiting[0][sent:]


def _end_group() -> None:
    """End this process, and with it what the user's code has started and left running."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _settle(start: Mapping[str, Any]) -> None:
    process.become("reader")
    if start["dies_with_thread"]:  # the one that has started us ends with the trainer
        machine.die_with_parent(start["trainer_pid"])
    machine.raise_oom_score()
    malloc.keep_freed_blocks()  # or each large item would have fresh pages, which cost more than a copy
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
    for descriptor in (start["socket"], start["arena"], *start["files"]):
        os.set_inheritable(descriptor, False)  # the exec needed it; what the user's code starts does not
    sys.argv = list(start["argv"])
    for stream in (sys.stdout, sys.stderr):  # what is printed is seen at once
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    if isinstance(sys.stderr, io.TextIOWrapper):
        faulthandler.enable()
    look_for_strays()


def main(start: Mapping[str, Any]) -> None:
    """The reader process, from the first import to its end."""
    status = 1
    try:
        _settle(start)
        channel = socket.socket(fileno=start["socket"])
        commands = _Commands(channel, start["trainer_pid"])
        try:
            reader = _Reader(start, channel, commands)
        except BaseException as error:
            end_stray(error)
            failure = describe_failure(error, epoch=0, worker=None)
            extra = pickle.dumps((failure, describe_load_error(error, "the reader")))
            _send(channel, [HEADER.pack(ReaderMessage.NOT_LOADED, 0, 0, 0, len(extra)), extra])
        else:
            settle_libraries()
            while (wanted := commands.next_pass()) is not None:
                reader.serve(wanted)
        status = 0
    except (BrokenPipeError, ConnectionResetError):  # the trainer wants no more of us
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        machine.flush_standard_streams()
        os._exit(status)  # not by the interpreter's own end, which would wait for threads of the user's
