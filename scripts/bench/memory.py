"""Memory: how much does the pool take beside a serial run over the same data, and does it grow?

- items: two million small dicts as the source, read in shuffled order by four workers for three epochs.
- array: a function that captures an array of 2 GB and reads all of it, the same.

The serial run iterates the data in one process. What is counted is the proportional set size (`Pss` of
`/proc/PID/smaps_rollup`) of the whole tree of processes, after each epoch, less what the process had after its serial
run; so the interpreters of supervisor and workers count, and shared pages once. Baselines:

- forked: plain workers, forked by `multiprocessing` from the process that has the data, which iterate a share each.
  Reference counts copy their pages; arrays have none, so there the difference is what a supervisor costs.
- allowed: what the pool may take, 300 MB and 60 MB (the arena's slots, 1 MB here, included); and, for the growth from
  the first epoch to the third, 20 MB.

Every epoch's sum of labels, or of the array, is verified.

    scripts/bench/run memory
    scripts/bench/run memory --quick                               100,000 items and 64 MB
    BENCH_MEMORY_ITEMS=500000 BENCH_MEMORY_ARRAY_MB=1000 scripts/bench/run memory

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    memory      items_allowed      300 MB
    memory      array_allowed       60 MB
    memory      growth_allowed      20 MB
    memory      items_forked     1,025 MB
    memory      items_pool         239 MB                           0.80 x items_allowed (best 0.80; bar ≤ 1)
    memory      items_growth     0.462 MB                          0.023 x growth_allowed (best 0.023; bar ≤ 1)
    memory      array_forked      34.4 MB
    memory      array_pool        60.3 MB                           1.00 x array_allowed (best 1.00; bar ≤ 1) MISSED
    memory      array_growth     0.356 MB                          0.018 x growth_allowed (best 0.018; bar ≤ 1)
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchlib.model import Bar, Figure, Measured, Question, Window, require

WORKERS = 4
EPOCHS = 3
SECONDS = 1.0  # not a window here; a quick run has a shorter one, and is told by it
ALLOWED_MB = {"items": 300.0, "array": 60.0, "growth": 20.0}


def sizes(window: Window) -> tuple[int, int]:
    """How many items, and megabytes of array."""
    is_quick = window.seconds < SECONDS
    items = int(os.environ.get("BENCH_MEMORY_ITEMS", 100_000 if is_quick else 2_000_000))
    megabytes = int(os.environ.get("BENCH_MEMORY_ARRAY_MB", 64 if is_quick else 2000))
    return items, megabytes


def make_items(count: int) -> list[dict[str, Any]]:
    return [
        {"path": f"data/train/{i % 1000:03d}/{i:08d}.jpg", "label": i % 1000, "weight": i / 7} for i in range(count)
    ]


def make_array(megabytes: int) -> Any:
    array = np.empty((megabytes, 1_000_000), np.uint8)
    for row in range(megabytes):
        array[row] = row % 251
    return array


def tree_mb() -> float:
    """Proportional set size of this process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
            children.setdefault(parent, []).append(int(entry.name))
    waiting, kilobytes = [os.getpid()], 0
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    kilobytes += int(line.split()[1])
        except OSError:
            continue
    return kilobytes * 1024 / 1e6


def over_serial(what: str, prefix: str, serial: Callable[[], int], epochs: Iterator[int]) -> Measured:
    """What three epochs take beyond what one serial run has taken, after each is verified."""
    expected = serial()
    gc.collect()
    before_mb = tree_mb()
    found_mb = []
    for total in epochs:
        require(total == expected, f"an epoch's sum is {total}, not {expected}")
        found_mb.append(tree_mb() - before_mb)
    require(len(found_mb) == EPOCHS, "an epoch is missing")
    figures = {f"{what}_{prefix}": max(found_mb)}
    if prefix == "pool":
        figures[f"{what}_growth"] = max(found_mb[-1] - found_mb[0], 0.001)
        figures[f"{what}_allowed"] = ALLOWED_MB[what]
        if what == "items":
            figures["growth_allowed"] = ALLOWED_MB["growth"]
    return Measured(figures)


