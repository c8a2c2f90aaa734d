"""The board: a cell of counters for each worker and an "abandoned" mark for each run, at the arena's start.

Every number has one writer (a worker its cell, the supervisor the marks, the main process `size`) and is
written whole, so no lock is needed.
"""

from __future__ import annotations

import enum
import mmap
from typing import NamedTuple

from loaderpool.config import MAX_WORKERS

_FIELDS_PER_CELL = (
    16  # 128 bytes: two cache lines, so that neighbours' prefetchers do not fight over one
)
# Runs share marks by number modulo this; a mark is reused long after its run ended.
RUN_MARKS = 2048
_MARKS_START = MAX_WORKERS * _FIELDS_PER_CELL
_VALUES_START = _MARKS_START + RUN_MARKS
_LOADING, _CELLS, _LOST, _BEGUN, _RESIZES, _SIZE = range(_VALUES_START, _VALUES_START + 6)
_TRIALS, _TRIAL_MS, _TRIALS_OVER, _TRIAL_IDLE_NS, _TRIAL_FOUND = range(_SIZE + 1, _SIZE + 6)
_TRIAL_FIELDS = 5
_MILLI = 1000  # of a sample per second, of a second: the board has whole numbers
BOARD_BYTES = -(-(_TRIAL_FOUND + _TRIAL_FIELDS) * 8 // 4096) * 4096


class Field(enum.IntEnum):
    """One number of a worker's cell. The worker writes all but its number and pid, which its supervisor does.

    A node's cell has NUMBER, SAMPLES, BATCHES, BUSY_NS and WAIT_NS, all of which its dispatcher writes.
    """

    NUMBER = 0  # 1 + the worker's number; 0: there is none
    TICKET = 1  # the ticket that is running
    INDEX = 2  # 1 + source index (or position of a generator's item) of the sample that is running; 0: none
    STARTED_NS = 3  # when it (or the block of rows it is in) began, monotonic
    SAMPLES = 4
    BATCHES = 5
    BUSY_NS = 6
    WAIT_NS = 7
    PID = 8
    BEGUN = 9  # 1 once it serves
    IN_SETUP = 10  # 1 while the user's `setup` hook runs
    IN_GENERATOR = 11  # 1 while a generator makes the item that INDEX is of
    THREAD = 12  # which thread makes the sample, by its ident; 0: the main one
    BLOCK = 13  # how many samples at most are made before INDEX is noted again; 0: one


class TrialResult(NamedTuple):
    """Result of a trial with fewer workers (`core/trial.py`)."""

    workers: int = 0  # of all; 0: the trial's supervisor was lost
    enough: int = 0  # the fewest that were as fast as all; all, if none fewer were
    too_few: int = 0  # the most that were slower; 0: none were
    rate: float = 0.0  # of all workers, in samples per second; 0.0: nothing was found out
    paused_s: float = 0.0  # for how long workers were paused


class _Value:
    """A number of the board that is in no cell."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __get__(self, board: Board, _: object) -> int:
        return int(board.numbers[self._at])

    def __set__(self, board: Board, value: int) -> None:
        board.numbers[self._at] = value


class Board:
    """Reads and writes the board. `numbers` is the whole board as a memoryview of u64."""

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
    begun = _Value(
        _BEGUN
    )  # 1 once the first one of the pool runs: the executable is a Python with our packages
    loading = _Value(
        _LOADING
    )  # the loader that is loaded, 0: none; who dies then has died of the import
    cells = _Value(_CELLS)  # that workers have had, from the first on
    lost = _Value(
        _LOST
    )  # workers or nodes that died before they were told to, over all supervisors of the pool
    resizes = _Value(_RESIZES)  # messages `Resize` that were read, by all supervisors of the pool
    trials_over = _Value(_TRIALS_OVER)  # number of the latest trial whose result is there
    trial_idle_ns = _Value(_TRIAL_IDLE_NS)  # time of paused workers without a ticket, in all trials

    # Written by the main process.
    size = _Value(_SIZE)  # 1 + the workers, or nodes, of the latest resize; 0: there was none
    trials = _Value(_TRIALS)  # number of the latest trial that was requested
    trial_ms = _Value(_TRIAL_MS)  # for how long it may pause workers

    def workers(self) -> list[tuple[int, int, int]]:
        """Return number, pid and cell of each worker that there is."""
        numbers = self.numbers[
            Field.NUMBER : self.cells * _FIELDS_PER_CELL : _FIELDS_PER_CELL
        ].tolist()
        return [
            (number - 1, self.read(cell, Field.PID), cell)
            for cell, number in enumerate(numbers)
            if number
        ]

    def clear_workers(self) -> None:
        """There is no worker any more: their supervisor is gone."""
        for _, _, cell in self.workers():
            self.clear(cell)

    def end_trial(self, number: int, found: TrialResult) -> None:
        """Store the result of a trial. Runs in: the supervisor."""
        numbers = *found[:3], int(_MILLI * found.rate), int(_MILLI * found.paused_s)
        for at, value in enumerate(numbers, _TRIAL_FOUND):
            self.numbers[at] = value
        self.trials_over = number  # SYNC: last; pairs with the main process, which reads it first

    def trial_result(self) -> TrialResult:
        """Return the result of the trial with the number `trials_over`."""
        found = self.numbers[_TRIAL_FOUND : _TRIAL_FOUND + _TRIAL_FIELDS].tolist()
        return TrialResult(found[0], found[1], found[2], found[3] / _MILLI, found[4] / _MILLI)

    def abandon(self, run: int) -> None:
        """Tell workers that the rest of this run was abandoned."""
        # SYNC: pairs with the looks before each call: Progress.note, Progress.note_generator, is_unwanted of threads.
        self.numbers[self.mark(run)] = run
