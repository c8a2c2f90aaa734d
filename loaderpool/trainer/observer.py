"""Snapshots of a loader and the machine, taken every two seconds while batches are read."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from loaderpool.config import FIRST_STEPS
from loaderpool.errors import ClosedError
from loaderpool.memory.board import Field
from loaderpool.memory.call_times import CallTimes, read_call_times
from loaderpool.memory.recorder import DELIVERIES, RecordRing
from loaderpool.plan.item_names import generated_item
from loaderpool.system import capacity, clock, machine
from loaderpool.system.interrupts import FailuresIgnored
from loaderpool.trainer.epoch_tracker import EpochTracker
from loaderpool.trainer.explain.page import PAGE_BYTES, Page, told_of
from loaderpool.trainer.explain.window import (
    LEAST_STEPS,
    Autotuned,
    Snapshot,
    Window,
    WorkerCounts,
    sums_of_workers,
    window_of,
)

if TYPE_CHECKING:
    from loaderpool.engine.contracts import Engine
    from loaderpool.engine.engine import PoolEngine
    from loaderpool.engine.pool import WorkerPool
    from loaderpool.trainer.fewer_workers import FewerWorkers
    from loaderpool.trainer.tracing import Tracing

_KEPT = 64  # snapshots kept
# Age of the latest delivery up to which a snapshot is of now. After a delivery the consumer may do
# other work for hours.
_FRESH_NS = 1_000_000_000
_numbers = itertools.count(1)  # numbers of the loaders of this process


def _is_pooled(engine: Engine | None) -> TypeGuard[PoolEngine]:
    """Return True if a pool that is not closed makes the batches."""
    pool: WorkerPool | None = getattr(engine, "pool", None)
    return pool is not None and not pool.is_closed


class Observer:
    """Recent snapshots of a loader.

    Args:
        tracker: Epochs and counters of the loader.
        engine: Engine of the loader. None: it makes nothing in this process.
        calls_of: Result of one call of its function.
        autotuned: Returns the decisions of `workers="auto"`.
        function_and_source: Returns a key for both, to share trials with other loaders.

    Attributes:
        tries_fewer: True if workers may be paused for a trial.
        constants: Fields of `Snapshot` that do not change.
    """

    def __init__(
        self,
        tracker: EpochTracker,
        engine: Engine | None,
        calls_of: Literal["sample", "batch"],
        autotuned: Callable[[], Autotuned],
        function_and_source: Callable[[], Hashable],
    ) -> None:
        self._tracker, self._engine = tracker, engine
        config, plan, has_cache = (
            tracker.config,
            tracker.plan,
            engine is not None and engine.cache is not None,
        )
        self.autotuned = autotuned
        self.tries_fewer = True
        self._function_and_source = function_and_source
        self._fewer: FewerWorkers | None = None  # created after the first steps
        can_have_cache = (
            calls_of == "sample" and not plan.is_open and config.threads == 1 and not has_cache
        )
        limit = None if tracker.draws is None else tracker.draws.batch_limit
        if config.buckets is not None:
            sizes = config.buckets.batch_sizes
            text = f"buckets=lp.Buckets(..., batch_sizes=[{', '.join(['{}'] * len(sizes))}])"
            limit = text, sizes
        self.constants: dict[str, Any] = {
            "threads": config.threads,
            "calls_of": calls_of,
            "takes_batch_fn": config.order != "Packed" and config.samples_per_item is None,
            "batch_limit": limit or ("batch_size={}", (config.batch_size or 1,)),
            "items_to_cache": plan.rows_per_epoch if can_have_cache else 0,
            "deterministic": config.deterministic,
            "is_stream": plan.is_open and not plan.lanes,
            "cpus": min(
                float(capacity.usable_cpu_count()), capacity.cgroup_cpu_quota() or math.inf
            ),
            "machine_cpus": float(os.cpu_count() or 1),
            "cpu_advice": capacity.openmp_advice(),
            "lanes": plan.lanes,
        }
        self._latest: collections.deque[Snapshot] = collections.deque(maxlen=_KEPT)
        self._taken, self._is_closed = 0, False
        self._consumer = ""  # name of the thread that reads batches
        self._page: Page | None = None
        self._number = next(_numbers)

    def look(self, now_ns: int) -> Snapshot:
        """Take a snapshot, keep it and return it. Called in the thread that reads batches."""
        if not self._taken:
            with contextlib.suppress(OSError):  # without a page, other processes find nothing
                self._page = Page()
                self._tracker.counters.recorder = RecordRing(self._page.map, PAGE_BYTES, DELIVERIES)
        if _is_pooled(self._engine):
            self._engine.pool.on_idle = functools.partial(_refresh_page, weakref.ref(self))
        self._consumer = f"self/task/{threading.get_native_id()}"
        found = self._at(now_ns)
        self._latest.append(found)
        self._taken += 1
        if self._page is not None:
            self._page.write(self._told(list(self._latest)))
        if found.steps >= LEAST_STEPS and self.tries_fewer and _is_pooled(self._engine):
            self._try_fewer(self._engine.pool, found)
        return found

    def _try_fewer(self, pool: WorkerPool, now: Snapshot) -> None:
        if self._fewer is None:
            from loaderpool.trainer.fewer_workers import FewerWorkers

            self._fewer = FewerWorkers(self._function_and_source)
        self._fewer.take_result(pool, now)
        self._fewer.request(pool, list(self._latest))

    def close(self) -> None:
        """Remove the page, and keep a last snapshot, because counts of the engine end with it."""
        with FailuresIgnored():  # an error here must not prevent the close
            if self._taken and self._is_taking:
                self._latest.append(self.now())
        self._is_closed = True
        self._page = self._tracker.counters.recorder = None

    # -- results; these methods are thread-safe --

    @property
    def cpu_s_per_sample(self) -> float | None:
        """CPU seconds of workers per sample in the last two minutes, or None if unknown."""
        if not self._latest:
            return None
        new = self._latest[-1].since(self._latest[0])
        return new.cpu_s / new.made if new.made and new.cpu_s else None

    def calls(self) -> CallTimes:
        """Return the durations of calls, including workers that have ended.

        After a close, return those of the last snapshot.
        """
        engine = self._engine
        if _is_pooled(engine):
            pool = engine.pool
            cells = range(0 if pool.workers.are_nodes else pool.arena.board.cells)
            return read_call_times(pool.arena.call_times, list(cells), engine.settings.loader)
        return self._latest[-1].calls if self._latest else CallTimes()

    def now(self) -> Snapshot:
        """Return a snapshot of now, for example as the start of a window for `since`."""
        return self._at(clock.monotonic_ns())

    def latest(self) -> list[Snapshot]:
        """Return the recent snapshots, the latest last."""
        found = list(self._latest)
        if not found or self._is_taking:
            found.append(self.now())
        return found

    def observed(self, seconds: float) -> Window:
        """Return the window of the last `seconds` in which batches were read."""
        return window_of(self.latest(), seconds)

    def since(self, begun: Snapshot) -> Window:
        """Return the window from a snapshot until now."""
        first = [
            each
            for each in list(self._latest)
            if each.now_ns > begun.now_ns and each.steps <= FIRST_STEPS
        ]
        return window_of([begun, *first, self.now()], math.inf)

    def tracing(self) -> Tracing:
        """Return the records of the loader and its pool.

        Raises:
            ClosedError: The loader was closed.
        """
        from loaderpool.trainer.tracing import Tracing

        page = self._page
        if self._is_closed:
            raise ClosedError(
                "This Loader is closed, and its records are gone. Call trace() before close()."
            )
        told = self._told(self.latest())
        tracing = Tracing(
            os.getpid(), " ".join(sys.argv), True, clock.monotonic_ns(), clock.wall_ns()
        )
        if _is_pooled(self._engine):
            arena = self._engine.pool.arena
            tracing.add_pool(lambda at, nbytes: arena.map[at : at + nbytes], arena.nbytes)
        if page is not None:
            tracing.add_loader(told, lambda at, nbytes: page.map[at : at + nbytes])
        return tracing

    @property
    def _is_taking(self) -> bool:
        steps = self._tracker.counters.steps
        is_fresh = steps.asked_ns or clock.monotonic_ns() - steps.last_ns < _FRESH_NS
        return bool(is_fresh) and not self._is_closed

    def _at(self, now_ns: int) -> Snapshot:
        engine, counters = self._engine, self._tracker.counters
        workers = _count_workers(engine, now_ns) if _is_pooled(engine) else {}
        paused_s = self._latest[-1].paused_s if self._latest else 0.0
        if _is_pooled(engine):
            paused_s = engine.pool.arena.board.trial_idle_ns / 1e9
        sums = {
            **counters.steps.sums(now_ns),
            **sums_of_workers(workers, self._latest[-1] if self._latest else None),
            **(_count_slots(engine) if _is_pooled(engine) else {}),
        }
        return Snapshot(
            **self.constants,
            **sums,
            number=self._taken,
            now_ns=now_ns,
            samples=counters.taken.samples,
            bytes=counters.taken.nbytes,
            by_worker=workers,
            workers=sum(worker.workers for worker in workers.values()),
            calls=self.calls(),
            machine_cpu_s=capacity.machine_cpu_s(),
            trainer_cpu_s=clock.process_cpu_ns() / 1e9,
            trainer_queued_s=capacity.queued_s(self._consumer) if self._consumer else 0.0,
            short_batches=counters.short.text,
            by_tf_data=self._tracker.iterations.latest.is_dataset,
            autotuned=self.autotuned(),
            tried=None if self._fewer is None else self._fewer.tried,
            paused_s=paused_s,
            room_bytes=capacity.available_memory_bytes() if self.constants["items_to_cache"] else 0,
        )

    def _told(self, found: list[Snapshot]) -> dict[str, Any]:
        """Return the page's content, from these snapshots."""
        engine, now_ns = self._engine, found[-1].now_ns
        asked_ns = self._tracker.counters.steps.asked_ns
        loader, arena = None, None
        if _is_pooled(engine):
            loader, arena = (
                engine.settings.loader,
                machine.file_identity(engine.pool.arena.descriptor),
            )
        return {
            "number": self._number,
            "loader": loader,
            "arena": arena,
            "looked_s": now_ns / 1e9,
            "asked_s": (now_ns - asked_ns) / 1e9 if asked_ns else None,
            **told_of(found),
        }


