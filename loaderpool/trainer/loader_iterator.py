"""`LoaderIterator`: iterator over the batches of one pass, for a loop in Python.

`Pass` has these batches for every consumer: a loop, `tf.data` or Keras. Called in the main process.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from loaderpool.engine.delivery import Delivery, data_bytes
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
from loaderpool.trainer.counters import PassTimes, failed_indices
from loaderpool.trainer.epoch_tracker import EpochTracker
from loaderpool.trainer.loader_core import FOR_KERAS, LoaderCore
from loaderpool.trainer.pass_log import IterationLog, PassLog

if TYPE_CHECKING:
    from loaderpool.engine.contracts import Run


# Result of a conversion: an iterator over rows and components of each batch of a delivery, and a
# function that makes the consumer's batch from components.
Opened = tuple[Iterator[tuple[int, Sequence[Any]]], Callable[[Sequence[Any]], Any]]
# Called again for the same delivery if a Ctrl-C has interrupted the iteration.
Conversion = Callable[[Delivery], Opened]

_NONE: Iterator[tuple[int, Sequence[Any]]] = iter(())


def as_arrays(delivery: Delivery) -> Opened:
    """Convert batches to nested structures of NumPy arrays."""
    return delivery.batches(), delivery.form.rebuild


class _Current:
    """The batches of the latest delivery that were not consumed.

    `batches` yields the `left` batches of `delivery`. After an interrupt it is `_NONE` until
    `reopen`. With the last batch, the delivery is dropped.

    Attributes:
        convert: Makes the consumer's batches from a delivery.
        delivery: The delivery; None: no batch is left.
        left: Number of the batches; less than 0 if the pass was closed during its last batch.
        batches: Iterator over rows and components of each batch.
        assemble: Makes a batch from components; from `convert`.
        row_bytes: Bytes of a row; None: rows differ.
    """

    __slots__ = ("assemble", "batches", "convert", "delivery", "left", "row_bytes")

    def __init__(self, convert: Conversion) -> None:
        self.convert = convert
        self.delivery: Delivery | None = None
        self.left = 0
        self.batches = _NONE
        self.assemble: Callable[[Sequence[Any]], Any] | None = None
        self.row_bytes: int | None = None

    def open(self, delivery: Delivery) -> None:
        """Start with the batches of a new delivery. Called in a block of `InterruptsHeld`."""
        self.batches, self.assemble = self.convert(delivery)
        self.delivery, self.left = delivery, delivery.count
        fixed, indices = delivery.form.fixed, delivery.indices
        index_bytes = 0 if indices is None else indices[0].itemsize
        self.row_bytes = None if fixed is None else sum(fixed.row_bytes) + index_bytes

    def reopen(self, delivery: Delivery) -> None:
        """Continue with the batches that are left. Called in a block of `InterruptsHeld`."""
        batches, self.assemble = self.convert(delivery)
        self.batches = itertools.islice(batches, delivery.count - self.left, None)


class _FailureLimit:
    """Number of failed samples in a pass. The pass ends before the batch that exceeds the limit.

    Attributes:
        make_error: Makes the error that replaces that batch; None: the limit is not exceeded. A
            stored exception would keep all frames of its traceback.

    Args:
        tracker: Tracker of the loader.
    """

    def __init__(self, tracker: EpochTracker) -> None:
        self._tracker = tracker
        self._count = 0
        self.make_error: Callable[[], LoaderpoolError] | None = None

    def admitted(self, delivery: Delivery, rows: int) -> Delivery:
        """Return the delivery, or its batches before the one that exceeds the limit.

        The number of batches in a delivery depends on the workers' speed. The error replaces the
        batch that exceeds the limit. So the speed affects neither the batches before the error nor
        the error itself.

        Args:
            delivery: The delivery.
            rows: Number of rows of the epoch.

        Raises:
            LoaderpoolError: The delivery's first batch exceeds the limit.
        """
        tracker = self._tracker
        policy = tracker.config.on_error
        for number, failures in enumerate(delivery.failures()):
            self._count += sum(len(failed_indices(failure)) for failure in failures)
            if failures and not policy.allows(self._count, rows):
                # Imported here, so that `import loaderpool` does not load it.
                from loaderpool.engine.failures import sample_error

                allowed = f"more than on_error=({policy.action!r}, {policy.budget}) allows"
                preface = (
                    f"{counted(self._count, 'sample')} failed in this epoch, {allowed}. "
                    "The last one:\n"
                )
                self.make_error = functools.partial(sample_error, failures[-1], preface=preface)
                if not number:
                    raise self.make_error()
                return delivery.head(number)
            tracker.counters.failed.note(failures, policy.action)
        return delivery


class Pass:
    """The batches of one epoch. Each batch is delivered once.

    Used by one thread at a time. After a KeyboardInterrupt, the pass continues with the batch that
    was requested, because a batch stays current until it is counted. The pass keeps no reference to
    delivered batches, so a slot is released with the consumer's own arrays.

    Ownership: The pass owns its run, and releases it at its end, after an error, or in `close`. A
    pass that is dropped must be closed.

    Attributes:
        is_over: True if the pass was closed or has ended. With the last delivery it becomes True,
            unless hooks or `EpochTracker.at_end` must still be called.
        log: Record of delivered batches; None before the first request.
        consumed: Number of the plan's batches that the consumer is past, including batches that
            were left out.
        current: Batches of the latest delivery that were not consumed.

    Args:
        tracker: Tracker of the loader.
        iteration: Passes of one iterator, to which this pass is added.
        convert: Makes the consumer's batches from a delivery.
    """

    def __init__(
        self, tracker: EpochTracker, iteration: IterationLog, convert: Conversion = as_arrays
    ) -> None:
        self._tracker, self._iteration = tracker, iteration
        self._has_hooks = bool(tracker.hooks)
        self._taken, self._times = tracker.counters.taken, PassTimes()
        self._run: Run | None = None
        self.log: PassLog | None = None
        self.consumed = 0
        self._is_end_owed = False  # hooks have a note that the last batch is delivered
        self._failures = _FailureLimit(tracker)
        self.is_over = False
        self.current = _Current(convert)

    @property
    def is_ready(self) -> bool:
        """True if `take` returns a batch without waiting."""
        if self.current.left > 0:
            return True
        return not self.is_over and self._run is not None and self._run.is_ready

    # ---- delivery ----

    def take(self) -> object:
        """Return the next batch. Blocks until it has arrived.

        Raises:
            StopIteration: The pass is over.
            KeyboardInterrupt: It came while the call waited. `take` may be called again.
            LoaderpoolError: The pass has failed.
        """
        current = self.current
        while True:
            if current.left < 1:
                with InterruptsHeld():
                    current.open(self.next_delivery())
            # An interrupt has ended the iteration over this delivery.
            elif current.batches is _NONE and current.delivery is not None:
                with InterruptsHeld():
                    current.reopen(current.delivery)
            try:
                # A Ctrl-C may come after any call.
                for rows, parts in current.batches:
                    if self._has_hooks:
                        self._owe_end(1)
                    if not rows and self._tracker.config.on_error.action == "skip":
                        self._leave_out()
                        continue
                    # `assemble` is set since the first delivery.
                    batch = current.assemble(parts)  # type: ignore[misc]
                    row_bytes = current.row_bytes
                    nbytes = data_bytes(parts) if row_bytes is None else rows * row_bytes
                    taken = self._taken
                    taken.batches += 1
                    taken.samples += rows
                    taken.nbytes += nbytes
                    self.consumed += 1
                    current.left -= 1
                    # Otherwise the last batch's slot would be lent until the next request.
                    if current.left < 1:
                        current.delivery, current.batches = None, _NONE
                    return batch
            except BaseException:
                current.batches = _NONE
                raise

    def take_joined(self, assemble: Callable[[Sequence[Any]], Any]) -> object:
        """Return all batches of the next delivery, each component as `dtype[count, rows, ...]`.

        Call it only if `form.has_equal_batches` is True. Blocks and raises like `take`. A pass uses
        either this method or `take`.
        """
        with InterruptsHeld():
            delivery = self.next_delivery()
            count = delivery.count
            if self._has_hooks:
                self._owe_end(count)
            taken, parts = self._taken, delivery.joined()
            taken.batches += count
            taken.samples += count * delivery.rows
            taken.nbytes += data_bytes(parts)
            self.consumed += count
            return assemble(parts)

    def next_delivery(self) -> Delivery:
        """Return the next batches of the epoch, for callers that unpack them.

        Blocks until they have arrived. Called by any thread. On the main thread, the caller enters
        `InterruptsHeld`, and stores the result in that block.

        Raises:
            StopIteration: The epoch is over.
            KeyboardInterrupt: It came while the call waited. The method may be called again.
            LoaderpoolError: The pass has failed. The next pass starts again.
        """
        if self.is_over:
            raise StopIteration
        tracker, counters = self._tracker, self._tracker.counters
        times = self._times
        counters.steps.start_wait(times, clock.monotonic_ns())
        try:
            delivery = self._take()
        except BaseException as error:
            times.asked_ns = 0
            self._on_error(error)
            raise
        log = self.log
        if delivery is None or log is None:
            times.asked_ns = 0
            raise StopIteration
        if not log.delivered:
            counters.begin_pass(times)
        counters.note(delivery, times)
        log.delivered += delivery.count
        if log.numbers is not None:
            log.numbers.note(delivery, self._run)
        # Consumers that count batches never request the end.
        if log.delivered >= log.batches:
            run, self._run = self._run, None
            if run is not None:
                tracker.park(run, log)
            self.is_over = not self._has_hooks and tracker.at_end is None
            counters.short.end_pass(is_whole=not log.place.is_rest)
        return delivery

    def _take(self) -> Delivery | None:
        """Return the run's next delivery, or None if the epoch is over or the pass was closed."""
        tracker, log = self._tracker, self.log
        if log is None:
            self._run, self.log = _, log = tracker.open_run()
            self._iteration.add(log)
            if self.is_over:  # the pass was closed meanwhile, by another thread or a signal handler
                tracker.next.give_back(log.place)
                self._end_run()
                return None
        if self._failures.make_error is not None:
            raise self._failures.make_error()
        if log.delivered >= log.batches:
            self._finish()
            return None
        run = self._run
        if run is None:  # another thread has closed the pass
            return None
        try:
            delivery = run.take()
        except StopIteration:
            if self.is_over:  # another thread has closed the pass
                return None
            if not run.is_at_end:
                raise LoaderpoolError(
                    f"Epoch {log.epoch} ended after {log.delivered} of {log.batches} batches. This "
                    "is a bug in loaderpool; please report it."
                ) from None
            return self._end_of_stream(log)
        if delivery.row_failures:
            delivery = self._failures.admitted(delivery, log.whole.rows_per_epoch)
        if delivery.form.item_spec is not None:
            delivery.count_packed(log.plan, log.first)
        if tracker.config.batch_indices:
            from loaderpool.trainer.batch_indices import add_indices

            add_indices(tracker, log, delivery)
        return delivery

    def _on_error(self, error: BaseException) -> None:
        """Handle an error of a request: end the run, unless it can be continued."""
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

    # ---- the end of an epoch for hooks, and batches that are left out ----

    def _owe_end(self, count: int) -> None:
        """Note, once, that the epoch is delivered, if the next `count` batches are its last."""
        with InterruptsHeld():
            if (
                self.log is not None
                and self.consumed + count == self.log.batches
                and not self._is_end_owed
            ):
                self._is_end_owed = True
                self._tracker.hooks.owe_end()

    def _leave_out(self) -> None:
        """Skip the current batch, because it has no rows left."""
        with InterruptsHeld():
            assert self.log is not None
            self.log.omitted.append(self.consumed)
            self.consumed += 1
            current = self.current
            current.left -= 1
            if current.left < 1:
                current.delivery, current.batches = None, _NONE

    # ---- the end ----

    def _end_of_stream(self, log: PassLog) -> Delivery | None:
        """Handle the end of a stream. If nothing of its epoch was left, start the next epoch."""
        log.batches = log.delivered
        self._end_run()
        if log.delivered:
            self._tracker.counters.short.end_pass(is_whole=not log.place.is_rest)
            return None
        if not log.place.is_rest:
            self._tracker.next.give_back(log.place)
            return None
        self.is_over, self.log = False, None
        return self._take()

    def _finish(self) -> None:
        self._end_run()
        if self._has_hooks:
            self._owe_end(0)  # in case the epoch had no batches
            self._tracker.hooks.settle_ends()
        if self._tracker.at_end is not None:
            self._tracker.at_end()

    def _end_run(self) -> None:
        self.is_over = True
        run, self._run = self._run, None
        if run is not None:
            run.end()

    def close(self) -> None:
        """Abandon the pass. Idempotent and non-blocking; also called by finalizers."""
        current = self.current
        current.delivery, current.batches, current.left = None, _NONE, 0
        self._end_run()


