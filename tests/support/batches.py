"""Batches as tests compare them: to the bit, in dtype, shape and structure; pools that tests share; users that fork."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

import loaderpool as lp
from loaderpool.element.spec import RaggedArray
from tests.support import leaks
from tests.support.processes import found as found_process
from tests.support.processes import is_alive, parents, strike, supervisors, wait_gone

# Arguments of a Loader that say where it runs: a pool's workers, or (0) this process.
Place = Callable[[int], dict[str, Any]]


def copied(batch: Any) -> Any:
    """The batch in memory of its own."""
    if isinstance(batch, dict):
        return {key: copied(part) for key, part in batch.items()}
    if isinstance(batch, tuple):
        parts = [copied(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, RaggedArray):
        return RaggedArray(batch.values.copy(), batch.row_splits.copy())
    return batch.copy()


def read(batches: Iterable[Any], passes: int = 1) -> list[Any]:
    """All batches of some passes, each copied the moment it came."""
    return [copied(batch) for _ in range(passes) for batch in batches]


def read_while(batches: Iterable[Any], doing: Mapping[int, Callable[[], object]]) -> list[Any]:
    """All batches of a pass, each copied and let go of; behind those of these numbers something is done."""
    got = []
    for number, batch in enumerate(batches):
        got.append(copied(batch))
        del batch
        if number in doing:
            doing[number]()
    return got


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Both have the same structure, and arrays of the same dtype, shape and bits."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), where
        for place, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}[{place}]")
    elif isinstance(expected, RaggedArray):
        assert_same(
            (actual.values, actual.row_splits), (expected.values, expected.row_splits), where
        )
    else:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        if expected.dtype == object:
            texts = actual.ravel().tolist(), expected.ravel().tolist()
            assert texts[0] == texts[1] and list(map(type, texts[0])) == list(
                map(type, texts[1])
            ), where
        else:
            assert actual.tobytes() == expected.tobytes(), f"{where}: {actual} is not {expected}"


def indices_in(batches: Iterable[Any]) -> list[int]:
    """Return all numbers of the batches in order. For tuples, use the first component."""
    return [
        int(index)
        for batch in batches
        for index in np.ravel(batch[0] if isinstance(batch, tuple) else batch)
    ]


def rows(batches: Iterable[Any]) -> list[tuple[float, ...]]:
    """Return all rows of batches. Each batch is a tuple of arrays with one axis."""
    return [
        row for batch in batches for row in zip(*(part.tolist() for part in batch), strict=True)
    ]


@contextmanager
def shared_pools() -> Iterator[Place]:
    """Gives pools that are started once for each number of workers; what they leave behind in the end is an error.

    Loading replaces a pool's workers, so that single tests cannot be watched for what they leave; the block is.
    """
    with leaks.guard():
        pools: dict[int, lp.Pool] = {}

        def place(workers: int) -> dict[str, Any]:
            if not workers:
                return {"workers": 0}
            return {"workers": pools.setdefault(workers, lp.Pool(workers))}

        try:
            yield place
        finally:
            while pools:  # each holds the mapping that its arrays may look at
                pools.popitem()[1].close()


def told_when(loader: lp.Loader, is_so: Callable[[lp.Statistics], bool]) -> lp.Statistics:
    """Statistics once they are so: hosts tell of themselves with their next answer, and Ray of a death in its time."""
    until_s = time.monotonic() + 20
    while not is_so(told := loader.statistics()):
        assert time.monotonic() < until_s, told
        time.sleep(0.01)
    return told


def kill_worker(loader: lp.Loader) -> int:
    """End a worker, and return its pid; where all have just ended, another one is waited for."""
    pid = strike(
        lambda: [
            worker.pid
            for worker in loader.statistics().workers
            if worker.pid and is_alive(worker.pid)
        ]
    )
    wait_gone([pid], 20.0)  # on a busy machine it could be met once more
    return pid


def supervisor_of(loader: lp.Loader) -> int:
    """The supervisor of a loader's pool; dead or alive, but not reaped, so that its pid is its own.

    Spawned workers have a thread of this process in its place: then it is this process.
    """

    def look() -> list[int]:
        workers = loader.statistics().workers  # first: it may have another supervisor started
        born_of = parents()
        of_workers = {born_of.get(worker.pid or 0) for worker in workers}
        alive, dead = supervisors()
        theirs = [pid for pid in (*alive, os.getpid()) if pid in of_workers]
        return theirs or dead or alive * (len(alive) == 1)

    return found_process(look)


def kill_supervisor(loader: lp.Loader) -> int:
    """End the supervisor, and return its pid."""
    return strike(lambda: [supervisor_of(loader)])
