"""Who takes the batches of a round and compares them with the twin's, epoch by epoch."""

from __future__ import annotations

import collections
import json
import random
import time
from typing import Any

import loaderpool as lp

from .companion import Beside, Companion
from .killer import AnyKiller
from .readings import Reading
from .rounds import WORKERS, Result, Round
from .streams import Twin, compare, digest
from .succession import Succession

__all__ = ["Consumer"]

_HELD_BATCHES = 8  # that are kept, some of them over passes
_LEFT, _SAVED, _TWO_AT_ONCE = 0.2, 0.4, 0.3  # of the passes


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
        self, loaders: Succession, twin: Twin, this: Round, killer: AnyKiller, draw: random.Random, result: Result,
        companion: Companion | None,
    ) -> None:  # fmt: skip
        self._loaders, self._twin, self._round, self._killer = loaders, twin, this, killer
        self._companion = companion
        self._draw, self._result = draw, result
        self._epoch = 0
        self._beside: Beside | None = None
        self._is_one_loaders = True  # the present pass
        self._held: collections.deque[tuple[str, Any, bytes]] = collections.deque(maxlen=_HELD_BATCHES)

    def take_pass(self) -> None:
        """One pass, compared with the twin's; perhaps with some batches of another one beside it."""
        draw, result, shape, epoch = self._draw, self._result, self._round.shape, self._epoch
        expected, errors = self._twin.epoch(epoch)
        is_whole = shape.is_sequence or draw.random() >= _LEFT
        end = len(expected) if is_whole else draw.randrange(1, len(expected))
        is_free = not (shape.is_sequence or shape.is_one_shot)
        is_saved = is_free and draw.random() < _SAVED
        stops = sorted(draw.sample(range(1, end), min(draw.randrange(1, 4), end - 1))) if is_saved else []
        has_beside = is_free and not is_saved and not self._round.is_dataset and draw.random() < _TWO_AT_ONCE
        self._loaders.stand_before(epoch)
        if has_beside:
            self._beside = Beside(self._loaders, self._twin.epoch(epoch + 1)[0], self._round.is_ordered)
        self._is_one_loaders, before = True, self._loaders.loader.statistics().errors
        got: list[bytes] = []
        self._take_parts(got, stops if is_whole else [*stops, end], end)
        found = compare(got, expected, is_ordered=self._round.is_ordered, is_whole=is_whole)
        failed = self._loaders.loader.statistics().errors - before
        if is_whole and not has_beside and self._is_one_loaders and failed != errors:
            found.append(f"{failed} samples failed, the twin has {errors}")
        result.mismatches += [f"epoch {epoch}: {each}" for each in found]
        self._epoch += 1
        self._end_beside()
        self.check_held(f"after epoch {epoch}")
        result.passes += 1
        result.batches += len(got)

    def _take_parts(self, got: list[bytes], stops: list[int], end: int) -> None:
        """Take the pass until it has so many batches; at each stop before that another loader goes on with it."""
        loaders, place, is_over = self._loaders, None, False
        while not is_over:
            reading, had = loaders.read(place), len(got)
            try:
                is_over = self._take(reading, got, stops[0] if stops else None) or stops.pop(0) == end
            except lp.SourceLostError:
                is_over = self._is_one_loaders = False
                self._end_beside(is_counted=False)  # the epochs behind this one are those of the loader that goes on
                place = reading.save(len(got) - had, self._draw)
                self._count_loss()
                if len(got) == end and not stops:  # the loss came before the stream's end: nothing of it is left
                    loaders.loader.load_state_dict(json.loads(place))
                    is_over = True
                elif self._draw.random() < 0.5:
                    loaders.succeed()
            else:
                if not is_over:
                    self._is_one_loaders = False
                    place = reading.save(len(got) - had, self._draw)
                    loaders.succeed()
                    self._result.saves += 1
            if len(got) > had and reading.epoch not in (None, self._epoch):
                self._result.mismatches.append(f"pass {self._epoch} says it is epoch {reading.epoch}")
                is_over = True
            is_over = is_over or bool(self._result.mismatches)
            del reading

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
            self._live_with(batch, seen, f"batch {len(got) - 1} of epoch {self._epoch}")
            if len(got) == until:
                return False
        return True

    def _count_loss(self) -> None:
        """A reader's death has ended a pass: there must have been one."""
        result = self._result
        result.losses += 1
        if result.losses > self._round.budget.reader_kills:
            result.mismatches.append(f"{result.losses} passes have lost their reader, which was not killed so often")

    def _end_beside(self, *, is_counted: bool = True) -> None:
        beside, self._beside = self._beside, None
        if beside is not None:
            self._result.mismatches += beside.end()
            self._result.batches += beside.batches
            self._epoch += is_counted and beside.batches > 0
            for _ in range(beside.losses):
                self._count_loss()

    def _live_with(self, batch: Any, seen: bytes, name: str) -> None:
        draw = self._draw
        if draw.random() < 0.05:
            self._held.append((name, batch, seen))
        elif draw.random() < 0.02 and self._held:
            self._held.popleft()
        if self._round.is_resized and draw.random() < 0.01:
            self._loaders.resize(draw.randrange(1, WORKERS[-1] + 1))
            self._result.resizes += 1
        if self._companion is not None and draw.random() < 0.3:
            self._companion.take()
        if self._beside is not None and draw.random() < 0.5:
            self._beside.take()
        if draw.random() < 0.02:
            time.sleep(draw.random() * 0.02)
        elif draw.random() < 0.001:
            time.sleep(0.3)
