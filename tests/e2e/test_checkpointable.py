"""Iterators of `as_dataset(checkpointable=True)` that were saved and restored go on with what was not taken."""

from __future__ import annotations

import gc
import itertools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.e2e.test_resume import SHAPES, failing, plain, sample
from tests.support import tensorflow_runtime
from tests.support.batches import Place, shared_pools
from tests.support.child import run_child

pytestmark = pytest.mark.may_leak(reason="pools are shared by the tests; the fixture looks when the last has run")

WIDE = (128, 256)  # four of these travel alone, smaller ones several at once


@pytest.fixture(scope="module")
def on(tf: Any) -> Iterator[Place]:
    with shared_pools() as place:
        yield place
        gc.collect()
        tensorflow_runtime.let_go_of_arrays()


@pytest.fixture
def save(tf: Any, tmp_path: Path) -> Callable[[Any], str]:
    numbers = itertools.count()

    def saved(iterator: Any) -> str:
        return str(tf.train.Checkpoint(iterator=iterator).write(tmp_path / str(next(numbers))))

    return saved


@pytest.fixture
def restored(tf: Any) -> Callable[[Any, str], Any]:
    def iterator_of(dataset: Any, path: str) -> Any:
        iterator = iter(dataset)
        tf.train.Checkpoint(iterator=iterator).read(path).assert_consumed()
        return iterator

    return iterator_of


def wide(item: int, rng: np.random.Generator) -> Any:
    return np.full(WIDE, item, np.float32), rng.random()


def records(shard: int) -> Iterator[Any]:
    for number in range(3 * shard + 5):
        yield np.int64(100 * shard + number), np.random.rand()


ALL: dict[str, Callable[..., lp.Loader]] = {
    "generators": lambda **how: lp.Loader.from_generator(records, shards=[0, 1, 2, 3, 4], batch_size=2, seed=4, **how),
    **SHAPES,
    "buckets": lambda **how: lp.Loader(
        range(90),
        lambda i, rng: rng.random(1 + i % 9),
        batch_size=4,
        shuffle=True,
        pad=True,
        bucket_by=[1 + i % 9 for i in range(90)],
        boundaries=[3, 6],
        **how,
    ),
    "stream": lambda **how: lp.Loader(
        lp.interleave([range(50)], iter), lambda i, rng: (i, rng.random()), batch_size=4, **how
    ),
    "stream in a window": lambda **how: lp.Loader(
        lp.interleave([range(48)], iter), wide, batch_size=4, shuffle=9, **how
    ),
    "stream that skips": lambda **how: lp.Loader(
        lp.interleave([range(101)], iter), failing, batch_size=4, on_error="skip", **how
    ),
    "wide": lambda **how: lp.Loader(range(60), wide, batch_size=4, shuffle=True, seed=8, **how),
    "ragged": lambda **how: lp.Loader(
        range(50), lambda i: {"r": np.arange(i % 5), "n": i}, batch_size=4, shuffle=True, ragged=True, **how
    ),
    "text": lambda **how: lp.Loader(range(50), lambda i: {"t": f"item {i}"}, batch_size=4, drop_remainder=True, **how),
}


def numbers(batch: Any) -> Any:
    """A batch from either side, comparable."""
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


