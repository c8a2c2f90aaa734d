"""`LoaderCore`: what a loader is made of, for iterators and adapters, which need no more of it."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from loaderpool.config import LoaderConfig
from loaderpool.core.delivery import CheckedArguments
from loaderpool.errors import ArgumentError, ClosedError, closed_error, counted, foreign_error
from loaderpool.plan.order import Plan
from loaderpool.sources.stream import StreamSource
from loaderpool.system import process
from loaderpool.system.interrupts import InterruptsAllowed, InterruptsHeld, Undoing, gate_handlers, is_of_a_handler
from loaderpool.trainer.epochs.epoch_tracker import EpochHooks, EpochTracker
from loaderpool.trainer.epochs.position import Position
from loaderpool.trainer.pool import Pool, first_workers, shared_pool

if TYPE_CHECKING:
    from loaderpool.core.delivery import Engine
    from loaderpool.trainer.epochs.fingerprint import Fingerprint
    from loaderpool.trainer.epochs.observer import Observer
    from loaderpool.trainer.explain.window import Autotuned

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


def start_engine(
    checked: CheckedArguments, pool: Pool | None, epoch: int, own_pool: Pool | None = None
) -> tuple[Engine, Pool | None]:
    """Start an engine in the background; what can go wrong in the caller's line goes wrong here.

    Runs in: a block of `InterruptsHeld`, in which the caller notes how both are ended.

    Ownership: the caller ends both, by `end_engine`; where this raises, both are ended.

    Args:
        checked: what the loader was made with.
        pool: the pool that it shares, or None.
        epoch: of its first pass.
        own_pool: what was made for it already.

    Returns:
        The engine, and the pool that was made for it; None where the pool is shared or the work is done here.
    """
    payload, config = checked.payload, checked.config
    has_workers = (pool is not None or config.workers != 0) and _workers_are_allowed
    with contextlib.ExitStack() as undo:
        if has_workers and pool is None:
            pool = own_pool = own_pool or Pool(config.workers, config.limits.restarts)
        if own_pool is not None:
            undo.callback(own_pool.close)
        if pool is not None:
            checked = pool._check_loader(checked)
        shared = None
        if payload["cache"] is not None:
            from loaderpool.trainer.epochs.cache_watch import make_cache  # which `import loaderpool` shall not wait for

            with InterruptsAllowed():  # it pickles function and source
                shared = make_cache(payload["cache"], payload, checked.plan.size)
            undo.callback(shared.close)
        engine: Engine
        if has_workers:
            assert pool is not None
            session = pool.session  # first: its supervisor begins while this process imports the rest and pickles
            from loaderpool.core.engine import PoolEngine

            engine = PoolEngine(session, checked, epoch, shared)
        else:
            from loaderpool.core.local_engine import LocalEngine

            engine, own_pool = LocalEngine(checked, epoch, shared), None
        undo.pop_all()
    return engine, own_pool


def end_engine(engine: Engine, own_pool: Pool | None) -> None:
    """End the engine, and the pool with it if it was made for it."""
    if own_pool is not None:
        own_pool.close()
    engine.close()  # after the workers, if they end too: then its memory is free at once, even where the loader is kept


# Keras shows the `repr` of what it is given and cannot use.
FOR_KERAS = "for Keras: model.fit(loader.for_keras())"


class LoaderCore:
    """A loader's settings, plan, passes and engine. The pool ends when the last one drops that looks at it.

    Construction starts the engine, in the background; inside a worker there is none.

    Args:
        arguments: of `Loader`, by name.
        checked: what they come to.
        own_pool: what was started for the loader already, or None.
    """

    def __init__(self, arguments: dict[str, Any], checked: CheckedArguments, own_pool: Pool | None) -> None:
        self.arguments = arguments
        self.config: LoaderConfig = checked.config
        self.plan: Plan = checked.plan
        self.stream: StreamSource | None = checked.stream
        self.engine: Engine | None = None
        self.pool: Pool | None = shared_pool(arguments)  # shared, or its own
        self.is_closed = False
        self._is_without_lengths = checked.needs_lengths  # inside a worker nothing asks for them
        self._owner_pid = os.getpid()
        self._undoing: Undoing | None = None  # ends what other processes or files have of it
        hooks: EpochHooks | None = arguments["_hooks"]
        # The tracker outlives the core in its iterators' finalizers, so it reaches the engine without holding the core.
        self.tracker = EpochTracker(_EngineHandle(self), self.config, self.plan, hooks)
        self._calls_of: Literal["sample", "batch"] = "sample" if checked.unit == "sample" else "batch"
        self._has_cache = checked.payload["cache"] is not None
        self.tracker.counters.on_mark = _LookHandle(self)
        if process.is_trainer():
            self._start(checked, own_pool)

    def _start(self, checked: CheckedArguments, own_pool: Pool | None) -> None:
        cache = checked.payload["cache"]
        gate_handlers()
        with InterruptsHeld():
            # The payload is not kept: what travelled is in shared memory, and a local engine has it.
            self.engine, own_pool = start_engine(checked, self.pool, self.tracker.epoch, own_pool)
            if self.pool is not None or own_pool is not None or cache is not None:
                self._undoing = Undoing(self, functools.partial(end_engine, self.engine, own_pool))
            self.pool = self.pool or own_pool
        if self.engine.captured is not None:
            from loaderpool.core.warnings import warn_of_changes  # which a pool has imported

            self.tracker.at_begin = functools.partial(warn_of_changes, self.engine.captured)
            if self.pool is not None:
                self.pool.session.modules.note()
        if cache is not None:
            from loaderpool.trainer.epochs.cache_watch import CacheWatch  # which `import loaderpool` shall not wait for

            self.tracker.at_end = CacheWatch(cache.where, self.engine.cache_counts)

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """What a saved state must have, too, to be of this loader."""
        from loaderpool.trainer.epochs.fingerprint import Fingerprint  # few loaders are asked for their state

        functions = self.arguments["fn"] or self.arguments["batch_fn"], self.arguments["augment"]
        return Fingerprint(self.arguments["source"], *functions, self.config, self.plan)

    @functools.cached_property
    def observer(self) -> Observer:
        """What was seen of it lately."""
        from loaderpool.trainer.epochs.observer import Observer  # which `import loaderpool` shall not wait for

        loader = self.tracker, self.engine, self.config, self.plan
        cache = self._calls_of, self._has_cache
        return Observer(*loader, *cache, functools.partial(_autotuned_of, self.pool))

    def look(self, now_ns: int) -> None:
        """Look at what it does. Runs in: the thread that takes batches."""
        now = self.observer.look(now_ns)
        if self.pool is not None:
            self.pool._look(self, now)

    @property
    def workers(self) -> int:
        """How many worker processes there are; 0: this process."""
        if self.pool is not None:  # it may have been resized
            return self.pool.workers
        return first_workers(self.config.workers)

    @property
    def has_processes(self) -> bool:
        """Whether something outside this object works for it, or holds files."""
        return self._undoing is not None

    @property
    def description(self) -> str:
        """What a `repr` says of the loader, its views and iterators."""
        plan = self.plan
        items = "generators" if plan.lanes else "a stream" if plan.is_open else f"{plan.size:,} items"
        items = "an endless sequence" if plan.is_endless else items
        where = "closed" if self.is_closed else counted(self.workers, "worker")
        return f"{items}, batch_size={self.config.batch_size}, {where}"

    def batches_per_epoch(self) -> int:
        """The length of the loader: batches of this shard in an epoch.

        Raises:
            TypeError: unknown, as `on_error="skip"` may leave batches out, or the source is a stream or endless.
        """
        if self._is_without_lengths:
            self.check_usable()
        if self.plan.is_endless:
            raise TypeError("an endless sequence has no length. Pass steps_per_epoch to fit, or break out of the loop")
        if self.plan.is_open:
            what = "generators" if self.plan.lanes else "a stream"
            raise TypeError(f"the number of batches is unknown, because the source is {what}")
        if self.config.on_error.action == "skip":
            raise TypeError('the number of batches is unknown with on_error="skip", which may drop whole batches')
        return self.plan.batches_per_epoch

    def state_at(self, position: Position) -> dict[str, Any]:
        """The saved form of a position.

        Raises:
            StateError: the loader's data changes between epochs, by hooks of the user's.
        """
        from loaderpool.trainer.epochs.saved_state import check_resumable, write_state

        check_resumable(self.stream, self.tracker)
        return write_state(position, self.fingerprint, self.plan)

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

    def resize(self, workers: int) -> None:
        """Have this many workers from now on.

        Raises:
            ArgumentError: the loader runs in this process (workers=0), or `workers` is below 1.
        """
        self.check_usable()
        if self.pool is None:
            raise ArgumentError("a loader with workers=0 cannot be resized. Use replace(workers=...)")
        self.pool.resize(workers)

    def close(self) -> None:
        """End the engine, and the pool if it is the loader's own. Twice is fine."""
        with InterruptsHeld():
            self.is_closed = True
            self.tracker.drop_parked()
            if "observer" in vars(self):
                self.observer.close()
            if self.pool is not None:
                self.pool._drop(self)
            if self._undoing is not None:
                self._undoing.now()


def _autotuned_of(pool: Pool | None) -> Autotuned:
    from loaderpool.trainer.explain.window import Autotuned  # which `import loaderpool` shall not wait for

    return Autotuned() if pool is None else pool._autotuned


class _LookHandle:
    """Has a loader look at itself without keeping it alive."""

    def __init__(self, core: LoaderCore) -> None:
        self._core = weakref.ref(core)

    def __call__(self, now_ns: int) -> None:
        core = self._core()
        if core is not None:
            try:
                core.look(now_ns)
            except Exception as error:  # who only looks shall end no training
                if is_of_a_handler(error):
                    raise
                core.tracker.counters.on_mark = None


class _EngineHandle:
    """Reaches a loader's engine without keeping the loader alive."""

    def __init__(self, core: LoaderCore) -> None:
        self._core = weakref.ref(core)

    def __call__(self) -> Engine:
        core = self._core()
        if core is None:
            raise ClosedError("the Loader was garbage-collected and closed. Keep a reference to it while you iterate")
        return core.running_engine()
