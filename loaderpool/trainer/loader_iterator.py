"""`LoaderIterator`: the batches of one pass, from the run that makes them to a loop, `tf.data` or Keras."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from loaderpool.core.delivery import Delivery, data_bytes
from loaderpool.errors import ClosedError, ClusterError, LoaderpoolError, counted
from loaderpool.plan.places import Position
from loaderpool.system import clock
from loaderpool.system.interrupts import (
    InterruptsHeld,
    Undoing,
    gate_handlers,
    is_of_a_handler,
    wait_for_the_end,
)
from loaderpool.trainer.counters import failed_indices
from loaderpool.trainer.epoch_tracker import EpochTracker
from loaderpool.trainer.loader_core import FOR_KERAS, LoaderCore
from loaderpool.trainer.pass_log import IterationLog, PassLog

if TYPE_CHECKING:
    from loaderpool.core.contracts import Run


# Rows and components of each batch of a delivery, and what makes of a batch's components what the consumer gets. It is
# asked again for the same delivery where a Ctrl-C broke off a step of the first answer.
Opened = tuple[Iterator[tuple[int, Sequence[Any]]], Callable[[Sequence[Any]], Any]]
Conversion = Callable[[Delivery], Opened]

_NONE: Iterator[tuple[int, Sequence[Any]]] = iter(())


def as_arrays(delivery: Delivery) -> Opened:
    """Batches as nested structures of NumPy arrays."""
    return delivery.batches(), delivery.form.rebuild


class Pass:
    """The batches of one epoch, each handed over once.

    Used by one thread at a time. It may be asked again after a KeyboardInterrupt, and goes on with the batch that was
    awaited: until a batch counts as taken, it is still in front. What was handed over is in no variable of it any more,
    so that a slot comes back with the consumer's own arrays.

    Ownership: `close` (or the end, or an error) lets go of the run; a pass that is dropped must be closed.

    Attributes:
        is_over: it was closed, or is at its end: this shows with the last delivery, if the end has nothing to do.
        log: what it has handed out; None before the first delivery was asked for.
        consumed: batches of the plan that the consumer is past: those left out, too.
        left: batches of the delivery that was fetched last, which are still in front.

    Args:
        tracker: of the loader.
        iteration: the passes of one iterator; this one will be among them.
        convert: opens a delivery: what the consumer gets.
    """

    def __init__(
        self, tracker: EpochTracker, iteration: IterationLog, convert: Conversion = as_arrays
    ) -> None:
        self._tracker, self._iteration, self._convert = tracker, iteration, convert
        self._counters, self._has_hooks = tracker.counters, bool(tracker.hooks)
        self._run: Run | None = None
        self.log: PassLog | None = None
        self.consumed = self.left = 0
        self._is_end_owed = False  # hooks were told that the last batch is handed over
        self._errors = 0  # samples that failed
        # Makes a new error each time: a kept exception would keep, through its traceback, all its frames.
        self._make_error: Callable[[], LoaderpoolError] | None = (
            None  # the next batch has one failure too many
        )
        self.is_over = False
        self._delivery: Delivery | None = None  # whose batches are in front
        self._batches = _NONE  # of it
        self._assemble: Callable[[Sequence[Any]], Any] | None = None  # as it was opened
        self._batch_bytes: int | None = None  # of each; None: they differ

    @property
    def is_ready(self) -> bool:
        """Whether `take` would return a batch without waiting for it."""
        return self.left > 0 or (not self.is_over and self._run is not None and self._run.is_ready)

    # ---- what is handed over

    def take(self) -> Any:
        """Return the next batch. Blocks until it is there.

        Raises:
            StopIteration: the pass is over.
            KeyboardInterrupt: it came in the wait; the pass may be asked again.
            LoaderpoolError: what ended the pass.
        """
        while True:
            if self.left < 1:  # below 0: it was closed in the middle of the last one
                with InterruptsHeld():
                    delivery = self.next_delivery()
                    self._batches, self._assemble = self._convert(delivery)
                    self._delivery, self.left = delivery, delivery.count
                    fixed = delivery.form.fixed
                    self._batch_bytes = (
                        None if fixed is None else delivery.rows * sum(fixed.row_bytes)
                    )
                    del delivery
            elif self._batches is _NONE and self._delivery is not None:  # a step was broken off
                with InterruptsHeld():
                    batches, self._assemble = self._convert(self._delivery)
                    self._batches = itertools.islice(
                        batches, self._delivery.count - self.left, None
                    )
            try:
                # A Ctrl-C may come after any call.
                for rows, parts in self._batches:
                    if self._has_hooks:
                        self._owe_end(1)
                    if not rows and self._tracker.config.on_error.action == "skip":
                        self._leave_out()
                        continue
                    batch = self._assemble(parts)  # type: ignore[misc]  # there is one since the first delivery
                    nbytes = self._batch_bytes
                    if nbytes is None:
                        nbytes = data_bytes(parts)
                    counters = self._counters
                    counters.batches += 1
                    counters.samples += rows
                    counters.nbytes += nbytes
                    self.consumed += 1
                    self.left -= 1
                    if (
                        self.left < 1
                    ):  # else the last batch's slot would be lent until the next one is asked for
                        self._delivery, self._batches = None, _NONE
                    return batch
            except BaseException:
                self._batches = _NONE
                raise

    def take_joined(self, assemble: Callable[[Sequence[Any]], Any]) -> Any:
        """Return all batches of the next delivery, each component as `dtype[count, rows, ...]`; for fixed forms only.

        Blocks and raises as `take`; it is not called beside that.
        """
        with InterruptsHeld():
            delivery = self.next_delivery()
            count = delivery.count
            if self._has_hooks:
                self._owe_end(count)
            counters, parts = self._counters, delivery.joined()
            counters.batches += count
            counters.samples += count * delivery.rows
            counters.nbytes += data_bytes(parts)
            self.consumed += count
            return assemble(parts)

    def next_delivery(self) -> Delivery:
        """Return the next batches of the epoch, for who hands them over itself. Blocks until they are there.

        Runs in: any thread; on the main one in a block of `InterruptsHeld`, in which the caller stores what it gets.

        Raises:
            StopIteration: the epoch is over.
            KeyboardInterrupt: it came in the wait; the pass may be asked again.
            LoaderpoolError: what ended the pass; the next pass starts again.
        """
        if self.is_over:
            raise StopIteration
        tracker, counters = self._tracker, self._counters
        counters.asked_ns = clock.monotonic_ns()
        try:
            delivery = self._take()
        except BaseException as error:
            counters.asked_ns = 0
            self._on_error(error)
            raise
        log = self.log
        if delivery is None or log is None:
            counters.asked_ns = 0
            raise StopIteration
        if not log.delivered:
            counters.begin_pass()
        counters.note(delivery)
        log.delivered += delivery.count
        if log.keeps_places:
            log.note_places(delivery, self._run)
        if log.delivered >= log.batches:  # consumers that count take no more, and ask for no end
            run, self._run = self._run, None
            if run is not None:
                tracker.park(run, log)
            self.is_over = not self._has_hooks and tracker.at_end is None
        return delivery

    def _take(self) -> Delivery | None:
        """Return the run's next delivery; None: the epoch is over, or this pass was closed."""
        tracker, log = self._tracker, self.log
        if log is None:
            self._run, self.log = _, log = tracker.open_run()
            self._iteration.add(log)
            if self.is_over:  # closed meanwhile, on another thread or by a signal's handler
                tracker.next.give_back(log.place)
                self._end_run()
                return None
        if self._make_error is not None:
            raise self._make_error()
        if log.delivered >= log.batches:
            self._finish()
            return None
        run = self._run
        if run is None:  # closed on another thread
            return None
        try:
            delivery = run.take()
        except StopIteration:
            if self.is_over:  # closed on another thread
                return None
            if not run.is_at_end:
                raise LoaderpoolError(
                    f"Epoch {log.epoch} ended after {log.delivered} of {log.batches} batches. This is a bug in "
                    "loaderpool; please report it."
                ) from None
            return self._end_of_stream(log)
        return self._admitted(delivery) if delivery.row_failures else delivery

    def _admitted(self, delivery: Delivery) -> Delivery:
        """Return the delivery, or as many of its batches as come before the one that has one failure too many.

        How many batches come in one delivery depends on how fast the workers are. So that this decides neither what
        arrives before the error nor which one it is, the error comes in that batch's place.

        Raises:
            LoaderpoolError: it is the first one.
        """
        policy = self._tracker.config.on_error
        for number, failures in enumerate(delivery.failures()):
            self._errors += sum(len(failed_indices(failure)) for failure in failures)
            if failures and not policy.allows(self._errors, self._tracker.plan.rows_per_epoch):
                from loaderpool.core.failures import (
                    sample_error,
                )  # which `import loaderpool` shall not wait for

                allowed = f"more than on_error=({policy.action!r}, {policy.budget}) allows"
                preface = f"{counted(self._errors, 'sample')} failed in this epoch, {allowed}. The last one:\n"
                self._make_error = functools.partial(sample_error, failures[-1], preface=preface)
                if not number:
                    raise self._make_error()
                return delivery.head(number)
            self._counters.note_failures(failures, policy.action)
        return delivery

    def _on_error(self, error: BaseException) -> None:
        """Let go of the run, unless it may be asked again."""
        if isinstance(error, ClosedError):
            wait_for_the_end()
        log, run = self.log, self._run
        is_failure = isinstance(error, Exception) and not is_of_a_handler(error)
        if is_failure:
            self._tracker.note_error(error)
        if is_failure or (log is not None and not (run is not None and run.outlives_interrupts)):
            if log is not None and not log.delivered:
                self._tracker.next.give_back(log.place)
            self._end_run()

    # ---- what hooks are told, and which batches are left out

    def _owe_end(self, count: int) -> None:
        """Note, once, that an epoch's end is due where so many batches in front are its last: they are handed over."""
        with InterruptsHeld():
            if (
                self.log is not None
                and self.consumed + count == self.log.batches
                and not self._is_end_owed
            ):
                self._is_end_owed = True
                self._tracker.hooks.owe_end()

    def _leave_out(self) -> None:
        """Pass over the batch in front, of which no row is left."""
        with InterruptsHeld():
            assert self.log is not None
            self.log.omitted.append(self.consumed)
            self.consumed += 1
            self.left -= 1
            if self.left < 1:
                self._delivery, self._batches = None, _NONE

    # ---- the end

    def _end_of_stream(self, log: PassLog) -> Delivery | None:
        """The stream has no more; where nothing was left of its epoch, go on with the next one."""
        log.batches = log.delivered
        self._end_run()
        if log.delivered:
            return None
        if not log.place.is_rest:
            self._tracker.next.give_back(log.place)
            return None
        self.is_over, self.log = False, None
        return self._take()

    def _finish(self) -> None:
        self._end_run()
        if self._has_hooks:
            self._owe_end(0)  # of an epoch without batches
            self._tracker.hooks.settle_ends()
        if self._tracker.at_end is not None:
            self._tracker.at_end()

    def _end_run(self) -> None:
        self.is_over = True
        run, self._run = self._run, None
        if run is not None:
            run.end()

    def close(self) -> None:
        """Let go; the next pass is whole. Never blocks; may run in a finalizer, and twice."""
        self._delivery, self._batches, self.left = None, _NONE, 0
        self._end_run()


