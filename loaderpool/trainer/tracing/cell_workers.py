"""Which process had a worker's cell, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from loaderpool.memory.recorder import MarkKind
from loaderpool.trainer.tracing.recording import PoolRecords

_NEVER_NS = 1 << 63


class Life(NamedTuple):
    """One worker."""

    number: int
    pid: int
    ended_ns: int  # or later than all


class CellWorkers:
    """The workers of a pool, as its supervisors have told of them.

    Args:
        pool: its records.
    """

    def __init__(self, pool: PoolRecords) -> None:
        self._by_cell: dict[int, list[Life]] = {}
        names = pool.supervisor.records.dtype.names or ()
        for values in pool.supervisor.records.tolist():
            mark = dict(zip(names, values, strict=True))
            kind, at_ns = mark["kind"], mark["at_ns"]
            if kind == MarkKind.SUPERVISOR:  # with the one before it all of its workers have ended
                for lives in self._by_cell.values():
                    self._end(lives, at_ns)
            elif kind in (MarkKind.STARTED, MarkKind.ENDED):
                lives = self._by_cell.setdefault(mark["cell"], [])
                self._end(lives, at_ns)
                if kind == MarkKind.STARTED:
                    lives.append(Life(mark["number"], mark["value"], _NEVER_NS))
                elif not lives:  # its beginning is not known any more
                    lives.append(Life(mark["number"], mark["value"], at_ns))
        for cell, worker in pool.workers.items():
            lives = self._by_cell.setdefault(cell, [])
            if not lives:
                lives.append(Life(cell, worker.pid, _NEVER_NS))

    @staticmethod
    def _end(lives: list[Life], at_ns: int) -> None:
        if lives and lives[-1].ended_ns == _NEVER_NS:
            lives[-1] = lives[-1]._replace(ended_ns=at_ns)

    def __iter__(self) -> Iterator[Life]:
        for lives in self._by_cell.values():
            yield from lives

    def of(self, cell: int) -> list[Life]:
        """Return those that had this cell, one after the other."""
        return self._by_cell.get(cell, [])

    def at(self, cell: int, at_ns: int) -> Life:
        """Return the one that had this cell then. A worker may do something before its start is noted."""
        lives = self._by_cell[cell]
        return next((life for life in lives if at_ns < life.ended_ns), lives[-1])
