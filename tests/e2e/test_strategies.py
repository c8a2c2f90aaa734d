"""`as_distributed_dataset` and `for_keras` under strategies of `tf.distribute`, in one process and in two."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.side_by_side import run_side_by_side

pytestmark = pytest.mark.slow


def sample(index: int, rng: np.random.Generator) -> Any:
    return np.full(4, index / 64, np.float32), np.float32(index + rng.random())


def steps(strategy: Any, batches: Any) -> list[list[float]]:
    """Return the rows of each step, over all replicas of this process."""
    return [np.concatenate(strategy.experimental_local_results(y)).tolist() for _, y in batches]


def rows(loader: lp.Loader, passes: int = 1) -> list[list[float]]:
    return [y.tolist() for _ in range(passes) for _, y in loader]


@pytest.mark.parametrize("items", [64, 57, 33])
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_a_step_has_the_rows_of_one_loader_with_so_large_a_batch(
    mirrored: Any, pool: lp.Pool, items: int, drop_remainder: bool
) -> None:
    """Also in the last step, in which a replica may have fewer rows, or none."""
    settings: dict[str, Any] = {"shuffle": True, "drop_remainder": drop_remainder, "workers": pool}
    with (
        lp.Loader(range(items), sample, batch_size=4, **settings) as loader,
        lp.Loader(range(items), sample, batch_size=8, **settings) as whole,
    ):
        batches = loader.as_distributed_dataset(mirrored)
        expected = rows(whole, 2)
        assert steps(mirrored, batches) + steps(mirrored, batches) == expected
        assert batches.cardinality == len(expected) / 2
        if items % 8 == 0:
            loader.epoch = 0
            assert steps(mirrored, loader.as_distributed_dataset(mirrored, epochs=2)) == expected
            loader.epoch = 0
            endless = zip(
                expected, loader.as_distributed_dataset(mirrored, epochs=None), strict=False
            )
            assert steps(mirrored, (batch for _, batch in endless)) == expected


def test_tensors_of_each_replica_look_at_the_slots(tf: Any, mirrored: Any, pool: lp.Pool) -> None:
    def wide(index: int) -> Any:
        return np.full((64, 64, 3), index, np.float32), np.float32(index)

    with lp.Loader(range(200), wide, batch_size=4, workers=pool) as loader:
        for step, (x, _) in enumerate(loader.as_distributed_dataset(mirrored)):
            for replica, part in enumerate(mirrored.experimental_local_results(x)):
                assert part.device.endswith(f"CPU:{replica}")
                assert part[:, 9, 9, 1].numpy().tolist() == [
                    8 * step + 4 * replica + row for row in range(4)
                ]
        assert loader.statistics().memory.batches_copied == 0


def test_the_dataset_keeps_its_loader(mirrored: Any, pool: lp.Pool) -> None:
    batches = lp.Loader(range(16), sample, batch_size=4, workers=pool).as_distributed_dataset(
        mirrored
    )
    assert len(steps(mirrored, batches)) == 2


def small(keras: Any, is_built: bool) -> Any:
    first = [keras.Input((4,))] if is_built else []
    made = keras.Sequential([*first, keras.layers.Dense(1, kernel_initializer="zeros")])
    made.compile(keras.optimizers.SGD(1e-3), "mse")
    return made


def test_fit_takes_it_and_knows_its_steps(tf: Any, mirrored: Any, pool: lp.Pool) -> None:
    import keras

    with mirrored.scope():
        trained = small(keras, is_built=True)
    with (
        lp.Loader(range(60), sample, batch_size=4, workers=pool) as loader,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", ".*ran out of data")
        warnings.filterwarnings("ignore", ".*shuffle=True")
        history = trained.fit(loader.as_distributed_dataset(mirrored), epochs=3, verbose=0)
        assert int(trained.optimizer.iterations.numpy()) == 3 * 8
        assert history.history["loss"][2] < history.history["loss"][0]
        trained.evaluate(loader.as_distributed_dataset(mirrored), verbose=0)


def weights_after(trained: Any, pool: lp.Pool) -> Any:
    """Return the weights after three epochs, each with a validation. Both loaders must have taken
    as many batches.
    """
    settings: dict[str, Any] = {"batch_size": 8, "shuffle": True, "workers": pool}
    with (
        lp.Loader(range(48), sample, **settings) as loader,
        lp.Loader(range(16), sample, **settings) as other,
    ):
        trained.fit(loader.for_keras(), validation_data=other.for_keras(), epochs=3, verbose=0)
        assert (loader.epoch, other.epoch) == (3, 3)
    return trained.get_weights()


@pytest.fixture(scope="module")
def without_a_strategy(tf: Any, pool: lp.Pool) -> Any:
    import keras

    return weights_after(small(keras, is_built=True), pool)


@pytest.mark.parametrize(("is_built", "is_inside"), [(True, False), (False, True)])
def test_for_keras_trains_on_the_same_batches_as_without_a_strategy(
    mirrored: Any, pool: lp.Pool, without_a_strategy: Any, is_built: bool, is_inside: bool
) -> None:
    """Keras first takes a batch of another pass, whether or not the model is built, and again at
    each validation.
    """
    import keras

    with mirrored.scope():
        trained = small(keras, is_built)
    with mirrored.scope() if is_inside else contextlib.nullcontext():
        weights = weights_after(trained, pool)
    for ours, theirs in zip(weights, without_a_strategy, strict=True):
        assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_wrong_strategy_is_refused_with_what_works(tf: Any, mirrored: Any, pool: lp.Pool) -> None:
    import keras

    with lp.Loader(range(16), sample, batch_size=8, workers=pool) as loader:
        for wrong in ("mirrored", None, tf.distribute.MirroredStrategy):
            with pytest.raises(
                lp.ArgumentError, match=re.escape("strategy must be a tf.distribute.Strategy")
            ):
                loader.as_distributed_dataset(wrong)
        told = re.escape("no effect under a tf.distribute strategy")
        with mirrored.scope(), pytest.raises(lp.ArgumentError, match=told):
            small(keras, is_built=True).fit(loader.for_keras(class_weight={0: 1.0}), verbose=0)
        servers = object.__new__(
            tf.distribute.ParameterServerStrategy
        )  # without the cluster, which TensorFlow would wait for
        with pytest.raises(
            lp.ArgumentError,
            match=r"ParameterServerStrategy runs .* Train under MultiWorkerMirrored",
        ):
            loader.as_distributed_dataset(servers)
        with pytest.raises(lp.ArgumentError, match="epochs must be"):
            loader.as_distributed_dataset(mirrored, epochs=0)
        told = re.escape(
            "gives this process input pipeline 0 of 1, but the loader has shard=Shard(2, 1)"
        )
        with (
            loader.replace(shard=lp.Shard(2, 1)) as half,
            pytest.raises(lp.ArgumentError, match=told),
        ):
            half.as_distributed_dataset(mirrored)
        with mirrored.scope(), loader.replace(shard="auto") as auto:
            assert auto.config.shard == lp.Shard(1, 0)
        default = steps(
            tf.distribute.get_strategy(),
            loader.as_distributed_dataset(tf.distribute.get_strategy()),
        )
        loader.epoch = 0
        assert default == rows(loader)


TWO_WORKERS = """
import json, os
import numpy as np, pytest, re
import tensorflow as tf
import loaderpool as lp

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = int(os.environ["RANK"])
path = os.environ["SCRATCH"] + f"/{rank}"

