"""Read, copy and compare batches to the bit, in dtype, shape and structure; pools that tests share;
kills of processes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
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

# Returns arguments of a Loader, for a number of workers: those of a shared pool, or this process
# (0).
Place = Callable[[int], dict[str, Any]]


def copied(batch: Any) -> Any:
    """Return a copy of a batch."""
    if isinstance(batch, dict):
        return {key: copied(part) for key, part in batch.items()}
    if isinstance(batch, tuple):
        parts = [copied(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, RaggedArray):
        return RaggedArray(batch.values.copy(), batch.row_splits.copy())
    return batch.copy()


def read(batches: Iterable[Any], passes: int = 1) -> list[Any]:
    """Return all batches of some passes. Each is copied as soon as it arrives."""
    return [copied(batch) for _ in range(passes) for batch in batches]


def calls_of(work: Callable[[], object]) -> int:
    """Return the number of calls of Python functions that `work` makes."""
    count = itertools.count()
    sys.setprofile(lambda _frame, event, _arg: next(count) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return next(count)


def read_while(batches: Iterable[Any], doing: Mapping[int, Callable[[], object]]) -> list[Any]:
    """Return copies of all batches of a pass. After the batches with these numbers, call a
    function.
    """
    got = []
    for number, batch in enumerate(batches):
        got.append(copied(batch))
        del batch
        if number in doing:
            doing[number]()
    return got


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Assert that both have the same structure, and arrays of the same dtype, shape and bits."""
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


def rows_over_a_stop(
    make: Callable[..., lp.Loader], place: Place, choose: random.Random
) -> tuple[list[tuple[float, ...]], bool]:
    """Read epoch 1 in some ranks, stop, and read the rest in as many other ranks.

    The numbers of ranks, of workers and of batches before the stop are chosen at random.

    Args:
        make: Makes a loader for a place and a keyword `shard`.
        place: Arguments of a loader, by its number of workers.
        choose: Makes the random choices.

    Returns:
        All rows, and True if there was one rank before and after the stop.
    """
    before, after = choose.choice((1, 2, 3)), choose.choice((1, 2, 3))
    workers, taken = choose.choice((0, 0, 1, 3)), choose.randrange(0, 4)
    found: list[tuple[float, ...]] = []
    state = None
    for index in range(before):
        with make(place(0), shard=lp.Shard(before, index)) as part:
            part.epoch = 1
            iterator = iter(part)
            found += rows(itertools.islice(iterator, taken))
            state = json.loads(json.dumps(part.state_dict()))
    for index in range(after):
        with make(place(workers), shard=lp.Shard(after, index)) as part:
            part.load_state_dict(state)
            if part.epoch == 1:
                found += rows(part)
    return found, before == after == 1


@contextmanager
def shared_pools() -> Iterator[Place]:
    """Context with a function that returns a pool for each number of workers. Leaks of the pools
    are an error at the end.

    Loading replaces a pool's workers, so leaks of a single test cannot be found. The whole context
    is checked.
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
            while pools:  # each pool holds the mapping of its arrays
                pools.popitem()[1].close()


def told_when(loader: lp.Loader, is_so: Callable[[lp.Statistics], bool]) -> lp.Statistics:
    """Return the statistics when they satisfy a condition. Nodes send theirs with their next
    answer, and Ray reports deaths late.
    """
    until_s = time.monotonic() + 20
    while not is_so(told := loader.statistics()):
        assert time.monotonic() < until_s, told
        time.sleep(0.01)
    return told


def kill_worker(loader: lp.Loader) -> int:
    """Kill a worker, and return its pid. If all have just ended, wait for a replacement."""
    pid = strike(
        lambda: [
            worker.pid
            for worker in loader.statistics().workers
            if worker.pid and is_alive(worker.pid)
        ]
    )
    wait_gone([pid], 20.0)  # otherwise, on a busy machine, it could be chosen again
    return pid


def supervisor_of(loader: lp.Loader) -> int:
    """Return the pid of the pool's supervisor, dead or alive. It is not reaped, so no other process
    has its pid.

    Spawned workers have a thread in place of a supervisor. Then the pid is that of this process.
    """

    def look() -> list[int]:
        workers = loader.statistics().workers  # first, because this may start another supervisor
        born_of = parents()
        of_workers = {born_of.get(worker.pid or 0) for worker in workers}
        alive, dead = supervisors()
        theirs = [pid for pid in (*alive, os.getpid()) if pid in of_workers]
        return theirs or dead or alive * (len(alive) == 1)

    return found_process(look)


def kill_supervisor(loader: lp.Loader) -> int:
    """Kill the supervisor, and return its pid."""
    return strike(lambda: [supervisor_of(loader)])
