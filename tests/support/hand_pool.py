"""A pool without processes: the trainer's side and the supervisor's state as they are, moved step by step by hand.

What the trainer commands waits in one queue, what the supervisor tells it in another, what a worker shall do in a
third; a step moves one message of one of them. So every order of events can be chosen, and where no step is left and a
consumer still waits, that is a deadlock and not a timeout. Rows are made by the real `Work`, into a real arena.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import loaderpool as lp
from loaderpool.errors import ClosedError, MemoryLimitError
from loaderpool.memory.arena import Arena
from loaderpool.memory.board import Board
from loaderpool.supervisor import instructions as told
from loaderpool.supervisor.state import SupervisorState
from loaderpool.system import machine
from loaderpool.system.long_work import LongWork
from loaderpool.trainer.engine.checked_arguments import CheckedArguments
from loaderpool.trainer.engine.local_engine import LocalEngine
from loaderpool.trainer.engine.pool_engine import PoolEngine
from loaderpool.trainer.epochs.epoch_pass import Pass
from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
from loaderpool.trainer.epochs.position import IterationLog
from loaderpool.trainer.session.routing import Routing
from loaderpool.trainer.session.running_workers import RunningWorkers
from loaderpool.trainer.session.warnings import PendingWarnings
from loaderpool.transport.messages import (
    Command,
    Control,
    Notice,
    Report,
    Status,
    Words,
    decode_all,
    encode,
    join32,
    split32,
)
from loaderpool.transport.pickling import get_object, receive
from loaderpool.worker.jobs import Job

__all__ = [
    "BATCHES", "FIRSTS", "HandPool", "HandSession", "check_all_slots_free", "consume", "first", "hand_pool",
    "read_in_any_order", "small_pool",
]  # fmt: skip

# A pass of `small_pool`: so many batches, which begin with these numbers.
BATCHES = 40
FIRSTS = list(range(0, 2 * BATCHES, 2))

# Smaller than a real one: a test makes many, and those that are not collected yet use up the address space.
_ARENA_BYTES = 1 << 30


def _small_arena() -> Arena:
    descriptor = machine.create_memory_file("arena")
    os.ftruncate(descriptor, _ARENA_BYTES)
    return Arena(descriptor, _ARENA_BYTES)


class HandPipe:
    """As much of a ReturnPipe as there has to be."""

    def __init__(self, queue: collections.deque[Words]) -> None:
        self._queue = queue

    def release(self, message: bytes) -> None:
        self._queue.extend(decode_all(message))


class HandSession:
    """As much of a Session as an engine needs, with the supervisor's state behind it."""

    is_foreign = False
    hands_over_files = True

    def __init__(self, workers: int) -> None:
        self.workers_wanted, self.hosts = workers, 0
        self.arena = _small_arena()
        self.state = SupervisorState(workers)
        self.controls: collections.deque[Words] = collections.deque()
        self.notices: collections.deque[tuple[Words, Any]] = collections.deque()
        self.commands: dict[int, collections.deque[Words]] = {}
        self.pipe: Any = HandPipe(self.controls)
        self.lock = threading.RLock()
        self.todo: collections.deque[Callable[[], None]] = collections.deque()
        self.routing = Routing()
        self.is_closed = False
        self.deliveries = self.supervisor_restarts = 0
        self.workers = RunningWorkers(self.arena.board)
        self.warnings = PendingWarnings()
        self.long_work: LongWork | None = None
        self.on_idle: Callable[[], None] | None = None
        self.work: Callable[[HandSession, int, Words], None] = lambda session, worker, words: None
        self.choice = random.Random(0)
        self.slow_one = False  # the first worker moves only where nobody else can
        self._numbers = 0

    def take_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def send(self, kind: Control, *words: int) -> None:
        self.controls.extend(decode_all(encode(kind, *words)))

    def check_owner(self) -> None: ...

    def catch_up(self) -> None: ...

    def check_usable(self) -> None:
        if self.is_closed:
            raise ClosedError("closed")

    def send_files(self, *_: Any) -> None: ...

    def wake(self) -> None: ...

    def run_todo(self) -> None:
        if not self.lock.acquire(blocking=False):
            return
        try:
            while self.todo:
                self.todo.popleft()()
        finally:
            self.lock.release()

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        with self.lock:
            while not is_ready():
                self.check_usable()
                assert self.step(), "a deadlock: the consumer waits, and nobody has anything to do"

    def step(self) -> bool:
        """Move one message; False: there is none."""
        busy = [worker for worker, commands in self.commands.items() if commands]
        moves: list[Callable[[], None]] = [lambda worker=worker: self._act(worker) for worker in busy]  # type: ignore[misc]
        if self.controls:
            moves.append(lambda: self.obey(self.state.on_control(self.controls.popleft())))
        if self.notices:
            moves.append(lambda: self.routing.tell(*self.notices.popleft()))
        if self.slow_one and len(moves) > 1 and min(self.commands) in busy:
            del moves[busy.index(min(self.commands))]
        if not moves:
            return False
        self.choice.choice(moves)()
        self.state.check_invariants()
        return True

    def settle(self) -> None:
        """Take every step that can be taken."""
        with self.lock:
            self.run_todo()
            while self.step():
                self.run_todo()

    def obey(self, instructions: list[told.Instruction]) -> None:
        """Do what the supervisor's state says."""
        for one in instructions:
            if isinstance(one, told.Fork):
                self.commands[one.worker] = collections.deque()
            elif isinstance(one, told.Load):
                self.obey(self.state.on_loaded(one.loader))
            elif isinstance(one, told.ToWorker):
                self.commands[one.worker].extend(decode_all(one.message))
            elif isinstance(one, told.ToTrainer):
                self.notices.extend((words, None) for words in decode_all(one.message))

    def _act(self, worker: int) -> None:
        words = self.commands[worker].popleft()
        if words[0] == Command.EXIT:
            del self.commands[worker]
            self.obey(self.state.on_worker_gone(worker, 0, 0))
        else:
            self.work(self, worker, words)


