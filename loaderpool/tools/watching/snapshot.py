"""What a loader is at, told from the bytes that its trainer and its workers share: pure functions."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from loaderpool.memory.board import Board, Field
from loaderpool.memory.call_times import CallTimes, read_call_times
from loaderpool.plan.generator_positions import generated_item
from loaderpool.trainer.explain.decision import Decision
from loaderpool.trainer.explain.explanation import Explanation, SlowItem, explain, slow_items
from loaderpool.trainer.explain.looks import Look, WorkerCounts, observed_in
from loaderpool.trainer.explain.observed import Observed
from loaderpool.trainer.explain.page import PageContent

# What is told of "lately" is about so long.
_LATELY_S = 30.0
# Shares of a shorter time would jump: a call may take so long.
_LEAST_SHARE_NS = 1_500_000_000


class WorkerState(enum.Enum):
    """What a worker is at."""

    STARTING = "starting"  # it has begun no ticket yet
    SETUP = "setup"  # the user's hook runs
    ITEM = "item"  # the function is called for it, or it is read
    GENERATOR = "generator item"  # a generator makes it
    IDLE = "idle"
    HOST = "host"  # it is one, whose workers another machine has


@dataclasses.dataclass(frozen=True)
class WorkerSnapshot:
    """A worker at this moment, or a host."""

    number: int
    pid: int  # 0: it is a host
    state: WorkerState
    index: int | None  # of the item, or of its generator's items
    items: int  # of how many it is the first that are made as a block, if samples take microseconds; else 1
    item_s: float | None  # how long it has been at it
    busy_share: float | None  # of the last seconds; None: it has not been there long enough
    cpus: float | None  # that it used in them, on average
    generator: int | None = None  # that makes the item


@dataclasses.dataclass(frozen=True)
class PoolMemory:
    """A board's bytes and what the kernel tells of its workers.

    Args:
        board: the arena's beginning.
        call_times: what lies behind it, of as many workers as there are, or more.
        cpu_s: CPU time by pid, of the processes that live.
    """

    board: bytes
    call_times: bytes
    cpu_s: Mapping[int, float]


@dataclasses.dataclass(frozen=True)
class LoaderSnapshot:
    """A loader at this moment."""

    number: int | None  # of its pool; None: batches are made in the training's own process
    pool: tuple[int, int] | None  # which one, where several loaders share one
    explanation: Explanation  # of the last half minute in which batches were taken
    wait_shares: tuple[float, ...]  # of the time between looks, the latest last
    look_age_s: float
    steps_per_s: float | None  # None: there was none yet
    samples_per_s: float | None
    bytes_per_s: float | None
    asked_s: float | None  # since when a batch is waited for; None: none is
    handed_over_s: float | None  # since when the training has the latest batch; None: it is waited for
    calls_of: str  # "sample" or "batch": what a call of the function makes
    call_s: dict[str, float]  # how long calls take: p50, p90, p99; empty: none was measured
    slowest: tuple[SlowItem, ...]
    slots: int
    slots_lent: int
    workers: tuple[WorkerSnapshot, ...]
    decisions: tuple[Decision, ...]  # the latest changes of their number by `workers="auto"`, the latest last

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        workers = [{**dataclasses.asdict(each), "state": each.state.value} for each in self.workers]
        slowest = [dataclasses.asdict(each) for each in self.slowest]
        explanation = self.explanation.to_dict()
        del explanation["slowest"]  # they stand below, as they are now
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "explanation": explanation,
            "slowest": slowest,
            "workers": workers,
            "decisions": [dataclasses.asdict(each) for each in self.decisions],
        }


def take_snapshot(page: PageContent, pool: PoolMemory | None, now_ns: int) -> LoaderSnapshot:
    """Return what the loader is at.

    Args:
        page: with at least one look.
        pool: that it has its workers of; None: it has none, or it cannot be read.
        now_ns: monotonic.
    """
    last = page.looks[-1]
    observed = observed_in(page.looks, page.about, _LATELY_S)
    number, identity = page.more.get("loader"), page.more.get("arena")
    board = Board(pool.board) if pool is not None else None
    calls = last.work.calls
    if pool is not None and board is not None and number is not None:
        calls = _calls(pool, board, number)
    explanation = explain(observed)
    return LoaderSnapshot(
        number=number,
        pool=tuple(identity) if identity is not None else None,
        explanation=explanation,
        wait_shares=tuple(_wait_shares(page.looks)),
        look_age_s=_since(last.now_ns, now_ns),
        **_rates(observed),
        asked_s=_since(page.asked_ns, now_ns) if page.asked_ns else None,
        handed_over_s=_since(page.handed_over_ns, now_ns) if page.handed_over_ns and not page.asked_ns else None,
        calls_of=page.about.calls_of,
        call_s=_quantiles(observed.calls if observed.calls.calls else calls),
        slowest=slow_items(calls),
        slots=last.work.slots,
        slots_lent=last.work.slots_lent,
        workers=tuple(_workers(page.looks, pool, board, now_ns)),
        decisions=last.autotuned.decisions,
    )


def _since(then_ns: int, now_ns: int) -> float:
    return max(0, now_ns - then_ns) / 1e9


def _rates(observed: Observed) -> dict[str, float | None]:
    if not observed.steps or observed.seconds <= 0:
        return {"steps_per_s": None, "samples_per_s": None, "bytes_per_s": None}
    return {
        "steps_per_s": observed.steps / observed.seconds,
        "samples_per_s": observed.samples_per_s,
        "bytes_per_s": observed.bytes / observed.seconds,
    }


def _wait_shares(looks: Iterable[Look]) -> Iterator[float]:
    """Yield the share of each time between two looks in which steps were taken."""
    for first, last in itertools.pairwise(looks):
        steps_ns = last.steps.steps_ns - first.steps.steps_ns
        if steps_ns > 0:
            yield min(1.0, max(0.0, (last.steps.wait_ns - first.steps.wait_ns) / steps_ns))


def _quantiles(calls: CallTimes) -> dict[str, float]:
    if not calls.calls:
        return {}
    return {f"p{percent}": calls.quantile_ns(percent / 100) / 1e9 for percent in (50, 90, 99)}


def _calls(pool: PoolMemory, board: Board, loader: int) -> CallTimes:
    return read_call_times(memoryview(pool.call_times).cast("Q"), board.pids(), loader)


def _workers(looks: list[Look], pool: PoolMemory | None, board: Board | None, now_ns: int) -> Iterator[WorkerSnapshot]:
    """Yield those that there are: hosts as the latest look has them, and workers as the board does."""
    counts = looks[-1].work.workers
    if board is None or pool is None or any(not worker.pid for worker in counts.values()):
        earlier = looks[-2] if len(looks) > 1 else looks[-1]
        for number, worker in counts.items():
            before = earlier.work.workers.get(number)
            yield _between_looks(number, worker, before, looks[-1].now_ns - earlier.now_ns)
        return
    numbers = {worker.pid: number for number, worker in counts.items()}
    base = next((look for look in reversed(looks) if now_ns - look.now_ns >= _LEAST_SHARE_NS), None)
    before_by_pid = {each.pid: each for each in base.work.workers.values()} if base is not None else {}
    since_ns = now_ns - base.now_ns if base is not None else 0
    found = {pid: cell for cell, pid in board.pids().items() if pid in pool.cpu_s}
    for pid, cell in sorted(found.items(), key=lambda each: (numbers.get(each[0], each[1]), each[1])):
        state, index, item_s = _state(board, cell, now_ns)
        items = max(1, board.read(cell, Field.BLOCK)) if state is WorkerState.ITEM else 1
        before = before_by_pid.get(pid)
        busy_share = cpus = None
        if before is not None:
            busy_share = _busy_share(board, cell, before, since_ns, state)
            cpus = max(0.0, pool.cpu_s[pid] - before.cpu_s) / (since_ns / 1e9)
        generated = None if index is None else generated_item(index)
        generator, index = (None, index) if generated is None else generated
        yield WorkerSnapshot(numbers.get(pid, cell), pid, state, index, items, item_s, busy_share, cpus, generator)


def _state(board: Board, cell: int, now_ns: int) -> tuple[WorkerState, int | None, float | None]:
    # INDEX first: what began after that is younger than it says, never older (`Progress.note` stores it last).
    index = board.read(cell, Field.INDEX)
    if board.read(cell, Field.IN_SETUP):
        return WorkerState.SETUP, None, None
    if index:
        state = WorkerState.GENERATOR if board.read(cell, Field.IN_GENERATOR) else WorkerState.ITEM
        return state, index - 1, _since(board.read(cell, Field.STARTED_NS), now_ns)
    has_begun = board.read(cell, Field.TICKET) or board.read(cell, Field.STARTED_NS)
    return (WorkerState.IDLE if has_begun else WorkerState.STARTING), None, None


def _busy_share(board: Board, cell: int, before: WorkerCounts, since_ns: int, state: WorkerState) -> float:
    """Return the share of the time since then; time that no counter has yet goes to what it is at."""
    busy_ns = max(0, board.read(cell, Field.BUSY_NS) - before.busy_ns)
    idle_ns = max(0, board.read(cell, Field.WAIT_NS) - before.idle_ns)
    uncounted_ns = max(0, since_ns - busy_ns - idle_ns)
    if state not in (WorkerState.IDLE, WorkerState.STARTING):
        busy_ns += uncounted_ns
    return min(1.0, busy_ns / since_ns)


def _between_looks(number: int, now: WorkerCounts, before: WorkerCounts | None, since_ns: int) -> WorkerSnapshot:
    state = WorkerState.IDLE if now.pid else WorkerState.HOST
    if before is None or since_ns <= 0:
        return WorkerSnapshot(number, now.pid, state, None, 1, None, None, None)
    new = now.since(before)
    counted_ns = new.busy_ns + new.idle_ns
    share = min(1.0, max(0.0, new.busy_ns / counted_ns)) if counted_ns > 0 else None
    cpus = max(0.0, new.cpu_s) / (since_ns / 1e9) if now.pid else None
    return WorkerSnapshot(number, now.pid, state, None, 1, None, share, cpus)
