"""`Pause`: workers rest, as the slots that come back are held: with no slot there is no ticket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from loaderpool.system import clock
from loaderpool.system.interrupts import checkpoint

if TYPE_CHECKING:
    from loaderpool.trainer.engine.pool_engine import PoolEngine
    from loaderpool.trainer.session.lease import Lender

_LOOK_S = 0.002
# Where no batch has come for so long, or for so many times as long as it took one lately, no more will come.
_SILENT_S, _SILENT_TIMES = 0.3, 4.0


class Pause:
    """Fills a loader's slots, and holds back those that the consumer gives back.

    A pass that has to wait for a batch ends the hold, for that batch may want such a slot.

    Args:
        engine: of the loader.
    """

    def __init__(self, engine: PoolEngine) -> None:
        self._engine = engine

    def fill(self, most_s: float) -> int:
        """Wait until all slots that the consumer does not have are filled, or no more will be. Runs in: the consumer.

        Returns:
            How many are; each holds a batch, or several tiny ones.
        """
        session = self._engine.session
        begun_s = latest_s = clock.monotonic_s()
        longest_s, filled = 0.0, self._filled()
        while clock.monotonic_s() - begun_s < most_s and not self._is_full():
            checkpoint()
            time.sleep(_LOOK_S)
            session.catch_up()
            now_s = clock.monotonic_s()
            if self._filled() > filled:
                longest_s, latest_s, filled = max(longest_s, now_s - latest_s), now_s, self._filled()
            elif now_s - latest_s > max(_SILENT_S, _SILENT_TIMES * longest_s):
                break
        return self._filled()

    def begin(self) -> None:
        """Hold back from now on."""
        with self._engine.session.lock:
            if (lender := self._lender) is not None:
                lender.hold()

    @property
    def is_on(self) -> bool:
        """Whether slots are held back still."""
        return (lender := self._lender) is not None and lender.is_held

    def end(self) -> None:
        """Give back what was held back. Twice is fine."""
        with self._engine.session.lock:
            if (lender := self._lender) is not None:
                lender.let_go()

    @property
    def _lender(self) -> Lender | None:
        return None if self._engine.layout is None else self._engine.layout.ring.lender

    def _filled(self) -> int:
        return sum(run.slots_ready for run in list(self._engine.runs.values()))

    def _is_full(self) -> bool:
        layout = self._engine.layout
        if layout is None:
            return False
        ring = layout.ring
        return self._filled() + len(ring.lender.lent) >= ring.count
