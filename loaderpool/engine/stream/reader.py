"""`ReaderProcess` and `ReaderPass`: the process that reads a stream, used by the main process."""

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
from loaderpool.engine.failures import reader_lost_error, reading_error, setup_error
from loaderpool.errors import LoaderpoolError, PoolBrokenError, UnpicklableError, closed_error
from loaderpool.memory.arena import Arena
from loaderpool.plan.batches import Plan
from loaderpool.sources.stream import StreamSource
from loaderpool.system import capacity, fault_points, machine
from loaderpool.system.capacity import START_ADVICE
from loaderpool.transport import child_process
from loaderpool.transport.channel import GRACE_S
from loaderpool.transport.child_process import Program, Surroundings
from loaderpool.transport.payload.generators import Registry
from loaderpool.transport.payload.ship import Shipment, ship
from loaderpool.transport.reports import GivenUp, LostReport
from loaderpool.worker.reading import COMMAND, HEADER

# Maximum number of batches that a reader may send without waiting. Smaller: with tiny batches, the
# reader waits for this process.
_MOST_ASKED = 16
# Size of the socket's send buffer, of which the kernel may grant less. The reader continues while
# this much data is on its way.
_SENT_BYTES = 1 << 20
_PROGRAM = Program("loaderpool.worker.reading", "loaderpool-reader")
_BUFFER_BYTES = 1 << 16  # smaller parts are received together, with one call


class StreamEnded(Exception):
    """A stream ended with an error.

    `make_error` makes the error from the position of the first missing item.
    """

    def __init__(self, make_error: Callable[[int], LoaderpoolError]) -> None:
        self.make_error = make_error


class Arriving(NamedTuple):
    """The items of one batch, on their way from the reader. Has the fields of `bundles.Frame`."""

    nbytes: int
    buffers: int
    first: int
    rows: int
    # fills `uint8[nbytes]`; raises `StreamEnded` if the reader has died
    write_into: Callable[[memoryview], None]


