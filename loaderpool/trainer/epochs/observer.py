"""Looks at a loader and at the machine every two seconds while batches are taken, for who asks why training waits."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from loaderpool.cache.setting import Count
from loaderpool.config import LoaderConfig
from loaderpool.core.delivery import Engine
from loaderpool.errors import ClosedError
from loaderpool.memory.board import Field
from loaderpool.memory.call_times import CallTimes, read_call_times
from loaderpool.memory.recorder import DELIVERIES, DeliveryRecorder, no_records, read_ring
from loaderpool.plan.base import generated_item
from loaderpool.plan.order import Plan
from loaderpool.system import capacity, clock, machine
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.explain.looks import FIRST_STEPS, Look, WorkerCounts, counts_of_workers, observed_in
from loaderpool.trainer.explain.observed import AboutLoader, Autotuned, Observed
from loaderpool.trainer.explain.page import PAGE_BYTES, Page, told_of

if TYPE_CHECKING:
    from loaderpool.core.engine import PoolEngine
    from loaderpool.trainer.tracing.recording import Recording

_LOOKS = 64  # that are kept
# A look is of now, and counts are of the latest hand-over: after it the consumer may do anything, for hours.
_FRESH_NS = 1_000_000_000
_numbers = itertools.count(1)  # of loaders of this process
_observers: weakref.WeakSet[Observer] = weakref.WeakSet()  # of loaders that have a page


def _is_pooled(engine: Any) -> TypeGuard[PoolEngine]:
    """Whether a pool that is not closed makes its batches."""
    return hasattr(engine, "session") and not engine.session.is_closed


def _count_workers(engine: PoolEngine) -> dict[int, WorkerCounts]:
    """Return each worker's numbers, by its own. Takes some 25 us for each: files of the kernel's are read."""
    board = engine.session.arena.board
    return {
        worker.number: WorkerCounts(
            pid=worker.pid,
            workers=1 if worker.place is None else worker.place.workers,
            busy_s=board.read(worker.cell, Field.BUSY_NS) / 1e9,
            idle_s=board.read(worker.cell, Field.WAIT_NS) / 1e9,
            cpu_s=capacity.process_cpu_s(worker.pid) if worker.pid else 0.0,
            queued_s=capacity.queued_s(worker.pid) if worker.pid else 0.0,
            made=board.read(worker.cell, Field.SAMPLES),
            read_bytes=capacity.disk_read_bytes(worker.pid) if worker.pid else 0,
        )
        for worker in list(engine.session.workers.values())
    }


def _count_slots(engine: PoolEngine) -> dict[str, Any]:
    """Return what a look has of the ring; nothing before there is one."""
    slots, counts = engine.slot_counts, engine.counts
    if not slots.number:
        return {}
    return {
        "slots": slots.number,
        "slots_lent": slots.lent,
        "slots_wanted": slots.wanted,
        "slot_bytes": slots.nbytes,
        "slots_ready": sum(run.slots_ready for run in list(engine.runs.values())),
        "copied": counts.copied,
        "copy_s": counts.copied_ns / 1e9,
        "load_s": counts.load_s,
    }


def _workers_at_work(engine: Engine | None, now_ns: int) -> dict[int, dict[str, Any]]:
    """Return what each worker is at now, by its number, for JSON; nodes' workers are told of on their machines."""
    if not _is_pooled(engine):
        return {}
    board = engine.session.arena.board
    found: dict[int, dict[str, Any]] = {}
    for worker in list(engine.session.workers.values()):
        if not worker.pid:
            continue
        # INDEX first: what began after that is younger than it says, never older (`Progress.note` stores it last).
        index, started_ns = board.read(worker.cell, Field.INDEX), board.read(worker.cell, Field.STARTED_NS)
        if board.read(worker.cell, Field.IN_SETUP):
            found[worker.number] = {"state": "setup"}
        elif index:
            generator, item = generated_item(index - 1) or (None, index - 1)
            items, seconds = max(1, board.read(worker.cell, Field.BLOCK)), max(0, now_ns - started_ns) / 1e9
            what = {"index": item, "generator": generator, "items": items, "item_s": seconds}
            found[worker.number] = {"state": "item", **what}
        else:
            has_begun = board.read(worker.cell, Field.TICKET) or started_ns
            found[worker.number] = {"state": "idle" if has_begun else "starting"}
    return found


