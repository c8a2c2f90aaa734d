"""Looks at a loader and at the machine every two seconds while batches are taken, for who asks why training waits."""

from __future__ import annotations

import collections
import contextlib
import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from loaderpool.cache.setting import NO_COUNTS, Count
from loaderpool.config import LoaderConfig
from loaderpool.errors import ClosedError
from loaderpool.memory.board import Field
from loaderpool.memory.call_times import CallTimes, read_call_times
from loaderpool.memory.recorder import DELIVERIES, DeliveryRecorder, no_records, read_ring
from loaderpool.plan.base import BasePlan
from loaderpool.plan.generator_positions import generated_item
from loaderpool.system import capacity, clock, machine
from loaderpool.trainer.engine.delivery import Engine
from loaderpool.trainer.engine.pool_engine import PoolEngine
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.explain.looks import AboutLoader, Look, MachineCounts, WorkCounts, WorkerCounts, observed_in
from loaderpool.trainer.explain.observed import FIRST_STEPS, Autotuned, Observed
from loaderpool.trainer.explain.page import RING_NAME, Page, page_of_process, told_of

if TYPE_CHECKING:
    from loaderpool.trainer.engine.delivery import Engine
    from loaderpool.trainer.tracing.recording import Recording


def is_pooled(engine: Any) -> TypeGuard[PoolEngine]:
    """Whether a pool makes its batches."""
    return hasattr(engine, "session")


def count_calls(engine: Engine | None) -> CallTimes | None:
    """Return how long calls took so far, also of workers that are gone; None: nothing counts them, or not any more."""
    if not is_pooled(engine) or engine.session.is_closed:
        return None
    session = engine.session
    return read_call_times(session.arena.call_times, list(session.workers.cells), engine.number)


def count_work(engine: Engine | None) -> WorkCounts:
    """Return the numbers of this moment. Takes some 25 us for each worker: files of the kernel's are read."""
    if not is_pooled(engine) or engine.session.is_closed:
        return WorkCounts()
    session, layout = engine.session, engine.layout
    board, found = session.arena.board, list(session.workers.values())
    workers = {
        worker.number: WorkerCounts(
            worker.pid,
            1 if worker.place is None else worker.place.workers,
            board.read(worker.cell, Field.BUSY_NS),
            board.read(worker.cell, Field.WAIT_NS),
            capacity.process_cpu_s(worker.pid) if worker.pid else 0.0,
            capacity.queued_s(worker.pid) if worker.pid else 0.0,
            board.read(worker.cell, Field.SAMPLES),
            capacity.disk_read_bytes(worker.pid) if worker.pid else 0,
        )
        for worker in found
    }
    calls = count_calls(engine) or CallTimes()
    if layout is None:
        return WorkCounts(workers, calls)
    ring = layout.ring
    return WorkCounts(
        workers,
        calls,
        slots=ring.plan.most_slots,
        slots_lent=len(ring.lender.lent),
        slots_wanted=ring.slots_wanted,
        slot_bytes=ring.slot_bytes,
        copied=engine.counts.copied,
        copied_ns=engine.counts.copied_ns,
        slots_ready=sum(run.slots_ready for run in list(engine.runs.values())),
        load_s=engine.counts.load_s,
    )


def workers_at_work(engine: Engine | None, now_ns: int) -> dict[int, dict[str, Any]]:
    """Return what each worker is at now, by its number, for JSON; hosts' workers are told of on their machines."""
    if not is_pooled(engine) or engine.session.is_closed:
        return {}
    board = engine.session.arena.board
    found: dict[int, dict[str, Any]] = {}
    for worker in list(engine.session.workers.values()):
        if not worker.pid:
            continue
        # INDEX first: what began after that is younger than it says, never older (`Progress.note` stores it last).
        index = board.read(worker.cell, Field.INDEX)
        if board.read(worker.cell, Field.IN_SETUP):
            found[worker.number] = {"state": "setup"}
        elif index:
            items = max(1, board.read(worker.cell, Field.BLOCK))
            seconds = max(0, now_ns - board.read(worker.cell, Field.STARTED_NS)) / 1e9
            generator, item = generated_item(index - 1) or (None, index - 1)
            found[worker.number] = {
                "state": "item", "index": item, "generator": generator, "items": items, "item_s": seconds
            }  # fmt: skip
        else:
            has_begun = board.read(worker.cell, Field.TICKET) or board.read(worker.cell, Field.STARTED_NS)
            found[worker.number] = {"state": "idle" if has_begun else "starting"}
    return found


