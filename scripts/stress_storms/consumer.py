"""Who takes the batches of a round and compares them with the twin's, epoch by epoch."""

from __future__ import annotations

import collections
import json
import random
import time
from typing import Any

import loaderpool as lp

from .companion import Companion
from .killer import Killer
from .readings import Reading
from .rounds import WORKERS, Result, Round
from .streams import Twin, compare, digest
from .succession import Succession

__all__ = ["Consumer"]

_HELD_BATCHES = 8  # that are kept, some of them over passes
_LEFT, _SAVED = 0.2, 0.4  # of the passes


class Consumer:
    """Somebody who is now fast, now slow, who keeps some batches, leaves some passes, and goes on in another loader.

    Args:
        loaders: what is stormed.
        twin: what must come.
        this: the round.
        killer: is told of the first batch.
        draw: of what is done.
        result: what came is noted there.
        companion: another loader on the same pool, or None.
    """

    def __init__(
        self, loaders: Succession, twin: Twin, this: Round, killer: Killer, draw: random.Random, result: Result,
        companion: Companion | None,
    ) -> None:  # fmt: skip
        self._loaders, self._twin, self._round, self._killer = loaders, twin, this, killer
        self._companion = companion
        self._draw, self._result = draw, result
        self._held: collections.deque[tuple[str, Any, bytes]] = collections.deque(maxlen=_HELD_BATCHES)

    def take_pass(self) -> None:
        """One pass, compared with the twin's."""
        draw, result, shape, epoch = self._draw, self._result, self._round.shape, self._result.passes
        expected, errors = self._twin.epoch(epoch)
        is_whole = shape.is_sequence or draw.random() >= _LEFT
        end = len(expected) if is_whole else draw.randrange(1, len(expected))
        is_saved = not (shape.is_sequence or shape.is_one_shot) and draw.random() < _SAVED
        stops = sorted(draw.sample(range(1, end), min(draw.randrange(1, 4), end - 1))) if is_saved else []
        stops += [] if is_whole else [end]
        loaders = self._loaders
        loaders.stand_before(epoch)
        is_one_loaders, before = len(stops) <= (not is_whole), loaders.loader.statistics().errors
        got: list[bytes] = []
        place = None
        while True:
            reading, had = loaders.read(place), len(got)
            try:
                is_over = self._take(reading, got, stops[0] if stops else None)
            except lp.SourceLostError:
                is_one_loaders, is_over = False, not self._may_go_on()
                place = reading.save(len(got) - had, draw)
                if len(got) == len(expected):  # the loss came before the stream's end: nothing of it is left
                    loaders.loader.load_state_dict(json.loads(place))
                    is_over = True
                elif draw.random() < 0.5:
                    loaders.succeed()
            else:
                is_over = is_over or len(got) == stops.pop(0) == end
                if not is_over:
                    place = reading.save(len(got) - had, draw)
                    loaders.succeed()
                    result.saves += 1
            if len(got) > had and reading.epoch not in (None, epoch):
                result.mismatches.append(f"pass {epoch} says it is epoch {reading.epoch}")
                is_over = True
            del reading
            if is_over:
                break
        found = compare(got, expected, is_ordered=self._round.is_ordered, is_whole=is_whole)
        failed = loaders.loader.statistics().errors - before
        if is_whole and is_one_loaders and failed != errors:
            found.append(f"{failed} samples failed, the twin has {errors}")
        result.mismatches += [f"epoch {epoch}: {each}" for each in found]
        self.check_held(f"after epoch {epoch}")
        result.passes += 1
        result.batches += len(got)

    def check_held(self, when: str) -> None:
        """What was lent has not changed since."""
        for name, batch, seen in self._held:
            if digest(batch) != seen:
                self._result.mismatches.append(f"{name}, which is held, has changed {when}")

    def end(self) -> None:
        """The twins are needed no more."""
        self._twin.close()
        if self._companion is not None:
            self._result.mismatches += self._companion.mismatches
            self._result.companion_batches = self._companion.batches
            self._companion.close()

    def _take(self, reading: Reading, got: list[bytes], until: int | None) -> bool:
        """Take batches until there are so many; whether the pass has ended before."""
        for batch in reading:
            seen = digest(batch)
            got.append(seen)
            self._killer.has_first_batch = True
            self._live_with(batch, seen, f"batch {len(got) - 1} of epoch {self._result.passes}")
            if len(got) == until:
                return False
        return True

    def _may_go_on(self) -> bool:
        """A reader's death has ended the pass; whether there was one."""
        result = self._result
        result.losses += 1
        if result.losses <= self._round.budget.reader_kills:
            return True
        result.mismatches.append(f"{result.losses} passes have lost their reader, which was not killed so often")
        return False

    def _live_with(self, batch: Any, seen: bytes, name: str) -> None:
        draw = self._draw
        if draw.random() < 0.05:
            self._held.append((name, batch, seen))
        elif draw.random() < 0.02 and self._held:
            self._held.popleft()
        if self._round.is_resized and draw.random() < 0.01:
            self._loaders.loader.resize(draw.randrange(1, WORKERS[-1] + 1))
            self._result.resizes += 1
        if self._companion is not None and draw.random() < 0.3:
            self._companion.take()
        if draw.random() < 0.02:
            time.sleep(draw.random() * 0.02)
        elif draw.random() < 0.001:
            time.sleep(0.3)
