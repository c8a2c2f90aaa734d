"""A dispatcher's ends of the ways to the trainer: control comes in, notices go out, batches go into slots."""

from __future__ import annotations

import os
import pickle
import select
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from loaderpool.memory.arena import Arena
from loaderpool.memory.board import Field, HostField, HostState
from loaderpool.ray.host_messages import Piece
from loaderpool.supervisor.records import SlotRecord
from loaderpool.system import machine
from loaderpool.transport.messages import READ_BYTES, Notice, Status, Words, decode_all, encode, join32, split32
from loaderpool.transport.payload.loaded import Payloads, ReceivedDescriptors
from loaderpool.transport.pipes import Outlet, SocketOutlet


class TrainerPipes:
    """What a dispatcher shares with the trainer.

    Attributes:
        is_gone: the trainer is dead, or takes nothing any more.

    Args:
        start: the settings of the dispatcher's start.
        poll: is told what to watch.
    """

    def __init__(self, start: Mapping[str, Any], poll: select.poll) -> None:
        self._control: int = start["control"]
        self._pid: int = start["trainer_pid"]
        to_trainer = socket.socket(fileno=start["socket"])
        self.arena = Arena(start["arena"], start["arena_bytes"])
        self.payloads = Payloads(self.arena, ReceivedDescriptors(to_trainer))
        os.set_blocking(self._control, False)
        poll.register(self._control, select.POLLIN)
        self._pipe, self._socket = Outlet(start["completions"], poll), SocketOutlet(to_trainer, poll)
        self._pidfd = machine.open_pidfd(self._pid)
        if self._pidfd is not None:
            poll.register(self._pidfd, select.POLLIN)
        self._is_gone = False

    @property
    def is_gone(self) -> bool:
        """Whether nothing need be done any more."""
        return self._is_gone or self._pipe.is_gone or self._socket.is_gone

    def answer(self, descriptor: int) -> Iterator[Words]:
        """Do what a descriptor of ours is ready for; returns what the trainer says."""
        if descriptor == self._control:
            try:
                data = os.read(self._control, READ_BYTES)
            except BlockingIOError:
                return iter(())
            self._is_gone |= not data
            return decode_all(data)
        if descriptor == self._pidfd:
            self._is_gone = True
        else:
            self._pipe.flush()
            self._socket.flush()
        return iter(())

    def look(self) -> None:
        """See whether the trainer is there, where no descriptor tells."""
        if self._pidfd is None and os.getppid() != self._pid:
            self._is_gone = True

    def send(self, message: bytes) -> None:
        """Send a notice."""
        self._pipe.send(message)

    def send_with(self, message: bytes, extra: bytes) -> None:
        """Send a notice with bytes."""
        self._socket.send_with(message, extra)

    def tell(self, message: bytes, value: Any) -> None:
        """Send a notice with an object of ours."""
        self._socket.send_with(message, pickle.dumps(value))

    # ---- a host's cell of the trainer's board, which is another one's once the host is gone ----

    def begin_cell(self, cell: int) -> None:
        """A host is to start, which has the cell from now on."""
        self.arena.board.clear(cell)

    def set_state(self, cell: int, state: HostState) -> None:
        """Note what a host is at."""
        self._write(cell, HostField.STATE, state)

    def set_wait(self, cell: int, wait_ns: int) -> None:
        """Note how long a host's workers have waited for work."""
        self._write(cell, Field.WAIT_NS, wait_ns)

    def count_ticket(self, cell: int, words: Words, busy_ns: int) -> None:
        """Count what a host has made of a ticket; the words are those of `complete`."""
        count = split32(words[4])[0]
        numbers, base = self.arena.board.numbers, self.arena.board.base(cell)
        numbers[base + Field.SAMPLES] += count * split32(words[5])[1]
        numbers[base + Field.BATCHES] += count
        numbers[base + Field.BUSY_NS] += busy_ns

    def _write(self, cell: int, field: Field | HostField, value: int) -> None:
        self.arena.board.numbers[self.arena.board.base(cell) + field] = value

    # ---- batches ----

    def complete(self, words: Words, host: int, status: int, beside: Any, slot: SlotRecord) -> int:
        """Put what a host answers to a ticket into its slot, and tell of it; returns how it ended.

        Args:
            words: of the ticket, as `Command.TICKET`.
            host: who answers.
            status: how the ticket ended there.
            beside: as `HostReport.TICKET` has it.
            slot: where the batches go.
        """
        _, ticket, run, first, count_attempt, rows, _, _ = words
        extra, file = b"", None
        pieces: list[Piece] = []
        if status in (Status.FINISHED, Status.OVERSIZE):
            pieces, extra = beside
            if max(piece.offset + piece.content.nbytes for piece in pieces) <= slot.nbytes:
                status = Status.FINISHED
                for at, content in pieces:
                    np.ndarray((content.nbytes,), np.uint8, self.arena.map, slot.offset + at)[:] = content
            else:
                status, file = Status.OVERSIZE, _memory_file(pieces, extra)
        elif status != Status.ABANDONED:
            extra = beside
        completion = encode(
            Notice.COMPLETION, ticket, run, first, count_attempt, rows, slot.number, join32(status, host)
        )
        if file is not None:
            self._socket.send_file(completion, file, sum(piece.content.nbytes for piece in pieces))
        elif extra:
            self._socket.send_with(completion, extra)
        else:
            self._pipe.send(completion)
        return status


def _memory_file(pieces: list[Piece], failures: bytes) -> int:
    """Return a memory file with a batch that outgrew its slot, and its row failures behind it."""
    descriptor = machine.create_memory_file("batch")
    with open(descriptor, "wb", closefd=False) as file:
        for piece in pieces:
            file.write(np.ascontiguousarray(piece.content).data)
        file.write(failures)
    return descriptor
