"""`Pool`: worker processes that several loaders can share, or one loader has alone.

Runs in: the main process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from loaderpool.checks import one_of, whole_number
from loaderpool.config import DEFAULT_RESTARTS, MAX_WORKERS, Auto, check_restarts, check_workers
from loaderpool.errors import ArgumentError, UnpicklableError, closed_error, counted, warn
from loaderpool.hints import known_names_only
from loaderpool.system import abilities, machine, ranks
from loaderpool.system.interrupts import InterruptsHeld, Undoing

if TYPE_CHECKING:
    from loaderpool.engine.delivery import CheckedArguments
    from loaderpool.engine.pool import WorkerPool
    from loaderpool.trainer.autotune import PoolWorkers
    from loaderpool.trainer.explain.window import Autotuned, Snapshot
    from loaderpool.transport.child_process import Program


def first_workers(workers: int | Auto) -> int:
    """Return the number of workers to start with, for a checked `workers` argument."""
    return (
        workers.first(ranks.usable_cpu_count(), ranks.local_count())
        if isinstance(workers, Auto)
        else workers
    )


def shared_pool(arguments: Mapping[str, Any]) -> Pool | None:
    """Return the user's pool, if the `workers` argument of a loader is one; otherwise None."""
    workers = arguments["workers"]
    return workers if isinstance(workers, Pool) else None


