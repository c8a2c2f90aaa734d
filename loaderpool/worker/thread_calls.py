"""Which tickets' calls a worker's threads make, and when what they made may be used.

Between two tickets threads would idle until the last row of the first is made. So the calls of the tickets that wait
behind the one that is being filled begin as soon as threads are free. Of a worker that has died it is unknown which of
its tickets was to blame; so each of them is made again with nothing beside it: then a death over it is its own.

A function that fills one buffer again and again has all its threads fill it. Where results share memory, their ticket
is made once more by one thread: what then differs was such a buffer, and what does not is a constant.

The global generators cannot be seeded for a sample while other samples are made. Where they are watched, what was made
while any code drew from them is made once more, with nothing beside it; who draws again is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy.typing as npt

from loaderpool.config import LoaderConfig, UnitKind
from loaderpool.errors import ArgumentError
from loaderpool.worker.batches import bounds_in
from loaderpool.worker.calls import Calls, Maker, refuse_draws
from loaderpool.worker.global_rng import GlobalsWatch
from loaderpool.worker.jobs import Exclusions, Filled, Job, Opened
from loaderpool.worker.progress import Progress
from loaderpool.worker.reuse import share_memory
from loaderpool.worker.threads import Planned, TicketCalls, WorkerThreads

_Rows = Sequence[npt.NDArray[Any]]
# Results of later tickets that a ticket's own are compared with. More would cost their number for each ticket.
_OTHERS = 2
# What tells a ticket from others that a worker has at the same time.
_Key = tuple[int, int, int, int, int]


class ThreadCalls:
    """A loader's threads in one worker, and the tickets that they have begun.

    Args:
        calls: the function.
        threads: how many.
        config: the loader's settings; of these whether the global generators are watched.
        unit: what one call of the function makes.
        progress: the worker's cell.
        exclusions: what is not run.

    Attributes:
        look_ahead: called in `run` while it waits; it may `begin` more, and returns whether more may come later.
    """

    def __init__(
        self,
        calls: Calls,
        threads: int,
        config: LoaderConfig,
        unit: UnitKind,
        progress: Progress,
        exclusions: Exclusions,
    ) -> None:
        self._calls, self._threads, self._unit, self._exclusions = calls, threads, unit, exclusions
        self._worker_threads = WorkerThreads(calls, threads, unit != "sample", progress)
        self._watch = GlobalsWatch() if config.seed_globals == "auto" else None
        self._looks_for_reuse = True
        self._ticket_calls: dict[_Key, tuple[Opened, TicketCalls]] = {}
        self.look_ahead: Callable[[], bool] | None = None

    def opened(self, job: Job) -> Opened | None:
        """Return the ticket's rows, if it was begun."""
        found = self._ticket_calls.get(_key(job))
        return None if found is None else found[0]

    def begin(self, opened: Opened, arrays: _Rows | None) -> TicketCalls:
        """Have a ticket's calls made, behind those of the tickets begun before.

        Args:
            opened: its rows.
            arrays: those of its slot, if the function writes into them itself.
        """
        if not self._ticket_calls and self._watch is not None:
            self._watch.arm()
        planned = list(self._plan(opened))
        kept = {
            row: result for row, _, indices in planned for result in self._calls.take_kept(opened.job.epoch, indices[0])
        }
        ticket_calls = self._worker_threads.begin(opened.job, iter(planned), opened.read, arrays, kept)
        self._ticket_calls[_key(opened.job)] = opened, ticket_calls
        return ticket_calls

    def run(
        self,
        opened: Opened,
        fill: Callable[[Maker], Filled],
        arrays: _Rows | None,
        bytes_of: Callable[[], bytes],
    ) -> Filled:
        """Fill a ticket's slot with what threads make. When this returns or raises, none of them is at it any more.

        Args:
            opened: the ticket's rows.
            fill: fills the slot.
            arrays: as for `begin`.
            bytes_of: gives what the slot holds of them now.

        Raises:
            ArgumentError: the function draws from the global generators, or fills one buffer for all samples.
            BaseException: whatever `fill` raises.
        """
        key = _key(opened.job)
        is_beside_others = not opened.job.is_isolated
        for _ in range(2):
            begun = self._ticket_calls.get(key)
            ticket_calls = self.begin(opened, arrays) if begun is None else begun[1]
            ticket_calls.look_ahead = self.look_ahead if is_beside_others else None
            try:
                filled = fill(ticket_calls)
                is_shared = self._looks_for_reuse and share_memory(self._results(ticket_calls), arrays or ())
            finally:
                ticket_calls.end()
                del self._ticket_calls[key]
            if self._watch is not None and self._watch.drew():
                self._drop_others()  # whose draw it was is unknown
                is_beside_others = False
                continue
            return self._made_by_one(opened, filled, fill, bytes_of) if is_shared else filled
        raise refuse_draws(self._threads)

    def _results(self, ticket_calls: TicketCalls) -> Iterator[Any]:
        """What the ticket's calls gave, and some other calls, as there may be only one."""
        others = (
            call
            for _, other in self._ticket_calls.values()
            if other is not ticket_calls
            for call in other.calls.values()
        )
        made = (call.result for call in others if call.result is not None)
        return itertools.chain((call.result for call in ticket_calls.calls.values()), itertools.islice(made, _OTHERS))

    def _made_by_one(
        self, opened: Opened, made: Filled, fill: Callable[[Maker], Filled], bytes_of: Callable[[], bytes]
    ) -> Filled:
        """Make the same ticket on the main thread, with nothing beside it."""
        by_threads = _image(made, bytes_of)
        self._drop_others()
        calls = self._calls
        if opened.read is not None:  # others were opened since
            calls = calls.copy()
            calls.read_by(opened.read)
        filled = calls.watched(fill)
        if made.row_failures or filled.row_failures:  # they need not come again
            return filled
        if _image(filled, bytes_of) != by_threads:
            raise ArgumentError(
                "The function reuses one array (or dict) for several samples, which threads overwrite with "
                f"threads={self._threads}. Create a new one in each call, write into `out`, or set threads=1."
            )
        self._looks_for_reuse = False
        return filled

    def _drop_others(self) -> None:
        """Drop all that was begun; the turns of the other tickets will begin them again."""
        for _, other in self._ticket_calls.values():
            other.end()
        self._ticket_calls.clear()

    def _plan(self, opened: Opened) -> Iterator[Planned]:
        """The ticket's calls, but for what is excluded."""
        job, indices, positions = opened.job, opened.indices, opened.positions.tolist()
        if self._unit == "sample":
            bounds = [(row, row + 1) for row in range(len(indices))]
        else:
            bounds = bounds_in(job, len(indices))
        for start, stop in bounds:
            if self._exclusions.find(job.epoch, indices[start:stop]) is None:
                yield job.row_start + start, positions[start:stop], indices[start:stop]

    def close(self) -> None:
        """End the threads; a worker ends without this."""
        self._worker_threads.close()


def _image(made: Filled, bytes_of: Callable[[], bytes]) -> bytes:
    """Return what was made, to be compared."""
    if made.oversize is None:
        return bytes_of()
    apart = bytearray(made.oversize.nbytes)
    made.oversize.write(apart, 0)
    return bytes(apart)


def _key(job: Job) -> _Key:
    return job.run, job.epoch, job.batch, job.row_start, job.attempt
