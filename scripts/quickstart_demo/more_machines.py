"""scripts/quickstart --ray: the same training on a cluster. A node ends in mid-epoch, and the
weights stay equal.

The cluster's nodes are processes of this machine, and none of them is left at the end.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

import loaderpool as lp
from tests.support.ray_cluster import RayCluster

from .contest import make_network
from .images import Item, load_and_augment

_NODES = 3
_BATCH_SIZE = 8  # small, so that there are many batches


def show(items: Sequence[Item], epochs: int) -> None:
    """Train three times, and print whether the weights are equal."""
    # otherwise TensorFlow adds numbers in another order each time
    tf.config.experimental.enable_op_determinism()
    print(f"training three times, {epochs} epochs each: the same model, seed and data", flush=True)
    here = _train(items, epochs, 0)
    version = importlib.metadata.version("ray")
    print(
        f"Ray {version} with {_NODES} nodes of one CPU each, which are processes of this machine",
        flush=True,
    )
    with RayCluster(nodes=_NODES) as cluster:
        with lp.RayPool(cluster.address) as pool:
            there = _train(items, epochs, pool)

        def cut_node_off() -> None:
            print("in the midst of an epoch all processes of a node are killed\n", flush=True)
            cluster.cut_off(1)

        with lp.RayPool(cluster.address) as pool:
            shot = _train(items, epochs, pool, cut_node_off)
    names = ("this process, workers=0", f"RayPool, {_NODES} nodes", "RayPool, a node is killed")
    print(f"{'batches are made by':25}  seconds  samples/s  hosts replaced  weights")
    for name, (seconds, replaced, weights) in zip(names, (here, there, shot), strict=True):
        print(
            f"{name:25}  {seconds:7.1f}  {epochs * len(items) / seconds:9,.0f}  {replaced:14}  {weights[:16]}…"
        )
    if len({here[2], there[2], shot[2]}) > 1:
        raise SystemExit(
            "quickstart: the weights differ, which is a mistake: report it, please, with this output"
        )
    print(
        f"The weights after {epochs} epochs are the same to the bit: made here, on {_NODES} nodes, and on {_NODES} of "
        "which one was killed."
    )


def _train(
    items: Sequence[Item],
    epochs: int,
    workers: int | lp.Pool,
    at_third: Callable[[], None] | None = None,
) -> tuple[float, int, str]:
    """Return the seconds of a training, the number of replaced hosts, and the SHA-256 of the
    weights.

    `at_third` is called after a third of the first epoch.
    """
    with lp.Loader(
        items, load_and_augment, batch_size=_BATCH_SIZE, shuffle=True, seed=0, workers=workers
    ) as loader:
        steps = len(loader)
        network = make_network(total_steps=epochs * steps)
        loader.element_spec  # noqa: B018 - workers are started before the clock is
        pending = [] if at_third is None else [at_third]

        def before_batch(batch: int, logs: object) -> None:
            if batch == steps // 3 and pending:
                pending.pop()()

        started_s = time.monotonic()
        callback = keras.callbacks.LambdaCallback(on_train_batch_begin=before_batch)
        network.fit(loader.for_keras(), epochs=epochs, verbose=0, callbacks=[callback])
        elapsed_s = time.monotonic() - started_s
        digest = hashlib.sha256(
            b"".join(weight.tobytes() for weight in network.get_weights())
        ).hexdigest()
        return elapsed_s, loader.statistics().nodes_lost, digest
