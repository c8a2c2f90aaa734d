"""Looks at a loader and at the machine every two seconds while batches are taken, for who asks why training waits."""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import Literal

from loaderpool.config import LoaderConfig
from loaderpool.errors import ClosedError
from loaderpool.memory.call_times import CallTimes
from loaderpool.memory.recorder import DELIVERIES, DeliveryRecorder, no_records, read_ring
from loaderpool.plan.base import BasePlan
from loaderpool.system import capacity, clock, cpu_time, machine
from loaderpool.trainer.engine.delivery import Engine
from loaderpool.trainer.engine.pool_engine import PoolEngine
from loaderpool.trainer.engine.work_counts import count_calls, count_work
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.explain.decision import Autotuned
from loaderpool.trainer.explain.looks import AboutLoader, Look, MachineCounts, observed_in
from loaderpool.trainer.explain.observed import Observed
from loaderpool.trainer.explain.page import PAGE_BYTES, LooksPage
from loaderpool.trainer.tracing.recording import LoaderRecords, Recording, read_clocks, read_pool

_LOOKS = 64  # that are kept
# A look is of now, and counts are of the latest hand-over: after it the consumer may do anything, for hours.
_FRESH_NS = 1_000_000_000


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
        plan: BasePlan,
        calls_of: Literal["sample", "batch"],
        has_cache: bool,
        autotuned: Callable[[], Autotuned],
    ) -> None:
        self._tracker, self._counters, self._engine = tracker, tracker.counters, engine
        self.autotuned = autotuned
        quota = capacity.cgroup_cpu_quota()
        is_by_index = calls_of == "sample" and not plan.is_open
        self.about = AboutLoader(
            threads=config.worker_options.threads,
            can_have_threads=not plan.lanes,
            calls_of=calls_of,
            can_have_cache=is_by_index and config.worker_options.threads == 1 and not has_cache,
            deterministic=config.deterministic,
            is_stream=plan.is_open and not plan.lanes,
            cpus=min(float(capacity.usable_cpu_count()), quota or float("inf")),
            machine_cpus=float(os.cpu_count() or 1),
            lanes=plan.lanes,
        )
        self._looks: collections.deque[Look] = collections.deque(maxlen=_LOOKS)
        self._taken, self._is_closed = 0, False
        self._cpu_s, self._made = 0.0, 0  # CPU time of workers from look to look, and samples that they made in it
        self._consumer = ""  # the thread that takes batches
        self._page: LooksPage | None = None
        self._records: tuple[mmap.mmap, int] | None = None  # where its deliveries are recorded

    def look(self, now_ns: int) -> Look:
        """Look at all that is counted, and return it. Runs in: the thread that takes batches."""
        if not self._taken:
            self._publish()
        self._consumer = f"self/task/{threading.get_native_id()}"
        look = self._at(now_ns)
        self._keep(look)
        self._taken += 1
        if self._page is not None:
            self._page.write(look)
        return look

    def _publish(self) -> None:
        """Have a page for who looks from outside, where there can be one."""
        engine, where = self._engine, {}
        if isinstance(engine, PoolEngine):
            where = {"loader": engine.number, "arena": machine.file_identity(engine.session.arena.descriptor)}
        with contextlib.suppress(OSError, AttributeError):  # no descriptors are left; or this is no Linux
            self._page = self._counters.times.live = LooksPage(self.about, {"pid": os.getpid(), **where})
        with contextlib.suppress(OSError):
            page = self._page
            self._records = (mmap.mmap(-1, DELIVERIES.ring_bytes), 0) if page is None else (page.map, PAGE_BYTES)
            self._counters.times.recorder = DeliveryRecorder(*self._records)

    def close(self) -> None:
        """Take the page down. What was seen is kept: of what comes now there is no engine to tell."""
        with contextlib.suppress(Exception):  # who only looks shall not hinder a close
            if self._taken and self._is_taking:
                self._keep(self.now())
        self._is_closed = True
        self._page = self._counters.times.live = self._counters.times.recorder = self._records = None

    def _keep(self, look: Look) -> None:
        before = self._looks[-1].work.workers if self._looks else {}
        for number, worker in look.work.workers.items():
            if number in before and worker.pid:
                new = worker.since(before[number])
                self._cpu_s += new.cpu_s
                self._made += new.samples
        self._looks.append(look)

    @property
    def cpu_s_per_sample(self) -> float | None:
        """CPU time of workers for a sample, from the first look to the latest; None: it is not known."""
        return self._cpu_s / self._made if self._made and self._cpu_s else None

    def calls(self) -> CallTimes:
        """Return how long calls took; behind a close, until then. Runs in: any thread."""
        counted = count_calls(self._engine)
        if counted is None:
            return self._looks[-1].work.calls if self._looks else CallTimes()
        return counted

    def looks(self) -> list[Look]:
        """Return what was seen lately, the latest last. Runs in: any thread."""
        looks = list(self._looks)
        if not looks or self._is_taking:
            looks.append(self.now())
        return looks

    def observed(self, seconds: float) -> Observed:
        """Return what was measured in the last so many seconds in which batches were taken. Runs in: any thread."""
        return self._observed_in(self.looks(), seconds)

    def recording(self) -> Recording:
        """Return what was recorded of it and of its pool. Runs in: any thread.

        Raises:
            ClosedError: the loader was closed.
        """
        records, engine = self._records, self._engine
        if self._is_closed:
            raise ClosedError("this Loader is closed, and what it has recorded is gone: call trace() before")
        number, pools, has_hosts = None, [], False
        if isinstance(engine, PoolEngine):
            session = engine.session
            arena_map, number, has_hosts = session.arena.map, engine.number, bool(session.hosts)
            pools = [read_pool(lambda at, nbytes: arena_map[at : at + nbytes], session.arena.nbytes, has_hosts)]
        deliveries = no_records(DELIVERIES)
        if records is not None:
            ring_map, at = records
            deliveries = read_ring(lambda at, nbytes: ring_map[at : at + nbytes], at, DELIVERIES)
        asked_ns = self._counters.times.asked_ns
        loader = LoaderRecords(number, 0 if pools else None, self.about.calls_of, has_hosts, deliveries, asked_ns)
        now_ns, wall_ns = read_clocks()
        return Recording(os.getpid(), " ".join(sys.argv), [loader], pools, now_ns, wall_ns)

    @property
    def _is_taking(self) -> bool:
        counters = self._counters
        is_fresh = counters.times.asked_ns or clock.monotonic_ns() - counters.last_ns < _FRESH_NS
        return bool(is_fresh) and not self._is_closed

    def now(self) -> Look:
        """Return a look, from which on `since` measures. Runs in: any thread."""
        return self._at(clock.monotonic_ns())

    def since(self, begun: Look) -> Observed:
        """Return what was measured since then. Runs in: any thread."""
        return self._observed_in([begun, self.now()], float("inf"))

    def _observed_in(self, looks: list[Look], seconds: float) -> Observed:
        return observed_in(looks, self.about, seconds)

    def _at(self, now_ns: int) -> Look:
        counters = self._counters
        return Look(
            self._taken,
            now_ns,
            counters.times.counts(now_ns),
            counters.samples,
            counters.nbytes,
            count_work(self._engine),
            MachineCounts(
                cpu_time.machine_cpu_s(),
                clock.process_cpu_ns() / 1e9,
                cpu_time.queued_s(self._consumer) if self._consumer else 0.0,
                cpu_time.throttled_s(),
            ),
            self._tracker.latest_is_dataset,
            self.autotuned(),
        )