@pytest.mark.parametrize("name", ALL)
def test_a_restored_iterator_goes_on_with_what_was_not_taken(
    name: str, on: Place, save: Callable[..., str], restored: Any
) -> None:
    make = ALL[name]
    with make(workers=0) as reference:
        epochs = [[numbers(batch) for batch in reference] for _ in range(4)]
    length = len(epochs[0])
    expected = [batch for epoch in epochs[:3] for batch in epoch]
    stops = sorted({0, 1, length // 2, length, length + length // 3, 3 * length - 1, 3 * length})
    paths = {}
    with make(**on(2)) as stopped:
        iterator = iter(stopped.as_dataset(epochs=3, checkpointable=True, prefetch=3))
        taken = 0
        for stop in stops:
            assert take(iterator, stop - taken) == expected[taken:stop]
            taken = stop
            paths[stop] = save(iterator)
        del iterator
    for turn, stop in enumerate(stops):
        with make(**on(turn % 3), memory_limit="8MiB") as again:
            dataset = again.as_dataset(epochs=3, checkpointable=True, prefetch=3)
            iterator = restored(dataset, paths[stop])
            assert take(iterator, 10**6) == expected[stop:], stop
            assert again.epoch == 3
            assert take(iter(dataset), 1) == epochs[3][:1], "the next iterator's epoch is the next"
            del iterator, dataset


@pytest.mark.parametrize("workers", [0, 3])
def test_without_an_order_nothing_is_repeated_or_dropped(
    on: Place, save: Callable[..., str], restored: Any, workers: int
) -> None:
    def make() -> lp.Loader:
        return SHAPES["samples"](**on(workers), deterministic=False)

    with make() as reference:
        epochs = [sorted(str(numbers(batch)) for batch in reference) for _ in range(2)]
    path = None
    got: list[str] = []
    while len(got) < 2 * len(epochs[0]):
        with make() as loader:
            dataset = loader.as_dataset(epochs=2, checkpointable=True, prefetch=4)
            iterator = iter(dataset) if path is None else restored(dataset, path)
            some = take(iterator, 5)
            assert some
            got += map(str, some)
            path = save(iterator)
            del iterator, dataset
    assert sorted(got[: len(epochs[0])]) == epochs[0]
    assert sorted(got[len(epochs[0]) :]) == epochs[1]


def test_a_stream_without_end_and_one_that_is_made_longer(on: Place, save: Callable[..., str], restored: Any) -> None:
    make = SHAPES["samples"]
    with make(workers=0) as reference:
        expected = [numbers(batch) for _ in range(4) for batch in reference]
    with make(**on(2)) as loader:
        endless = iter(loader.as_dataset(epochs=None, checkpointable=True))
        assert take(endless, 60) == expected[:60]
        path = save(endless)
        del endless
    for epochs in (3, 4, None):
        with make(**on(1)) as loader:
            left = 26 * (epochs or 4) - 60
            iterator = restored(loader.as_dataset(epochs=epochs, checkpointable=True), path)
            assert take(iterator, left if epochs is None else 10**6) == expected[60 : 60 + left]
            del iterator


def test_in_the_users_own_pipeline(on: Place, tf: Any, save: Callable[..., str], restored: Any) -> None:
    stages: dict[str, Callable[[Any], Any]] = {
        "map": lambda ds: ds.map(lambda x: -x, num_parallel_calls=4).prefetch(8),
        "batch": lambda ds: ds.batch(3),
        "unbatch": lambda ds: ds.unbatch().batch(5),
        "shuffle": lambda ds: ds.shuffle(6, seed=3),
        "repeat": lambda ds: ds.repeat(3),
        "take and skip": lambda ds: ds.skip(2).take(20),
        "zip": lambda ds: tf.data.Dataset.zip((ds, ds)),
        "filter": lambda ds: ds.filter(lambda x: tf.reduce_sum(x) % 3 != 0),
    }
    for name, stage in stages.items():

        def build(loader: lp.Loader, stage: Any = stage) -> Any:
            return stage(loader.as_dataset(checkpointable=True))

        def make(**how: Any) -> lp.Loader:
            return lp.Loader(range(100), lambda i: np.int64(i), batch_size=4, drop_remainder=True, shuffle=True, **how)

        with make(**on(2)) as loader:
            iterator = iter(build(loader))
            take(iterator, 4)
            path = save(iterator)
            expected = take(iterator, 12)
            del iterator
        with make(**on(1)) as loader:
            iterator = restored(build(loader), path)
            assert take(iterator, 12) == expected, name
            del iterator


def test_an_iterator_for_each_epoch(on: Place, save: Callable[..., str], restored: Any) -> None:
    """Saved in the middle, and when it had given all: in a new process the next one has the next epoch."""
    make = SHAPES["samples"]
    with make(workers=0) as reference:
        epochs = [[numbers(batch) for batch in reference] for _ in range(4)]
    paths = []
    with make(**on(2)) as loader:
        dataset = loader.as_dataset(checkpointable=True)
        for stop in (7, 100):
            loader.epoch = 1
            iterator = iter(dataset)
            take(iterator, stop)
            paths.append((save(iterator), stop))
            del iterator
        del dataset
    for path, stop in paths:
        with make(**on(1)) as loader:
            dataset = loader.as_dataset(checkpointable=True)
            iterator = restored(dataset, path)
            assert take(iterator, 100) == epochs[1][stop:]
            assert take(iter(dataset), 100) == epochs[2]
            del iterator, dataset


def test_the_epoch_of_one_that_had_given_nothing_is_not_guessed(
    on: Place, tf: Any, save: Callable[..., str], restored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loaderpool.adapters import checkpointable

    make = SHAPES["samples"]
    with make(workers=0) as reference:
        reference.epoch = 2
        expected = [numbers(batch) for batch in reference]
    with make(**on(2)) as loader:
        dataset = loader.as_dataset(checkpointable=True)
        path = save(iter(dataset))
        assert len(take(restored(dataset, path), 100)) == len(loader), "in the same process it is as a new one"
        del dataset
    monkeypatch.setattr(checkpointable, "_PROCESS", 5)  # as in another process
    with make(**on(1)) as loader:
        dataset = loader.as_dataset(checkpointable=True)
        with pytest.raises(tf.errors.OpError, match=r"set loader\.epoch"):
            next(restored(dataset, path))
        loader.epoch = 2
        assert take(restored(dataset, path), 100) == expected
        del dataset


def test_restored_in_the_same_process_it_goes_back(on: Place, tf: Any, tmp_path: Path) -> None:
    with SHAPES["samples"](**on(2)) as loader:
        iterator = iter(loader.as_dataset(epochs=None, checkpointable=True))
        checkpoint = tf.train.Checkpoint(iterator=iterator)
        take(iterator, 30)
        path = checkpoint.write(tmp_path / "there")
        expected = take(iterator, 40)
        for _ in range(2):
            checkpoint.read(path)
            assert take(iterator, 40) == expected
        del iterator, checkpoint


def test_two_from_one_checkpoint_do_not_disturb_each_other(on: Place, save: Callable[..., str], restored: Any) -> None:
    with ALL["wide"](**on(2)) as loader:
        dataset = loader.as_dataset(epochs=3, checkpointable=True)
        iterator = iter(dataset)
        take(iterator, 8)
        path = save(iterator)
        expected = take(iterator, 100)
        one, other = restored(dataset, path), restored(dataset, path)
        pairs = [(numbers(a), numbers(b)) for a, b in zip(one, other, strict=True)]
        assert pairs == [(batch, batch) for batch in expected]
        del iterator, one, other, dataset


def test_after_load_state_dict(on: Place, tf: Any, save: Callable[..., str], restored: Any) -> None:
    make = SHAPES["samples"]
    with make(workers=0) as reference:
        state = {**reference.state_dict(), "position": 40}
        expected = [numbers(batch) for batch in reference]
    with make(**on(2)) as loader:
        loader.load_state_dict(state)
        dataset = loader.as_dataset(epochs=2, checkpointable=True)
        assert len(dataset) == 16 + 26
        iterator = iter(dataset)
        assert take(iterator, 5) == expected[10:15]
        path = save(iterator)
        rest = take(iterator, 100)
        assert rest[:11] == expected[15:]
        with pytest.raises(tf.errors.OpError, match="make another"):
            next(iter(dataset))
        del iterator, dataset
    with make(**on(1)) as loader:
        with pytest.raises(tf.errors.OpError, match="load that state before as_dataset"):
            next(restored(loader.as_dataset(epochs=2, checkpointable=True), path))
        loader.load_state_dict(state)
        assert take(restored(loader.as_dataset(epochs=2, checkpointable=True), path), 100) == rest


def test_an_iterator_of_another_loader_is_refused_with_what_differs(
    on: Place, tf: Any, save: Callable[..., str], restored: Any
) -> None:
    with lp.Loader(range(101), sample, batch_size=4, shuffle=True, seed=3, pad=True, **on(1)) as loader:
        iterator = iter(loader.as_dataset(checkpointable=True))
        take(iterator, 3)
        path = save(iterator)
        del iterator
        changes: list[tuple[dict[str, Any], str]] = [
            ({"seed": 4}, r"seed \(saved 3, now 4\)"),
            ({"source": range(100)}, "size"),
            ({"batch_size": 5}, "batch_size"),
            ({"fn": lambda item, rng: sample(item, rng)}, "function"),
            ({"num_shards": 2}, "num_shards=1"),
        ]
        for change, told in changes:
            with loader.replace(**change) as other:
                iterator = restored(other.as_dataset(checkpointable=True), path)
                with pytest.raises(tf.errors.OpError, match=told):
                    next(iterator)
                assert isinstance(other.last_error, lp.StateError)
                del iterator


# ---- errors ----


@pytest.mark.parametrize("fn", ["tiny", "wide"])
def test_what_failed_is_made_again_where_it_is_restored(
    fn: str, tf: Any, on: Place, save: Callable[..., str], restored: Any, tmp_path: Path
) -> None:
    flag = tmp_path / "fails"
    flag.touch()

    def fails_at_61(item: int) -> Any:
        if item == 61 and flag.exists():
            raise KeyError("sixty-one")
        return np.int64(item) if fn == "tiny" else (np.full(WIDE, item, np.float32), np.int64(item))

    def first(batch: Any) -> int:
        return int(tf.nest.flatten(batch)[-1][0])

    def make(workers: int) -> lp.Loader:
        return lp.Loader(range(100), fails_at_61, batch_size=4, **on(workers))

    with make(2) as loader:
        iterator = iter(loader.as_dataset(epochs=2, checkpointable=True))
        seen = [first(next(iterator)) for _ in range(9)]
        paths = [(9, save(iterator))]
        with pytest.raises(tf.errors.OpError, match="sixty-one"):
            while True:
                seen.append(first(next(iterator)))
        assert seen == list(range(0, 60, 4)), "all that came before it"
        assert isinstance(loader.last_error, KeyError)
        paths.append((15, save(iterator)))
        with pytest.raises(tf.errors.FailedPreconditionError, match="contained only 15"):  # as without checkpointable
            next(iterator)
        del iterator
    flag.unlink()
    for taken, path in paths:
        with make(1) as loader:
            iterator = restored(loader.as_dataset(epochs=2, checkpointable=True), path)
            assert [first(batch) for batch in iterator] == [*range(4 * taken, 100, 4), *range(0, 100, 4)]
            del iterator


# ---- what stands behind it ----


def live_runs(loader: lp.Loader) -> int:
    return sum(not run.is_over for run in loader._core.engine.layout.quotas.active)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["tiny", "wide"])
def test_an_iterator_that_was_left_holds_no_slots(name: str, on: Place) -> None:
    if not tensorflow_runtime.aliases_arrays():
        pytest.skip("where arrays are copied nobody tells when an iterator is gone")
    with ALL[name](**on(2)) as loader:
        dataset = loader.as_dataset(epochs=None, checkpointable=True)
        for _ in range(10):
            iterator = iter(dataset)
            take(iterator, 3)
            assert live_runs(loader) == 1
            del iterator
            tensorflow_runtime.let_go_of_arrays()
        assert live_runs(loader) == 0
        del dataset


def test_a_place_far_away_costs_the_same(on: Place, tf: Any) -> None:
    far = 5 * 10**11
    with lp.Loader(range(10**12), lambda i: i, batch_size=10, shuffle=True, **on(2)) as loader:
        fetch = loader.as_dataset(checkpointable=True)._loaderpool_loader
        kind, place, items = fetch.next(0, fetch.header, [0, far // 10, 0, 2, 3, -1, far])
        assert items.ravel().tolist() == loader._core.plan.indices(3, np.arange(far, far + 20))
        assert place.tolist()[:3] == [1, far // 10 + 2, 0] and place.tolist()[4:] == [3, -1, far + 20]


def test_what_excludes_it_says_so(tf: Any, tmp_path: Path) -> None:
    from loaderpool.adapters.keras import BackupCallback

    with lp.Loader(range(8), batch_size=2, workers=0) as loader:
        with pytest.raises(lp.ArgumentError, match="device"):
            loader.as_dataset(checkpointable=True, device="/CPU:1")
        BackupCallback(loader, tmp_path)
        with pytest.raises(lp.ArgumentError, match="BackupCallback"):
            loader.as_dataset(checkpointable=True)

    class Sequence:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return np.zeros((2, 2))

        def on_epoch_end(self) -> None: ...

    with lp.Loader.from_sequence(Sequence(), workers=0) as loader, pytest.raises(lp.StateError, match="on_epoch_end"):
        loader.as_dataset(checkpointable=True)
    with lp.Loader(iter(range(8)), batch_size=2, workers=0) as loader, pytest.raises(lp.StateError, match="only once"):
        loader.as_dataset(checkpointable=True)


def test_the_iterator_of_a_strategy_is_not_trackable_but_the_hosts_is(
    on: Place, tf: Any, save: Callable[..., str], restored: Any
) -> None:
    """TensorFlow has no checkpoint of a distributed iterator; the host's can be saved, and its batches dealt out."""
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])

    def make() -> lp.Loader:
        return lp.Loader(range(40), lambda i: np.int64(i), batch_size=4, shuffle=True, **on(1))

    def step(iterator: Any) -> list[list[int]]:
        batch = next(iterator)
        parts = tf.split(batch, strategy.num_replicas_in_sync)
        dealt = strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )
        doubled = strategy.run(lambda x: 2 * x, (dealt,))
        return [part.numpy().tolist() for part in strategy.experimental_local_results(doubled)]

    with make() as loader:
        dataset = loader.as_dataset(checkpointable=True)
        with pytest.raises(ValueError, match="trackable"):
            save(iter(strategy.experimental_distribute_dataset(dataset)))
        iterator = iter(dataset)
        step(iterator)
        path = save(iterator)
        expected = [step(iterator) for _ in range(5)]
        del iterator, dataset
    with make() as loader:
        iterator = restored(loader.as_dataset(checkpointable=True), path)
        assert [step(iterator) for _ in range(5)] == expected
        del iterator


# ---- killed ----

TRAIN = """
import json, os, signal, sys
import numpy as np
import tensorflow as tf
import loaderpool as lp

def augment(item, rng):
    x = rng.normal(size=6).astype(np.float32) + item % 5
    return x, np.float32(x.sum() > 12)

def wide(item, rng):
    x, y = augment(item, rng)
    return np.pad(x, (0, 40_000)), y

def train(kind, path, kill_after=0):
    tf.random.set_seed(3)
    weights = tf.Variable(tf.random.normal((6, 1)))
    step = tf.Variable(0, dtype=tf.int64)
    epoch = tf.Variable(0, dtype=tf.int64)
    optimizer = tf.keras.optimizers.Adam(0.02)
    optimizer.build([weights])

    @tf.function
    def update(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y[:, None], x[:, :6] @ weights))
        optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
        step.assign_add(1)

    @tf.function
    def several(iterator, count):
        for _ in tf.range(count):
            update(*next(iterator))

    fn = wide if kind == "function" else augment
    loader = lp.Loader(range(90), fn, batch_size=4, shuffle=True, seed=2, workers=2)  # 23 batches an epoch
    per_epoch = kind == "iterators"
    dataset = loader.as_dataset(epochs=1 if per_epoch else 3, checkpointable=True)
    iterator = iter(dataset)
    parts = dict(weights=weights, step=step, epoch=epoch, optimizer=optimizer)
    checkpoint = tf.train.Checkpoint(**parts, iterator=iterator)
    manager = tf.train.CheckpointManager(checkpoint, path, max_to_keep=2)
    manager.restore_or_initialize()
    first = int(step)
    if per_epoch:
        loader.epoch = int(epoch)

    def after_step():
        if int(step) % 5 == 0:
            manager.save()
        if kill_after and int(step) >= kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    if kind == "function":
        while int(step) < 69:
            several(iterator, tf.minimum(5, 69 - int(step)))
            after_step()
    elif per_epoch:
        while int(epoch) < 3:
            for batch in iterator:
                update(*batch)
                after_step()
            epoch.assign_add(1)
            checkpoint.iterator = iterator = iter(dataset)
            manager.save()  # of an iterator that has given nothing
    else:
        for batch in iterator:
            update(*batch)
            after_step()
    loader.close()
    return weights.numpy().ravel().tolist(), int(step), first
"""
KINDS = {"tiny": 31, "function": 40, "iterators": 47}  # after how many steps it is killed


def trained(code: str, folder: Path) -> Any:
    return run_child(TRAIN + code, env={"TF_CPP_MIN_LOG_LEVEL": "3"}, cwd=folder, timeout_s=110)


def test_a_killed_loop_ends_with_the_weights_of_one_that_was_not(tf: Any, tmp_path: Path) -> None:
    # Forks, before TensorFlow is used: to import it takes longer than to train.
    killed = f"[status_of_fork(lambda: train(kind, kind, after)) for kind, after in {KINDS}.items()]"
    code = f"from tests.support.processes import status_of_fork\nprint({killed})"
    assert trained(code, tmp_path).check().stdout.splitlines()[-1] == str([-signal.SIGKILL.value] * len(KINDS))
    code = f"print(json.dumps([[train(kind, kind), train(kind, kind + '-whole')] for kind in {list(KINDS)!r}]))"
    result = trained(code, tmp_path).check()
    for (kind, kill_after), (again, whole) in zip(
        KINDS.items(), json.loads(result.stdout.splitlines()[-1]), strict=True
    ):
        assert again[2] > kill_after - 6, f"{kind}: it went on where it was"
        assert (whole[1], whole[2]) == (69, 0)
        assert again[1] == 69, f"{kind}: another number of steps"
        assert again[0] == whole[0], f"{kind}: other weights"