def _refresh_page(observer: weakref.ref[Observer]) -> None:
    """Write the page of a loader again. Called in a thread that waits for a batch."""
    with FailuresIgnored():  # an error here must not end a training
        found = observer()
        if found is not None and found._page is not None and found._page.is_old:
            found._page.write(found._told(found.latest()))


def _count_workers(engine: PoolEngine, now_ns: int) -> dict[int, WorkerCounts]:
    """Return the counts of each worker, by its number.

    Takes some 25 us for each, because files of the kernel are read.
    """
    read, found = engine.pool.arena.board.read, {}
    for worker in engine.pool.workers.running():
        cell, pid = worker.cell, worker.pid
        found[worker.number] = WorkerCounts(
            pid=pid,
            workers=1 if worker.place is None else worker.place.workers,
            busy_s=read(cell, Field.BUSY_NS) / 1e9,
            idle_s=read(cell, Field.WAIT_NS) / 1e9,
            **(capacity.process_times(pid) if pid else {}),
            made=read(cell, Field.SAMPLES),
            doing=_doing(read, cell, now_ns) if pid else {"state": "remote"},
        )
    return found


def _doing(read: Callable[[int, Field], int], cell: int, now_ns: int) -> dict[str, Any]:
    """Return the present activity of a worker, for JSON."""
    # Read INDEX first. If another item begins in between, the reported time is too short, but never
    # too long (`Progress.note` stores INDEX last).
    index, started_ns = read(cell, Field.INDEX), read(cell, Field.STARTED_NS)
    if read(cell, Field.IN_SETUP):
        return {"state": "setup"}
    if not index:
        return {"state": "idle" if read(cell, Field.TICKET) or started_ns else "starting"}
    generator, item = generated_item(index - 1) or (None, index - 1)
    what = {"index": item, "generator": generator, "items": max(1, read(cell, Field.BLOCK))}
    return {"state": "item", **what, "item_s": max(0, now_ns - started_ns) / 1e9}


def _count_slots(engine: PoolEngine) -> dict[str, Any]:
    """Return the slots' fields of a snapshot; empty before there are slots."""
    counts = engine.runs.counts
    if not counts.slots:
        return {}
    return {
        "slots": counts.slots,
        "slot_bytes": counts.slot_bytes,
        "slots_wanted": counts.slots_wanted,
        "slots_lent": engine.runs.slots_lent,
        "slots_ready": sum(run.buffer.waiting for run in list(engine.runs.by_number.values())),
        "copied": counts.copied,
        "copy_s": counts.copied_ns / 1e9,
    }