class LoaderIterator(Iterator[Any]):
    """Iterator over the batches of one epoch, as NumPy arrays; returned by `iter(loader)`.

    `tensors()`, `as_torch()` and `as_jax()` have iterators with the same methods. Threads may share
    one. After a `KeyboardInterrupt` you can continue with the next batch, except with `workers=0`,
    where the iteration ends.
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
        self._undoing: Undoing | None = None  # cleanup of the pass, once it has started

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        """Return the number of batches per epoch, however many were taken."""
        log = self._pass.log
        return self._core.batches_per_epoch(None if log is None else log.whole)

    def __bool__(self) -> bool:
        return True  # without it, `bool` would call `__len__`, and the length may be unknown

    def __repr__(self) -> str:
        return f"<an iterator over batches of {self._core.description}; {FOR_KERAS}>"

    def __next__(self) -> Any:
        # `_is_owned`, as in `threading.Condition`
        if self._turn._is_owned():  # type: ignore[attr-defined]
            _refuse_reentry(self)
        with self._turn:
            return self._give()

    def _give(self) -> object:
        one_pass = self._pass
        if self._undoing is None:
            with InterruptsHeld():
                self._begin()
        try:
            return one_pass.take()
        except BaseException as error:
            # The cluster is lost, and makes no more batches. A state saved after this gets the
            # position of this pass, not that of the next epoch.
            if isinstance(error, ClusterError) and self._core.tracker.next.lost_at is None:
                self._core.tracker.next.lost_at = self.position
            if one_pass.current.left < 1 and one_pass.is_over:
                self._end()
            raise

    def _begin(self) -> None:
        """Register the pass and its cleanup. Called in a block of `InterruptsHeld`."""
        gate_handlers()  # for all signals, because single batches only check SIGINT
        # The first delivery needs this module, and has to be waited for anyway.
        if "observer" not in vars(self._core):
            # If no descriptors are left, the module is imported when it is needed.
            with contextlib.suppress(OSError):
                import loaderpool.trainer.observer  # noqa: F401

        tracker, one_pass = self._core.tracker, self._pass
        self._undoing = Undoing(
            self, functools.partial(_abandon, tracker, self.iteration, one_pass)
        )
        tracker.iterations.start(self.iteration, self)

    def _end(self) -> None:
        """Unregister the pass, which is over and holds nothing.

        This takes place between two epochs. A Ctrl-C may come at any point.
        """
        assert self._undoing is not None
        self._core.tracker.iterations.end(self.iteration)
        self._undoing.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after this iterator's latest batch.

        Otherwise like `Loader.state_dict`.
        """
        return self._core.state_at(self.position)

    @property
    def position(self) -> Position:
        """Position after the latest batch of this iterator."""
        return self._position(self._pass.consumed)

    def _position(self, consumed: int) -> Position:
        log = self._pass.log
        return self._core.tracker.start_of_next() if log is None else log.position(consumed)

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
    """Raise an error if this thread is already in the iterator's `__next__`, which calls this.

    The lock does not show that. After an interrupt, it may remain owned by the thread.
    """
    asking = sys._getframe(1)
    frame = asking.f_back
    while frame is not None:
        if frame.f_code is asking.f_code and frame.f_locals.get("self") is iterator:
            raise LoaderpoolError(
                "next() was called while the same thread is inside next() of this iterator, as by "
                "a signal handler. Iterate over the loader in the handler instead, which starts a "
                "separate iteration"
            )
        frame = frame.f_back