class Observer:
    """What was seen of a loader lately.

    Attributes:
        about: what does not change of it.
        autotuned: as given.

    Args:
        tracker: of the loader's passes.
        engine: of the loader; None: it makes nothing in this process.
        config: its settings.
        plan: its plan.
        calls_of: what a call of its function makes.
        has_cache: what it gives is kept.
        autotuned: tells what `workers="auto"` did.
    """

    def __init__(
        self,
        tracker: EpochTracker,
        engine: Engine | None,
        config: LoaderConfig,
        plan: Plan,
        calls_of: Literal["sample", "batch"],
        has_cache: bool,
        autotuned: Callable[[], Autotuned],
    ) -> None:
        self._tracker, self._counters, self._engine = tracker, tracker.counters, engine
        self.autotuned = autotuned
        is_by_index = calls_of == "sample" and not plan.is_open
        self.about = AboutLoader(
            threads=config.threads,
            can_have_threads=not plan.lanes,
            calls_of=calls_of,
            can_have_cache=is_by_index and config.threads == 1 and not has_cache,
            deterministic=config.deterministic,
            is_stream=plan.is_open and not plan.lanes,
            cpus=min(float(capacity.usable_cpu_count()), capacity.cgroup_cpu_quota() or math.inf),
            machine_cpus=float(os.cpu_count() or 1),
            lanes=plan.lanes,
            items=0 if plan.is_open else plan.rows_per_epoch,
        )
        self._looks: collections.deque[Look] = collections.deque(maxlen=_LOOKS)
        self._first_looks: list[Look] = []  # of the steps that may compile
        self._taken, self._is_closed = 0, False
        self._consumer = ""  # the thread that takes batches
        self._has_cache = has_cache
        self._page: Page | None = None
        self._number = next(_numbers)

    def look(self, now_ns: int) -> Look:
        """Look at all that is counted, and return it. Runs in: the thread that takes batches."""
        if not self._taken:
            with contextlib.suppress(OSError):  # what looks from outside finds nothing then
                self._page = Page()
                self._counters.times.recorder = DeliveryRecorder(self._page.map, PAGE_BYTES)
                _observers.add(self)
            if _is_pooled(self._engine):
                self._engine.session.on_idle = _refresh_pages
        self._consumer = f"self/task/{threading.get_native_id()}"
        look = self._at(now_ns)
        self._keep(look)
        self._taken += 1
        if self._page is not None:
            self._page.write(self._told(list(self._looks)))
        return look

    def _keep(self, look: Look) -> None:
        self._looks.append(look)
        if look.steps <= FIRST_STEPS or not self._first_looks:
            self._first_looks.append(look)

    def refresh_page(self) -> None:
        """Have the page tell of it as it is now. Runs in: a thread that waits, and for which nothing comes."""
        page = self._page
        if page is not None and page.is_old:
            page.write(self._told(self.looks()))

    def _told(self, looks: list[Look]) -> dict[str, Any]:
        """Return what the page tells of it, as these looks have it. Runs in: any thread."""
        engine, now_ns, asked_ns = self._engine, looks[-1].now_ns, self._counters.times.asked_ns
        loader, arena, cached = None, None, None
        if _is_pooled(engine):
            loader, arena = engine.number, machine.file_identity(engine.session.arena.descriptor)
        if self._has_cache and engine is not None:
            counts = engine.cache_counts()
            cached = {"hits": counts[Count.HITS], "misses": counts[Count.MISSES], "bytes": counts[Count.BYTES]}
        return {
            "number": self._number,
            "loader": loader,
            "arena": arena,
            "looked_s": now_ns / 1e9,
            "asked_s": (now_ns - asked_ns) / 1e9 if asked_ns else None,
            **told_of(looks, self.about, _workers_at_work(engine, now_ns)),
            "cache": cached,
        }

    def close(self) -> None:
        """Take the page down. What was seen is kept: of what comes now there is no engine to tell."""
        with contextlib.suppress(Exception):  # a look shall not hinder a close
            if self._taken and self._is_taking:
                self._keep(self.now())
        self._is_closed = True
        self._page = self._counters.times.recorder = None

    # -- what was seen. Runs in: any thread

    @property
    def cpu_s_per_sample(self) -> float | None:
        """CPU time of workers for a sample, from the first look to the latest; None: it is not known."""
        if not self._looks:
            return None
        first, last = self._first_looks[0], self._looks[-1]
        cpu_s, made = last.cpu_s - first.cpu_s, last.made - first.made
        return cpu_s / made if made and cpu_s else None

    def calls(self) -> CallTimes:
        """Return how long calls took, also of workers that are gone; after a close, until then."""
        engine = self._engine
        if _is_pooled(engine):
            return read_call_times(engine.session.arena.call_times, list(engine.session.workers.cells), engine.number)
        return self._looks[-1].calls if self._looks else CallTimes()

    def now(self) -> Look:
        """Return a look, from which on `since` measures."""
        return self._at(clock.monotonic_ns())

    def looks(self) -> list[Look]:
        """Return what was seen lately, the latest last."""
        looks = list(self._looks)
        if not looks or self._is_taking:
            looks.append(self.now())
        return looks

    def observed(self, seconds: float) -> Observed:
        """Return what was measured in the last so many seconds in which batches were taken."""
        return observed_in(self.looks(), self.about, seconds)

    def since(self, begun: Look) -> Observed:
        """Return what was measured since then."""
        first = [look for look in list(self._first_looks) if look.now_ns > begun.now_ns]
        return observed_in([begun, *first, self.now()], self.about, math.inf)

    def recording(self) -> Recording:
        """Return what was recorded of it and of its pool.

        Raises:
            ClosedError: the loader was closed.
        """
        from loaderpool.trainer.tracing.recording import LoaderRecords, Recording, read_clocks, read_pool

        if self._is_closed:
            raise ClosedError("This Loader is closed, and its records are gone. Call trace() before close().")
        engine, page, asked_ns = self._engine, self._page, self._counters.times.asked_ns
        number, pools, has_hosts, deliveries = None, [], False, no_records(DELIVERIES)
        if _is_pooled(engine):
            number, arena = engine.number, engine.session.arena
            has_hosts = any(worker.place is not None for worker in engine.session.workers.values())
            pools = [read_pool(lambda at, nbytes: arena.map[at : at + nbytes], arena.nbytes, has_hosts)]
        if page is not None:
            deliveries = read_ring(lambda at, nbytes: page.map[at : at + nbytes], PAGE_BYTES, DELIVERIES)
        loader = LoaderRecords(number, 0 if pools else None, self.about.calls_of, has_hosts, deliveries, asked_ns)
        return Recording(os.getpid(), " ".join(sys.argv), [loader], pools, *read_clocks())

    @property
    def _is_taking(self) -> bool:
        is_fresh = self._counters.times.asked_ns or clock.monotonic_ns() - self._counters.last_ns < _FRESH_NS
        return bool(is_fresh) and not self._is_closed

    def _at(self, now_ns: int) -> Look:
        engine, counters = self._engine, self._counters
        before = self._looks[-1] if self._looks else None
        workers = _count_workers(engine) if _is_pooled(engine) else {}
        has_room = self.about.can_have_cache and self._tracker.may_be_followed
        counts: dict[str, Any] = {
            **counters.times.sums(now_ns),
            **counts_of_workers(workers, before),
            **(_count_slots(engine) if _is_pooled(engine) else {}),
        }
        return Look(
            number=self._taken,
            now_ns=now_ns,
            **counts,
            samples=counters.samples,
            bytes=counters.nbytes,
            by_worker=workers,
            workers=sum(worker.workers for worker in workers.values()),
            calls=self.calls(),
            machine_cpu_s=capacity.machine_cpu_s(),
            trainer_cpu_s=clock.process_cpu_ns() / 1e9,
            trainer_queued_s=capacity.queued_s(self._consumer) if self._consumer else 0.0,
            throttled_s=capacity.throttled_s(),
            by_tf_data=self._tracker.latest_is_dataset,
            autotuned=self.autotuned(),
            room_bytes=capacity.available_memory_bytes() if has_room else 0,
        )


def _refresh_pages() -> None:
    """Have pages tell of their loaders as they are now. Runs in: a thread that waits, and for which nothing comes."""
    with contextlib.suppress(Exception):  # a look shall end no training
        for each in list(_observers):
            each.refresh_page()