def pool_epochs(source: Any, fn: Any, batch_size: int) -> Iterator[int]:
    import loaderpool as lp

    with lp.Loader(source, fn, batch_size=batch_size, shuffle=True, workers=WORKERS) as loader:
        for _ in range(EPOCHS):
            yield sum(int(batch.sum()) for batch in loader)


@contextmanager
def forked(work: Callable[[int, int], int]) -> Iterator[list[Any]]:
    """Plain workers; each answers every epoch's number with the result of its work."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(WORKERS)]

    def serve(worker: int) -> None:
        for epoch in iter(pipes[worker][1].recv, None):
            pipes[worker][1].send(work(worker, epoch))

    processes = [context.Process(target=serve, args=(worker,)) for worker in range(WORKERS)]
    for process in processes:
        process.start()
    yield [mine for mine, _ in pipes]
    for mine, _ in pipes:
        mine.send(None)
    for process in processes:
        process.join()


def forked_epochs(size: int, value: Callable[[int], int]) -> Iterator[int]:
    def work(worker: int, epoch: int) -> int:
        order = np.random.default_rng(epoch).permutation(size)[worker::WORKERS]
        return sum(value(int(index)) for index in order)

    with forked(work) as pipes:
        for epoch in range(EPOCHS):
            for pipe in pipes:
                pipe.send(epoch)
            yield sum(pipe.recv() for pipe in pipes)


def items_pool(window: Window) -> Measured:
    items = make_items(sizes(window)[0])
    epochs = pool_epochs(items, lambda item: item["label"], 1000)
    return over_serial("items", "pool", lambda: sum(item["label"] for item in items), epochs)


def items_forked(window: Window) -> Measured:
    items = make_items(sizes(window)[0])
    epochs = forked_epochs(len(items), lambda index: items[index]["label"])
    return over_serial("items", "forked", lambda: sum(item["label"] for item in items), epochs)


def array_pool(window: Window) -> Measured:
    array = make_array(sizes(window)[1])
    epochs = pool_epochs(range(len(array)), lambda index: array[index].sum(dtype=np.int64), 4)
    return over_serial("array", "pool", lambda: sum(int(row.sum(dtype=np.int64)) for row in array), epochs)


def array_forked(window: Window) -> Measured:
    array = make_array(sizes(window)[1])
    epochs = forked_epochs(len(array), lambda index: int(array[index].sum(dtype=np.int64)))
    return over_serial("array", "forked", lambda: sum(int(row.sum(dtype=np.int64)) for row in array), epochs)


QUESTION = Question(
    name="memory",
    figures=(
        Figure("items_allowed", "MB", "what is allowed"),
        Figure("array_allowed", "MB", "what is allowed"),
        Figure("growth_allowed", "MB", "what is allowed"),
        Figure("items_forked", "MB", "dicts read by 4 plain forked workers, over a serial run"),
        Figure("items_pool", "MB", "2 million dicts as the source, 4 workers, over a serial run"),
        Figure("items_growth", "MB", "its growth from the first epoch to the third"),
        Figure("array_forked", "MB", "the array read by 4 plain forked workers, over a serial run"),
        Figure("array_pool", "MB", "a captured array of 2 GB, 4 workers, over a serial run"),
        Figure("array_growth", "MB", "its growth from the first epoch to the third"),
    ),
    contestants={
        "items_forked": items_forked,
        "items_pool": items_pool,
        "array_forked": array_forked,
        "array_pool": array_pool,
    },
    bars=(
        Bar("items_pool", "items_allowed", at_most=1.0),
        Bar("items_growth", "growth_allowed", at_most=1.0),
        Bar("array_pool", "array_allowed", at_most=1.0),
        Bar("array_growth", "growth_allowed", at_most=1.0),
    ),
    rounds=1,
    seconds=SECONDS,
)
