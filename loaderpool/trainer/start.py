"""Which engine makes a loader's batches, and what ends together with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from loaderpool.system.interrupts import InterruptsAllowed
from loaderpool.trainer.engine.checked_arguments import CheckedArguments
from loaderpool.trainer.engine.delivery import Engine
from loaderpool.trainer.pool import Pool

if TYPE_CHECKING:
    pass

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
            from loaderpool.trainer.engine.pool_engine import PoolEngine

            engine = PoolEngine(session, checked, epoch, shared)
        else:
            from loaderpool.trainer.engine.local_engine import LocalEngine

            engine, own_pool = LocalEngine(checked, epoch, shared), None
        undo.pop_all()
    return engine, own_pool


def end_engine(engine: Engine, own_pool: Pool | None) -> None:
    """End the engine, and the pool with it if it was made for it."""
    if own_pool is not None:
        own_pool.close()
    engine.close()  # after the workers, if they end too: then its memory is free at once, even where the loader is kept
