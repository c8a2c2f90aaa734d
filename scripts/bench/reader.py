"""What does it bring to read a Python-heavy stream in a process of its own, beside a step that is busy, too?

Work: an iterable whose items take some 0.3 ms of pure Python each (JSON, words counted), in batches of 32, two workers
that do next to nothing. The step takes about as long as the reading of a batch: in a loop as much pure Python, in a
`fit` a small dense network. Stream and step both want the interpreter, if they share one.
Baseline: the same iterable on a thread of the trainer, where one goes that cannot be pickled.
Bar: 1.15 times the rate of the thread. Below that the reader would not be worth its code (docs/decisions, 22).
Verified: the sum over each batch of the loop; over `fit` the mean of all that its steps were given.
Command: scripts/bench/run reader

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    reader      loop_process       220 batches/s [216 .. 225]       2.01 x loop_thread (best 1.95; bar ≥ 1.15)
    reader      loop_process_step    4.15 ms        [4.11 .. 4.15]
    reader      loop_thread        109 batches/s [96.1 .. 115]
    reader      loop_thread_step     4.1 ms        [4.04 .. 4.21]
    reader      fit_process        131 batches/s [122 .. 134]       1.18 x fit_thread (best 1.12; bar ≥ 1.15)
    reader      fit_process_step    7.82 ms        [7.7 .. 8.15]
    reader      fit_thread         111 batches/s [107 .. 120]
    reader      fit_thread_step    8.89 ms        [7.7 .. 9.31]
"""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchlib.model import Bar, Figure, Measured, Question, Window, require
from benchlib.windows import delivered

BATCH_SIZE = 32
WORKERS = 2
ITEMS = 10**9  # more than a window needs
PARSES = 26  # of an item: 0.3 ms
UNITS = 1536  # of each of two layers: steps of some 10 ms on two cores
_LINE = json.dumps({"text": "The quick brown fox jumps, over the lazy dog. " * 6})


def parse() -> int:
    """The work that an item takes."""
    total = 0
    for _ in range(PARSES):
        for word in json.loads(_LINE)["text"].split():
            total += len(word.lower().strip(".,"))
    return total


class Lines:
    """Parsed items; each begins anew at 0."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for number in range(ITEMS):
            yield number, parse()


class LinesHere(Lines):
    """The same for the thread: what cannot be pickled is read where it is."""

    def __reduce__(self) -> Any:
        raise TypeError("it stays in the trainer")


SOURCES = {"process": Lines, "thread": LinesHere}


def sample(item: tuple[int, int]) -> tuple[npt.NDArray[np.float32], np.float64]:
    """What a worker makes of an item."""
    return np.full(64, item[0] % 7, np.float32), np.float64(item[0])


def loader_of(where: str) -> Any:
    """A loader of the stream, read there."""
    import loaderpool as lp

    loader = lp.Loader(SOURCES[where](), sample, batch_size=BATCH_SIZE, workers=WORKERS)
    require(loader.statistics().stream_read_by == where, f"the stream is not read by a {where}")
    return loader


def beside_loop(where: str, window: Window) -> Measured:
    steps_ms: list[float] = []

    def step(batch: Any) -> float:
        started = time.perf_counter()
        for _ in range(BATCH_SIZE):
            parse()
        steps_ms.append(1e3 * (time.perf_counter() - started))
        return float(batch[1].sum())

    with loader_of(where) as loader:
        delivery = delivered(loader, window, step)
    sums = delivery.seen
    expected = [sum(range(first, first + BATCH_SIZE)) for first in range(0, len(sums) * BATCH_SIZE, BATCH_SIZE)]
    require(sums == expected, "wrong batches")
    return Measured({f"loop_{where}": delivery.rate, f"loop_{where}_step": statistics.median(steps_ms)})


def beside_fit(where: str, window: Window) -> Measured:
    import keras

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.steps_ms: list[float] = []
            self.begun = self.ends = 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.started = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.perf_counter()
            if self.begun:
                self.steps_ms.append(1e3 * (now - self.started))
                self.model.stop_training = now >= self.ends
            else:
                self.begun, self.ends = now, now + window.seconds
            self.elapsed_s, self.mean, self.steps = now - self.begun, logs["given"], batch + 1

    def given(expected: Any, _: Any) -> Any:
        return expected

    dense = [keras.layers.Dense(UNITS, "relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *dense, keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[given])
    clock = Clock()
    with loader_of(where) as loader:
        model.fit(loader.as_dataset(epochs=None), steps_per_epoch=10**6, verbose=0, callbacks=[clock])
    mean = (clock.steps * BATCH_SIZE - 1) / 2
    require(abs(clock.mean - mean) < 1e-3 * mean, f"wrong batches: their mean is {clock.mean}, not {mean}")
    rate = len(clock.steps_ms) / clock.elapsed_s
    return Measured({f"fit_{where}": rate, f"fit_{where}_step": statistics.median(clock.steps_ms)})


_BESIDE = {"loop": (beside_loop, "a loop with a step of pure Python"), "fit": (beside_fit, "Keras' `fit`")}

QUESTION = Question(
    name="reader",
    figures=tuple(
        figure
        for name, (_, what) in _BESIDE.items()
        for where in SOURCES
        for figure in (
            Figure(f"{name}_{where}", "batches/s", f"a stream of 0.3 ms an item, read by a {where} beside {what}"),
            Figure(f"{name}_{where}_step", "ms", "its step"),
        )
    ),
    contestants={
        f"{where} beside {name}": functools.partial(contest, where)
        for name, (contest, _) in _BESIDE.items()
        for where in SOURCES
    },
    bars=tuple(Bar(f"{name}_process", f"{name}_thread", at_least=1.15) for name in _BESIDE),
    rounds=5,
    seconds=1.5,
    warm_s=0.3,
)
