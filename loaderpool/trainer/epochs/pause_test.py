"""`PauseTest`: how long a step takes while workers do nothing, measured on batches that the training wants anyhow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loaderpool.system import clock

if TYPE_CHECKING:
    from loaderpool.trainer.engine.pause import Pause
    from loaderpool.trainer.epochs.step_times import StepTimes

# Of each round: a device that was waited for has work to catch up with, and tf.data fetches ahead.
_LEFT_OUT = 2
_LEFT_OUT_BY_TF_DATA = 4
# Deliveries before a round: at a pass's beginning few batches may be made ahead; nor may there be later, for a while.
_BEFORE, _BEFORE_AGAIN = 2, 6
_LEAST = 2  # deliveries that are left to measure
_FILL_S = 10.0
_ROUNDS = 8


class PauseTest:
    """Has the ring fill, workers pause, and the consumer take what is there; again until there are steps enough.

    The same batches come as without it, in the same order. Runs in: the thread that takes batches.

    Attributes:
        steps: that were measured.
        seconds: how long they took together.
        is_over: it is.

    Args:
        hold: of the loader's slots.
        times: of the loader's steps, in which the test's own waiting is not counted.
        steps: how many shall be measured.
        by_tf_data: tf.data takes the batches.
    """

    def __init__(self, hold: Pause, times: StepTimes, steps: int, by_tf_data: bool) -> None:
        self._hold, self._times, self._wanted = hold, times, steps
        self._leave_out = _LEFT_OUT_BY_TF_DATA if by_tf_data else _LEFT_OUT
        self._left = self._taken = 0  # deliveries of this round: still to come, and taken
        self._last_ns = self._last_batches = 0  # when the latest of them was handed over, and its batches
        self._rounds = 0
        self._let_by = 0  # deliveries before the next round
        self.steps, self.seconds = 0, 0.0
        self.is_over = False

    def before(self) -> None:
        """A batch will be asked for."""
        if self._left or self._let_by or self.is_over:
            return
        self._rounds += 1
        begun_ns = clock.monotonic_ns()
        filled = self._hold.fill(_FILL_S)
        self._times.leave_out(clock.monotonic_ns() - begun_ns)
        if filled < self._leave_out + _LEAST:
            self._let_by = _BEFORE_AGAIN
            self.is_over = self._rounds >= _ROUNDS
            return
        self._hold.begin()
        self._left, self._taken = filled, 0

    def after(self, batches: int, begins: bool) -> None:
        """So many batches were handed over together; `begins`: they are a pass's first."""
        if begins and not self._left:
            self._let_by = max(self._let_by, _BEFORE)
        elif self._let_by:
            self._let_by -= 1
        if not self._left:
            return
        now_ns, last_ns = clock.monotonic_ns(), self._last_ns
        self._last_ns = now_ns
        if not self._hold.is_on:  # a batch was waited for
            self._end_round()
            return
        self._taken += 1
        self._left -= 1
        if self._taken > self._leave_out and not begins:
            self.steps += self._last_batches
            self.seconds += (now_ns - last_ns) / 1e9
        self._last_batches = batches
        if not self._left:
            self._end_round()

    def _end_round(self) -> None:
        self._left = 0
        self._hold.end()
        self.is_over = self.steps >= self._wanted or self._rounds >= _ROUNDS
