"""The board: shared counters at the arena's start.

It has a cell of counters for each worker, an "abandoned" mark for each run, single values, and the
place of each node of a cluster.
Every number has one writer at a time: a worker writes its cell, the supervisor writes the marks,
and the comments at `Board` name the writers of the values. Numbers are written atomically, so no
lock is needed.
"""

from __future__ import annotations

import enum
import mmap
from typing import NamedTuple

from loaderpool.config import MAX_WORKERS

# A cell has 128 bytes, which are two cache lines: prefetchers often load lines in pairs, so two
# workers never contend for one line.
_FIELDS_PER_CELL = 16
# Number of marks. A run's mark is its number modulo this, so a mark is reused long after its run.
RUN_MARKS = 2048
_MARKS_START = MAX_WORKERS * _FIELDS_PER_CELL
_VALUES_START = _MARKS_START + RUN_MARKS
_LOADING, _CELLS, _LOST, _BEGUN, _RESIZES, _SIZE = range(_VALUES_START, _VALUES_START + 6)
_TRIALS, _TRIAL_MS, _TRIALS_OVER, _TRIAL_IDLE_NS, _TRIAL_FOUND = range(_SIZE + 1, _SIZE + 6)
_TRIAL_FIELDS = 5
_MILLI = 1000  # factor of rates and seconds, because the board has integers only
_NODE_WORKERS = _TRIAL_FOUND + _TRIAL_FIELDS
_RECLAIMED = _NODE_WORKERS + 1
_PLACES_START = _RECLAIMED + 1
_FIELDS_PER_PLACE = 16  # the number of workers, and a text of 120 bytes
BOARD_BYTES = -(-(_PLACES_START + MAX_WORKERS * _FIELDS_PER_PLACE) * 8 // 4096) * 4096


class Field(enum.IntEnum):
    """One number of a worker's cell.

    The supervisor writes NUMBER and PID, and the worker all other numbers. A node's cell has
    NUMBER, SAMPLES, BATCHES, BUSY_NS and WAIT_NS; the dispatcher writes them.
    """

    NUMBER = 0  # 1 + number of the worker; 0: the cell is free
    TICKET = 1  # number of the running ticket
    # 1 + source index of the running sample, or 1 + position of a generator's item; 0: none runs.
    INDEX = 2
    STARTED_NS = 3  # monotonic start time of that sample, or of the block of rows that it is in
    SAMPLES = 4
    BATCHES = 5
    BUSY_NS = 6
    WAIT_NS = 7
    PID = 8
    BEGUN = 9  # 1 once the worker serves tickets
    IN_SETUP = 10  # 1 while the user's `setup` hook runs
    IN_GENERATOR = 11  # 1 while a generator makes the item of INDEX
    THREAD = 12  # ident of the thread that makes the sample; 0: the main thread
    BLOCK = 13  # maximum number of samples that are made before INDEX changes again; 0: one


class TrialResult(NamedTuple):
    """Result of a trial with fewer workers (`supervisor/trial.py`)."""

    workers: int = 0  # number of all workers; 0: the trial's supervisor was lost
    # Smallest number of workers that was as fast as all workers; equal to `workers` if there is no
    # smaller one.
    enough: int = 0
    too_few: int = 0  # largest number of workers that was slower; 0: none was
    rate: float = 0.0  # samples per second of all workers; 0.0: the trial has no result
    paused_s: float = 0.0  # seconds for which workers were paused


class NodePlace(NamedTuple):
    """ID, address and workers of a node of a cluster."""

    node: str = ""  # Ray's ID of the node; empty: not chosen yet
    address: str = ""
    workers: int = 0  # number of its workers; 0 while the node starts


class _Value:
    """Descriptor for a number of the board that is in no cell."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __get__(self, board: Board, _: object) -> int:
        return int(board.numbers[self._at])

    def __set__(self, board: Board, value: int) -> None:
        board.numbers[self._at] = value


class Board:
    """Access to the board in the arena. `numbers` is the whole board as a memoryview of u64."""

    def __init__(self, arena_map: mmap.mmap | bytes) -> None:
        self.numbers: memoryview = memoryview(arena_map)[:BOARD_BYTES].cast("Q")

    @staticmethod
    def base(cell: int) -> int:
        """Return the index of the cell's first field in `numbers`."""
        return cell * _FIELDS_PER_CELL

    @staticmethod
    def mark(run: int) -> int:
        """Return the index in `numbers` of the run's abandoned mark."""
        return _MARKS_START + run % RUN_MARKS

    def read(self, cell: int, field: Field) -> int:
        """Return one field of a cell."""
        return int(self.numbers[cell * _FIELDS_PER_CELL + field])

    def clear(self, cell: int) -> None:
        """Zero a cell before a new worker takes it."""
        for at in range(cell * _FIELDS_PER_CELL, (cell + 1) * _FIELDS_PER_CELL):
            self.numbers[at] = 0

    # Written by the supervisor.
    # 1 once the pool's first supervisor runs. It shows that the executable is a Python interpreter
    # with this package.
    begun = _Value(_BEGUN)
    # Number of the loader that is being loaded; 0: none. If a process dies meanwhile, the import is
    # the cause.
    loading = _Value(_LOADING)
    cells = _Value(_CELLS)  # number of cells in use so far, from the first cell on
    # Number of workers or nodes that died without a request, over all supervisors of the pool.
    lost = _Value(_LOST)
    resizes = _Value(_RESIZES)  # number of `Resize` messages read, by all supervisors of the pool
    trials_over = _Value(_TRIALS_OVER)  # number of the latest trial that has a result
    trial_idle_ns = _Value(_TRIAL_IDLE_NS)  # time of paused workers without a ticket, in all trials
    node_workers = _Value(_NODE_WORKERS)  # latest number of workers of all nodes; 0: no node ran

    # Written by the main process.
    size = _Value(_SIZE)  # 1 + number of workers or nodes of the latest resize; 0: no resize yet
    trials = _Value(_TRIALS)  # number of the latest trial that was requested
    trial_ms = _Value(_TRIAL_MS)  # maximum time for which that trial pauses workers, in ms
    reclaimed = _Value(_RECLAIMED)  # number of arrays of `Arena.array` that have been reclaimed

    def workers(self) -> list[tuple[int, int, int]]:
        """Return number, pid and cell of each worker that has a cell now."""
        numbers = self.numbers[
            Field.NUMBER : self.cells * _FIELDS_PER_CELL : _FIELDS_PER_CELL
        ].tolist()
        return [
            (number - 1, self.read(cell, Field.PID), cell)
            for cell, number in enumerate(numbers)
            if number
        ]

    def place(self, cell: int) -> NodePlace:
        """Return the place of the node that has this cell. While the node starts, it is empty."""
        at = _PLACES_START + cell * _FIELDS_PER_PLACE
        workers = int(self.numbers[at])
        if not workers:
            return NodePlace()
        text = self.numbers[at + 1 : at + _FIELDS_PER_PLACE].tobytes().rstrip(b"\0").decode()
        node, _, address = text.partition(" ")
        return NodePlace(node, address, workers)

    def set_place(self, cell: int, place: NodePlace) -> None:
        """Store the place of the node that has this cell. Called by the dispatcher.

        The place is empty when a node gets the cell. The node's own place follows once it runs.
        """
        at, size = _PLACES_START + cell * _FIELDS_PER_PLACE, 8 * (_FIELDS_PER_PLACE - 1)
        text = f"{place.node} {place.address}".encode("ascii", "replace")[:size].ljust(size, b"\0")
        self.numbers[at + 1 : at + _FIELDS_PER_PLACE] = memoryview(text).cast("Q")
        self.numbers[at] = place.workers  # SYNC: stored last; pairs with `place`

    def clear_workers(self) -> None:
        """Zero the cells of all workers. Called in the main process after a supervisor's death."""
        for _, _, cell in self.workers():
            self.clear(cell)

    def end_trial(self, number: int, found: TrialResult) -> None:
        """Store the result of a trial. Called in the supervisor; pairs with `trial_result`."""
        numbers = *found[:3], int(_MILLI * found.rate), int(_MILLI * found.paused_s)
        for at, value in enumerate(numbers, _TRIAL_FOUND):
            self.numbers[at] = value
        self.trials_over = number  # SYNC: stored last; the main process reads it first

    def trial_result(self) -> TrialResult:
        """Return the result of the trial with the number `trials_over`."""
        found = self.numbers[_TRIAL_FOUND : _TRIAL_FOUND + _TRIAL_FIELDS].tolist()
        return TrialResult(found[0], found[1], found[2], found[3] / _MILLI, found[4] / _MILLI)

    def abandon(self, run: int) -> None:
        """Mark the rest of a run as abandoned, so that workers stop. Called in the supervisor."""
        # SYNC: pairs with the checks in workers: at the start of a ticket (worker/loop.py), and
        # before user code in Progress.note and Progress.note_generator.
        self.numbers[self.mark(run)] = run
