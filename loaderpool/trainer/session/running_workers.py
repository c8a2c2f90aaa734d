"""`RunningWorkers`: what the trainer knows of its workers, or of hosts in their place, and of those that were lost."""

from __future__ import annotations

from typing import NamedTuple

from loaderpool.memory.board import Board
from loaderpool.system import machine
from loaderpool.transport.messages import Notice, Words
from loaderpool.transport.pipes import Attachment, read_attachment


class HostPlace(NamedTuple):
    """Where a host runs, as its dispatcher tells it."""

    node: str  # its id, as Ray names it; empty while none is chosen
    address: str
    workers: int  # that the host has there; 0 while it starts


class RunningWorker:
    """A worker as its supervisor has told of it.

    Attributes:
        start_time: of its process; with the pid it tells that from a later one of the same number.

    Args:
        number: its number, never given again.
        pid: of its process; 0: it is a host.
        cell: its cell of the board.
        place: where a host runs; None: it is a process of this machine.
    """

    __slots__ = ("cell", "number", "pid", "place", "start_time")

    def __init__(self, number: int, pid: int, cell: int, place: HostPlace | None = None) -> None:
        self.number, self.pid, self.cell, self.place = number, pid, cell, place
        self.start_time = machine.start_time(pid) if pid else 0


class RunningWorkers(dict[int, RunningWorker]):
    """Those that run, by number; the session tells it of their notices.

    Attributes:
        restarts: workers that died and were replaced; of hosts those of hosts that are gone by now.
        hosts_lost: hosts that died, or were given up.
        cells: that processes of this machine have had, whether they still run or not.

    Args:
        board: whose cells they have.
    """

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board
        self.restarts = self.hosts_lost = 0
        self.cells: set[int] = set()

    def started(self, words: Words, attachment: Attachment) -> None:
        """Take in `Notice.WORKER_STARTED`; of a host it comes once more when it runs."""
        assert words[0] == Notice.WORKER_STARTED
        _, number, pid, cell, *_ = words
        self[number] = RunningWorker(number, pid, cell, read_attachment(attachment) if attachment else None)
        if not attachment:
            self.cells.add(cell)

    def ended(self, words: Words) -> None:
        """Take in `Notice.WORKER_ENDED`."""
        assert words[0] == Notice.WORKER_ENDED
        _, number, _, was_lost, *_ = words
        worker = self.pop(number, None)
        if worker is None or worker.place is None:
            self.restarts += was_lost
        else:
            self.hosts_lost += was_lost

    def all_ended(self) -> None:
        """Their supervisor is dead, and they with it."""
        self.clear()
