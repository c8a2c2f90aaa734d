"""`LoaderState` in a `tf.train.Checkpoint`: after any stop, a loop continues with the first batch
that it had not taken.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.e2e.test_resume import ITEMS, SHAPES, WithHook, plain, sample
from tests.support import tensorflow_runtime
from tests.support.batches import Place, shared_pools

WIDE = (128, 256)  # four samples of this size make a ticket; of smaller ones, several batches do
EPOCHS = 3


@pytest.fixture(scope="module")
def on(tf: Any) -> Iterator[Place]:
    with shared_pools() as place:
        yield place
        gc.collect()
        tensorflow_runtime.let_go_of_arrays()


@pytest.fixture
def state_of(tf: Any) -> Callable[[lp.Loader], Any]:
    from loaderpool.adapters.tensorflow import LoaderState

    return LoaderState


@pytest.fixture
def save(tf: Any, tmp_path: Path) -> Callable[[Any], str]:
    numbers = itertools.count()

    def saved(state: Any) -> str:
        return str(tf.train.Checkpoint(loader=state).write(tmp_path / str(next(numbers))))

    return saved


@pytest.fixture
def restore(tf: Any) -> Callable[[Any, str], None]:
    def read(state: Any, path: str) -> None:
        tf.train.Checkpoint(loader=state).read(path).assert_consumed()

    return read


def wide(item: int, rng: np.random.Generator) -> Any:
    return np.full(WIDE, item, np.float32), rng.random()


def records(shard: int) -> Iterator[Any]:
    for number in range(3 * shard + 5):
        yield np.int64(100 * shard + number), np.random.rand()


ALL: dict[str, Callable[..., lp.Loader]] = {
    "generators": lambda **how: lp.Loader.from_generator(
        records, shards=[0, 1, 2, 3, 4], batch_size=2, seed=4, **how
    ),
    "samples": SHAPES["samples"],
    "skip": SHAPES["skip"],
    "sequence": SHAPES["sequence"],
    "tiny": lambda **how: lp.Loader(
        range(5 * ITEMS), lambda i: i, batch_size=2, shuffle=True, **how
    ),
    "buckets": lambda **how: lp.Loader(
        range(90),
        lambda i, rng: rng.random(1 + i % 9),
        batch_size=4,
        shuffle=True,
        pad=True,
        buckets=lp.Buckets([1 + i % 9 for i in range(90)], [3, 6]),
        **how,
    ),
    "stream": lambda **how: lp.Loader(
        lp.interleave([range(48)], iter), wide, batch_size=4, shuffle=9, **how
    ),
    "ragged": lambda **how: lp.Loader(
        range(50),
        lambda i: {"r": np.arange(i % 5), "t": f"item {i}"},
        batch_size=4,
        shuffle=True,
        ragged=True,
        **how,
    ),
}


def numbers(batch: Any) -> Any:
    """Return the numbers of a batch, of either loop, for comparison."""
    if isinstance(batch, dict):
        return {key: numbers(part) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(numbers(part) for part in batch)
    if hasattr(batch, "to_list"):
        return batch.to_list()
    if hasattr(batch, "row_splits"):
        return [np.asarray(row).tolist() for row in batch]
    array = np.asarray(batch)
    if array.dtype == object:
        return [text.encode() if isinstance(text, str) else text for text in array.ravel()]
    return plain(array)


def take(iterator: Any, count: int) -> list[Any]:
    return [numbers(batch) for batch in itertools.islice(iterator, count)]


def loop(loader: lp.Loader, state: Any, epochs: int, at_once: int = 1) -> Iterator[Any]:
    """Run a training loop over epochs. Each epoch is a dataset, or `at_once` epochs are one."""
    while loader.epoch < epochs:
        yield from state.iterate(loader.as_dataset(epochs=at_once, prefetch=3))


@pytest.mark.parametrize("name", ALL)
def test_a_restored_loop_goes_on_with_what_was_not_taken(
    name: str, on: Place, state_of: Any, save: Callable[..., str], restore: Any
) -> None:
    make = ALL[name]
    with make(workers=0) as reference:
        epochs = [[numbers(batch) for batch in reference] for _ in range(EPOCHS)]
    length = len(epochs[0])
    expected = [batch for epoch in epochs for batch in epoch]
    stops = sorted({0, length // 2, length, length + length // 3, 3 * length})
    gone_on_from: set[tuple[int, bytes]] = set()
    for at_once in (1, EPOCHS):
        paths, places = {}, {}
        with make(**on(2)) as stopped:
            state = state_of(stopped)
            batches = loop(stopped, state, EPOCHS, at_once)
            taken = 0
            for stop in stops:
                assert take(batches, stop - taken) == expected[taken:stop]
                taken = stop
                paths[stop], places[stop] = save(state), state.serialize()
            assert next(batches, None) is None
            paths[taken], places[taken] = save(state), state.serialize()
            batches.close()
        for turn, stop in enumerate(stops):
            if (stop, places[stop]) in gone_on_from:
                continue  # restored from the state that the other loop saved at this batch
            gone_on_from.add((stop, places[stop]))
            with make(**on(turn % 3), limits=lp.Limits(memory="8MiB")) as again:
                state = state_of(again)
                restore(state, paths[stop])
                assert save(state), "before a batch was taken"
                rest = loop(again, state, EPOCHS)
                assert take(rest, 10**6) == expected[stop:], stop
                assert again.epoch == EPOCHS


def test_behind_stages_of_the_users_own(
    on: Place, tf: Any, mirrored: Any, state_of: Any, save: Callable[..., str], restore: Any
) -> None:
    stages: dict[str, Callable[[Any], Any]] = {
        "map": lambda ds: ds.map(lambda x: -x, num_parallel_calls=4).prefetch(8),
        "enumerate": lambda ds: ds.enumerate().map(lambda number, x: x),
        "to a device": lambda ds: ds.apply(tf.data.experimental.prefetch_to_device("/CPU:1", 4)),
        "distributed": mirrored.experimental_distribute_dataset,
    }

    def make(**how: Any) -> lp.Loader:
        return lp.Loader(range(100), lambda i: np.int64(i), batch_size=4, shuffle=True, **how)

    def some(batches: Any, count: int) -> list[Any]:
        elements = itertools.islice(batches, count)
        return [
            np.concatenate(mirrored.experimental_local_results(element)).tolist()
            for element in elements
        ]

    for name, stage in stages.items():
        with make(**on(2)) as loader:
            state = state_of(loader)
            batches = state.iterate(stage(loader.as_dataset(epochs=2)))
            some(batches, 6)
            path = save(state)
            expected = some(batches, 100)
            assert len(expected) == 44
            del batches
        with make(**on(1)) as loader:
            state = state_of(loader)
            restore(state, path)
            assert some(state.iterate(stage(loader.as_dataset(epochs=2))), 100) == expected, name


def test_what_is_not_one_iteration_over_the_loader_is_refused(
    on: Place, tf: Any, state_of: Any
) -> None:
    def make(**how: Any) -> lp.Loader:
        return lp.Loader(range(8), lambda i: np.zeros((64, 512)) + i, batch_size=4, **how)

    with make(**on(1)) as loader, make(**on(1)) as other:
        state = state_of(loader)
        wrong = {
            "0 iterations": other.as_dataset(),
            "2 iterations": tf.data.Dataset.zip((loader.as_dataset(), loader.as_dataset())),
        }
        for told, dataset in wrong.items():
            with pytest.raises(lp.StateError, match=told):
                next(state.iterate(dataset))
        repeated = loader.as_dataset().repeat().prefetch(tf.data.AUTOTUNE)
        with pytest.raises(lp.StateError, match=r"iterations|were delivered"):
            for _ in zip(range(50), state.iterate(repeated), strict=False):
                state.serialize()
        del repeated, wrong, dataset


def test_restored_in_the_same_process_it_goes_back(
    on: Place, tf: Any, state_of: Any, tmp_path: Path
) -> None:
    with SHAPES["samples"](**on(2)) as loader:
        state = state_of(loader)
        checkpoint = tf.train.Checkpoint(loader=state)
        batches = state.iterate(loader.as_dataset(epochs=None))
        take(batches, 30)
        path = checkpoint.write(tmp_path / "there")
        expected = take(batches, 22)
        for _ in range(2):
            checkpoint.read(path)
            assert next(batches, None) is None, "the iteration that was under way has ended"
            batches = loop(loader, state, 2)
            assert take(batches, 40) == expected
            batches = state.iterate(loader.as_dataset(epochs=None))
            take(batches, 3)
        del batches, checkpoint


def test_a_second_iteration_ends_the_first(on: Place, state_of: Any) -> None:
    with SHAPES["samples"](**on(2)) as loader:
        state = state_of(loader)
        first = state.iterate(loader.as_dataset())
        take(first, 5)
        second = state.iterate(loader.as_dataset())
        assert next(first, None) is None
        assert json.loads(state.serialize())["epoch"] == 0, "until the second has given a batch"
        take(second, 2)
        saved = json.loads(state.serialize())
        assert (saved["epoch"], saved["position"]) == (1, 8)
        sum(1 for _ in loader)
        assert json.loads(state.serialize()) == saved, (
            "other passes over the loader are not counted"
        )
        del first, second


def test_a_restore_before_the_object_exists(
    on: Place, tf: Any, state_of: Any, save: Callable[..., str]
) -> None:
    with SHAPES["samples"](**on(2)) as loader:
        state = state_of(loader)
        batches = state.iterate(loader.as_dataset())
        take(batches, 5)
        path = save(state)
        expected = take(batches, 100)
    with SHAPES["samples"](**on(1)) as loader:
        checkpoint = tf.train.Checkpoint()
        status = checkpoint.read(path)
        checkpoint.loader = state_of(loader)
        status.assert_consumed()
        assert take(checkpoint.loader.iterate(loader.as_dataset()), 100) == expected


def test_a_loop_that_is_not_counted_is_not_saved(
    on: Place, tf: Any, state_of: Any, save: Callable[..., str]
) -> None:
    """The saved place would be the start of the next pass, and the rest of this pass would never be
    trained on.
    """
    with lp.Loader(range(64), lambda item: np.full(WIDE, item), batch_size=4, **on(2)) as loader:
        state = state_of(loader)
        for batches in (loader, loader.as_dataset(), loader.as_dataset(epochs=None)):
            uncounted = iter(batches)
            next(uncounted)
            with pytest.raises(
                lp.StateError,
                match=r"not by LoaderState\.iterate.*state\.iterate\(loader\.as_dataset\(\)\)",
            ):
                save(state)
            del uncounted, batches
            gc.collect()
            save(state)  # the pass was abandoned, as if it had only looked at a batch
        held = [
            iter(loader.as_dataset())
        ]  # keeps the iterator, as the traceback of a Ctrl-C during a wait does
        counted = state.iterate(held[0])
        next(counted)
        del counted
        gc.collect()
        save(state)
        held.clear()
        counted = state.iterate(loader.as_dataset())
        next(counted)
        beside = iter(loader.as_dataset())
        next(beside)
        save(state)  # the place of the loop is known
        list(counted)
        list(beside)
        save(state)


def test_a_loop_that_ended_before_its_first_batch_is_saved_where_it_began(
    on: Place, state_of: Any, save: Callable[..., str], restore: Any
) -> None:
    """For example after Ctrl-C, whose traceback holds the iterator. tf.data has fetched batches of
    the epoch.
    """

    def interrupted(held: list[Any]) -> Iterator[Any]:
        held.append(iter(loader.as_dataset()))
        next(held[0])
        raise KeyboardInterrupt
        yield

    with lp.Loader(range(64), lambda item: np.full(WIDE, item), batch_size=4, **on(2)) as loader:
        state, held = state_of(loader), []  # type: ignore[var-annotated]
        with pytest.raises(KeyboardInterrupt):
            next(state.iterate(interrupted(held)))
        path = save(state)
        held.clear()
    with lp.Loader(range(64), lambda item: np.full(WIDE, item), batch_size=4, **on(2)) as loader:
        state = state_of(loader)
        restore(state, path)
        assert loader.epoch == 0
        assert [batch[0, 0, 0] for batch in state.iterate(loader)] == list(range(0, 64, 4))


def test_an_asynchronous_checkpoint_is_refused(tf: Any, state_of: Any, tmp_path: Path) -> None:
    """Its thread would read the place when the loop is already further on than the saved
    weights.
    """
    with SHAPES["tiny"](
        workers=0
    ) as loader:  # TensorFlow keeps the checkpoint, and so the loader, forever
        checkpoint = tf.train.Checkpoint(loader=state_of(loader), step=tf.Variable(0))
        options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
        with pytest.raises(lp.StateError, match="async_checkpoint"):
            checkpoint.save(str(tmp_path / "there"), options=options)


def test_a_state_of_another_loader_is_refused_and_of_other_shards_gone_on_from(
    on: Place, state_of: Any, save: Callable[..., str], restore: Any
) -> None:
    with lp.Loader(
        range(101), sample, batch_size=4, shuffle=True, seed=3, pad=True, **on(1)
    ) as loader:
        state = state_of(loader)
        batches = state.iterate(loader.as_dataset())
        take(batches, 3)
        path = save(state)
        expected = take(batches, 1)
        with (
            loader.replace(seed=4) as other,
            pytest.raises(lp.StateError, match=r"seed: saved 3, current 4\."),
        ):
            restore(state_of(other), path)
        # the rest of the epoch is divided again
        with loader.replace(shard=lp.Shard(2, 0)) as shard:
            again = state_of(shard)
            restore(again, path)
            assert take(again.iterate(shard.as_dataset()), 1) == expected
        with pytest.raises(lp.StateError, match="not a LoaderState"):
            state.deserialize(b"\xff")


def test_what_cannot_be_saved_says_so_at_once(tf: Any, state_of: Any) -> None:
    with (
        lp.Loader.from_sequence(WithHook(), workers=0) as loader,
        pytest.raises(lp.StateError, match="on_epoch_end"),
    ):
        state_of(loader)
    with (
        lp.Loader(iter(range(8)), batch_size=2, workers=0) as loader,
        pytest.raises(lp.StateError, match="only once"),
    ):
        state_of(loader)
    with lp.Loader(range(8), batch_size=2, workers=0) as loader:
        dataset = loader.as_dataset()
        with pytest.raises(lp.ArgumentError, match=r"needs the Loader, got .*Dataset"):
            state_of(dataset)
