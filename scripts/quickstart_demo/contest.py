"""Two ways to feed the same function to the same network, measured alike: samples/s, and the time waited for data.

They take turns, an epoch each, so that other work on the machine meets both; each epoch is checked to have had the
samples that it should. The clock starts before anything is made that feeds, so that start-up counts.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import loaderpool as lp

from .loading import SIZE_PX, Item, load_and_augment
from .network import make_traced_network

__all__ = ["Contest", "Measurement", "ResultError", "hold"]

_PREFETCH = 2  # batches; the default of as_dataset


class ResultError(AssertionError):
    """A contestant delivered other samples than the epoch has, so its time means nothing."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one contestant did in one epoch."""

    samples: int  # samples trained on
    elapsed_s: float  # from before the dataset is made to the end of the last step
    wait_s: float  # part of it spent in next(iterator)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.elapsed_s

    @property
    def wait_share(self) -> float:
        """0..1."""
        return self.wait_s / self.elapsed_s


@dataclasses.dataclass(frozen=True)
class Contest:
    """The epochs of middle speed, as one burst of other work shall count little, and what the loaders tell."""

    from_generator: Measurement
    loaderpool: Measurement
    workers: int  # worker processes of loaderpool
    batches: int  # that loaderpool handed over, all rounds
    batches_lent: int  # of these, those that TensorFlow got without a copy


def hold(items: Sequence[Item], *, rounds: int, batch_size: int) -> Contest:
    """Each contestant has trained a network of its own for `rounds` epochs of `items`.

    Raises:
        ResultError: one of them delivered other samples.
    """
    plain_network, pooled_network = (
        make_traced_network(len(items), batch_size=batch_size, epochs=rounds) for _ in range(2)
    )
    plain: list[Measurement] = []
    pooled: list[Measurement] = []
    told: list[lp.Statistics] = []
    for seed in range(rounds):
        plain.append(_feed_by_generator(plain_network, items, batch_size, seed))
        measurement, statistics = _feed_by_loaderpool(pooled_network, items, batch_size, seed)
        pooled.append(measurement)
        told.append(statistics)
    return Contest(
        from_generator=_middle(plain),
        loaderpool=_middle(pooled),
        workers=len(told[0].workers),
        batches=sum(each.batches for each in told),
        batches_lent=sum(each.batches_lent for each in told),
    )


def _feed_by_loaderpool(
    network: Any, items: Sequence[Item], batch_size: int, seed: int
) -> tuple[Measurement, lp.Statistics]:
    started_s = time.perf_counter()
    # Closed each time, or it would read the next epoch ahead while the other contestant is measured.
    with lp.Loader(items, load_and_augment, batch_size=batch_size, shuffle=True, seed=seed) as loader:
        measurement = _train(network, loader.as_dataset(prefetch=_PREFETCH), items, started_s)
        return measurement, loader.statistics()


def _feed_by_generator(network: Any, items: Sequence[Item], batch_size: int, seed: int) -> Measurement:
    """The baseline is given what helps it: ready batches, as each element costs TensorFlow some hundred microseconds,
    and prefetch, so that loading goes on beside the training.
    """
    started_s = time.perf_counter()

    def batches() -> Iterator[tuple[Any, Any]]:
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(items))
        for start in range(0, len(order), batch_size):
            samples = [load_and_augment(items[index], rng) for index in order[start : start + batch_size]]
            images, labels = zip(*samples, strict=True)
            yield np.stack(images), np.array(labels)

    signature = (tf.TensorSpec((None, SIZE_PX, SIZE_PX, 3), tf.float32), tf.TensorSpec((None,), tf.int64))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(_PREFETCH)
    return _train(network, dataset, items, started_s)


def _train(network: Any, dataset: Any, items: Sequence[Item], started_s: float) -> Measurement:
    """The network has been trained on all that the dataset has, and that was each label as often as `items` has it."""
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
        raise ResultError(f"the labels seen were {dict(seen)}, but an epoch has {dict(expected)}")
    return Measurement(sum(seen.values()), elapsed_s, wait_s)


def _middle(rounds: Sequence[Measurement]) -> Measurement:
    """The median by speed; of two, the slower."""
    return sorted(rounds, key=lambda each: each.samples_per_s)[(len(rounds) - 1) // 2]
