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
from loaderpool.ray.host_cells import HostCells
from loaderpool.ray.host_messages import Piece
from loaderpool.supervisor.records import SlotRecord
from loaderpool.system import machine
from loaderpool.transport.messages import READ_BYTES, Notice, Status, Words, decode_all, encode, join32
from loaderpool.transport.payload.descriptors import ReceivedDescriptors
from loaderpool.transport.payload.loaded import Payloads
from loaderpool.transport.pipes import Outlet, SocketOutlet


class TrainerPipes:
    """What a dispatcher shares with the trainer.

    Attributes:
        is_gone: the trainer is dead, or takes nothing any more.
        host_cells: where the trainer reads what hosts have done.

    Args:
        start: the settings of the dispatcher's start.
        poll: is told what to watch.
    """

    def __init__(self, start: Mapping[str, Any], poll: select.poll) -> None:
        self._control: int = start["control"]
        self._pid: int = start["trainer_pid"]
        to_trainer = socket.socket(fileno=start["socket"])
        self.arena = Arena(start["arena"], start["arena_bytes"])
        self.host_cells = HostCells(self.arena.board)
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
        self._socket.send(message, extra)

    def tell(self, message: bytes, value: Any) -> None:
        """Send a notice with an object of ours."""
        self._socket.send(message, pickle.dumps(value))

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
            self._socket.send(completion, extra)
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