class HandPool:
    """A loader on such a pool.

    Args:
        workers: how many there shall be.
        seed: of the order of events.
        **settings: of the `Loader`, source and function among them.
    """

    def __init__(self, workers: int, seed: int = 0, **settings: Any) -> None:
        made_here = lp.Loader(workers=0, **settings)
        local: Any = made_here._core.engine
        assert isinstance(local, LocalEngine)
        self.config, self.plan = local.config, local.plan
        self._work, self._runs = local.work, {}  # type: ignore[var-annotated]
        self._batch_ns = 1000
        self.session = HandSession(workers)
        self.session.choice.seed(seed)
        self.session.work = self._act
        session: Any = self.session
        self.checked = CheckedArguments(local.config, local.plan, local.unit, None, None, {})
        self.engine = PoolEngine(session, self.checked, 0)
        self.book = EpochTracker(lambda: self.engine, local.config, local.plan, None)

    @property
    def ring(self) -> Any:
        return self.engine.layout and self.engine.layout.ring

    @property
    def sharing(self) -> Any:
        assert self.engine.layout is not None
        return self.engine.layout.quotas

    def quotas(self) -> list[int]:
        """Of the active runs."""
        return [run.quota for run in self.sharing.active]

    def check_shares(self) -> None:
        """RING-3, and at least a slot for each."""
        active = self.sharing.active
        if len(active) > 1:
            lent = {slot for run in active for slot in run.lent}
            assert min(self.quotas()) >= 1
            assert sum(self.quotas()) <= self.ring.prospect - self.ring.lent_count(but=lent)

    def batches(self) -> Iterator[Any]:
        """One pass, as a loader's iterator gives it."""
        one_pass = Pass(self.book, IterationLog())
        try:
            while True:
                try:
                    delivery = one_pass.next_delivery()
                except StopIteration:
                    return
                self.check_shares()
                parts = collections.deque(parts for _, parts in delivery.batches())
                del delivery
                while parts:
                    yield parts.popleft()[0]
        finally:
            one_pass.close()

    def close(self) -> None:
        self.session.is_closed = True
        self.session.arena.close_descriptor()

    # ---- what a worker does ----

    def _act(self, session: HandSession, worker: int, words: Words) -> None:
        if words[0] == Command.PROBE:
            attachment = pickle.dumps(self._work.probe(words[3], batch=words[5]))
            session.notices.append(((Notice.SPEC, words[2], worker, 0, 0, 0, 0, 0), attachment))
            report = (Report.DONE, words[1], worker, Status.FINISHED, 0, 0, 0, 0)
            session.obey(session.state.on_report(report))
        elif words[0] == Command.LAYOUT:
            _, pickled = get_object(session.arena, words[2], words[3])
            form, is_given = receive(pickled)
            self._work.set_form(form, is_given)
        elif words[0] == Command.RUN:
            self._runs[words[1]] = (words[3], words[4])
        elif words[0] == Command.TICKET:
            self._make(session, worker, words)

    def _make(self, session: HandSession, worker: int, words: Words) -> None:
        _, ticket, run, first, count_attempt, row_range, slot, _ = words
        (count, attempt), (start, stop) = split32(count_attempt), split32(row_range)
        first_epoch, per_epoch = self._runs[run]
        record = session.state.ledger.slots[slot]
        status, attachment = Status.FINISHED, None
        if session.arena.board.numbers[Board.mark(run)] == run:
            status = Status.ABANDONED
        else:
            job = Job(run, first_epoch + first // per_epoch, first % per_epoch, count, start, stop)
            anchor = session.arena.anchor(record.offset, record.nbytes)
            filled = self._work.fill(job, anchor, 0, record.nbytes)
            if filled.oversize is not None:
                status, nbytes = Status.OVERSIZE, filled.oversize.nbytes
                memory = np.empty(nbytes, np.uint8)
                filled.oversize.write(memory, 0)
                attachment = (memory, nbytes, nbytes)
        told_of = (Notice.COMPLETION, ticket, run, first, count_attempt, row_range, slot, join32(status, worker))
        session.notices.append((told_of, attachment))
        rows = count * (stop - start)
        report = (Report.DONE, ticket, worker, status, self._batch_ns, rows, count, attempt)
        session.obey(session.state.on_report(report))


def consume(batches: Iterator[Any]) -> list[int]:
    """The first number of each batch."""
    return [int(np.ravel(batch)[0]) for batch in batches]


@contextlib.contextmanager
def hand_pool(workers: int, seed: int = 0, **settings: Any) -> Iterator[HandPool]:
    """A pool that is closed in the end."""
    pool = HandPool(workers, seed, **settings)
    try:
        yield pool
    finally:
        pool.close()


def _row(index: int) -> Any:
    return np.full(1000, index)


def small_pool(**more: Any) -> contextlib.AbstractContextManager[HandPool]:
    """A pool of two workers whose slots are few and small, but for what `more` says of the `Loader`."""
    settings = {
        "source": range(2 * BATCHES),
        "fn": _row,
        "batch_size": 2,
        "limits": lp.Limits(memory=5 * 16384),
        **more,
    }
    return hand_pool(2, **settings)


def first(batches: Iterator[Any], count: int) -> list[int]:
    """The first number of each of the next batches."""
    return consume(itertools.islice(batches, count))


def read_in_any_order(
    pool: HandPool,
    iterators: int,
    look: Callable[[Any], Any],
    choice: random.Random,
    kept: int,
    meddle: Callable[[float], None],
) -> list[list[Any]]:
    """What each of several iterators gave; without those for which there was no memory.

    Args:
        pool: its batches.
        iterators: how many, all at once.
        look: what is noted of a batch.
        choice: whose turn it is.
        kept: so many of the latest batches stay, and must stay as they are.
        meddle: called between two batches with a number from 0 to 1, by which it may do something else to the pool.
    """
    running = {at: pool.batches() for at in range(iterators)}
    seen: dict[int, list[Any]] = {at: [] for at in running}
    keep: collections.deque[Any] = collections.deque(maxlen=kept)
    while running:
        at = choice.choice(list(running))
        try:
            batch = next(running[at])
        except StopIteration:
            del running[at]
            continue
        except MemoryLimitError:  # so tight a budget has no slot for it
            assert not seen.pop(at)
            del running[at]
            continue
        seen[at].append(look(batch))
        if kept:
            keep.append((batch, seen[at][-1]))
        del batch
        meddle(choice.random())
        assert all(look(old) == contents for old, contents in keep)
    return list(seen.values())


def check_all_slots_free(pool: HandPool) -> None:
    """After everything ended: no slot is lost, none is held by a run, no run is left."""
    pool.book.drop_parked()
    pool.session.settle()
    state = pool.session.state
    assert not state.ledger.runs and not pool.engine.runs
    assert (
        sorted(state.ledger.slots)
        == sorted(pool.ring.extents)
        == sorted(next(iter(state.ledger.loaders.values())).free)
    )
    assert not pool.ring.lender.lent
