"""A round of the storm: one loader, some passes, deaths all the while; every batch is compared with the twin's."""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import random
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

import loaderpool as lp
from tests.support.processes import descendants, describe, wait_gone

from .killer import Budget, Counts, Killer
from .shapes import SHAPES, Faults, Shape, make
from .streams import Twin, compare, digest
from .watchdog import watched

__all__ = ["Plan", "Result", "Round", "plan_rounds", "run_round"]

_WORKERS = (1, 2, 3, 4)
_HELD_BATCHES = 8  # that the consumer keeps, some of them over passes
_PASSES = 2  # at least, so that an edge between epochs is met
_GONE_S = 10.0  # after close


@dataclasses.dataclass(frozen=True)
class Round:
    """What is stormed, and how."""

    number: int
    shape: Shape
    is_ordered: bool
    workers: int
    budget: Budget
    draws: str  # the seed of all that is drawn in it
    is_resized: bool = False  # in mid-pass, time and again
    has_companion: bool = False  # another loader on the same pool, read by turns


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rounds are made: enough of each for one turn over all shapes, ordered and not."""

    seed: int
    kills: int = 36
    supervisor_kills: int = 1
    stops_every: int = 4  # rounds; 0: never
    resized_every: int = 3  # rounds
    companion_every: int = 5  # rounds
    shapes: tuple[str, ...] = tuple(SHAPES)


@dataclasses.dataclass
class Result:
    """What came of a round."""

    round: Round
    passes: int = 0
    batches: int = 0
    counts: Counts = dataclasses.field(default_factory=Counts)
    faults: int = 0  # segmentation faults out of the function
    resizes: int = 0
    companion_batches: int = 0  # of the loader beside it
    restarts: int = 0  # as the loader counts them
    supervisor_restarts: int = 0
    mismatches: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def plan_rounds(plan: Plan) -> Iterator[Round]:
    """Rounds without end: each shape ordered and not, then again with other numbers of workers."""
    draw = random.Random(plan.seed)
    kinds = [(SHAPES[name], is_ordered) for name in plan.shapes for is_ordered in (True, False)]
    draw.shuffle(kinds)
    number = 0
    while True:
        for shape, is_ordered in kinds:
            workers = _WORKERS[(number + number // len(kinds)) % len(_WORKERS)]
            has_stop = bool(plan.stops_every) and number % plan.stops_every == 0
            # A shape that may be killed but slowly is killed less.
            kills = max(4, int(plan.kills * min(1.0, 0.08 / shape.kill_every_s)))
            budget = Budget(kills, plan.supervisor_kills, int(has_stop), shape.kill_every_s, shape.spares_first)
            yield Round(
                number,
                shape,
                is_ordered,
                workers,
                budget,
                f"{plan.seed}/{number}",
                is_resized=number % plan.resized_every == 1,
                has_companion=number % plan.companion_every == 2,
            )
            number += 1


def run_round(this: Round, deadline_s: float, stop_at_s: float = float("inf")) -> Result:
    """Storm one loader until all its kills are spent.

    Args:
        this: what to do.
        deadline_s: of each pass; past it the watchdog ends this process.
        stop_at_s: no pass is begun after this, by the monotonic clock.
    """
    result = Result(this)
    started = time.monotonic()
    draw = random.Random(this.draws)
    what = f"round {this.number} ({this.shape.name}, {'' if this.is_ordered else 'un'}ordered, {this.workers} workers)"
    killer = Killer(this.budget, random.Random(draw.random()))
    with tempfile.TemporaryDirectory(prefix="loaderpool-stress-") as folder:
        faults = Faults(folder, os.getpid(), this.shape.faults_one_in)
        seed = draw.randrange(2**31)
        pool = lp.Pool(this.workers, max_restarts=None) if this.has_companion else None
        where: dict[str, Any] = {"workers": this.workers} if pool is None else {"pool": pool}
        loader = make(this.shape, faults, seed, deterministic=this.is_ordered, **where)
        companion = None if pool is None else _Companion(pool, faults, seed)
        consumer = _Consumer(
            loader, Twin(this.shape, faults, seed), this, killer, random.Random(draw.random()), result, companion
        )
        killer.start()
        try:
            while True:
                with watched(deadline_s, f"{what}, pass {result.passes}"):
                    consumer.take_pass()
                is_late = time.monotonic() >= stop_at_s
                if result.mismatches or is_late or (result.passes >= _PASSES and killer.is_done):
                    break
        except Exception:
            result.mismatches.append(f"pass {result.passes} raised\n{traceback.format_exc()}")
        finally:
            killer.stop()
        with watched(deadline_s, f"{what}, its end"):
            statistics = loader.statistics()
            result.restarts, result.supervisor_restarts = statistics.restarts, statistics.supervisor_restarts
            before_close = descendants(os.getpid())
            consumer.end()
            loader.close()
            if pool is not None:
                pool.close()
            consumer.check_held("after close()")
            left = wait_gone(before_close, _GONE_S)
            result.mismatches += [f"left behind: {describe(pid)}" for pid in left]
        result.counts = killer.counts
        result.faults = len(os.listdir(folder))
    del consumer, loader, companion, pool
    gc.collect()
    result.seconds = time.monotonic() - started
    return result


class _Consumer:
    """Takes passes, as somebody would who is now fast, now slow, who keeps some batches and leaves some passes."""

    def __init__(
        self,
        loader: lp.Loader,
        twin: Twin,
        this: Round,
        killer: Killer,
        draw: random.Random,
        result: Result,
        companion: _Companion | None,
    ) -> None:
        self._loader, self._twin, self._round, self._killer = loader, twin, this, killer
        self._companion = companion
        self._draw, self._result = draw, result
        self._held: collections.deque[tuple[str, Any, bytes]] = collections.deque(maxlen=_HELD_BATCHES)

    def take_pass(self) -> None:
        """One pass, compared with the twin's."""
        draw, result, epoch = self._draw, self._result, self._result.passes
        expected, errors = self._twin.epoch(epoch)
        may_leave = not self._round.shape.is_sequence and draw.random() < 0.2
        take = draw.randrange(1, len(expected)) if may_leave else None
        before = self._loader.statistics().errors
        got: list[bytes] = []
        batches = iter(self._loader)
        for batch in batches:
            seen = digest(batch)
            got.append(seen)
            self._killer.has_first_batch = True
            self._live_with(batch, seen, f"batch {len(got) - 1} of epoch {epoch}")
            if len(got) == take:
                break
        if batches.epoch != epoch:
            result.mismatches.append(f"pass {epoch} says it is epoch {batches.epoch}")
        del batches
        is_whole = take is None
        found = compare(got, expected, is_ordered=self._round.is_ordered, is_whole=is_whole)
        if is_whole and self._loader.statistics().errors - before != errors:
            found.append(f"{self._loader.statistics().errors - before} samples failed, the twin has {errors}")
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

    def _live_with(self, batch: Any, seen: bytes, name: str) -> None:
        draw = self._draw
        if draw.random() < 0.05:
            self._held.append((name, batch, seen))
        elif draw.random() < 0.02 and self._held:
            self._held.popleft()
        if self._round.is_resized and draw.random() < 0.01:
            self._loader.resize(draw.randrange(1, _WORKERS[-1] + 1))
            self._result.resizes += 1
        if self._companion is not None and draw.random() < 0.3:
            self._companion.take()
        if draw.random() < 0.02:
            time.sleep(draw.random() * 0.02)
        elif draw.random() < 0.001:
            time.sleep(0.3)


class _Companion:
    """Another loader on the same pool, from which a batch is taken now and then; ordered, compared as it comes."""

    def __init__(self, pool: lp.Pool, faults: Faults, seed: int) -> None:
        shape = SHAPES["single batches"]
        self._loader = make(shape, faults, seed + 1, pool=pool)
        self._twin = Twin(shape, faults, seed + 1)
        self._batches = iter(self._loader)
        self._expected: list[bytes] = []
        self._epoch = -1
        self.batches = 0
        self.mismatches: list[str] = []

    def take(self) -> None:
        """The next batch, of this epoch or the next."""
        if not self._expected:
            self._epoch += 1
            self._batches = iter(self._loader)
            self._expected = list(reversed(self._twin.epoch(self._epoch)[0]))
        batch = next(self._batches, None)
        self.batches += 1
        if batch is None or digest(batch) != self._expected.pop():
            self.mismatches.append(f"the companion's batch {self.batches} (epoch {self._epoch}) is not its twin's")
            self._expected.clear()

    def close(self) -> None:
        """It is needed no more."""
        del self._batches
        self._twin.close()
        self._loader.close()
