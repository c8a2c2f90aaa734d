"""The network, and one measurement for both ways to feed it: samples/s, and the time spent waiting for a batch."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .loading import CLASSES, SIZE_PX, Item, Sample

__all__ = [
    "Measurement",
    "ResultError",
    "make_network",
    "make_traced_network",
    "median_of",
    "plain_dataset",
    "train_measured",
]


class ResultError(AssertionError):
    """A contestant delivered other samples than the epoch has, so its time means nothing."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one contestant did in one epoch."""

    samples: int  # samples trained on
    elapsed_s: float  # from asking for the dataset to the end of the last step
    wait_s: float  # part of it spent in next(iterator)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.elapsed_s

    @property
    def wait_share(self) -> float:
        """0..1."""
        return self.wait_s / self.elapsed_s


def make_network(total_steps: int) -> Any:
    """A compiled Keras model from float32[n, 96, 96, 3] to ten logits; the same weights each time.

    Small on purpose: it costs less than reading a JPEG file, as a network on a GPU does.
    """
    keras.utils.set_random_seed(0)
    layers = keras.layers

    def convolution(filters: int, width: int, stride: int) -> list[Any]:
        return [
            layers.Conv2D(filters, width, strides=stride, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),  # 0.99 would need more steps than a short training has
            layers.ReLU(),
        ]

    network = keras.Sequential(
        [
            keras.Input((SIZE_PX, SIZE_PX, 3)),
            *convolution(16, 7, 4),
            *convolution(32, 3, 1),
            layers.MaxPooling2D(),
            *convolution(64, 3, 1),
            layers.MaxPooling2D(),
            *convolution(64, 3, 1),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(CLASSES),
        ]
    )
    network.compile(
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, total_steps)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def plain_dataset(
    items: Sequence[Item],
    fn: Callable[[Item, np.random.Generator], Sample],
    *,
    batch_size: int,
    seed: int,
) -> tf.data.Dataset:
    """The baseline: one epoch of `fn` in `tf.data.Dataset.from_generator`, in shuffled order.

    It is given what helps it: ready batches, as each element costs TensorFlow some hundred microseconds, and prefetch,
    so that loading goes on beside the training.
    """

    def batches() -> Iterator[tuple[Any, Any]]:
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(items))
        for start in range(0, len(order), batch_size):
            samples = [fn(items[index], rng) for index in order[start : start + batch_size]]
            images, labels = zip(*samples, strict=True)
            yield np.stack(images), np.array(labels)

    signature = (tf.TensorSpec((None, SIZE_PX, SIZE_PX, 3), tf.float32), tf.TensorSpec((None,), tf.int64))
    return tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(2)


def make_traced_network(items: Sequence[Item], *, batch_size: int, epochs: int) -> Any:
    """As make_network, after a step for whole batches and one for the last, smaller one: TensorFlow traces both."""
    network = make_network(total_steps=epochs * -(-len(items) // batch_size))
    for rows in {batch_size, len(items) % batch_size or batch_size}:
        network.train_on_batch(np.zeros((rows, SIZE_PX, SIZE_PX, 3), np.float32), np.zeros(rows, np.int64))
    return network


def train_measured(
    network: Any, make_dataset: Callable[[], Iterable[tuple[Any, Any]]], items: Sequence[Item]
) -> Measurement:
    """The network has been trained on all the dataset has, and that was each label as often as `items` has it.

    The clock starts before the dataset is made, so that what it starts up (processes, buffers) counts.

    Raises:
        ResultError: other labels came.
    """
    seen: collections.Counter[int] = collections.Counter()
    wait_s = 0.0
    started_s = time.perf_counter()
    iterator = iter(make_dataset())
    while True:
        asked_s = time.perf_counter()
        batch = next(iterator, None)
        wait_s += time.perf_counter() - asked_s
        if batch is None:
            break
        network.train_on_batch(*batch)
        seen.update(batch[1].numpy().tolist())
    elapsed_s = time.perf_counter() - started_s
    expected = collections.Counter(label for _, label in items)
    if seen != expected:
        raise ResultError(f"the labels seen were {dict(seen)}, but an epoch has {dict(expected)}")
    return Measurement(sum(seen.values()), elapsed_s, wait_s)


def median_of(rounds: Sequence[Measurement]) -> Measurement:
    """The round of the middle speed (the slower of two), so that one burst of other work on the machine counts little."""
    return sorted(rounds, key=lambda each: each.samples_per_s)[(len(rounds) - 1) // 2]
