"""Rounds of the storm: loaders and a twin without crashes, compared batch by batch during kills.

A round has a shape, an order or none, and some kills. Its loaders follow each other, each with
another number of workers and another memory limit. Every batch is compared with that of the twin,
the same loader without processes.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import hashlib
import itertools
import json
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import loaderpool as lp
from loaderpool.element.spec import RaggedArray
from tests.support.processes import descendants, describe, wait_gone

from .killer import Budget, Killer, watched
from .shapes import SHAPES, Faults, Shape, make

WORKERS = (1, 2, 3, 4)
_MEMORY_LIMITS = (None, "24MiB", "96MiB")
_PASSES = 2  # least number of passes in a round, so that an epoch follows another one
_GONE_S = 10.0  # time after `close` in which all processes must end
_HELD_BATCHES = 8  # batches that are kept, some of them over several passes
_LEFT, _SAVED, _TWO_AT_ONCE = 0.2, 0.4, 0.3  # shares of all passes
_SHOWN = 5  # differences of one pass that are printed


@dataclasses.dataclass(frozen=True)
class Round:
    """Work of a round, and its kills."""

    number: int
    shape: Shape
    is_ordered: bool
    workers: int
    budget: Budget
    draws: str  # seed of all random choices in the round
    is_resized: bool  # True if the number of workers changes repeatedly during passes

    def __str__(self) -> str:
        order = "ordered" if self.is_ordered else "unordered"
        return f"round {self.number} ({self.shape.name}, {order}, {self.workers} workers)"


@dataclasses.dataclass
class Result:
    """Result of a round: counts of events, differences from the twin, and duration."""

    round: Round
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    mismatches: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def plan_rounds(options: argparse.Namespace) -> Iterator[Round]:
    """Yield endless rounds: each shape with and without an order, then again with other numbers of
    workers.
    """
    kinds = [(SHAPES[name], is_ordered) for name in options.shape for is_ordered in (True, False)]
    kills = -(-options.kills // len(kinds)) if options.seconds is None else options.kills_a_round
    random.Random(options.seed).shuffle(kinds)
    for number in itertools.count():
        shape, is_ordered = kinds[number % len(kinds)]
        budget = Budget(
            kills=max(
                4, int(kills * min(1.0, 0.08 / shape.kill_every_s))
            ),  # fewer kills if they must be slow
            supervisor_kills=max(1, -(-options.supervisor_kills // len(kinds))),
            stops=int(bool(options.stops_every) and number % options.stops_every == 0),
            every_s=shape.kill_every_s,
            reader_kills=options.reader_kills if shape.has_reader else 0,
        )
        yield Round(
            number, shape, is_ordered, WORKERS[(number + number // len(kinds)) % len(WORKERS)], budget,
            draws=f"{options.seed}/{number}", is_resized=number % 3 == 1,
        )  # fmt: skip


def run_round(this: Round, deadline_s: float, stop_at_s: float = float("inf")) -> Result:
    """Kill processes of a loader and its successors until all kills are made, or until the
    monotonic time `stop_at_s`.
    """
    result = Result(this)
    started = time.monotonic()
    draw = random.Random(this.draws)
    killer = Killer(this.budget, random.Random(draw.random()), result.counts)
    with tempfile.TemporaryDirectory(prefix="loaderpool-stress-") as folder:
        faults = Faults(folder, os.getpid(), this.shape.faults_one_in)
        consumer = _Consumer(result, faults, draw, killer)
        killer.start()
        try:
            while True:
                with watched(deadline_s, f"{this}, pass {result.counts['passes']}"):
                    consumer.take_pass()
                is_done = result.counts["passes"] >= _PASSES and killer.is_done
                if result.mismatches or is_done or time.monotonic() >= stop_at_s:
                    break
        except Exception:
            result.mismatches.append(
                f"pass {result.counts['passes']} raised\n{traceback.format_exc()}"
            )
        finally:
            killer.stop()
        with watched(deadline_s, f"{this}, its end"):
            before_close = descendants(os.getpid())
            consumer.close()
            consumer.check_held("after close()")
            result.mismatches += [
                f"left behind: {describe(pid)}" for pid in wait_gone(before_close, _GONE_S)
            ]
        result.counts["faults"] = faults.met
    del consumer
    gc.collect()
    result.seconds = time.monotonic() - started
    return result


class _Consumer:
    """Takes passes at varying speed, keeps some batches, abandons some passes, and continues in
    other loaders.
    """

    def __init__(self, result: Result, faults: Faults, draw: random.Random, killer: Killer) -> None:
        self._result, self._round, self._faults, self._killer = result, result.round, faults, killer
        self._seed, self._draw = draw.randrange(2**31), random.Random(draw.random())
        self._twin = Twin(self._round.shape, faults, self._seed)
        self._loader = self._make(self._round.workers)
        self._epoch = 0
        self._is_read = False  # a pass over the loader has started
        self._is_one_loaders = True  # all batches of the present pass come from one loader
        self._beside: _Beside | None = None
        self._held: collections.deque[tuple[str, Any, bytes]] = collections.deque(
            maxlen=_HELD_BATCHES
        )

    def take_pass(self) -> None:
        """Take a pass, and compare it with the twin's. Perhaps take batches of a second pass at the
        same time.
        """
        draw, result, shape, epoch = self._draw, self._result, self._round.shape, self._epoch
        expected, errors = self._twin.epoch(epoch)
        is_whole = shape.is_sequence or draw.random() >= _LEFT
        end = len(expected) if is_whole else draw.randrange(1, len(expected))
        is_free = not (shape.is_sequence or shape.is_one_shot)
        is_saved = is_free and draw.random() < _SAVED
        stops = (
            sorted(draw.sample(range(1, end), min(draw.randrange(1, 4), end - 1)))
            if is_saved
            else []
        )
        has_beside = is_free and not is_saved and draw.random() < _TWO_AT_ONCE
        if shape.is_one_shot and self._is_read:
            self._succeed()
            self._loader.epoch = epoch
        self._is_read = True
        if has_beside:
            self._beside = _Beside(
                self._loader, self._twin.epoch(epoch + 1)[0], self._round.is_ordered
            )
        self._is_one_loaders, before = True, self._loader.statistics().errors
        got: list[bytes] = []
        self._take_parts(got, stops if is_whole else [*stops, end], end)
        found = compare(got, expected, is_ordered=self._round.is_ordered, is_whole=is_whole)
        failed = self._loader.statistics().errors - before
        if is_whole and not has_beside and self._is_one_loaders and failed != errors:
            found.append(f"{failed} samples failed, the twin has {errors}")
        result.mismatches += [f"epoch {epoch}: {each}" for each in found]
        self._epoch += 1
        self._end_beside()
        self.check_held(f"after epoch {epoch}")
        result.counts["passes"] += 1
        result.counts["batches"] += len(got)

    def check_held(self, when: str) -> None:
        """Check that kept views have not changed."""
        for name, batch, seen in self._held:
            if digest(batch) != seen:
                self._result.mismatches.append(f"{name}, which is held, has changed {when}")

    def close(self) -> None:
        """Close the loader and the twin."""
        self._twin.close()
        self._close_loader()

    # ---- the parts of a pass

    def _take_parts(self, got: list[bytes], stops: list[int], end: int) -> None:
        """Take batches of a pass until there are `end`. At each stop before that, save it and
        continue in another loader.
        """
        place, is_over = None, False
        while not is_over:
            (batches, save), had = self._read(place), len(got)
            try:
                is_over = (
                    self._take(batches, got, stops[0] if stops else None) or stops.pop(0) == end
                )
            except lp.SourceError:
                is_over = self._is_one_loaders = False
                self._end_beside(
                    is_counted=False
                )  # the next epochs are made by the loader that continues
                place = save(len(got) - had)
                self._count_loss()
                if (
                    len(got) == end and not stops
                ):  # the reader died at the end of the stream, so no batch is left
                    self._loader.load_state_dict(json.loads(place))
                    is_over = True
                elif self._draw.random() < 0.5:
                    self._succeed()
            else:
                if not is_over:
                    self._is_one_loaders = False
                    place = save(len(got) - had)
                    self._succeed()
                    self._result.counts["saves"] += 1
            if len(got) > had and getattr(batches, "epoch", self._epoch) != self._epoch:
                self._result.mismatches.append(
                    f"pass {self._epoch} says it is epoch {batches.epoch}"
                )
            is_over = is_over or bool(self._result.mismatches)
            del batches, save

    def _take(self, batches: Iterator[Any], got: list[bytes], until: int | None) -> bool:
        """Take batches until there is this number of them. Return True if the pass ended before."""
        for batch in batches:
            seen = digest(batch)
            got.append(seen)
            self._killer.has_first_batch = True
            self._live_with(batch, seen, f"batch {len(got) - 1} of epoch {self._epoch}")
            if len(got) == until:
                return False
        return True

    def _live_with(self, batch: Any, seen: bytes, name: str) -> None:
        draw = self._draw
        if draw.random() < 0.05:
            self._held.append((name, batch, seen))
        elif draw.random() < 0.02 and self._held:
            self._held.popleft()
        if self._round.is_resized and draw.random() < 0.01:
            self._loader.resize(draw.randrange(1, WORKERS[-1] + 1))
            self._result.counts["resizes"] += 1
        if self._beside is not None and draw.random() < 0.5:
            self._beside.take()
        if draw.random() < 0.02:
            time.sleep(draw.random() * 0.02)
        elif draw.random() < 0.001:
            time.sleep(0.3)

    def _count_loss(self) -> None:
        """Count a pass that ended because its reader died. There must have been such a death."""
        result = self._result
        result.counts["losses"] += 1
        if result.counts["losses"] > self._round.budget.reader_kills:
            result.mismatches.append("more passes have lost their reader than it was killed times")

    def _end_beside(self, *, is_counted: bool = True) -> None:
        beside, self._beside = self._beside, None
        if beside is not None:
            self._result.mismatches += beside.end()
            self._result.counts["batches"] += len(beside.got)
            self._epoch += is_counted and bool(beside.got)
            for _ in range(beside.losses):
                self._count_loss()

    # ---- one loader after the other

    def _read(self, place: Any) -> tuple[Iterator[Any], Callable[[int], Any]]:
        """Return a pass, from a saved place on if there is one, and a function that saves its place
        after a number of batches.
        """
        loader, draw = self._loader, self._draw
        if place is not None:
            loader.load_state_dict(json.loads(place))
        batches = iter(loader)

        def save(taken: int) -> str:
            own = batches.state_dict
            if loader.last_error is not None:  # a failed pass is not active
                return json.dumps(own())
            return json.dumps(
                draw.choice(
                    (own, loader.state_dict, lambda: loader.state_dict(batches_taken=taken))
                )()
            )

        return batches, save

    def _succeed(self) -> None:
        self._close_loader()
        with self._killer.first_batch_turn:
            self._killer.has_first_batch = False
        self._loader = self._make(
            self._draw.choice(WORKERS), memory=self._draw.choice(_MEMORY_LIMITS)
        )

    def _close_loader(self) -> None:
        """Close the loader, and check that it leaves nothing behind."""
        result = self._result
        mine = descendants(os.getpid())
        self._loader.close()
        result.mismatches += [
            f"left behind by close(): {describe(pid)}" for pid in wait_gone(mine, _GONE_S)
        ]

    def _make(self, workers: int, **settings: Any) -> lp.Loader:
        ordered = self._round.is_ordered
        return make(
            self._round.shape,
            self._faults,
            self._seed,
            deterministic=ordered,
            workers=workers,
            **settings,
        )


class _Beside:
    """A second pass over the stormed loader, of the next epoch, from which a batch is taken now and
    then.
    """

    def __init__(self, loader: lp.Loader, expected: list[bytes], is_ordered: bool) -> None:
        self._loader, self._expected, self._is_ordered = loader, expected, is_ordered
        self._batches: Iterator[Any] | None = None
        self._is_over = False
        self.got: list[bytes] = []
        self.losses = 0

    def take(self) -> None:
        """Take the next batch, if there is one."""
        if self._is_over:
            return
        if self._batches is None:
            self._batches = iter(self._loader)
        try:
            batch = next(self._batches, None)
        except lp.SourceError:
            batch, self.losses = None, 1
        if batch is None:
            self._is_over = True
        else:
            self.got.append(digest(batch))

    def end(self) -> list[str]:
        """Abandon the pass, and return its differences from the twin."""
        self._batches = None
        is_whole = self._is_over and not self.losses
        found = compare(self.got, self._expected, is_ordered=self._is_ordered, is_whole=is_whole)
        return [f"the pass beside it: {each}" for each in found]


class Twin:
    """The same loader without processes, with the expected batches of each epoch."""

    def __init__(self, shape: Shape, faults: Faults, seed: int) -> None:
        self._shape = shape
        self._make = lambda: make(shape, faults, seed, workers=0)
        self._loader = self._make()
        self._epoch = -1
        self._digests: list[bytes] = []
        self._errors = 0

    def epoch(self, epoch: int) -> tuple[list[bytes], int]:
        """Return digests of the epoch's batches, and the number of its failed samples. Epochs must
        be requested in order.
        """
        if epoch != self._epoch:
            if self._shape.is_one_shot and self._epoch >= 0:
                self._loader.close()
                self._loader = self._make()
            # hooks of a sequence have effects, so every pass must be whole
            if not self._shape.is_sequence:
                self._loader.epoch = epoch
            before = self._loader.statistics().errors
            self._digests = [digest(batch) for batch in self._loader]
            self._errors = self._loader.statistics().errors - before
            self._epoch = epoch
        return self._digests, self._errors

    def close(self) -> None:
        self._loader.close()


def digest(batch: Any) -> bytes:
    """Return a hash of a batch's structure, dtypes, shapes and bits."""
    state = hashlib.blake2b(digest_size=16)
    _feed(state, batch)
    return state.digest()