def ship_beside(
    payload: Mapping[str, Any],
    stream: StreamSource,
    config: LoaderConfig,
    plan: Plan,
    reads_apart: bool,
    registry: Registry,
    like: tuple[Shipment, Any] | None = None,
) -> tuple[Shipment, Shipment | str]:
    """Pickle a loader for its workers, and its stream for the reader.

    Both shipments pickle code by value, or both by name. Otherwise the items' classes would differ
    from those that the function knows.

    Args:
        payload: Objects for the workers.
        stream: The source.
        config: Settings of the loader.
        plan: Plan of the loader.
        reads_apart: True if a stream may be read in a separate process.
        registry: Random generators of the loader's objects.
        like: Earlier shipments of the same loader; None: these are the first.

    Returns:
        The shipment for the workers; and that for the reader, or the reason why there is no reader.

    Raises:
        UnpicklableError: An object for the workers cannot be pickled. If `like` is given, also if
            the stream cannot be pickled.
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
        # Pickle everything for the workers. If the stream is not the cause, the error is raised
        # again.
        return ship(dict(payload), registry=registry), str(error)
    return for_workers, shipment


class ReaderProcess:
    """A process with the user's iterable, which reads one pass after another.

    The iterable keeps its state from pass to pass, as with `workers=0`.

    Called by one thread, which starts and reaps the process. The kernel kills the process when that
    thread ends.

    Args:
        arena: Shared memory with the stream's shipment.
        place: Offset and length of the shipment.
        files: Descriptors of the shipment's data files. The caller owns them.
        around: Environment of the process.
    """

    def __init__(
        self, arena: Arena, place: tuple[int, int], files: Sequence[int], around: Surroundings
    ) -> None:
        self._arena, self._files, self._around = arena, files, around
        self._settings = {"place": place, "files": list(files)}
        self._control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self, data: socket.socket, epoch: int, start: int) -> None:
        """Request a pass. Starts the process if there is none.

        Args:
            data: The reader's end of the pass's socket.
            epoch: Epoch of the pass.
            start: First position of the pass.

        Raises:
            ValueError: The arena's descriptor is closed.
            OSError: No process could be started.
        """
        command = COMMAND.pack(epoch, start)
        if self._control is not None:
            with contextlib.suppress(OSError):  # the process has died since its last pass
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
        """Wait until the process has closed its pass; return False after `grace_s` seconds."""
        if self._control is None:
            return False
        self._control.settimeout(grace_s)
        with contextlib.suppress(OSError):
            return bool(self._control.recv(1))
        return False

    def end(self) -> None:
        """End the process, and wait for that. A process between passes can exit by itself first."""
        if self._control is not None:
            self._control.close()
            self._control = None
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            child_process.end(process, GRACE_S)


class ReaderPass:
    """One pass that a reader process reads.

    Called by the feed's thread. Other threads may only call `stop`.

    Args:
        reader: The reader process.
        epoch: Epoch of the pass.
        start: First position of the pass.
    """

    def __init__(self, reader: ReaderProcess, epoch: int, start: int) -> None:
        self._reader, self._epoch, self._start = reader, epoch, start
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begun = self._buffer[:0]  # received bytes that `_fill` has not used yet
        self._watch = machine.StopWatch()
        self._oom_kills = capacity.oom_kill_count()
        self._was_stopped = self._is_over = self._has_ended = False

    def frames(self, wanted: Callable[[], int]) -> Generator[Arriving, None, None]:
        """Start the pass, and yield each batch as it arrives. Requests batches from the reader.

        Args:
            wanted: Returns the number of batches that the reader may send now. It may always send
                at least one.

        Raises:
            StreamEnded: The stream has raised, or the process has died. All complete batches were
                yielded before.
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
                    # The reader may be gone. The data that it has sent can still be read.
                    with contextlib.suppress(OSError):
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
        """True if the next batch has arrived completely. Called by the feed's thread."""
        begun = self._begun
        return (
            len(begun) >= HEADER.size and len(begun) >= HEADER.size + HEADER.unpack_from(begun)[0]
        )

    def stop(self) -> None:
        """End `frames`, and let the process close the stream. Idempotent and non-blocking.

        Called by any thread, and by finalizers.
        """
        self._is_over = True
        if self._socket is not None:  # Otherwise `frames` has not started the pass yet.
            with contextlib.suppress(OSError):
                # Closing is not enough, because a fork of this process may have the socket too.
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the pass. Also ends a process that does not close the pass within GRACE_S seconds."""
        self.stop()
        if self._process is not None and (self._has_ended or not self._reader.is_done(GRACE_S)):
            self._reader.end()
        if self._socket is not None:
            self._socket.close()

    def _fill(self, view: memoryview) -> None:
        """Fill a view with the next bytes. Blocks until they have arrived.

        Raises:
            StreamEnded: The pass was stopped, or the process has died.
        """
        at = 0
        while at < len(view):
            if self._begun:
                count = min(len(self._begun), len(view) - at)
                view[at : at + count], self._begun = self._begun[:count], self._begun[count:]
                at += count
            elif len(view) - at < len(self._buffer):
                self._begun = self._buffer[: self._received(self._buffer)]
            # A large part is received with one call. Between calls, this thread may have to wait
            # for the interpreter's lock.
            else:
                at += self._received(view[at:], socket.MSG_WAITALL)

    def _received(self, view: memoryview, flags: int = 0) -> int:
        assert self._socket is not None and self._process is not None
        while True:
            try:
                count = self._socket.recv_into(view, 0, flags)
                if count:
                    return count
                if self._is_over:  # `stop` was called here, and the process may continue
                    raise StreamEnded(lambda position: closed_error())
                self._has_ended = True
            except ConnectionResetError:
                # The reader ended before it had read all requests. Its data can still be read.
                continue
            except BlockingIOError:  # nothing has arrived for `look_ms`
                pass
            if self._has_ended:  # the reader has ended, and all its data was read
                self._reader.end()
                raise StreamEnded(functools.partial(reader_lost_error, self._death(self._process)))
            pid = self._process.pid
            # Checked, because the user's child processes may keep the reader's end of the socket.
            self._has_ended = child_process.has_ended(pid)
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
    """Return the error for a failure that the reader has reported: of reading, or of loading.

    Args:
        ended: The failure.
        advice: Advice for a failure of loading; None: reading has failed.
        position: Position of the first missing item.
    """
    if advice is None:
        return reading_error(ended, position)
    return setup_error(
        ended, "the stream process could not load the source", advice, "the stream process"
    )
