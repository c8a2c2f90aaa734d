"""Steps of Keras' `fit` on three backends. The model is as small as possible, so that the data take
most of the time.
"""

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

WARM_STEPS = 20  # the compiler makes the first steps slow, and meanwhile the queues fill
FACTOR = 31  # makes the checksum of the first numbers depend on their order


def steps(row: Row, contestant: str, window: Window) -> dict[str, float]:
    """Return the steps per second, or the batches per second of a limit. A metric of the model
    verifies the first numbers of all batches.
    """
    work = WORKS[row.work]
    if contestant in LIMITS:
        return {contestant: LIMITS[contestant](work, window).rate}
    os.environ["KERAS_BACKEND"] = row.view
    if contestant in row.peers:
        multiprocessing.set_start_method("forkserver")  # a fork beside JAX's threads may deadlock
    metric = _first_numbers()
    with _batches(contestant, work) as batches:
        # XLA on the CPU would compile the model of TensorFlow's backend, which takes time and gains
        # nothing.
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
    """Return the batches in the form that `fit` expects. Keras would split a batch that is not in a
    tuple.
    """
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
    """Metric with the number of batches, and a checksum of their first numbers that depends on the
    order.
    """
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
    """Return a compiled model with one weight and one bias for the first column of each batch. Its
    metric sees each batch.
    """
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
    """Return the seconds of a step after the first ones, and the number of all steps."""
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
