"""`LoaderCore`: what a loader is made of, for iterators and adapters, which need no more of it."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from loaderpool.errors import ClosedError, closed_error, counted, foreign_error
from loaderpool.plan.places import Position
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
    from loaderpool.core.contracts import Engine
    from loaderpool.core.delivery import CheckedArguments
    from loaderpool.trainer.observer import Observer

# Keras shows the `repr` of what it is given and cannot use.
FOR_KERAS = "for Keras: model.fit(loader.for_keras())"
_workers_are_allowed = True


@contextlib.contextmanager
def without_workers() -> Iterator[None]:
    """Loaders that any code makes meanwhile work in this process: no pool is started, nothing is pickled."""
    global _workers_are_allowed
    before, _workers_are_allowed = _workers_are_allowed, False
    try:
        yield
    finally:
        _workers_are_allowed = before


class LoaderCore:
    """A loader's settings, plan, passes and engine. The pool ends when the last one drops that looks at it.

    Construction, with the arguments of `Loader` by name, starts the engine in the background. A worker has none.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.engine: Engine | None = None
        self.pool: Pool | None = shared_pool(arguments)  # shared, or its own
        self.is_closed = False
        self._owner_pid = os.getpid()
        self._end_passes: Callable[[], None] | None = None  # of an engine in this process
        self._undoing: Undoing | None = None  # ends what other processes or files have of it
        checked = check_arguments(arguments)
        self.config, self.plan, self.stream, self._unit = (
            checked.config,
            checked.plan,
            checked.stream,
            checked.unit,
        )
        # The tracker outlives the core in its iterators' finalizers, so it must not keep it alive.
        engine = functools.partial(_call, weakref.ref(self), LoaderCore.running_engine)
        self.tracker = EpochTracker(engine, self.config, self.plan, arguments["_hooks"])
        self.tracker.counters.on_mark = functools.partial(_call, weakref.ref(self), LoaderCore.look)
        if not process.is_trainer():
            return
        gate_handlers()
        with (
            InterruptsHeld(),
            contextlib.ExitStack() as undo,
        ):  # what can go wrong in the caller's line goes wrong here
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

    def _start(
        self, checked: CheckedArguments, has_workers: bool, undo: contextlib.ExitStack
    ) -> None:
        """Start the engine, in the background."""
        cache = checked.cache
        if self.pool is not None:
            self.pool._check_loader(checked)
        shared = None
        if cache is not None:
            from loaderpool.cache.store import make_cache

            with InterruptsAllowed():  # it pickles function and source
                shared = make_cache(cache, checked.payload.cached_of)
            undo.callback(shared.close)
            self.tracker.at_end = shared.warn
        if self.pool is not None and has_workers:
            workers = (
                self.pool.worker_pool
            )  # first: its supervisor begins while this process imports and pickles
            from loaderpool.core.engine import PoolEngine

            self.engine = PoolEngine(workers, checked, shared)
        else:
            from loaderpool.core.local_engine import LocalEngine

            self.engine = local = LocalEngine(checked, shared)
            self._end_passes = local.end_passes

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What a saved state must have, too, to be of this loader. Takes some hundred microseconds."""
        from loaderpool.trainer.saved_state import (
            fingerprint,
        )  # few loaders are asked for their state

        return fingerprint(self.arguments, self.config, self.plan)

    @functools.cached_property
    def observer(self) -> Observer:
        """What was seen of it lately."""
        from loaderpool.trainer.explain.window import Autotuned
        from loaderpool.trainer.observer import (
            Observer,
        )  # which `import loaderpool` shall not wait for

        calls_of: Literal["sample", "batch"] = "sample" if self._unit == "sample" else "batch"
        autotuned = Autotuned if self.pool is None else self.pool._autotuned
        key = functools.partial(_call, weakref.ref(self), LoaderCore.function_and_source)
        return Observer(self.tracker, self.engine, calls_of, autotuned, key)

    def function_and_source(self) -> tuple[str, str, int]:
        """Return names of both, and how many calls a worker makes at the same time."""
        return self.fingerprint["function"], self.fingerprint["source"], self.config.threads

    def look(self, now_ns: int) -> None:
        """Look at what it does. Runs in: the thread that takes batches."""
        try:
            now = self.observer.look(now_ns)
            if self.pool is not None:
                self.pool._look(self, now)
        except Exception as error:  # who only looks shall end no training
            if is_of_a_handler(error):
                raise
            self.tracker.counters.on_mark = None

    @property
    def workers(self) -> int:
        """How many worker processes there are; 0: this process."""
        return first_workers(self.config.workers) if self.pool is None else self.pool.workers

    @property
    def description(self) -> str:
        """What a `repr` says of the loader, its views and iterators."""
        plan = self.plan
        items = (
            "generators"
            if plan.lanes
            else "a stream"
            if plan.is_open
            else f"{plan.order.size:,} items"
        )
        items = "an endless sequence" if plan.is_endless else items
        where = "closed" if self.is_closed else counted(self.workers, "worker")
        return f"{items}, batch_size={self.config.batch_size}, {where}"

    def batches_per_epoch(self) -> int:
        """The length of the loader: batches of this shard in an epoch.

        Raises:
            TypeError: unknown, as `on_error="skip"` may leave batches out, or the source is a stream or endless.
        """
        if self.plan.is_endless:
            raise TypeError(
                "an endless sequence has no length. Pass steps_per_epoch to fit, or break out of the loop"
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
                'the number of batches is unknown with on_error="skip", which may drop whole batches'
            )
        return self.plan.batches_per_epoch if stated is None else stated

    def state_at(self, position: Position) -> dict[str, Any]:
        """The saved form of a position.

        Raises:
            StateError: the loader's data changes between epochs, by hooks of the user's.
        """
        from loaderpool.trainer.saved_state import check_resumable, write_state

        check_resumable(self.stream, self.tracker)
        generators = [] if self.engine is None else self.engine.generators.saved()
        return write_state(position, self.fingerprint, self.plan, generators)

    def running_engine(self) -> Engine:
        """The engine.

        Raises:
            ClosedError: there is none for this process, or none any more.
        """
        self.check_usable()
        assert self.engine is not None
        return self.engine

    def check_usable(self) -> None:
        """Raise if the loader is closed, or of another process."""
        if self.engine is None:
            raise ClosedError(
                f"this loader was created inside a loaderpool {process.role()} (pid {os.getpid()}) and cannot be used "
                "there: only the main process can iterate over a loader"
            )
        if self.is_closed:
            raise closed_error("this Loader")
        if os.getpid() != self._owner_pid and self.workers:
            raise foreign_error(self._owner_pid)

    def close(self) -> None:
        """End the engine, and the pool if it is the loader's own. Twice is fine."""
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
    engine.close()  # after the workers, if they end too: then its memory is free at once, even where the loader is kept


def _call(core: weakref.ref[LoaderCore], method: Callable[..., Any], *given: Any) -> Any:
    """Call a method of a loader that this call does not keep alive."""
    found = core()
    if found is None:  # closed when it was collected
        raise closed_error("this Loader")
    return method(found, *given)