def _abandon(tracker: EpochTracker, iteration: IterationLog, one_pass: Pass) -> None:
    tracker.iterations.end(iteration)
    one_pass.close()


class Batches(Protocol):
    """Batches of a loader, as the tensors of one framework. Called in the main process.

    The implementation is `adapters.conversion.ConvertedBatches`.
    """

    def __iter__(self) -> LoaderIterator:
        """Return the iterator of a new pass. Raises `ClosedError` if the loader is closed."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch. Raises `TypeError` if it is unknown."""


class AheadIterator(LoaderIterator):
    """Iterator whose next batches are sent to a device while the previous step is computed.

    With each batch, up to `ahead` further batches are taken, if they are ready. So no batch waits
    for a later one. `position` and `state_dict` do not count batches that were taken ahead.
    """

    def __init__(self, core: LoaderCore, convert: Conversion, ahead: int) -> None:
        super().__init__(core, convert)
        self._ahead = ahead
        # batches that were taken ahead, and the pass's `consumed` after each
        self._taken: collections.deque[tuple[Any, int]] = collections.deque()
        self._given = 0  # `consumed` after the latest batch that was returned
        self._error: Exception | None = None  # error of the pass, which follows these batches

    def _give(self) -> object:
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
        if not self._taken:  # the iterator was closed meanwhile
            raise StopIteration
        batch, self._given = self._taken.popleft()
        return batch

    def _take(self) -> None:
        with InterruptsHeld():
            self._taken.append((super()._give(), self._pass.consumed))

    @property
    def position(self) -> Position:
        """Position after the latest batch that was returned."""
        return self._position(self._given)

    def close(self) -> None:
        """End this iteration. The next one starts a new epoch."""
        super().close()
        self._taken.clear()
        self._error = None
