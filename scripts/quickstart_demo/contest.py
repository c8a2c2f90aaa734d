"""Two ways to feed the same function to the same network: samples per second, and time spent
waiting for data.

The contestants take turns of some batches, in the order A B, B A, A B, ... So other work on the
machine affects both, and each pair of turns gives a ratio. The samples of each turn are checked.
Its clock starts before the dataset is made. The pool starts once, before the turns, and its start
is measured separately.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import loaderpool as lp

from .images import CLASSES, SIZE_PX, Item, load_and_augment

_PREFETCH = 2  # number of batches; the default of as_dataset
# A turn takes some seconds on a busy machine. Shorter: filling and draining the pipeline is much of
# a turn. Longer: other processes run in one turn and not in the next.
_TURN_BATCHES = 10


class Turn(NamedTuple):
    """Result of one contestant in one turn."""

    samples: int  # number of samples in training steps
    elapsed_s: float  # time from before the dataset is made to the end of the last step
    wait_s: float  # part of it, spent in next(iterator)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.elapsed_s


@dataclasses.dataclass
class Contest:
    """Results of both contestants, and counts of the loaders."""

    plain: list[Turn] = dataclasses.field(default_factory=list)
    ours: list[Turn] = dataclasses.field(default_factory=list)
    workers: int = 0
    start_s: float = 0.0  # time until loaderpool's first step, before the turns
    batches: int = 0  # batches that loaderpool delivered in its turns
    batches_zero_copy: int = 0  # of these, batches that TensorFlow got without a copy

    @property
    def ratios(self) -> list[float]:
        """Ratio of samples per second, loaderpool to the other contestant, of each pair of turns,
        ascending.
        """
        pairs = zip(self.ours, self.plain, strict=True)
        return sorted(ours.samples_per_s / plain.samples_per_s for ours, plain in pairs)


def hold(items: Sequence[Item], *, rounds: int, batch_size: int) -> Contest:
    """Train a network with each contestant, for `rounds` epochs of `items`, in turns."""
    networks = [_traced_network(len(items), batch_size, rounds) for _ in range(2)]
    contest, first = Contest(), items[:batch_size]
    _feed_by_generator(networks[0], first, batch_size, 0)  # TensorFlow's one-time work, in no turn
    started_s = time.perf_counter()
    with lp.Pool() as pool:
        _feed_by_loaderpool(networks[1], first, batch_size, 0, pool)
        contest.start_s = time.perf_counter() - started_s
        for number, part in enumerate(_turns(items, rounds, batch_size)):
            for is_ours in (False, True) if number % 2 == 0 else (True, False):
                if is_ours:
                    turn, told = _feed_by_loaderpool(networks[1], part, batch_size, number, pool)
                    contest.ours.append(turn)
                    contest.workers = len(told.workers)
                    contest.batches += told.batches
                    contest.batches_zero_copy += told.memory.batches_zero_copy
                else:
                    contest.plain.append(_feed_by_generator(networks[0], part, batch_size, number))
    return contest


def _turns(items: Sequence[Item], rounds: int, batch_size: int) -> Iterator[list[Item]]:
    """Yield parts of the epochs. Each epoch has another order, and a part has whole batches."""
    rows = _TURN_BATCHES * batch_size
    for epoch in range(rounds):
        order = np.random.default_rng(epoch).permutation(len(items)).tolist()
        for start in range(0, len(order), rows):
            yield [items[index] for index in order[start : start + rows]]


def _feed_by_loaderpool(
    network: Any, items: Sequence[Item], batch_size: int, seed: int, pool: lp.Pool
) -> tuple[Turn, lp.Statistics]:
    started_s = time.perf_counter()
    # Each turn has a loader of its own, so that nothing is read ahead in the other contestant's
    # turn.
    with lp.Loader(
        items, load_and_augment, batch_size=batch_size, shuffle=True, seed=seed, workers=pool
    ) as loader:
        return _train(
            network, loader.as_dataset(prefetch=_PREFETCH), items, started_s
        ), loader.statistics()


def _feed_by_generator(network: Any, items: Sequence[Item], batch_size: int, seed: int) -> Turn:
    """Train with `from_generator`, in its fastest form.

    It yields whole batches, because each element takes TensorFlow some hundred microseconds. With
    prefetch, it loads during the training.
    """
    started_s = time.perf_counter()

    def batches() -> Iterator[tuple[Any, Any]]:
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(items))
        for start in range(0, len(order), batch_size):
            samples = [
                load_and_augment(items[index], rng) for index in order[start : start + batch_size]
            ]
            images, labels = zip(*samples, strict=True)
            yield np.stack(images), np.array(labels)

    signature = (
        tf.TensorSpec((None, SIZE_PX, SIZE_PX, 3), tf.float32),
        tf.TensorSpec((None,), tf.int64),
    )
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(
        _PREFETCH
    )
    return _train(network, dataset, items, started_s)


def _train(network: Any, dataset: Any, items: Sequence[Item], started_s: float) -> Turn:
    """Train the network on the whole dataset. Check that each label came as often as in `items`."""
    seen: collections.Counter[int] = collections.Counter()
    wait_s = 0.0
    iterator = iter(dataset)
    while True:
        asked_s = time.perf_counter()
        batch = next(iterator, None)
        wait_s += time.perf_counter() - asked_s
        if batch is None:
            break
        images, labels = batch
        network.train_on_batch(images, labels)
        seen.update(labels.numpy().tolist())
    elapsed_s = time.perf_counter() - started_s
    expected = collections.Counter(label for _, label in items)
    if seen != expected:
        raise AssertionError(
            f"the labels seen were {dict(seen)}, but the turn has {dict(expected)}"
        )
    return Turn(sum(seen.values()), elapsed_s, wait_s)


def make_network(total_steps: int) -> Any:
    """Return a compiled Keras model from float32[n, 96, 96, 3] to ten logits, with the same weights
    each time.

    It is small, because on a GPU, too, a step takes less time than one core needs to load its
    samples.
    """
    keras.utils.set_random_seed(0)
    layers = keras.layers

    def convolution(filters: int, width: int, stride: int) -> list[Any]:
        return [
            layers.Conv2D(filters, width, strides=stride, padding="same", use_bias=False),
            layers.BatchNormalization(
                momentum=0.9
            ),  # the default of 0.99 would need more steps than a short training has
            layers.ReLU(),
        ]

    network = keras.Sequential(
        [
            keras.Input((SIZE_PX, SIZE_PX, 3)), *convolution(16, 4, 4), layers.MaxPooling2D(),
            *convolution(32, 3, 1), *convolution(32, 3, 1), layers.MaxPooling2D(),
            *convolution(64, 3, 1), *convolution(64, 3, 1),
            layers.Flatten(), layers.Dropout(0.2), layers.Dense(CLASSES),
        ]
    )  # fmt: skip
    network.compile(
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, total_steps)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def _traced_network(samples: int, batch_size: int, epochs: int) -> Any:
    """Return a network after one step with a whole batch, and one with the smaller last batch.
    TensorFlow traces both.
    """
    network = make_network(total_steps=epochs * -(-samples // batch_size))
    for rows in {batch_size, samples % batch_size or batch_size}:
        network.train_on_batch(
            np.zeros((rows, SIZE_PX, SIZE_PX, 3), np.float32), np.zeros(rows, np.int64)
        )
    return network
