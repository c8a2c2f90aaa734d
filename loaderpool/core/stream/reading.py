"""The reader: a clean interpreter with the user's iterable in it, which reads one pass after another.

main process ── COMMAND, with the pass's own socket ──▶ reader
main process ◀── a byte, when it has let go of the pass ── reader

On the pass's socket:

feed ── a byte for each batch that it may send ──▶ reader
feed ◀── HEADER, then the items of a batch; or an error; or the end ── reader
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import pickle
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

from loaderpool.errors import LoaderpoolError
from loaderpool.memory.arena import Arena
from loaderpool.sources.stream import StreamSource, read_batches
from loaderpool.system import fault_points, process
from loaderpool.system.interrupts import InterruptsHeld, gate_handlers
from loaderpool.transport.payload.generators import seeder
from loaderpool.transport.payload.loaded import Payloads, describe_load_error
from loaderpool.transport.payload.modules import ModuleStore, keep
from loaderpool.transport.payload.record import WorkerPayload
from loaderpool.transport.reports import Failure, describe_failure, what_ended
from loaderpool.worker.bundles import Frame, frames
from loaderpool.worker.own_process import become_worker, end_stray, serve, settle_libraries

HEADER = struct.Struct(
    "<4Q"
)  # of a frame: bytes, buffers, first position, rows; 0 rows: the end, or an error
COMMAND = struct.Struct("<2q")  # a pass: its epoch, and its first position
_MOST_ASKED = 1 << 10  # at once; a feed asks for fewer


class _Sender:
    """Sends what the feed asks for. Raises an OSError where it never will again."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._asked = channel, 0

    def send(self, frame: Frame) -> None:
        """Send one frame. Blocks: until it is asked for.

        What a handler raises comes between two frames: the feed would wait for the rest of one.
        """
        gate_handlers()  # of any signal, which the stream may have set a moment ago
        with InterruptsHeld():
            if not self._asked:
                self._asked = len(self._channel.recv(_MOST_ASKED))
                if not self._asked:
                    raise BrokenPipeError
            self._asked -= 1
            parts = [
                HEADER.pack(frame.nbytes, frame.buffers, frame.first, frame.rows),
                *frame.parts,
            ]
            large = len(parts) - frame.buffers  # where the arrays begin
            for part in (b"".join(parts[:large]), *parts[large:]):
                self._channel.sendall(part)


def _serve(start: Mapping[str, Any], control: socket.socket) -> None:
    """Read passes until the main process wants no more."""
    payloads = Payloads(Arena(start["arena"], start["arena_bytes"]), {0: list(start["files"])})
    stream: StreamSource | None = None
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as channel:
            sender = _Sender(channel)
            if stream is None:
                stream = _load(payloads, start, sender)
            if stream is None:
                return
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # the rest is not wanted
                _read(stream, payloads.loaded[0], sender, *COMMAND.unpack(message))
        control.send(b"\0")


def _load(payloads: Payloads, start: Mapping[str, Any], sender: _Sender) -> StreamSource | None:
    """Return the stream; None: it could not be loaded, which is sent."""
    try:
        fault_points.reach("reader.loading")
        payloads.load(0, *start["place"])
    except BaseException as error:
        end_stray(error)
        advice = describe_load_error(error, "the reader")
        sender.send(_failed(describe_failure(error, epoch=0, worker=None), advice))
        return None
    settle_libraries()
    payload = payloads.loaded[0]
    stream = StreamSource(payload.source)
    stream.captured = seeder(payload.generators, payload.config._replace(threads=1))
    return stream


def _read(
    stream: StreamSource, payload: WorkerPayload, sender: _Sender, epoch: int, start: int
) -> None:
    """Read a pass to its end. Raises what a socket does whose other end is closed: the rest is not wanted."""
    fault_points.reach("reader.pass_taken")
    config = payload.config
    try:
        plan = payload.plan.after(start)
        batches = read_batches(
            stream, plan, window=config.shuffle_window, seed=config.seed, epoch=epoch
        )
        with contextlib.closing(batches), contextlib.closing(frames(batches)) as read:
            for frame in read:
                end_stray()
                fault_points.reach("reader.before_sending")
                sender.send(frame)
                fault_points.reach("reader.after_sending")
                del frame  # its items need not be held while the next ones are read
        end_stray()
    except BaseException as error:  # of the socket, too: then the next line meets it again
        end_stray(error)
        sender.send(_failed(what_ended(error, epoch), None))
    else:
        fault_points.reach("reader.before_end")
        sender.send(Frame(0, 0, 0, ()))
        fault_points.reach("reader.after_end")


def _failed(ended: Failure | LoaderpoolError, advice: str | None) -> Frame:
    return Frame(0, 0, 0, [pickle.dumps((ended, advice))])


def main(start: Mapping[str, Any]) -> None:
    """The reader process, from the first import to its end."""
    process.become("reader")
    become_worker(start["trainer_pid"])  # the thread that started us lives until we are gone
    keep(ModuleStore(start["modules"]))
    if isinstance(sys.stderr, io.TextIOWrapper):
        faulthandler.enable()
    serve(functools.partial(_serve, start, socket.socket(fileno=start["control"])))