_LOOKS = 64  # that are kept
# A look is of now, and counts are of the latest hand-over: after it the consumer may do anything, for hours.
_FRESH_NS = 1_000_000_000
_numbers = itertools.count(1)  # of loaders of this process


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
            threads=config.threads,
            can_have_threads=not plan.lanes,
            calls_of=calls_of,
            can_have_cache=is_by_index and config.threads == 1 and not has_cache,
            deterministic=config.deterministic,
            is_stream=plan.is_open and not plan.lanes,
            cpus=min(float(capacity.usable_cpu_count()), quota or float("inf")),
            machine_cpus=float(os.cpu_count() or 1),
            lanes=plan.lanes,
            items=0 if plan.is_open else plan.rows_per_epoch,
        )
        self._looks: collections.deque[Look] = collections.deque(maxlen=_LOOKS)
        self._first_looks: list[Look] = []  # of the steps that may compile
        self._taken, self._is_closed = 0, False
        self._cpu_s, self._made = 0.0, 0  # CPU time of workers from look to look, and samples that they made in it
        self._consumer = ""  # the thread that takes batches
        self._has_cache = has_cache
        self._page: Page | None = None
        self._records: mmap.mmap | None = None  # where its deliveries are recorded
        self._number = next(_numbers)

    def look(self, now_ns: int) -> Look:
        """Look at all that is counted, and return it. Runs in: the thread that takes batches."""
        if not self._taken:
            self._publish()
        self._consumer = f"self/task/{threading.get_native_id()}"
        look = self._at(now_ns)
        self._keep(look)
        self._taken += 1
        if self._page is not None:
            self._page.write({self: self.told(list(self._looks))})
        return look

    def _publish(self) -> None:
        """Have a page for who looks from outside, where there can be one."""
        name = f"{RING_NAME}-{self._number}"
        with contextlib.suppress(OSError):
            try:
                self._records = machine.map_readable_file(name, DELIVERIES.ring_bytes)
            except AttributeError:  # no Linux
                self._records = mmap.mmap(-1, DELIVERIES.ring_bytes)
            self._counters.times.recorder = DeliveryRecorder(self._records, 0)
        self._page = page_of_process()
        if is_pooled(self._engine):
            self._engine.session.on_idle = _refresh_page

    def told(self, looks: list[Look]) -> dict[str, Any]:
        """Return what the page tells of it, as these looks have it. Runs in: any thread."""
        engine, now_ns, asked_ns = self._engine, looks[-1].now_ns, self._counters.times.asked_ns
        in_pool: dict[str, Any] = {"loader": None, "arena": None}
        if is_pooled(engine):
            in_pool = {"loader": engine.number, "arena": machine.file_identity(engine.session.arena.descriptor)}
        counts = engine.cache_counts() if self._has_cache and engine is not None else NO_COUNTS
        cached = {"hits": counts[Count.HITS], "misses": counts[Count.MISSES], "bytes": counts[Count.BYTES]}
        return {
            "number": self._number,
            **in_pool,
            "looked_s": now_ns / 1e9,
            "asked_s": (now_ns - asked_ns) / 1e9 if asked_ns else None,
            **told_of(looks, self.about, workers_at_work(engine, now_ns)),
            "cache": cached if self._has_cache and engine is not None else None,
        }

    def close(self) -> None:
        """Take the page down. What was seen is kept: of what comes now there is no engine to tell."""
        with contextlib.suppress(Exception):  # who only looks shall not hinder a close
            if self._taken and self._is_taking:
                self._keep(self.now())
        self._is_closed = True
        page, self._page, self._counters.times.recorder, self._records = self._page, None, None, None
        if page is not None:
            page.remove(self)

    def _keep(self, look: Look) -> None:
        before = self._looks[-1].work.workers if self._looks else {}
        for number, worker in look.work.workers.items():
            if number in before and worker.pid:
                new = worker.since(before[number])
                self._cpu_s += new.cpu_s
                self._made += new.samples
        self._looks.append(look)
        if look.steps.steps <= FIRST_STEPS:
            self._first_looks.append(look)

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
        from loaderpool.trainer.tracing.recording import LoaderRecords, Recording, read_clocks, read_pool

        records, engine = self._records, self._engine
        if self._is_closed:
            raise ClosedError("This Loader is closed, and its records are gone. Call trace() before close().")
        number, pools, has_hosts = None, [], False
        if is_pooled(engine):
            session = engine.session
            arena_map, number, has_hosts = session.arena.map, engine.number, bool(session.hosts)
            pools = [read_pool(lambda at, nbytes: arena_map[at : at + nbytes], session.arena.nbytes, has_hosts)]
        deliveries = no_records(DELIVERIES)
        if records is not None:
            deliveries = read_ring(lambda at, nbytes: records[at : at + nbytes], 0, DELIVERIES)
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
        first = [look for look in list(self._first_looks) if look.now_ns > begun.now_ns]
        return self._observed_in([begun, *first, self.now()], float("inf"))

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
                capacity.machine_cpu_s(),
                clock.process_cpu_ns() / 1e9,
                capacity.queued_s(self._consumer) if self._consumer else 0.0,
                capacity.throttled_s(),
            ),
            self._tracker.latest_is_dataset,
            self.autotuned(),
            capacity.available_memory_bytes() if self.about.can_have_cache and self._tracker.may_be_followed else 0,
        )


def _refresh_page() -> None:
    """Have the page tell of all loaders as they are now. Runs in: a thread that waits, and for which nothing comes."""
    with contextlib.suppress(Exception):  # who only looks shall end no training
        page = page_of_process(makes=False)
        if page is not None and page.is_old:
            page.write({each: each.told(each.looks()) for each in page.loaders if isinstance(each, Observer)})