class LoaderIterator(Iterator[Any]):
    """Iterator over the batches of one epoch, as NumPy arrays; returned by `iter(loader)`.

    `tensors()`, `as_torch()` and `as_jax()` have iterators with the same methods. Threads may share one. After a
    `KeyboardInterrupt` you can continue with the next batch, except with `workers=0`, where the iteration ends.
    """

    def __init__(
        self,
        core: LoaderCore,
        convert: Conversion | None = None,
        iteration: IterationLog | None = None,
    ) -> None:
        self._core = core  # keeps the pool alive
        self._turn = threading.RLock()
        self.iteration = IterationLog() if iteration is None else iteration
        self._pass = Pass(core.tracker, self.iteration, convert or as_arrays)
        self._undoing: Undoing | None = None  # of the pass, once it has begun

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        """Return the number of batches per epoch, however many were taken."""
        return self._core.batches_per_epoch()

    def __bool__(self) -> bool:
        return True  # its length may be unknown

    def __repr__(self) -> str:
        return f"<an iterator over batches of {self._core.description}; {FOR_KERAS}>"

    def __next__(self) -> Any:
        if self._turn._is_owned():  # type: ignore[attr-defined]  # as `threading.Condition` asks
            _refuse_reentry(self)
        with self._turn:
            return self._give()

    def _give(self) -> Any:
        one_pass = self._pass
        if self._undoing is None:
            with InterruptsHeld():
                self._begin()
        try:
            return one_pass.take()
        except BaseException as error:
            # No batch is ever made again; who saves the place next means this one, and not the next epoch.
            if isinstance(error, ClusterError) and self._core.tracker.next.lost_at is None:
                self._core.tracker.next.lost_at = self.position
            if one_pass.left < 1 and one_pass.is_over:
                self._end()
            raise

    def _begin(self) -> None:
        """Note the pass, and what ends it. Runs in: a block of `InterruptsHeld`."""
        gate_handlers()  # of signals that each batch does not look at
        if "observer" not in vars(
            self._core
        ):  # the loader's first hand-over, which is awaited now, has use for it
            with contextlib.suppress(
                OSError
            ):  # no descriptors are left: then it is imported when it is needed
                import loaderpool.trainer.observer  # noqa: F401

        tracker, one_pass = self._core.tracker, self._pass
        self._undoing = Undoing(
            self, functools.partial(_abandon, tracker, self.iteration, one_pass)
        )
        tracker.iterations.start(self.iteration, self)

    def _end(self) -> None:
        """The pass is over and holds nothing. This is in the gap between two epochs; a Ctrl-C may come anywhere."""
        assert self._undoing is not None
        self._core.tracker.iterations.end(self.iteration)
        self._undoing.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after this iterator's latest batch; otherwise like `Loader.state_dict`."""
        return self._core.state_at(self.position)

    @property
    def position(self) -> Position:
        """Position after the latest batch of this iterator."""
        return self._position(self._pass.consumed)

    def _position(self, consumed: int) -> Position:
        return (self._pass.log or self._core.tracker.next_log()).position(consumed)

    @property
    def epoch(self) -> int:
        """Epoch number of this iteration, or -1 before its first batch."""
        return -1 if self._pass.log is None else self._pass.log.epoch

    def close(self) -> None:
        """End this iteration. The next one starts a new epoch."""
        with InterruptsHeld():
            self._pass.close()
            if self._undoing is not None:
                self._undoing.now()
            self._core.tracker.hooks.settle_ends()


