"""Where a process stands in a loader's work: noted on the board as it goes, and named where something fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from loaderpool.memory.board import Board, Field
from loaderpool.system import clock
from loaderpool.transport.reports import describe_failure
from loaderpool.worker.forked_children import end_stray
from loaderpool.worker.jobs import Abandoned, Job, WorkFailed


class Progress:
    """One process's cell on the board, and what it takes for a failure.

    Args:
        words: the board (or a stand-in) to note progress on.
        cell: first word of this worker's cell.
        worker: this worker's number, None in the caller's process.
        catches: what is taken for an error of the function; BaseException in a worker, which has no user at its keys.
    """

    def __init__(self, words: memoryview, cell: int, worker: int | None, catches: type[BaseException]) -> None:
        self.words, self.worker, self.catches = words, worker, catches
        self.index_word, self.started_word = cell + Field.INDEX, cell + Field.STARTED_NS
        self._thread_word = cell + Field.THREAD
        self._setup_word, self._generator_word = cell + Field.IN_SETUP, cell + Field.IN_GENERATOR

    def note(self, job: Job, index: int) -> None:
        """The sample of this source index is made from now on.

        Raises:
            Abandoned: the job's run was abandoned.
        """
        if self.worker is None:  # in the caller's process, where a tiny batch has no time for what is never looked at
            return
        words = self.words
        if words[Board.mark(job.run)] == job.run:
            raise Abandoned
        # In this order: between the two a look at the board sees no more than the last sample begun anew.
        words[self.started_word] = clock.monotonic_ns()
        words[self.index_word] = index + 1

    def note_thread(self, thread: int, started_ns: int) -> None:
        """The sample that was noted is made by this thread, since then."""
        words = self.words
        words[self._thread_word] = thread
        words[self.started_word] = started_ns

    def note_generator(self, run: int, position: int) -> None:
        """A generator makes the item of this position from now on.

        Raises:
            Abandoned: nobody wants this run any more; 0: a probe, which is of none.
        """
        words = self.words
        if run and words[Board.mark(run)] == run:
            raise Abandoned
        words[self.started_word] = clock.monotonic_ns()
        words[self._generator_word] = 1
        words[self.index_word] = position + 1

    def end_generator(self) -> None:
        """No generator runs any more."""
        words = self.words
        words[self.index_word] = 0
        words[self._generator_word] = 0

    @contextlib.contextmanager
    def setup(self) -> Iterator[None]:
        """The user's `setup` hook runs within. A word that stays set says that it ended its process."""
        self.words[self._setup_word] = 1
        try:
            yield
        finally:
            self.words[self._setup_word] = 0

    def failed(self, error: BaseException, epoch: int, indices: list[int], position: int) -> WorkFailed:
        """The error as one about these items, the first of which has this position."""
        end_stray(error)
        one = len(indices) == 1
        failure = describe_failure(
            error,
            epoch=epoch,
            worker=self.worker,
            index=indices[0] if one else None,
            indices=() if one else tuple(indices),
            position=position,
        )
        return WorkFailed(failure, error)
