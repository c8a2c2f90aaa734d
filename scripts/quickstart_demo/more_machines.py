"""scripts/quickstart --ray: the same training on a cluster, of which a node ends in mid-epoch; the weights tell.

The cluster's nodes are processes of this machine, and nothing is left of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import loaderpool as lp
from tests.support.ray_cluster import RayCluster

from .loading import Item, load_and_augment
from .network import make_network

__all__ = ["show"]

_NODES = 3
_BATCH_SIZE = 8  # small ones, so that there are many to be lost


@dataclasses.dataclass(frozen=True)
class _Trained:
    """What a training came to."""

    how: str
    samples: int
    elapsed_s: float
    weights: str  # their SHA-256
    hosts_replaced: int

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.elapsed_s


def show(console: Console, items: Sequence[Item], epochs: int) -> None:
    """Train three times, and say whether the weights are the same.

    Args:
        console: takes what is said.
        items: to train on.
        epochs: of each training, at least 2.
    """
    tf.config.experimental.enable_op_determinism()  # else TensorFlow itself adds up in another order each time
    console.print(f"training three times, {epochs} epochs each: the same model, seed and data")
    here = _train("this process, workers=0", items, epochs, 0)
    version = importlib.metadata.version("ray")
    console.print(f"Ray {version} with {_NODES} nodes of one CPU each, which are processes of this machine")
    with RayCluster(nodes=_NODES) as cluster:
        with lp.RayPool(cluster.address) as pool:
            there = _train(f"RayPool, {_NODES} nodes", items, epochs, pool)

        def cut_node_off() -> None:
            console.print("in the midst of an epoch all processes of a node are killed", style="bold")
            cluster.cut_off(1)

        with lp.RayPool(cluster.address) as pool:
            shot = _train("RayPool, a node is killed", items, epochs, pool, cut_node_off)
    console.print()
    console.print(_table([here, there, shot]))
    if not here.weights == there.weights == shot.weights:
        raise SystemExit("quickstart: the weights differ, which is a mistake: report it, please, with this output")
    console.print(
        f"The weights after {epochs} epochs are the same to the bit: made here, on {_NODES} nodes, and on {_NODES} of "
        "which one was killed.",
        style="bold",
    )


def _train(
    how: str, items: Sequence[Item], epochs: int, workers: int | lp.Pool, at_third: Callable[[], None] | None = None
) -> _Trained:
    with lp.Loader(items, load_and_augment, batch_size=_BATCH_SIZE, shuffle=True, seed=0, workers=workers) as loader:
        network = make_network(total_steps=epochs * len(loader))
        loader.form  # noqa: B018 - workers are started before the clock is
        started_s = time.monotonic()
        callbacks = [] if at_third is None else [_Once(len(loader) // 3, at_third)]
        network.fit(loader.for_keras(), epochs=epochs, verbose=0, callbacks=callbacks)
        elapsed_s = time.monotonic() - started_s
        digest = hashlib.sha256(b"".join(weight.tobytes() for weight in network.get_weights())).hexdigest()
        return _Trained(how, epochs * len(items), elapsed_s, digest, loader.statistics().hosts_lost)


class _Once(keras.callbacks.Callback):
    """Does something before a certain batch of the first epoch is trained on."""

    def __init__(self, batch: int, do: Callable[[], None]) -> None:
        super().__init__()
        self._batch, self._do = batch, do
        self._is_done = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == self._batch and not self._is_done:
            self._is_done = True
            self._do()


def _table(trained: Sequence[_Trained]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("batches are made by")
    for heading in ("seconds", "samples/s", "hosts replaced"):
        table.add_column(heading, justify="right")
    table.add_column("weights")
    for each in trained:
        rate = f"{each.samples_per_s:,.0f}"
        table.add_row(each.how, f"{each.elapsed_s:.1f}", rate, str(each.hosts_replaced), f"{each.weights[:16]}…")
    return table