def _refuse_reentry(iterator: Iterator[Any]) -> None:
    """Raise where another call of the iterator's `__next__`, which asks, is under way on this thread.

    That the thread owns its lock shows no such call: an interrupt may have left it owned.
    """
    asking = sys._getframe(1)
    frame = asking.f_back
    while frame is not None:
        if frame.f_code is asking.f_code and frame.f_locals.get("self") is iterator:
            raise LoaderpoolError(
                "next() was called while the same thread is inside next() of this iterator, as by a signal handler. "
                "Iterate over the loader in the handler instead, which starts a separate iteration"
            )
        frame = frame.f_back


def _abandon(tracker: EpochTracker, iteration: IterationLog, one_pass: Pass) -> None:
    tracker.iterations.end(iteration)
    one_pass.close()


class AheadIterator(LoaderIterator):
    """A pass whose batches are on their way to a device while the step before them is computed.

    Up to `ahead` batches after the one that is asked for are taken, if they are there: none waits for a later one.
    What was taken ahead does not count as given: `position` and `state_dict` follow the last batch that was.
    """

    def __init__(self, core: LoaderCore, convert: Conversion, ahead: int) -> None:
        super().__init__(core, convert)
        self._ahead = ahead
        self._taken: collections.deque[tuple[Any, int]] = (
            collections.deque()
        )  # and where the pass stands after it
        self._given = 0
        self._error: Exception | None = None  # that ended the pass, after what was taken

    def _give(self) -> Any:
        if not self._taken:
            error, self._error = self._error, None
            if error is not None:
                raise error
            self._take()
        while len(self._taken) <= self._ahead and self._error is None and self._pass.is_ready:
            try:
                self._take()
            except Exception as error:
                if is_of_a_handler(error):
                    raise
                self._error = error
        if not self._taken:  # closed meanwhile
            raise StopIteration
        batch, self._given = self._taken.popleft()
        return batch

    def _take(self) -> None:
        with InterruptsHeld():
            self._taken.append((super()._give(), self._pass.consumed))

    @property
    def position(self) -> Position:
        """Where this pass stands."""
        return self._position(self._given)

    def close(self) -> None:
        """End the pass; the next one starts again."""
        super().close()
        self._taken.clear()
        self._error = None
