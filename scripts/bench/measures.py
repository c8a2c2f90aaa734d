"""Measurements of rows. Each function is called with the row, a contestant and a window, and
returns figures by name.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

from bench.limits import LIMITS, new_rows, ready_batch
from bench.peers import as_array, as_dataset, import_what_it_needs, make_loader, own
from bench.rows import Row
from bench.samples import STEP_WIDTH, Array, tiny
from bench.windows import (
    LOOK_EVERY,
    Delivery,
    Window,
    only_tensor,
    tensor_as_array,
    verified,
)
from bench.works import WORKS, Work, check_batch, check_ends

Figures = dict[str, float]

LOCAL_ITEMS = 2**21  # more than a window needs; indices are exact in float32, and sums in float64
LOCAL_TURN_S = (
    0.0005  # shorter than the time slices of other processes, so that few turns are disturbed
)
WORK = WORKS["tiny32"]
REPETITIONS = 5  # measurements in one process, if it can make several
EPOCH_BATCHES = 1000
COLD_BATCHES = 120  # few enough that the first use of the buffers counts
# a gap is the median of several epochs, and some peers take seconds for one epoch
EPOCHS, FEWEST_EPOCHS = 40, 4
LAYERS = 6  # layers of 4 MB each, which fit into the last-level cache
LONG = 8  # factor of the matrix products in a long step
WARM_STEPS = 20
SLEEP_S = 0.002
KILLED_BATCH, KILLS = 8, 30
# batches between two kills: ten times the duration of a recovery, with two workers
BATCHES_BETWEEN = 30


# ---- rates


def rate(row: Row, contestant: str, window: Window) -> Figures:
    """Return the batches per second."""
    delivery, facts = _delivery(contestant, WORKS[row.work], row.view, window)
    return {contestant: delivery.rate, **facts}


def _delivery(contestant: str, work: Work, view: str, window: Window) -> tuple[Delivery, Figures]:
    if contestant in LIMITS:
        return LIMITS[contestant](work, window), {}
    if view == "tf":
        with as_dataset(contestant, work) as dataset:
            return verified(
                dataset, work, window, tensor_as_array, LOOK_EVERY if work.is_tiny else 1
            ), {}
    with own(contestant, work) as batches:
        delivery = verified(batches, work, window, as_array)
        return delivery, {
            "slots": batches.statistics().memory.buffers
        } if contestant == "loaderpool" else {}


def cold(row: Row, contestant: str, window: Window) -> Figures:
    """Return the batches per second of the first batches of a new loader, counted from the first
    delivery.
    """
    work = WORKS[row.work]
    if contestant == "new_rows":
        return {contestant: new_rows(work, COLD_BATCHES)}
    seen: list[tuple[int, float, float]] = []
    last_row = (work.batch_size - 1) * int(np.prod(work.shape))
    with own(contestant, work) as loader:
        is_plain = row.view == "own"
        batches = iter(loader if is_plain else loader.tensors())
        look = as_array if is_plain else tensor_as_array
        times: list[float] = []
        for position, batch in enumerate(itertools.islice(batches, COLD_BATCHES + 1)):
            array = look(batch)
            seen.append((position, array.item(0), array.item(last_row)))
            times.append(time.perf_counter())
        check_batch(work, COLD_BATCHES, array)
    check_ends(work, seen)
    return {contestant: COLD_BATCHES / (times[-1] - times[0])}


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


# ---- `workers=0` and a plain loop, in turns in one process


def local(row: Row, contestant: str, window: Window) -> Figures:
    """Return the microseconds for a batch of shuffled tiny samples."""
    import loaderpool as lp

    size = int(row.view)
    with lp.Loader(range(LOCAL_ITEMS), batch_size=4096, shuffle=True, workers=0) as indices:
        order: list[int] = np.concatenate(list(indices)).tolist()
    if sorted(order) != list(range(LOCAL_ITEMS)):
        raise ValueError("the order is no permutation")

    def loop() -> Iterator[Array]:
        for start in range(0, len(order), size):
            yield np.stack([tiny(index) for index in order[start : start + size]])

    with lp.Loader(range(LOCAL_ITEMS), tiny, batch_size=size, shuffle=True, workers=0) as loader:
        sides = {"loop": loop(), "loaderpool": iter(loader)}
        times: dict[str, list[float]] = {side: [] for side in sides}
        place, batches, ends = 0, max(1, 1024 // size), 0.0
        for number in itertools.count():
            expected = order[place : place + batches * size]
            place += len(expected)
            for side in sides if number % 2 else reversed(sides):
                times[side].append(_turn_us(sides[side], expected, size))
            if number == 40:  # the code is warm
                batches = max(1, round(1e6 * LOCAL_TURN_S / statistics.median(times["loaderpool"])))
                times = {side: [] for side in sides}
                ends = time.perf_counter() + window.seconds
            elif number > 40 and time.perf_counter() > ends:
                return {side: statistics.median(each) for side, each in times.items()}
    raise AssertionError


def _turn_us(batches: Iterator[Any], expected: list[int], size: int) -> float:
    count = len(expected) // size
    started = time.perf_counter()
    taken = list(itertools.islice(batches, count))
    elapsed_s = time.perf_counter() - started
    if sum(float(batch.sum(dtype=np.float64)) for batch in taken) != tiny(0).size * sum(expected):
        raise ValueError(f"wrong batches of {size}")
    return 1e6 * elapsed_s / count


# ---- time until the first batch, and from an epoch's last batch to the next epoch's first


def first(row: Row, contestant: str, window: Window) -> Figures:
    """Return the milliseconds from construction to the first batch, without imports."""
    if contestant == "interpreter":  # an interpreter that only imports NumPy and cloudpickle
        times_ms = []
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import numpy, cloudpickle"], check=True)
            times_ms.append(1e3 * (time.perf_counter() - started))
        return {contestant: statistics.median(times_ms)}
    if row.view == "pool":
        return {contestant: statistics.median(_on_running_pool())}
    work = dataclasses.replace(WORK, batches=4096)
    import_what_it_needs(contestant, row.view)
    started = time.perf_counter()
    with (as_dataset if row.view == "tf" else own)(contestant, work) as batches:
        batch = next(iter(batches))
        elapsed_ms = 1e3 * (time.perf_counter() - started)
        check_batch(work, 0, (tensor_as_array if row.view == "tf" else as_array)(batch))
    return {contestant: elapsed_ms}


def _on_running_pool() -> list[float]:
    """Return the times of second loaders, on workers that have served another loader."""
    import loaderpool as lp

    times_ms = []
    with lp.Pool(workers=WORK.workers) as pool, make_loader(WORK, pool) as another:
        check_batch(WORK, 0, next(iter(another)))
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            with make_loader(WORK, pool) as loader:
                batch = next(iter(loader))
                times_ms.append(1e3 * (time.perf_counter() - started))
                check_batch(WORK, 0, batch)
    return times_ms


def gap(row: Row, contestant: str, window: Window) -> Figures:
    """Return the milliseconds between two epochs, by the clock of the loop that reads them."""
    work = dataclasses.replace(WORK, batches=EPOCH_BATCHES)
    look = tensor_as_array if row.view == "tf" else as_array
    clock = time.perf_counter
    gaps_ms, batches_ms = [], []
    epochs: list[
        list[tuple[int, float, float]]
    ] = []  # verified at the end, because workers would continue during a check between two epochs
    with (as_dataset if row.view == "tf" else own)(contestant, work) as batches:
        ended, deadline = 0.0, clock() + window.seconds
        for epoch in range(EPOCHS):
            epochs.append(ends := [])
            began = now = 0.0
            for position, batch in enumerate(batches):
                now = clock()  # before any other use of the batch
                began = began or now
                array = look(batch)
                ends.append((position, array.item(0), array.item(-1)))
            gaps_ms.append(1e3 * (began - ended))
            batches_ms.append(1e3 * (now - began) / (EPOCH_BATCHES - 1))
            ended = now
            if epoch >= FEWEST_EPOCHS and now > deadline:
                break
    for ends in epochs:
        check_ends(work, ends)
        if len(ends) != EPOCH_BATCHES:
            raise ValueError(f"an epoch of {len(ends)} batches")
    # The first epochs start the workers, and measure the duration of the function.
    known = slice(max(1, len(gaps_ms) // 4), None)
    figures = {contestant: statistics.median(gaps_ms[known])}
    if contestant == "loaderpool":
        figures["three batches"] = 3 * statistics.median(batches_ms[known])
    return figures


# ---- time from step to step of a training, with the wait for the batch


def between_steps(row: Row, contestant: str, window: Window) -> Figures:
    """Return the median milliseconds from step to step."""
    import tensorflow as tf

    work = WORKS[row.work]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    weights = [
        tf.random.stateless_normal((STEP_WIDTH, STEP_WIDTH), (0, layer), stddev=STEP_WIDTH**-0.5)
        for layer in range(LAYERS)
    ]

    @tf.function
    def step(batch: Any) -> Any:
        values = batch
        for weight in weights * (LONG if row.work == "step" else 1):
            values = tf.nn.relu(values @ weight)
        return tf.reduce_sum(values), batch[0, 0]

    if contestant == "ready":
        tensor = tf.constant(ready_batch(work))
        return {contestant: _walk((tensor for _ in range(work.batches)), step, None, window)}
    with (as_dataset if row.view == "tf" else own)(contestant, work) as batches:
        tensors = (
            batches
            if row.view == "tf"
            else (tf.convert_to_tensor(as_array(batch)) for batch in batches)
        )
        return {contestant: _walk(tensors, step, work, window)}


def _walk(batches: Any, step: Any, work: Work | None, window: Window) -> float:
    between_ms: list[float] = []
    firsts: list[float] = []
    ended = deadline = 0.0
    for number, element in enumerate(batches):
        total, first = step(only_tensor(element))
        float(total)  # waits for the result
        now = time.perf_counter()
        firsts.append(float(first))
        if number == WARM_STEPS:
            deadline = now + window.seconds
        elif number > WARM_STEPS:
            between_ms.append((now - ended) * 1e3)
            if now > deadline:
                break
        ended = now
    if work is not None and firsts != [
        work.token(number * work.batch_size) for number in range(len(firsts))
    ]:
        raise ValueError("batches are wrong, missing or out of order")
    return statistics.median(between_ms)


# ---- time for which the work of a dead worker rests


def who_and_when(item: int) -> Array:
    """Return the item, the process that made it, and the time."""
    time.sleep(SLEEP_S)
    return np.array([item, os.getpid(), time.monotonic_ns()])


def recovery(row: Row, contestant: str, window: Window) -> Figures:
    """Return the milliseconds from just before a worker's SIGKILL to the end of its replacement's
    first row.
    """
    import loaderpool as lp

    rows: list[Array] = []
    killed_ns: list[int] = []
    items = range((KILLS + 2) * BATCHES_BETWEEN * KILLED_BATCH)
    limits = lp.Limits(restarts=None)
    with lp.Loader(
        items, who_and_when, batch_size=KILLED_BATCH, workers=2, limits=limits
    ) as loader:
        for number, batch in enumerate(loader, start=1):
            rows.append(batch.copy())
            if number % BATCHES_BETWEEN == 0 and len(killed_ns) < KILLS:
                worker = psutil.Process(
                    loader.statistics().workers[number // BATCHES_BETWEEN % 2].pid
                )
                if os.getpid() not in (parent.pid for parent in worker.parents()):
                    raise ValueError(f"{worker} is no worker of ours")
                killed_ns.append(time.monotonic_ns())
                os.kill(worker.pid, signal.SIGKILL)
    found = np.concatenate(rows)
    if found[:, 0].tolist() != list(items):
        raise ValueError("items are wrong, missing or out of order")
    began = sorted(
        int(found[found[:, 1] == pid, 2].min()) for pid in np.unique(found[:, 1]).tolist()
    )
    if len(began) != KILLS + 2:
        raise ValueError(f"{KILLS} kills, {len(began) - 2} replacements")
    return {
        contestant: statistics.median(
            (began[2 + kill] - when) / 1e6 for kill, when in enumerate(killed_ns)
        )
    }
