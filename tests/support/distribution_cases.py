"""Cases of a loader under `keras.distribution` on JAX, with several devices in one process or two.

`main` prints one line of JSON for each case: its name, what it returns, and None or a traceback.
"""

from __future__ import annotations

import gc
import json
import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import loaderpool as lp
from tests.support import keras_cases as cases

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def refused(text: str, **settings: Any) -> None:
    with cases.loader(**settings) as made, pytest.raises(lp.ArgumentError, match=re.escape(text)):
        made.for_keras()


def by_rows() -> Any:
    """Return a distribution that splits batches over all devices of all processes."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))


def distribution(kind: str, processes: int, process: int, mesh: tuple[int, int]) -> Any:
    """Return a distribution over this number of processes, as one of them sees it. None of them
    exists.
    """
    if kind == "dp":
        made = keras.distribution.DataParallel(devices=["cpu:0"] * processes)
    else:
        devices = keras.distribution.DeviceMesh(
            mesh, ("data", "model"), ["cpu:0"] * (mesh[0] * mesh[1])
        )
        layout = keras.distribution.LayoutMap(devices)
        made = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="data")
    made._num_processes, made._process_id = processes, process  # like Keras' own tests
    return made


# ---- one process ----


def union(
    kind: str, processes: int, mesh: tuple[int, int], items: int, **settings: Any
) -> list[list[list[float]]]:
    """Return the batches of each shard, once. Processes of one replica must have the same
    batches.
    """
    found: dict[int, list[list[float]]] = {}
    for process in range(processes):
        current = distribution(kind, processes, process, mesh)
        with current.scope():
            loader = lp.Loader(
                range(items),
                lambda i: (np.float32(i), np.float32(i)),
                batch_size=8,
                workers=0,
                shard="auto",
                **settings,
            )
            with loader:
                shards = min(current.num_model_replicas, processes)
                assert loader.config.shard == lp.Shard(shards, current.data_shard_id)
                batches = [x.tolist() for x, _ in loader.for_keras().get_jax_iterator()]
                assert len(batches) == len(loader)
            assert found.setdefault(current.data_shard_id, batches) == batches
    assert sorted(found) == list(range(shards))
    return list(found.values())


@case
def alone_the_numbers_of_keras_own_test() -> None:
    """`test_sharding` of Keras' `py_dataset_adapter_test` (3.16): processes x a mesh, without other
    processes.
    """
    for kind, processes, mesh, width in (
        ("dp", 4, (4, 1), 32),
        ("mp", 8, (2, 4), 16),
        ("mp", 4, (8, 2), 32),
    ):
        for shuffle in (False, True):
            for items, drops in ((4 * width, False), (4 * width + 8, False), (4 * width + 3, True)):
                found = union(kind, processes, mesh, items, shuffle=shuffle, drop_remainder=drops)
                assert len({len(batches) for batches in found}) == 1
                rows = [row for batches in found for batch in batches for row in batch]
                assert len(set(rows)) == len(rows) == (4 * width if drops else items)
                step = sorted(row for batches in found for row in batches[1])
                assert (step == list(range(width, 2 * width))) != shuffle


@case
def alone_devices_train_as_one() -> None:
    with cases.loader() as plain:
        whole = cases.inputs(plain, 2)
        expected = cases.mixed(whole[:8] + whole[9:17])
    with keras.distribution.DataParallel().scope():
        with cases.loader(drop_remainder=True, shard="auto") as made:
            assert made.config.shard == lp.Shard(1, 0)
            trained = cases.model(is_built=False)
            trained.fit(made.for_keras(), epochs=2, verbose=0)
            assert cases.seen(trained) == (16, expected)
        refused("Set drop_remainder=True", items=70)
        refused("Set batch_size to a multiple of 4", batch_size=6)
        refused("data shard 0 of 1, but the loader has shard=Shard(2, 0)", shard=lp.Shard(2, 0))


@case
def alone_devices_look_at_the_slots_and_give_them_back() -> None:
    def wide(index: int) -> Any:
        return np.full((16, 16), index, np.float32), np.float32(index)

    with (
        keras.distribution.DataParallel().scope(),
        lp.Loader(range(640), wide, batch_size=8, workers=2) as made,
    ):
        of_keras = keras.src.backend.jax.trainer.JAXEpochIterator(x=made.for_keras())
        for begin in (lambda: iter(made.as_jax(sharding=by_rows())), of_keras._get_iterator):
            kept = list(begin())
            assert len(kept) == 80
            for number, (x, y) in enumerate(kept):  # later batches have not overwritten them
                parts = [np.asarray(shard.data)[:, 3, 3].tolist() for shard in x.addressable_shards]
                assert parts == [[8 * number + row, 8 * number + row + 1] for row in (0, 2, 4, 6)]
                assert np.asarray(y).tolist() == list(range(8 * number, 8 * number + 8))
            del kept, x, y
            gc.collect()
            for _ in made:
                pass
            assert made.statistics().memory.buffers_in_use <= 1


# ---- two processes ----


@case
def in_two_train_as_one_with_batches_of_twice_the_size() -> Any:
    """Also the last batch, which is not full."""
    path = Path(os.environ["SCRATCH"], str(jax.process_index()))

    def noting(index: int, rng: np.random.Generator) -> Any:
        with path.open("a") as file:
            file.write(f"{index} ")
        return cases.sample(index, rng)

    trained = cases.model()
    with lp.Loader(range(72), noting, batch_size=8, workers=2, shuffle=True, shard="auto") as made:
        trained.fit(made.for_keras(), epochs=2, verbose=0)
        shard = [made.config.shard.num_shards, made.config.shard.index, len(made)]
    with cases.loader(72, batch_size=16) as whole:  # the batches of a single process
        assert cases.seen(trained) == (10, cases.mixed(cases.inputs(whole, 2)))
    weights = [np.asarray(weight).tolist() for weight in trained.get_weights()]
    path.unlink()
    with lp.Loader(range(72), noting, batch_size=8, workers=1, shard="auto") as made:
        loss = trained.evaluate(made.for_keras(), verbose=0)
    return {
        "shard": shard,
        "weights": weights,
        "loss": loss,
        "made": sorted(set(path.read_text().split())),
    }


@case
def in_two_arrays_are_one_batch() -> Any:
    found = []
    with lp.Loader(
        range(40), lambda i: np.float32(i), batch_size=4, workers=1, shard="auto"
    ) as made:
        for step, batch in enumerate(made.as_jax(sharding=by_rows())):
            assert batch.shape == (8,)
            assert float(jax.jit(lambda x: x.sum())(batch)) == sum(range(8 * step, 8 * step + 8))
            found.append([float(row) for shard in batch.addressable_shards for row in shard.data])
    for settings, told in (
        ({"batch_size": 4}, "cannot be split evenly over 2 processes. Set drop_remainder=True"),
        ({"batch_size": 4, "on_error": "skip"}, 'on_error="replace", which keeps their size'),
    ):
        with (
            cases.loader(41, shard="auto", **settings) as made,
            pytest.raises(lp.ArgumentError, match=re.escape(told)),
        ):
            made.as_jax(sharding=by_rows())
    return found


@case
def in_two_what_would_make_them_wait_or_differ_is_refused_in_both() -> None:
    rank = jax.process_index()

    def generator() -> Iterator[int]:
        yield from range(8 * rank + 8)

    def sized(index: int) -> Any:
        return np.zeros(1 + index % 3, np.float32), np.float32(0)

    refused('shard="auto": create the loader after', items=72)
    told = f"data shard {rank} of 2, but the loader has shard=Shard(2, {1 - rank})"
    refused(told, items=72, shard=lp.Shard(2, 1 - rank))
    refused("Set drop_remainder=True", items=70, shard="auto")
    refused("Set drop_remainder=True", items=72, shard="auto", deterministic=False)
    refused('on_error="replace", which keeps their size', items=64, shard="auto", on_error="skip")
    refused("Set batch_size to a multiple of 2", items=60, shard="auto", batch_size=5)
    settings: dict[str, Any] = {"workers": 1, "batch_size": 8, "shard": "auto"}
    with lp.Loader.from_generator(
        generator, fn=cases.sample, copies=1, drop_remainder=True, **settings
    ) as made:
        with pytest.raises(lp.ArgumentError, match=re.escape("for_keras(epochs=None)")):
            made.for_keras()
        cases.model().fit(
            made.for_keras(epochs=None), steps_per_epoch=3, verbose=0
        )  # three passes, or one and a half
    told = r"component \[0\] is of varied shape \(None, None\)"
    with (
        lp.Loader(range(64), sized, pad=True, **settings) as made,
        pytest.raises(lp.SpecMismatchError, match=told),
    ):
        next(made.for_keras().get_jax_iterator())
    with cases.loader(76, shard="auto", drop_remainder=True, deterministic=False) as made:
        trained = cases.model()
        trained.fit(made.for_keras(), verbose=0)
        assert cases.seen(trained)[0] == 4


@case
def in_two_each_may_have_data_of_its_own() -> Any:
    current = keras.distribution.distribution()
    current.auto_shard_dataset = False
    try:
        with cases.loader(64, seed=jax.process_index()) as made:
            trained = cases.model()
            trained.fit(made.for_keras(), verbose=0)
    finally:
        current.auto_shard_dataset = True
    assert cases.seen(trained)[0] == 8
    return cases.seen(trained)


def main(names: list[str]) -> None:
    if coordinator := os.environ.get("COORDINATOR"):
        keras.distribution.initialize(coordinator, 2, int(os.environ["RANK"]))
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    for name in names:
        returned = trace = None
        try:
            returned = CASES[name]()
        except BaseException:
            trace = traceback.format_exc()
        print(json.dumps([name, returned, trace]), flush=True)
