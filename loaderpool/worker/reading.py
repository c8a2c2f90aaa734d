"""The reader process: a new interpreter with the user's iterable, which reads pass after pass.

main process ── COMMAND, with the pass's own socket ──▶ reader
main process ◀── one byte, when the reader has closed the pass ── reader

On the pass's socket:

feed ── one byte for each batch that the reader may send ──▶ reader
feed ◀── HEADER, then the items of a batch, or an error, or nothing at the end ── reader

Runs in: the reader process, except HEADER and COMMAND, which the main process uses too.
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
from loaderpool.transport.modules import ModuleStore, keep
from loaderpool.transport.payload.generators import seeder
from loaderpool.transport.payload.loaded import Payloads, describe_load_error
from loaderpool.transport.payload.record import WorkerPayload
from loaderpool.transport.reports import Failure, describe_failure, what_ended
from loaderpool.worker.bundles import Frame, frames
from loaderpool.worker.own_process import become_worker, end_stray, serve, settle_libraries

# Header of a frame: number of bytes, number of buffers, first position, rows. A frame with 0 rows
# reports an error, or, if it also has 0 bytes, the end of the stream.
HEADER = struct.Struct("<4Q")
COMMAND = struct.Struct("<2q")  # request of a pass: epoch and first position
_MOST_ASKED = 1 << 10  # maximum number of requests to read at once; a feed sends fewer


class _Sender:
    """Sends the batches that the feed requests. Raises OSError once the feed has ended the pass."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._asked = channel, 0

    def send(self, frame: Frame) -> None:
        """Send one frame. Blocks until the feed requests it.

        A signal handler cannot raise within a frame, because the feed would wait for the rest.
        """
        gate_handlers()  # called each time, because the stream may set a handler at any time
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
            large = len(parts) - frame.buffers  # index of the first array
            for part in (b"".join(parts[:large]), *parts[large:]):
                self._channel.sendall(part)


def _serve(start: Mapping[str, Any], control: socket.socket) -> None:
    """Read the requested passes until the main process closes the control socket."""
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
            # These errors mean that the rest of the pass is not wanted.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                _read(stream, payloads.loaded[0], sender, *COMMAND.unpack(message))
        control.send(b"\0")


def _load(payloads: Payloads, start: Mapping[str, Any], sender: _Sender) -> StreamSource | None:
    """Load the stream and return it. If that fails, send the error and return None."""
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
    """Read a pass to its end, and send its batches.

    Raises:
        OSError: The feed has closed its end, because the rest is not wanted.
    """
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
                del frame  # so that its items are freed before the next ones are read
        end_stray()
    # Errors of the socket come here too. `send` then raises the same error again.
    except BaseException as error:
        end_stray(error)
        sender.send(_failed(what_ended(error, epoch), None))
    else:
        fault_points.reach("reader.before_end")
        sender.send(Frame(0, 0, 0, ()))
        fault_points.reach("reader.after_end")


def _failed(ended: Failure | LoaderpoolError, advice: str | None) -> Frame:
    return Frame(0, 0, 0, [pickle.dumps((ended, advice))])


def main(start: Mapping[str, Any]) -> None:
    """Run the reader process, from its first import to its end. Called by `child_process`."""
    process.become("reader")
    # The thread that started this process must live as long as the process.
    become_worker(start["trainer_pid"])
    keep(ModuleStore(start["modules"]))
    if isinstance(sys.stderr, io.TextIOWrapper):
        faulthandler.enable()
    serve(functools.partial(_serve, start, socket.socket(fileno=start["control"])))
