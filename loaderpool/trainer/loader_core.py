"""`LoaderCore`: the parts of a loader, as its iterators and adapters use them.

Runs in: the main process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np

from loaderpool.errors import (
    ArgumentError,
    ClosedError,
    closed_error,
    counted,
    foreign_error,
    warn,
)
from loaderpool.plan.places import Position
from loaderpool.sources.stream import replicated
from loaderpool.system import process
from loaderpool.system.interrupts import (
    InterruptsAllowed,
    InterruptsHeld,
    Undoing,
    gate_handlers,
    is_of_a_handler,
)
from loaderpool.trainer.arguments import check_arguments
from loaderpool.trainer.epoch_tracker import EpochTracker
from loaderpool.trainer.pool import Pool, first_workers, shared_pool

if TYPE_CHECKING:
    import numpy.typing as npt

    from loaderpool.engine.contracts import Engine
    from loaderpool.engine.delivery import CheckedArguments
    from loaderpool.engine.orders import StoredOrders
    from loaderpool.memory.layout import BatchForm
    from loaderpool.plan.batches import Plan
    from loaderpool.trainer.draws import Draws
    from loaderpool.trainer.observer import Observer

# Part of each `repr`, because Keras shows the `repr` of an argument that it cannot use.
FOR_KERAS = "for Keras: model.fit(loader.for_keras())"
_Result = TypeVar("_Result")
_workers_are_allowed = True


@contextlib.contextmanager
def without_workers() -> Iterator[None]:
    """Return a context manager in which new loaders make their batches here, as with `workers=0`.

    No pool is started, and nothing is pickled. This applies to loaders that any code creates.
    """
    global _workers_are_allowed
    before, _workers_are_allowed = _workers_are_allowed, False
    try:
        yield
    finally:
        _workers_are_allowed = before


class LoaderCore:
    """Settings, plan, epoch tracker and engine of a loader.

    The loader, its views and iterators share one core. When the last of them is gone, a finalizer
    closes the engine, and the pool if it is the loader's own.

    Attributes:
        arguments: Arguments of `Loader`, by name.
        engine: Makes the batches. It is started in the background. None in any process other than
            the main process, where loaders are made again by imports, and cannot be used.
        pool: The shared pool, or the loader's own; None with `workers=0`.
        is_closed: `close` was called.
        config: Checked settings.
        plan: Plan of the batches.
        stream: The source, if it is a stream.
        tracker: Counts and positions of the passes.

    Args:
        arguments: Arguments of `Loader`, by name.

    Raises:
        LoaderpoolError: An argument is wrong, or the engine could not be started.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.engine: Engine | None = None
        self.pool: Pool | None = shared_pool(arguments)
        self.is_closed = False
        self._owner_pid = os.getpid()
        self._has_failed_to_look = False
        # Orders of the epochs in shared memory, or None if no pool makes the batches.
        self._orders: StoredOrders | None = None
        # `LocalEngine.end_passes`, or None if a pool makes the batches.
        self._end_passes: Callable[[], None] | None = None
        # Closes the engine and the loader's own pool. None if neither has processes or files.
        self._undoing: Undoing | None = None
        checked = check_arguments(arguments)
        draws = cast("Draws | None", checked.draw)
        self.config, self.plan, self.stream, self._unit = (
            checked.config,
            checked.plan,
            checked.stream,
            checked.unit,
        )
        # The tracker must not keep the core alive, because finalizers of iterators refer to it.
        engine = functools.partial(_call, weakref.ref(self), LoaderCore.running_engine)
        self.tracker = EpochTracker(engine, self.config, self.plan, arguments["_hooks"], draws)
        self.tracker.counters.on_mark = functools.partial(_call, weakref.ref(self), LoaderCore.look)
        self._check_rows()
        if not process.is_trainer():
            return
        gate_handlers()
        # If the start fails, the error is raised here, in the user's line that makes the loader.
        with InterruptsHeld(), contextlib.ExitStack() as undo:
            own_pool = None
            has_workers = _workers_are_allowed and (
                self.pool is not None or self.config.workers != 0
            )
            if has_workers and self.pool is None:
                self.pool = own_pool = Pool(self.config.workers, self.config.limits.restarts)
                undo.callback(own_pool.close)
            self._start(checked, has_workers, undo)
            undo.pop_all()
            if self.pool is not None or checked.cache is not None:
                assert self.engine is not None
                self._undoing = Undoing(self, functools.partial(_end, self.engine, own_pool))

    def _check_rows(self) -> None:
        """Start to count short batches of shards, if no setting explains such batches."""
        config, lanes = self.config, self.plan.lanes
        is_plain = not config.drop_remainder and config.on_error.action != "skip"
        # Two generators have two short batches, which is what the advice leads to.
        if lanes < 3 or self._unit != "sample" or config.batch_size is None or not is_plain:
            return
        source = self.arguments["source"]
        generators = replicated(source)
        if generators is None or generators.shards is None:
            return
        short = self.tracker.counters.short
        short.full_rows = config.batch_size
        way = (
            "Set"
            if generators is source
            else "Use Loader.from_generator(open_one_file, shards=files, ...) with"
        )
        short.advice = (
            f"{way} cycle_length=2: then fewer than {lanes} generators run "
            "at once, and each reads more shards"
        )

    def _start(
        self, checked: CheckedArguments, has_workers: bool, undo: contextlib.ExitStack
    ) -> None:
        """Start the engine, which continues in the background.

        Args:
            checked: The checked arguments.
            has_workers: A pool makes the batches.
            undo: Gets a callback that closes the cache. The caller runs it if the start fails.
        """
        cache = checked.cache
        if self.pool is not None:
            self.pool._check_loader(checked)
        shared = None
        if cache is not None:
            from loaderpool.cache.store import make_cache

            with (
                InterruptsAllowed()
            ):  # pickles the function and the source, which is the user's code
                shared = make_cache(cache, checked.payload.cached_of)
            undo.callback(shared.close)
            self.tracker.at_end = shared.warn
        if self.pool is not None and has_workers:
            # First, because its supervisor starts while this process imports and pickles.
            workers = self.pool.worker_pool
            from loaderpool.engine.engine import PoolEngine

            self.engine = engine = PoolEngine(workers, checked, shared)
            self._orders = engine.orders
            if self.tracker.draws is not None:
                self.tracker.draws.build_in(engine.orders.empty)
        else:
            from loaderpool.engine.local_engine import LocalEngine

            self.engine = local = LocalEngine(checked, shared)
            self._end_passes = local.end_passes

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint that a saved state must match. It takes some hundred microseconds."""
        # Imported here, because few loaders need it.
        from loaderpool.trainer.saved_state import fingerprint

        return fingerprint(self.arguments, self.config, self.plan)

    @functools.cached_property
    def observer(self) -> Observer:
        """Observer with the latest snapshots of the loader, made when it is first needed."""
        # Imported here, so that `import loaderpool` does not wait for them.
        from loaderpool.trainer.explain.window import Autotuned
        from loaderpool.trainer.observer import Observer

        calls_of: Literal["sample", "batch"] = "sample" if self._unit == "sample" else "batch"
        autotuned = Autotuned if self.pool is None else self.pool._autotuned
        key = functools.partial(_call, weakref.ref(self), LoaderCore.function_and_source)
        return Observer(self.tracker, self.engine, calls_of, autotuned, key)

    def function_and_source(self) -> tuple[str, str, int]:
        """Return the key of this loader's trials: function, source, and threads of a worker.

        `Observer` stores the results of trials under the key. Later loaders with the same key reuse
        them.
        """
        return self.fingerprint["function"], self.fingerprint["source"], self.config.threads

    def look(self, now_ns: int) -> None:
        """Take a snapshot, by which `workers="auto"` may change the number of workers.

        Called by `Counters.note` about every two seconds, on the thread that takes batches. A
        failed observation must not end the training. So the first failure is a warning, and the
        next call tries again.

        Args:
            now_ns: Time of the call, from `clock.monotonic_ns`.

        Raises:
            LoaderpoolWarning: A warnings filter turns the warning into an error.
        """
        try:
            now = self.observer.look(now_ns)
            if self.pool is not None:
                self.pool._look(self, now)
        except Exception as error:
            if is_of_a_handler(error):
                raise
            if not self._has_failed_to_look:
                self._has_failed_to_look = True
                warn(
                    f"could not measure the loader: {type(error).__name__}: {error}. Training "
                    'continues, but explain(), statistics() and workers="auto" may lack recent '
                    "measurements"
                )

    @property
    def workers(self) -> int:
        """Number of worker processes; 0 if this process makes the batches."""
        return first_workers(self.config.workers) if self.pool is None else self.pool.workers

    @property
    def description(self) -> str:
        """Text about the loader in its `repr`, and in those of its views and iterators."""
        plan = self.plan
        items = (
            "generators"
            if plan.lanes
            else "a stream"
            if plan.is_open
            else counted(plan.order.size // (self.config.samples_per_item or 1), "item")
        )
        items = "an endless sequence" if plan.is_endless else items
        where = "closed" if self.is_closed else counted(self.workers, "worker")
        is_of_order = plan.order.is_drawn and plan.rows_vary and not plan.packed_length
        size = "batches of its order" if is_of_order else f"batch_size={self.config.batch_size}"
        return f"{items}, {size}, {where}"

    def batches_per_epoch(self, plan: Plan | None = None) -> int:
        """Return the length of the loader: the number of batches of this shard in an epoch.

        Args:
            plan: Plan of the epoch; None: of the next one.

        Raises:
            TypeError: The length is unknown: the source is a stream, generators without
                `shard_lengths`, or endless, or `on_error="skip"` may drop batches.
        """
        if self.plan.is_endless:
            raise TypeError(
                "an endless sequence has no length. Pass steps_per_epoch to fit, or break out of "
                "the loop"
            )
        stated = self.plan.stated_batches
        if self.plan.is_open and stated is None:
            what = "generators" if self.plan.lanes else "a stream"
            advice = ". Pass shard_lengths= to state the number of items of each shard" * (
                self.plan.lanes > 0
            )
            raise TypeError(
                f"the number of batches is unknown, because the source is {what}{advice}"
            )
        if self.config.on_error.action == "skip":
            raise TypeError(
                'the number of batches is unknown with on_error="skip", which may drop whole '
                "batches"
            )
        if plan is None and self.tracker.draws is not None:
            return self.tracker.draws.batches(self.tracker.epoch)
        return (plan or self.plan).batches_per_epoch if stated is None else stated

    def indices(self, epoch: int, batch: int) -> npt.NDArray[np.int64]:
        """Return the source indices of a batch, without reading its items. See `Loader.indices`."""
        plan = self.plan
        if plan.is_open and not plan.is_endless:
            what = "generators" if plan.lanes else "a stream"
            raise ArgumentError(f"indices needs a source with an index, but the source is {what}")
        plan = self.tracker.plan_of(Position(epoch))
        if not 0 <= batch < plan.batches_per_epoch:
            raise IndexError(
                f"epoch {epoch} has the batches 0 to {plan.batches_per_epoch - 1:,}, got batch "
                f"{batch:,}"
            )
        indices = plan.order.take(epoch, plan.positions(epoch, batch))
        if self._orders is not None:
            self._orders.check_fork()
        return indices

    def state_at(self, position: Position) -> dict[str, Any]:
        """Return the saved state of a position.

        Raises:
            StateError: The source can be read only once, or hooks change the loader's data.
        """
        from loaderpool.trainer.saved_state import check_resumable, write_state

        check_resumable(self.stream, self.tracker)
        generators = [] if self.engine is None else self.engine.generators.saved()
        if self.tracker.draws is not None:
            generators = generators + self.tracker.draws.generators.saved()
        if self._orders is not None:
            self._orders.check_fork()
        return write_state(position, self.fingerprint, self.plan, generators)

    def running_engine(self) -> Engine:
        """Return the engine.

        Raises:
            ClosedError: As `check_usable`.
        """
        self.check_usable()
        assert self.engine is not None
        return self.engine

    def form(self) -> BatchForm:
        """Return the form of the batches that consumers get. Blocks until the first sample is made.

        Raises:
            LoaderpoolError: As `Engine.form` and `check_usable`.
        """
        form = self.running_engine().form()
        if not self.config.batch_indices:
            return form
        from loaderpool.trainer.batch_indices import indexed_form

        return indexed_form(self.tracker, form)

    def check_usable(self) -> None:
        """Raise if this process cannot use the loader.

        Raises:
            ClosedError: The loader is closed, was made in a process of a pool, or has workers and
                belongs to the process that forked this one.
        """
        if self.engine is None:
            raise ClosedError(
                f"this loader was created inside a loaderpool {process.role()} (pid "
                f"{os.getpid()}) and cannot be used there: only the main process can iterate over "
                "a loader"
            )
        if self.is_closed:
            raise closed_error("this Loader")
        if os.getpid() != self._owner_pid and self.workers:
            raise foreign_error(self._owner_pid)

    def close(self) -> None:
        """Close the engine, and the pool if it is the loader's own. Idempotent."""
        with InterruptsHeld():
            self.is_closed = True
            self.tracker.parked.drop()
            if "observer" in vars(self):
                self.observer.close()
            if self._end_passes is not None:
                self._end_passes()
            if self._undoing is not None:
                self._undoing.now()


def _end(engine: Engine, own_pool: Pool | None) -> None:
    if own_pool is not None:
        own_pool.close()
    # After the workers, so that its memory is free at once, even if the user keeps the loader.
    engine.close()


def _call(core: weakref.ref[LoaderCore], method: Callable[..., _Result], *given: object) -> _Result:
    """Call a method of a loader's core, if the core still exists.

    Raises:
        ClosedError: The core was collected, which closed the loader.
    """
    found = core()
    if found is None:
        raise closed_error("this Loader")
    return method(found, *given)