def _feed(state: Any, part: Any) -> None:
    if isinstance(part, dict):
        state.update(b"{%d" % len(part))
        for key, value in part.items():
            state.update(repr(key).encode())
            _feed(state, value)
    elif isinstance(part, tuple):
        state.update(b"(%d" % len(part))
        for value in part:
            _feed(state, value)
    elif isinstance(part, RaggedArray):
        state.update(b"R")
        _feed(state, (part.values, part.row_splits))
    else:
        array = np.asarray(part)
        state.update(repr((array.dtype.str, array.shape)).encode())
        state.update(
            repr(array.tolist()).encode()
            if array.dtype == object
            else np.ascontiguousarray(array).data
        )


def compare(
    got: list[bytes], expected: list[bytes], *, is_ordered: bool, is_whole: bool
) -> list[str]:
    """Yield a line for each difference between the digests of delivered batches and those of the
    twin's epoch.
    """
    if is_ordered and got == (expected if is_whole else expected[: len(got)]):
        return []
    counted, wanted = collections.Counter(got), collections.Counter(expected)
    if not is_ordered and not counted - wanted and (not is_whole or not wanted - counted):
        return []
    found = []
    for number, each in enumerate(got):
        if each not in wanted:
            found.append(f"batch {number} as delivered is none of the twin's: corrupted")
        elif counted[each] > wanted[each]:
            found.append(
                f"batch {number} as delivered comes {counted[each]} times, not {wanted[each]}: doubled"
            )
        elif is_ordered and (number >= len(expected) or each != expected[number]):
            found.append(
                f"batch {number} as delivered is the twin's {expected.index(each)}: reordered"
            )
    if is_whole:
        found += [
            f"the twin's batch {number} is lost"
            for number, each in enumerate(expected)
            if each not in counted
        ]
    return [
        *found[:_SHOWN],
        *([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []),
    ] or ["differs"]
