"""Two ways to feed the same function to the same network, measured alike: samples/s, and the time waited for data.

They take turns of some batches, the one and the other beginning in turn (A B, B A, A B, ...), so that other work on the
machine meets both alike, and each pair of turns gives a ratio of its own. Each turn is checked to have had the samples
that it should. Its clock starts before the dataset is made. The pool starts once, before the turns, and is timed there.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import loaderpool as lp

from .loading import SIZE_PX, Item, load_and_augment
from .network import make_traced_network
from .others import Others

__all__ = ["Contest", "Measurement", "ResultError", "Side", "hold"]

_PREFETCH = 2  # batches; the default of as_dataset
# Some seconds on a busy machine. Shorter, and filling and draining the pipes is much of a turn; longer, and what other
# processes do in one turn is over in the next.
_TURN_BATCHES = 10


class ResultError(AssertionError):
    """A contestant delivered other samples than its turn has, so its time means nothing."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one contestant did in one turn."""

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
class Side:
    """All turns of one contestant."""

    turns: tuple[Measurement, ...]

    @property
    def samples(self) -> int:
        return sum(each.samples for each in self.turns)

    @property
    def samples_per_s(self) -> float:
        """The median of the turns, as one burst of other work shall count little."""
        return statistics.median(each.samples_per_s for each in self.turns)

    @property
    def wait_s(self) -> float:
        """Of all turns."""
        return sum(each.wait_s for each in self.turns)

    @property
    def wait_share(self) -> float:
        """0..1."""
        return self.wait_s / sum(each.elapsed_s for each in self.turns)


@dataclasses.dataclass(frozen=True)
class Contest:
    """What both did, and what the loaders tell."""

    from_generator: Side
    loaderpool: Side
    workers: int  # worker processes of loaderpool
    start_s: float  # from nothing to loaderpool's first batch and the step on it, once; no turn counts it
    batches: int  # that loaderpool handed over in its turns
    batches_lent: int  # of these, those that TensorFlow got without a copy
    others_busy_cpus: float | None  # CPUs that other processes kept busy meanwhile; None: unknown
    cpus: int  # that the machine has

    @property
    def ratios(self) -> list[float]:
        """Of each pair of turns, ascending: how many times as many samples/s loaderpool had."""
        pairs = zip(self.loaderpool.turns, self.from_generator.turns, strict=True)
        return sorted(ours.samples_per_s / plain.samples_per_s for ours, plain in pairs)

    @property
    def ratio(self) -> float:
        """Their median."""
        return statistics.median(self.ratios)


def hold(items: Sequence[Item], *, rounds: int, batch_size: int) -> Contest:
    """Each contestant has trained a network of its own for `rounds` epochs of `items`, in turns.

    Raises:
        ResultError: one of them delivered other samples.
    """
    networks = [make_traced_network(len(items), batch_size=batch_size, epochs=rounds) for _ in range(2)]
    plain: list[Measurement] = []
    pooled: list[Measurement] = []
    told: list[lp.Statistics] = []
    others = Others()
    first = items[:batch_size]
    _feed_by_generator(networks[0], first, batch_size, 0)  # what TensorFlow does once is of no turn
    started_s = time.perf_counter()
    with lp.Pool() as pool:
        _feed_by_loaderpool(networks[1], first, batch_size, 0, pool)
        start_s = time.perf_counter() - started_s
        for turn, part in enumerate(_turns(items, rounds, batch_size)):
            for is_ours in (False, True) if turn % 2 == 0 else (True, False):
                if is_ours:
                    measurement, statistics_ = _feed_by_loaderpool(networks[1], part, batch_size, turn, pool)
                    pooled.append(measurement)
                    told.append(statistics_)
                else:
                    plain.append(_feed_by_generator(networks[0], part, batch_size, turn))
        others_busy_cpus = others.busy_cpus()
    return Contest(
        from_generator=Side(tuple(plain)),
        loaderpool=Side(tuple(pooled)),
        workers=len(told[0].workers),
        start_s=start_s,
        batches=sum(each.batches for each in told),
        batches_lent=sum(each.batches_lent for each in told),
        others_busy_cpus=others_busy_cpus,
        cpus=others.cpus,
    )


def _turns(items: Sequence[Item], rounds: int, batch_size: int) -> Iterator[list[Item]]:
    """The epochs, each in an order of its own, cut into parts of some whole batches."""
    rows = _TURN_BATCHES * batch_size
    for epoch in range(rounds):
        order = np.random.default_rng(epoch).permutation(len(items)).tolist()
        for start in range(0, len(order), rows):
            yield [items[index] for index in order[start : start + rows]]


def _feed_by_loaderpool(
    network: Any, items: Sequence[Item], batch_size: int, seed: int, pool: lp.Pool
) -> tuple[Measurement, lp.Statistics]:
    started_s = time.perf_counter()
    # A loader of its own for each turn: nothing is read ahead while the other contestant is measured.
    with lp.Loader(items, load_and_augment, batch_size=batch_size, shuffle=True, seed=seed, workers=pool) as loader:
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
        raise ResultError(f"the labels seen were {dict(seen)}, but the turn has {dict(expected)}")
    return Measurement(sum(seen.values()), elapsed_s, wait_s)
