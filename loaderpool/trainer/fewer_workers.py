"""`FewerWorkers`: trials with some of a loader's workers paused. Runs in: the main process.

`Observer` imports it after the first steps, so that the first batch does not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from loaderpool.trainer.explain.trials import TrialLog, has_logs, log_of
from loaderpool.trainer.explain.window import Snapshot, Tried, window_of

if TYPE_CHECKING:
    from loaderpool.engine.pool import WorkerPool

_JUDGED_S = 10.0  # length of the window that decides about a trial


class FewerWorkers:
    """Trials with some workers paused. A loader has at most one trial in progress.

    Args:
        function_and_source: Returns a key for both, to share trials with other loaders.
    """

    def __init__(self, function_and_source: Callable[[], Hashable]) -> None:
        self._function_and_source = function_and_source
        self._trials: TrialLog | None = None  # set once a trial was possible for any loader
        self._trial = 0  # number of the trial in progress; 0: none
        self._tried_from: Snapshot | None = None  # snapshot at its request

    @property
    def tried(self) -> Tried | None:
        """Results so far; None: no trial was possible yet."""
        return None if self._trials is None else self._trials.tried

    def request(self, pool: WorkerPool, latest: list[Snapshot]) -> None:
        """Request a trial if it may show a limit of the source.

        Args:
            pool: Pool of the loader.
            latest: Recent snapshots, the latest last.
        """
        now = latest[-1]
        now_s = now.now_ns / 1e9
        if pool.workers.are_nodes or now.workers < 2:
            return
        if self._trials is None and has_logs():
            self._trials = log_of(self._function_and_source())
        trials = self._trials or TrialLog()
        board = pool.arena.board
        if self._trial or board.trials != board.trials_over:
            return
        if not trials.is_due(window_of(latest, _JUDGED_S), now_s):
            return
        trials = self._trials = log_of(self._function_and_source())
        if pool.lock.acquire(blocking=False):
            try:
                self._trial, self._tried_from = board.trials + 1, now
                board.trial_ms = int(1000 * trials.note_request((id(board), self._trial), now_s))
                board.trials = self._trial
            finally:
                pool.lock.release()

    def take_result(self, pool: WorkerPool, now: Snapshot) -> None:
        """Record the result of the requested trial.

        The result is lost if another loader of the pool has had a later trial.
        """
        board, trials, begun = pool.arena.board, self._trials, self._tried_from
        if begun is None or trials is None or board.trials_over < self._trial:
            return
        if board.trials_over == self._trial:
            trials.note_result(
                (id(board), self._trial), board.trial_result(), window_of([begun, now], math.inf)
            )
        self._trial, self._tried_from = 0, None
