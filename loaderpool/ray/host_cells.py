"""The hosts' cells of the trainer's board: what its statistics say of each host."""

from __future__ import annotations

from typing import Any

from loaderpool.memory.board import Board, Field, HostField, HostState
from loaderpool.transport.messages import Status, Words, split32

# Of so many latest round trips about the mean is shown.
_ROUND_TRIPS = 8


class HostCells:
    """Writes them. A cell is another host's once its own is gone.

    Runs in: the dispatcher.

    Args:
        board: the trainer's.
    """

    def __init__(self, board: Board) -> None:
        self._board = board

    def begin(self, cell: int) -> None:
        """A host is to start, which has the cell from now on."""
        self._board.clear(cell)

    def set_state(self, cell: int, state: HostState) -> None:
        """Note what a host is at."""
        self._board.numbers[self._board.base(cell) + HostField.STATE] = state

    def count(self, cell: int, ns: int, held_ns: int, wait_ns: int, restarts: int) -> None:
        """Take in what a host tells with each exchange.

        Args:
            cell: the host's.
            ns: how long the exchange took.
            held_ns: how much of it the host had it.
            wait_ns: how long its workers have waited for work.
            restarts: how many of its workers, and supervisors, were replaced.
        """
        numbers, base = self._board.numbers, self._board.base(cell)
        before, now = numbers[base + HostField.ROUND_TRIP_NS], max(0, ns - held_ns)
        numbers[base + HostField.ROUND_TRIP_NS] = before + (now - before) // _ROUND_TRIPS if before else now
        numbers[base + HostField.RESTARTS] = restarts
        numbers[base + Field.WAIT_NS] = wait_ns

    def count_ticket(self, cell: int, words: Words, busy_ns: int, status: int, beside: Any) -> None:
        """Count what a host has made of a ticket; the arguments are those of `TrainerPipes.complete`."""
        count = split32(words[4])[0]
        numbers, base = self._board.numbers, self._board.base(cell)
        numbers[base + Field.SAMPLES] += count * split32(words[5])[1]
        numbers[base + Field.BATCHES] += count
        numbers[base + Field.BUSY_NS] += busy_ns
        if status in (Status.FINISHED, Status.OVERSIZE):
            numbers[base + HostField.BYTES] += sum(piece.content.nbytes for piece in beside[0])

    def restarts(self, cell: int) -> int:
        """Return how many of a host's workers, and supervisors, were replaced."""
        return self._board.read(cell, HostField.RESTARTS)
