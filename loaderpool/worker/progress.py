"""Where a process stands in a loader's work: noted on the board as it goes, and named where something fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from loaderpool.memory.board import Board, Field
from loaderpool.memory.call_times import CallClock
from loaderpool.memory.recorder import CallKind
from loaderpool.system import clock
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.transport.reports import describe_failure
from loaderpool.worker.after_fork import end_stray
from loaderpool.worker.jobs import Abandoned, Job, WorkFailed


class Progress:
    """One process's cell on the board, and what it takes for a failure; the arguments are those of `Work`.

    Attributes:
        counts_generated: an item that a generator makes is a call.
    """

    def __init__(
        self,
        numbers: memoryview,
        cell: int,
        worker: int | None,
        catches: type[BaseException],
        calls: CallClock | None = None,
    ) -> None:
        self.numbers, self.worker, self.catches, self._cell = numbers, worker, catches, cell
        self._calls = calls
        self._counted: CallClock | None = None  # where calls of this ticket follow one another
        self.counts_generated = False
        self._generated: tuple[int, int] | None = None  # the item that a generator makes: since when, and its position
        self._index_field, self._started_field = cell + Field.INDEX, cell + Field.STARTED_NS

    def is_abandoned(self, run: int) -> bool:
        """Whether the consumer has abandoned this run; 0: a probe, which is of none."""
        return run != 0 and self.numbers[Board.mark(run)] == run

    def note(self, job: Job, index: int) -> None:
        """Note that the sample of this source index is made from now on.

        Raises:
            Abandoned: the job's run was abandoned.
        """
        if self.worker is None:  # in the caller's process, where a tiny batch has no time for what is never looked at
            return
        numbers = self.numbers
        if numbers[Board.mark(job.run)] == job.run:
            raise Abandoned
        now_ns, calls = clock.monotonic_ns(), self._counted
        if calls is not None:  # here, and not in a method: it is paid for each sample
            if now_ns - calls.begun_ns > calls.kept_from_ns:
                calls.keep(now_ns - calls.begun_ns, numbers[self._index_field])
            calls.begun_ns = now_ns
            if calls.begins is not None:
                calls.begins.append(now_ns)
        # In this order: between the two a look at the board sees no more than the last sample begun again.
        numbers[self._started_field] = now_ns
        numbers[self._index_field] = index + 1

    @contextlib.contextmanager
    def probing(self, index: int) -> Iterator[None]:
        """Note that the sample of this source index is made in the block, for no run."""
        self.numbers[self._started_field] = clock.monotonic_ns()
        self.numbers[self._index_field] = index + 1
        yield
        self.numbers[self._index_field] = 0  # not where it raises: a look shall still find it

    # ---- how long calls take ----

    def begin_ticket(self, now_ns: int, epoch: int, are_told: bool) -> None:
        """Take the time of calls from now on: each ends where the next one begins, or is told of (`note_call`)."""
        self.numbers[self._cell + Field.BLOCK] = 0
        if self._calls is not None:
            self._calls.begin_ticket(now_ns, epoch)
            self._counted = None if are_told else self._calls

    def note_call(self, begun_ns: int, ended_ns: int, index: int) -> None:
        """A call of a thread, or of a generator, is over."""
        if self._calls is not None:
            self._calls.note(begun_ns, ended_ns - begun_ns, index)

    def end_ticket(self, now_ns: int) -> None:
        """The last call is over."""
        if self._counted is not None:
            self._counted.end_ticket(now_ns, self.numbers[self._index_field])
            self._counted = None

    def begin_blocks(self, rows: int) -> None:
        """Note that from now on the sample that is noted is the first of so many; the ticket's calls do not count."""
        self._counted = None
        self.numbers[self._cell + Field.BLOCK] = rows

    # ---- threads, generators and the setup hook ----

    def note_thread(self, thread: int, started_ns: int, index: int) -> None:
        """Note that this sample is made by this thread, since then."""
        numbers = self.numbers
        numbers[self._cell + Field.THREAD] = thread
        numbers[self._started_field] = started_ns
        numbers[self._index_field] = index + 1

    def note_generator(self, run: int, position: int, items: int) -> None:
        """Note that a generator makes so many items from now on, of which the first has this position.

        Raises:
            Abandoned: the consumer has abandoned this run.
        """
        numbers = self.numbers
        if self.is_abandoned(run):
            raise Abandoned
        now_ns = clock.monotonic_ns()
        self._end_generated(now_ns)
        if items == 1 and self.counts_generated:
            self._generated = now_ns, position
        numbers[self._started_field] = now_ns
        numbers[self._cell + Field.IN_GENERATOR] = 1
        numbers[self._index_field] = position + 1

    def drop_generated(self) -> None:
        """Note that the item that was noted did not come: its generator has ended."""
        self._generated = None

    def end_generator(self) -> None:
        """Note that no generator runs any more."""
        self._end_generated(clock.monotonic_ns())
        self.numbers[self._index_field] = 0
        self.numbers[self._cell + Field.IN_GENERATOR] = 0

    def _end_generated(self, now_ns: int) -> None:
        """The item is there that a generator made alone; of a block none is known by itself."""
        if self._generated is not None:
            begun_ns, position = self._generated
            self._generated = None
            self.note_call(begun_ns, now_ns, position)

    @contextlib.contextmanager
    def setup(self) -> Iterator[None]:
        """Note that the `setup` hook runs in the block. A field that stays set says that it ended its process."""
        self.numbers[self._cell + Field.IN_SETUP] = 1
        begun_ns = clock.monotonic_ns()
        try:
            yield
        finally:
            self.numbers[self._cell + Field.IN_SETUP] = 0
            if self._calls is not None and self._calls.recorder is not None:
                self._calls.recorder.note_call(begun_ns, clock.monotonic_ns() - begun_ns, 0, CallKind.SETUP)

    # ---- failures ----

    def failed(
        self, error: BaseException, epoch: int, indices: list[int] | None = None, position: int | None = None
    ) -> WorkFailed:
        """Return the error as one about these items, the first of which has this position; None: about no item.

        Raises:
            Exception: the error itself, where the handler of a signal has raised it.
        """
        if is_of_a_handler(error):
            raise error
        end_stray(error)
        of_one = indices is not None and len(indices) == 1
        failure = describe_failure(
            error,
            epoch=epoch,
            worker=self.worker,
            index=indices[0] if indices and of_one else None,
            indices=() if of_one else tuple(indices or ()),
            position=position,
        )
        return WorkFailed(failure, error)