def sample(index):
    with open(path, "a") as file:
        file.write(f"{index} ")
    return np.full(4, index / 64, np.float32), np.float32(index)

@tf.function
def step(x, y):
    def of_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.linalg.matvec(x, weights) - y) ** 2)
        gradient = tf.distribute.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
        weights.assign_sub(1e-5 * gradient)
        return tf.reduce_sum(y)
    return strategy.reduce("SUM", strategy.run(of_replica, (x, y)), axis=None)

with strategy.scope():
    weights = tf.Variable(tf.zeros(4))
    # 61 items: 7 steps of 8 rows, and a last one with 3 and 2.
    loader = lp.Loader(range(61), sample, batch_size=4, workers=1, shuffle=True, shard="auto")
told = {"shard": [loader.config.shard.num_shards, loader.config.shard.index], "sums": [], "rows": []}
with loader:
    batches = loader.as_distributed_dataset(strategy)
    told["cardinality"] = int(batches.cardinality)
    for epoch in range(2):
        for x, y in batches:
            told["rows"].append([float(row) for part in strategy.experimental_local_results(y) for row in part])
            told["sums"].append(float(step(x, y)))
told["weights"] = weights.numpy().tolist()

open(path, "w").close()
with lp.Loader(range(64), sample, batch_size=4, workers=1, shard=lp.Shard(2, rank)) as loader:
    for x, y in loader.as_distributed_dataset(strategy):
        step(x, y)
with open(path) as file:
    told["made"] = sorted(set(file.read().split()))

with lp.Loader(range(64), sample, batch_size=4, workers=0) as loader:
    text = f'input pipeline {rank} of 2, but the loader has shard=Shard(1, 0). Create it with shard="auto" within'
    with pytest.raises(lp.ArgumentError, match=re.escape(text)):
        loader.as_distributed_dataset(strategy)
print("told " + json.dumps(told), flush=True)
"""


def test_two_processes_train_as_one_with_batches_of_twice_the_size(tf: Any, tmp_path: Path) -> None:
    def environment(rank: int, addresses: list[str]) -> dict[str, str]:
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        return {"TF_CONFIG": json.dumps(config), "RANK": str(rank), "SCRATCH": str(tmp_path)}

    results = run_side_by_side(TWO_WORKERS, environment, imported="tensorflow")
    first, second = (
        json.loads(
            next(line for line in result.check().stdout.splitlines() if line.startswith("told "))[
                5:
            ]
        )
        for result in results
    )
    assert (first["shard"], second["shard"]) == ([2, 0], [2, 1])
    assert first["cardinality"] == second["cardinality"] == 8
    with lp.Loader(
        range(61), lambda index: np.float32(index), batch_size=8, shuffle=True, workers=0
    ) as whole:
        expected = [batch.tolist() for _ in range(2) for batch in whole]
    together = [mine + others for mine, others in zip(first["rows"], second["rows"], strict=True)]
    assert together == expected
    assert first["sums"] == second["sums"] == [sum(step) for step in expected]
    assert first["weights"] == second["weights"]
    assert Counter(first["made"]) + Counter(second["made"]) == Counter(map(str, range(64)))