class Pool:
    """Worker processes that several loaders share.

    `close()` or the end of a `with` block ends all of them.

    Args:
        workers: As in `Loader`, at least 1. Default: `"auto"`.
        restarts: As in `Limits`. Default: `(50, 60)`.
        start: `"fork"`, or `"spawn"`, which is slower but works on every system. Default: `"fork"`
            if available.

    Example:
        >>> import loaderpool as lp

        >>> with lp.Pool(workers=2) as pool:
        ...     training = lp.Loader(range(80), workers=pool)
        ...     validation = lp.Loader(range(20), workers=pool)
        ...     print(len(training), len(validation))
        3 1
    """

    @known_names_only
    def __init__(
        self,
        workers: int | Literal["auto"] | tuple[int, int | None] = "auto",
        restarts: int | tuple[int, float] | None = DEFAULT_RESTARTS,
        start: Literal["fork", "spawn"] | None = None,
        _program: Program | None = None,
    ) -> None:
        checked = check_workers("workers", workers, at_least=1)
        self._workers, self._auto = (
            first_workers(checked),
            checked if isinstance(checked, Auto) else None,
        )
        self._restarts = check_restarts("restarts", restarts)
        start = one_of("start", start, values=("fork", "spawn", None))
        can_fork = abilities.can_fork_workers()
        if not can_fork and not _program:
            self._check_start(start)
        self._program = _program
        self._is_spawned = start == "spawn" or not (can_fork or _program)
        self._worker_pool: WorkerPool | None = None
        self._undoing: Undoing  # ends the workers; set when they start
        self._is_closed = False
        self._autotune: PoolWorkers | None = None  # made at the first snapshot of a loader
        self._lock, self._lock_pid = threading.RLock(), os.getpid()

    @staticmethod
    def _check_start(start: Literal["fork", "spawn"] | None) -> None:
        """Check the start method on a system where workers cannot be forked.

        Warn if the default is "spawn" only because the system refuses memory files.

        Raises:
            ArgumentError: `start` is "fork".
        """
        refusal = abilities.memory_file_refusal()
        if start == "fork":
            lacks = (
                f"which this system refuses ({refusal})" if refusal else "which this Python lacks"
            )
            fix = (
                f"{machine.ALLOW_MEMORY_FILES.capitalize()}, or remove start="
                if refusal
                else "Remove start="
            )
            raise ArgumentError(f'start="fork" needs os.fork and os.memfd_create, {lacks}. {fix}')
        if start is None and refusal:
            warn(
                f"Workers are spawned, because this system refuses memfd_create ({refusal}), which "
                "forked workers need. Start-up is slower and uses more memory. To use fork(), "
                f"{machine.ALLOW_MEMORY_FILES}. To silence this, pass "
                'workers=lp.Pool(n, start="spawn")'
            )

    def __reduce__(self) -> NoReturn:
        raise UnpicklableError(
            "a Pool cannot be pickled, because it owns processes. Create it where it is used"
        )

    @property
    def workers(self) -> int:
        """Current number of workers."""
        return self._workers

    def _check_loader(self, checked: CheckedArguments) -> None:
        """Check that the workers can make a loader's batches. Called before its engine is made.

        Raises:
            ArgumentError: They cannot.
        """
        cache = checked.cache
        if self._is_spawned and cache is not None and cache.in_memory:
            raise ArgumentError(
                'cache="memory" needs workers started with fork(), but this pool starts them with '
                "spawn. Pass a directory as cache="
            )

    @property
    def worker_pool(self) -> WorkerPool:
        """The running workers. The first access starts them. Called by any thread.

        Raises:
            ClosedError: The pool is closed.
        """
        found = self._worker_pool
        if found is None:
            with InterruptsHeld(), self._turn():
                # Another thread may have started them, or closed the pool, in the meantime.
                if self._worker_pool is None and not self._is_closed:
                    started = self._make_workers()
                    self._worker_pool, self._undoing = started, Undoing(self, started.close)
                    # The lock is reentrant, so a signal's handler or a finalizer on this thread may
                    # have closed the pool during the start.
                    if self._is_closed:
                        self.close()
                found = self._worker_pool
        if found is None:
            raise closed_error("this Pool")
        return found

    def _make_workers(self) -> WorkerPool:
        # Imported here, because these modules import `subprocess` and `socket`.
        if self._is_spawned:
            from loaderpool.engine.spawned import SpawnedPool

            return SpawnedPool(self._workers, self._restarts)
        from loaderpool.engine.pool import WorkerPool

        return WorkerPool(self._workers, self._restarts, self._program)

    def _turn(self) -> threading.RLock:
        """Return the lock for starting, resizing and closing the workers.

        A fork of this process gets a new lock, because a thread that the fork does not have may
        hold the old one.
        """
        if self._lock_pid != os.getpid():
            self._lock, self._lock_pid = threading.RLock(), os.getpid()
        return self._lock

    @property
    def is_closed(self) -> bool:
        """`True` after `close()`."""
        return self._is_closed

    def resize(self, workers: int) -> None:
        """Set the number of workers, at least 1. The batches stay the same."""
        checked = whole_number("workers", workers, at_least=1, at_most=MAX_WORKERS)
        with InterruptsHeld(), self._turn():
            self._auto = None  # otherwise it would change the number again
            self._set_workers(checked)

    def _look(self, loader: object, now: Snapshot) -> None:
        """Change the number of workers, if a snapshot of one of the loaders calls for it.

        Called by `LoaderCore.look`, on the thread that takes batches. Without `workers="auto"` it
        does nothing.

        Args:
            loader: Core of the loader, which identifies it.
            now: Latest snapshot of that loader.
        """
        auto = self._auto
        if auto is None:
            return
        if self._autotune is None:
            # Imported here, so that the first batch does not wait for it.
            from loaderpool.trainer.autotune import PoolWorkers

            self._autotune = PoolWorkers(
                *auto.bounds(ranks.usable_cpu_count(), ranks.local_count())
            )
        workers = self._autotune.look(loader, now, self._workers)
        if workers is not None:
            with InterruptsHeld(), self._turn():
                if self._auto is not None:
                    self._set_workers(workers)

    def _set_workers(self, workers: int) -> None:
        self._workers = workers
        if self._worker_pool is not None:
            self._worker_pool.resize(workers)

    def _autotuned(self) -> Autotuned:
        """Return the decisions of `workers="auto"`. Passed to `Observer`, which calls it."""
        # Imported here, so that `import loaderpool` does not wait for it.
        from loaderpool.trainer.explain.window import Autotuned

        found = Autotuned() if self._autotune is None else self._autotune.autotuned
        return found if self._auto is not None else found._replace(most=0)

    def close(self) -> None:
        """End the workers. Arrays that you hold stay valid."""
        with InterruptsHeld():
            # The lock waits for a start on another thread, so that its workers are closed, too.
            with self._turn():
                self._is_closed = True
                # A closed pool that the user keeps must hold no memory.
                found, self._worker_pool = self._worker_pool, None
            if found is not None:
                self._undoing.now()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else counted(self.workers, "worker")
        return f"<loaderpool.{type(self).__name__}: {state}>"

    def __enter__(self) -> Pool:  # noqa: PYI034 - Self is in typing from 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
