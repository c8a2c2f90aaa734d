"""The process that reads a stream, as the main process has it: started, listened to, ended."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from loaderpool.config import LoaderConfig
from loaderpool.core import child_process
from loaderpool.core.channel import GRACE_S
from loaderpool.core.child_process import Program, Surroundings
from loaderpool.core.failures import reader_lost_error, reading_error, setup_error
from loaderpool.core.stream.reading import COMMAND, HEADER
from loaderpool.errors import LoaderpoolError, PoolBrokenError, UnpicklableError, closed_error
from loaderpool.memory.arena import Arena
from loaderpool.plan.batches import Plan
from loaderpool.sources.stream import StreamSource
from loaderpool.system import capacity, fault_points, machine
from loaderpool.system.capacity import START_ADVICE
from loaderpool.transport.payload.generators import Registry
from loaderpool.transport.payload.ship import Shipment, ship
from loaderpool.transport.reports import GivenUp, LostReport

# Batches that a reader may send without being asked for each: more, and this process need not keep up with tiny ones.
_MOST_ASKED = 16
_SENT_BYTES = (
    1 << 20
)  # asked for, of which the kernel may grant less: the reader goes on while they are on their way
_PROGRAM = Program("loaderpool.core.stream.reading", "loaderpool-reader")
_BUFFER_BYTES = 1 << 16  # what is smaller is received together


class StreamEnded(Exception):
    """The stream ended with an error, which `make_error` makes of the position of the first item that is not there."""

    def __init__(self, make_error: Callable[[int], LoaderpoolError]) -> None:
        self.make_error = make_error


class Arriving(NamedTuple):
    """The items of one batch, as `pickling.Frame` has them, on their way from the reader."""

    nbytes: int
    buffers: int
    first: int
    rows: int
    write_into: Callable[
        [memoryview], None
    ]  # fills `uint8[nbytes]`; raises `StreamEnded` where the reader died


def ship_beside(
    payload: Mapping[str, Any],
    stream: StreamSource,
    config: LoaderConfig,
    plan: Plan,
    reads_apart: bool,
    registry: Registry,
    like: tuple[Shipment, Any] | None = None,
) -> tuple[Shipment, Shipment | str]:
    """What travels to the workers, and what to the reader of the stream; in its place why it has none.

    Code goes by value in both or by name in both: else items would not be of the classes that the function knows.
    `like` is what travelled before, of the same loader.

    Raises:
        UnpicklableError: what the workers need cannot travel.
    """
    of_workers, of_reader = like or (None, None)
    why = of_reader if isinstance(of_reader, str) else ""
    if not reads_apart:
        why = "with spawned workers, the main process reads the stream"
    elif stream.is_one_shot:
        why = f"a {stream.kind} is an iterator, which can only be read where it was created"
    if why:
        return ship(dict(payload), registry=registry, like=of_workers), why
    for_reader = {"source": stream.items, "config": config, "plan": plan}
    try:
        shipment = ship(for_reader, registry=registry, like=of_reader)
        for_workers = ship(
            dict(payload), without=shipment.without, registry=registry, like=of_workers
        )
        if for_workers.without != shipment.without:
            shipment = ship(
                for_reader, without=for_workers.without, registry=registry, like=of_reader
            )
    except UnpicklableError as error:
        if like is not None:
            raise
        return ship(dict(payload), registry=registry), str(
            error
        )  # where it is not the stream, the error comes again
    return for_workers, shipment


class ReaderProcess:
    """A process with the user's iterable in it, which reads one pass after another.

    So the iterable keeps its state from pass to pass, as it does with `workers=0`.

    Runs in: one thread, which starts and reaps the process. The kernel ends the process with that
    thread.

    Args:
        arena: has the stream's shipment.
        place: offset and length of that.
        files: descriptors of its data files: the caller's.
        around: what the process finds around it.
    """

    def __init__(
        self, arena: Arena, place: tuple[int, int], files: Sequence[int], around: Surroundings
    ) -> None:
        self._arena, self._files, self._around = arena, files, around
        self._settings = {"place": place, "files": list(files)}
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self, data: socket.socket, epoch: int, start: int) -> None:
        """Order a pass over a socket; start the process if there is none.

        Raises:
            ValueError: the arena's descriptor is closed.
            OSError: no process could be started.
        """
        command = COMMAND.pack(epoch, start)
        if self._control is not None:
            with contextlib.suppress(OSError):  # it has died since its last pass
                socket.send_fds(self._control, [command], [data.fileno()])
                return
            self.end()
        ours, theirs = (machine.above_standard(end.detach()) for end in socket.socketpair())
        self._control = socket.socket(fileno=ours)
        with socket.socket(fileno=theirs):
            arena = self._arena.descriptor
            start_with = {"control": theirs, "arena": arena, "arena_bytes": self._arena.nbytes}
            settings = {**start_with, "trainer_pid": os.getpid(), **self._settings}
            self.process = child_process.start(
                _PROGRAM, self._around, settings, [theirs, arena, *self._files]
            )
        socket.send_fds(self._control, [command], [data.fileno()])

    def is_done(self, grace_s: float) -> bool:
        """Wait until the process has let go of its pass; return False if it does not within some seconds."""
        if self._control is None:
            return False
        self._control.settimeout(grace_s)
        with contextlib.suppress(OSError):
            return bool(self._control.recv(1))
        return False

    def end(self) -> None:
        """End the process, for which it has a moment if it waits for a pass. Blocks: until it is gone."""
        if self._control is not None:
            self._control.close()
            self._control = None
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            child_process.end(process, GRACE_S)


class ReaderPass:
    """One pass that a reader process reads.

    Runs in: the feed's thread; other threads may only `stop`.

    Args:
        reader: reads it.
        epoch: the pass.
        start: its first position.
    """

    def __init__(self, reader: ReaderProcess, epoch: int, start: int) -> None:
        self._reader, self._epoch, self._start = reader, epoch, start
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begun = self._buffer[:0]  # what was received and is not read
        self._watch = machine.StopWatch()
        self._oom_kills = capacity.oom_kill_count()
        self._was_stopped = self._is_over = self._has_ended = False

    def frames(self, wanted: Callable[[], int]) -> Generator[Arriving, None, None]:
        """Begin the pass, and give each batch as it comes, which the reader sends when it is asked for.

        Args:
            wanted: how many may be on their way now; one always may.

        Raises:
            StreamEnded: the stream has an error, or the process died; after all whole batches.
        """
        try:
            ends = (machine.above_standard(end.detach()) for end in socket.socketpair())
            ours, theirs = (socket.socket(fileno=end) for end in ends)
            with theirs:
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_BYTES)
                self._socket = ours
                if self._is_over:
                    return
                self._reader.begin(theirs, self._epoch, self._start)
                self._process = self._reader.process
        except ValueError:  # the arena's descriptor is closed
            raise closed_error() from None
        except OSError as error:
            raise PoolBrokenError(
                f"Could not start the stream process: {error}; {START_ADVICE}"
            ) from error
        seconds, ms = divmod(self._watch.look_ms, 1000)
        ours.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 1000 * ms)
        )
        fault_points.reach("trainer.reader_launched")
        asked, header = 0, memoryview(bytearray(HEADER.size))
        while True:
            if not self.has_more:
                most = max(1, min(_MOST_ASKED, wanted()))
                if asked <= most // 2:
                    with contextlib.suppress(
                        OSError
                    ):  # it is gone; what it sent is still to be read
                        ours.send(bytes(most - asked))
                    asked = most
            self._fill(header)
            asked -= 1
            nbytes, buffers, first, rows = HEADER.unpack(header)
            if rows:
                yield Arriving(nbytes, buffers, first, rows, self._fill)
            elif nbytes:
                content = bytearray(nbytes)
                self._fill(memoryview(content))
                raise StreamEnded(functools.partial(_error, *pickle.loads(content)))
            else:
                return

    @property
    def has_more(self) -> bool:
        """Whether the next batch is here already. Runs in: the feed's thread."""
        begun = self._begun
        return (
            len(begun) >= HEADER.size and len(begun) >= HEADER.size + HEADER.unpack_from(begun)[0]
        )

    def stop(self) -> None:
        """Have `frames` end, and the process let go of the stream. Never blocks; any thread, also in a finalizer."""
        self._is_over = True
        if self._socket is not None:  # else `frames` has not looked yet
            with contextlib.suppress(OSError):
                self._socket.shutdown(
                    socket.SHUT_RDWR
                )  # closing is not enough: a fork of ours may have it, too

    def close(self) -> None:
        """End the pass, and with it a process that does not let go of it within a moment."""
        self.stop()
        if self._process is not None and (self._has_ended or not self._reader.is_done(GRACE_S)):
            self._reader.end()
        if self._socket is not None:
            self._socket.close()

    def _fill(self, view: memoryview) -> None:
        """Fill it with what comes next. Blocks: until it is there. Raises `StreamEnded`: it will not come."""
        at = 0
        while at < len(view):
            if self._begun:
                count = min(len(self._begun), len(view) - at)
                view[at : at + count], self._begun = self._begun[:count], self._begun[count:]
                at += count
            elif len(view) - at < len(self._buffer):
                self._begun = self._buffer[: self._received(self._buffer)]
            else:  # a large one comes whole: between two calls this thread may wait for the interpreter's lock
                at += self._received(view[at:], socket.MSG_WAITALL)

    def _received(self, view: memoryview, flags: int = 0) -> int:
        assert self._socket is not None and self._process is not None
        while True:
            try:
                count = self._socket.recv_into(view, 0, flags)
                if count:
                    return count
                if self._is_over:  # this side has ended the pass, and the process may go on
                    raise StreamEnded(lambda position: closed_error())
                self._has_ended = True
            except ConnectionResetError:
                continue  # it ended before it read all that we sent; what it sent is still to be read
            except BlockingIOError:  # none have come for `look_ms`
                pass
            if self._has_ended:  # and what it sent was read
                self._reader.end()
                raise StreamEnded(functools.partial(reader_lost_error, self._death(self._process)))
            pid = self._process.pid
            self._has_ended = child_process.has_ended(
                pid
            )  # children of the user's may hold its end of the socket
            if not machine.is_stopped(pid):
                self._watch.runs()
            elif self._watch.is_too_long():
                self._was_stopped = True
                child_process.kill_group(pid)

    def _death(self, process: subprocess.Popen[bytes]) -> LostReport:
        code, pid, epoch = process.returncode, process.pid, self._epoch
        is_out_of_memory = code == -signal.SIGKILL and capacity.oom_kill_count() > self._oom_kills
        return LostReport(
            GivenUp.BEFORE, None, epoch, code, pid, 1, "", is_out_of_memory, self._was_stopped
        )


def _error(ended: Any, advice: str | None, position: int) -> LoaderpoolError:
    """Return the error for what the reader told of, in its stream or in loading it."""
    if advice is None:
        return reading_error(ended, position)
    return setup_error(
        ended, "the stream process could not load the source", advice, "the stream process"
    )
