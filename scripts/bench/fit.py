"""Steps of Keras' `fit` with the smallest model there is, on three backends: what is measured is how its data come."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any

from bench.limits import LIMITS
from bench.peers import Samples, as_dataset, grain_dataset, make_loader
from bench.rows import Row
from bench.windows import Window
from bench.works import WORKS, Work

WARM_STEPS = 20  # the first ones meet the compiler, and queues that it has let fill up
FACTOR = 31  # makes the sum of the first numbers depend on their order


def steps(row: Row, contestant: str, window: Window) -> dict[str, float]:
    """Steps per second; of a limit, batches. The first numbers of all batches are verified by a metric of the model."""
    work = WORKS[row.work]
    if contestant in LIMITS:
        return {contestant: LIMITS[contestant](work, window).rate}
    os.environ["KERAS_BACKEND"] = row.view
    if contestant in row.peers:
        multiprocessing.set_start_method("forkserver")  # a fork beside JAX's threads may deadlock
    metric = _first_numbers()
    with _batches(contestant, work) as batches:
        # XLA on the CPU would compile the model of TensorFlow's backend, for nothing.
        model = _least_model(
            work, metric, jit_compile=False if row.view == "tensorflow" else "auto"
        )
        seconds, taken = _time_steps(model, batches, window.seconds)
    total = 0
    for position in range(taken):
        total = (total * FACTOR + work.token(position * work.batch_size) + 2**31) % 2**32 - 2**31
    if (int(metric.count), int(metric.total)) != (taken, total):
        raise ValueError(f"the first numbers of {taken} batches are wrong")
    return {contestant: 1 / seconds}


@contextlib.contextmanager
def _batches(contestant: str, work: Work) -> Iterator[Any]:
    """What `fit` takes. Keras splits what comes in no tuple."""
    if contestant == "torch":
        from torch.utils.data import DataLoader

        samples: Any = Samples(work, is_whole=False, is_tuple=True)
        yield DataLoader(
            samples, batch_size=work.batch_size, num_workers=work.workers, persistent_workers=True
        )
    elif contestant == "keras":
        from bench.peer_keras import Batches

        yield Batches(work, use_multiprocessing=True)
    elif contestant == "grain":
        yield grain_dataset(work, _as_tuple)
    elif contestant == "serial":
        with as_dataset(contestant, work) as dataset:
            yield dataset
    else:
        with make_loader(work) as loader:
            yield (
                loader.as_dataset(epochs=None)
                if contestant == "as_dataset"
                else loader.for_keras(epochs=None)
            )


def _as_tuple(batch: Any) -> Any:
    return (batch,)


def _first_numbers() -> Any:
    """A metric: how many batches there were, and a sum of their first numbers that depends on their order."""
    import keras
    from keras import ops

    class FirstNumbers(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="first_numbers", dtype="int32")
            self.count, self.total = (
                self.add_variable((), "zeros", "int32", name=name) for name in ("count", "total")
            )

        def update_state(self, x: Any, *_: Any, **__: Any) -> None:
            first = ops.cast(ops.reshape(x, (-1,))[0], "int32")
            self.total.assign(self.total * FACTOR + first)
            self.count.assign(self.count + 1)

        def result(self) -> Any:
            return ops.convert_to_tensor(self.count)

    return FirstNumbers()


def _least_model(work: Work, metric: Any, jit_compile: bool | str) -> Any:
    """A compiled model of one weight and one bias for each batch's first column; its metric gets each batch."""
    import keras

    class Least(keras.Model):  # type: ignore[misc]
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any
        ) -> Any:
            return keras.ops.mean(y_pred)

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            metric.update_state(x)
            return self.get_metrics_result()

        @property
        def metrics(self) -> list[Any]:
            return [*super().metrics, metric]

    inputs = keras.Input(work.shape, dtype=work.dtype.__name__)
    first = keras.layers.Lambda(lambda x: keras.ops.cast(x[:, :1], "float32"))(
        keras.layers.Reshape((-1,))(inputs)
    )
    model = Least(inputs, keras.layers.Dense(1)(first))
    model.compile("sgd", jit_compile=jit_compile)
    return model


def _time_steps(model: Any, batches: Any, seconds: float) -> tuple[float, int]:
    """Seconds of a step behind the first ones, and how many were taken in all."""
    import keras

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        taken, started, ended = 0, 0.0, 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.perf_counter()
            self.taken = batch + 1
            if self.taken == WARM_STEPS:
                self.started = now
            if self.taken > WARM_STEPS:
                self.ended = now
                self.model.stop_training = now > self.started + seconds

    clock = Clock()
    model.fit(batches, steps_per_epoch=10**6, shuffle=False, verbose=0, callbacks=[clock])
    return (clock.ended - clock.started) / (clock.taken - WARM_STEPS), clock.taken
