"""`Loader.as_dataset`: the dataset's properties, the memory of its tensors, and common uses."""

from __future__ import annotations

import functools
import gc
import os
import textwrap
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import loaderpool as lp
from tests.support import tensorflow_runtime
from tests.support.child import run_child
from tests.support.processes import descendants, lies_in_shared_memory, wait_gone
from tests.support.samples import Point, fail_at

# Four of these are more than half of the largest chunk. So each batch has its own ticket, and is
# delivered as views.
WIDE = (128, 256)
pytestmark = pytest.mark.corner


def sample(index: int) -> dict[str, Any]:
    return {"x": np.full((3,), index, np.float32), "y": np.int64(index)}


def wide(index: int) -> Any:
    return np.full(WIDE, index, np.float32), np.int64(index)


def let_go() -> None:
    gc.collect()
    tensorflow_runtime.let_go_of_arrays()


# ---- properties of the dataset ----


def test_element_spec_is_that_of_the_batches(tf: Any, pool: lp.Pool) -> None:
    def fn(index: int) -> Any:
        return {"p": Point(np.zeros((4, 2), np.uint8), (np.float64(1), "text")), "b": b"bytes"}

    with lp.Loader(range(10), fn, batch_size=4, workers=pool) as loader:
        spec = loader.as_dataset().element_spec
        batch = next(iter(loader.as_dataset()))
    assert spec == {
        "p": Point(
            tf.TensorSpec((None, 4, 2), tf.uint8),
            (tf.TensorSpec((None,), tf.float64), tf.TensorSpec((None,), tf.string)),
        ),
        "b": tf.TensorSpec((None,), tf.string),
    }
    assert isinstance(batch["p"], Point)
    assert batch["p"].y[1].numpy().tolist() == [b"text"] * 4


def test_drop_remainder_makes_the_batch_axis_static(tf: Any, pool: lp.Pool) -> None:
    for fn, shape in ((sample, (4, 3)), (wide, (4, *WIDE))):
        with lp.Loader(range(10), fn, batch_size=4, drop_remainder=True, workers=pool) as loader:
            dataset = loader.as_dataset()
            first = tf.nest.flatten(dataset.element_spec)[0]
            assert tuple(first.shape) == shape
            assert [tuple(tf.nest.flatten(batch)[0].shape) for batch in dataset] == [shape] * 2


def test_skipped_rows_leave_the_batch_axis_open_beside_drop_remainder(
    tf: Any, pool: lp.Pool
) -> None:
    def fn(item: int) -> Any:
        return np.full(3, fail_at({1})(item), np.float32)

    how: dict[str, Any] = {
        "batch_size": 4,
        "drop_remainder": True,
        "on_error": "skip",
        "workers": pool,
    }
    for given in (None, lp.ArraySpec((4, 3), np.float32), lp.ArraySpec((None, 3), np.float32)):
        with lp.Loader(range(10), fn, element_spec=given, **how) as loader:
            dataset = loader.as_dataset()
            assert tuple(dataset.element_spec.shape) == (None, 3)
            assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
            assert [tuple(batch.shape) for batch in dataset] == [(3, 3), (4, 3)]


@pytest.mark.parametrize(("epochs", "cardinality"), [(1, 3), (4, 12), (None, -1)])
def test_cardinality_is_known(tf: Any, pool: lp.Pool, epochs: int | None, cardinality: int) -> None:
    with lp.Loader(range(10), sample, batch_size=4, workers=pool) as loader:
        assert int(loader.as_dataset(epochs=epochs).cardinality()) == cardinality
    assert tf.data.INFINITE_CARDINALITY == -1


def test_options_have_no_sharding_and_nothing_that_holds_for_the_users_own_stages(
    tf: Any, pool: lp.Pool
) -> None:
    with lp.Loader(range(10), wide, batch_size=4, workers=pool) as loader:
        options = loader.as_dataset().map(lambda x, y: y).options()
    assert (
        options.experimental_distribute.auto_shard_policy
        == tf.data.experimental.AutoShardPolicy.OFF
    )
    assert options.threading.private_threadpool_size is None
    assert options.threading.max_intra_op_parallelism is None
    assert options.autotune.enabled is None
    assert (
        options.experimental_optimization.inject_prefetch is None
    )  # the user's last map may run ahead of training
    assert options.deterministic is None


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"epochs": 0}, ValueError, "epochs"),
        ({"epochs": True}, TypeError, "epochs"),
        ({"epochs": 2**62}, ValueError, "epochs"),  # epochs of four batches
        ({"prefetch": -2}, ValueError, "prefetch.*AUTOTUNE"),
        ({"prefetch": None}, TypeError, "prefetch"),
        *(
            ({"device": wrong}, ValueError, "device must be one of /CPU:0.*got")
            for wrong in (0, "", "gpu", "/GPU:7")
        ),
    ],
)
def test_wrong_arguments_fail_in_the_callers_line(
    tf: Any, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    loader = lp.Loader(range(4), sample, batch_size=1, workers=0)
    with loader, pytest.raises(lp.ArgumentError, match=text) as caught:
        loader.as_dataset(**arguments)
    assert isinstance(caught.value, error)


def test_devices_that_are_not_there_are_refused_and_others_taken(tf: Any) -> None:
    with lp.Loader(range(4), sample, batch_size=2, workers=0) as loader:
        with pytest.raises(lp.ArgumentError, match=r"device must be one of /CPU:0, .*got '/GPU:7'"):
            loader.tensors(device="/GPU:7")
        for device in ("/CPU:0", "/cpu:0", "/job:localhost/replica:0/task:0/device:CPU:0"):
            assert (
                len(list(loader.as_dataset(device=device)))
                == len(list(loader.tensors(device=device)))
                == 2
            )


def test_a_dict_that_tensorflow_cannot_sort_is_its_own_error(tf: Any) -> None:
    with lp.Loader(
        range(4), lambda i: {1: np.int64(i), "a": np.int64(i)}, batch_size=2, workers=0
    ) as loader:
        with pytest.raises(TypeError):
            loader.as_dataset()
        assert len(list(loader)) == 2


# ---- the same data ----


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_of_several_epochs_is_their_concatenation(tf: Any, workers: int) -> None:
    with lp.Loader(
        range(10), lambda i: np.int64(i), batch_size=4, shuffle=True, workers=workers
    ) as loader:
        wanted = [batch.tolist() for _ in range(3) for batch in loader]
        loader.epoch = 0
        assert [
            batch.numpy().tolist()
            for batch in loader.as_dataset(epochs=np.uint8(3), prefetch=np.int64(2))
        ] == wanted
        loader.epoch = 0
        endless = [
            batch.numpy().tolist()
            for batch in loader.as_dataset(epochs=None, prefetch=tf.data.AUTOTUNE).take(9)
        ]
        assert endless == wanted


_DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16", "float8_e4m3fn"),
]


@pytest.mark.parametrize("shape", [(2,), WIDE], ids=["chunks", "batches"])
def test_dtypes_arrive_as_they_are(tf: Any, pool: lp.Pool, shape: tuple[int, ...]) -> None:
    dtypes = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in _DTYPES}
    width = int(np.prod(shape))

    def fn(index: int) -> Any:
        return {
            name: ((np.arange(width) + index) % 7).reshape(shape).astype(dtype)
            for name, dtype in dtypes.items()
        }

    with lp.Loader(range(6), fn, batch_size=2, workers=pool) as loader:
        for wanted, got in zip(loader, loader.as_dataset(), strict=True):
            for name in _DTYPES:
                assert got[name].dtype.name == name
                assert got[name].numpy().dtype == dtypes[name]
                assert got[name].numpy().tobytes() == wanted[name].tobytes()


def test_float8_e5m2_has_eager_tensors_and_tensorflows_own_error_in_a_dataset(tf: Any) -> None:
    fn = functools.partial(np.ones, (4,), ml_dtypes.float8_e5m2)
    with lp.Loader(range(8), lambda i: {"v": fn()}, batch_size=2, workers=0) as loader:
        with pytest.raises(tf.errors.UnimplementedError):
            next(iter(loader.as_dataset()))
        assert next(iter(loader.tensors()))["v"].dtype.name == "float8_e5m2"


def test_a_dtype_that_tensorflow_lacks_is_named(tf: Any) -> None:
    fn = functools.partial(np.ones, (4,), ml_dtypes.float8_e8m0fnu)
    with lp.Loader(range(8), lambda i: {"v": fn()}, batch_size=2, workers=0) as loader:
        for view in (loader.as_dataset, loader.tensors):
            with pytest.raises(
                lp.LoaderpoolError, match=r"component \['v'\] is float8_e8m0fnu, and TensorFlow"
            ):
                next(iter(view()))


def test_ragged_rows_become_ragged_tensors_in_any_structure(tf: Any, pool: lp.Pool) -> None:
    def fn(index: int) -> Any:
        return {
            "r": np.arange(index, dtype=np.int32),
            "deep": (np.ones((index % 3, 2), np.float32), np.int64(index)),
        }

    with lp.Loader(range(10), fn, batch_size=4, ragged=True, workers=pool) as loader:
        dataset = loader.as_dataset()
        assert dataset.element_spec["r"] == tf.RaggedTensorSpec((None, None), tf.int32, 1, tf.int64)
        assert dataset.element_spec["deep"][0] == tf.RaggedTensorSpec(
            (None, None, 2), tf.float32, 1, tf.int64
        )
        batches = list(dataset)
    assert [isinstance(batch["r"], tf.RaggedTensor) for batch in batches] == [True] * 3
    rows = [row for batch in batches for row in batch["r"].to_list()]
    assert rows == [list(range(index)) for index in range(10)]
    assert batches[0]["deep"][0].row_lengths().numpy().tolist() == [0, 1, 2, 0]
    assert batches[2]["deep"][1].numpy().tolist() == [8, 9]


def test_text_of_any_kind_becomes_tf_string(tf: Any, pool: lp.Pool) -> None:
    texts = ["", "ascii", "grün", "nul\0inside", "trailing\0", "🜚" * 1000]

    def fn(text: str) -> Any:
        return {"one": text, "raw": text.encode(), "many": np.array([text, "x"], object)}

    with lp.Loader(texts, fn, batch_size=4, workers=pool) as loader:
        batches = list(loader.as_dataset())
    wanted = [text.encode() for text in texts]
    assert [item for batch in batches for item in batch["one"].numpy().tolist()] == wanted
    assert [item for batch in batches for item in batch["raw"].numpy().tolist()] == wanted
    assert batches[0]["many"].shape == (4, 2)
    assert batches[0]["many"].dtype == tf.string


def test_samples_without_elements_arrive_as_they_are(tf: Any) -> None:
    """In a child, because TensorFlow's `unbatch` crashes at a component without elements."""
    run_child(
        """
        import numpy as np
        import loaderpool as lp

        for shape in [(0,), (0, 3), (3, 0)]:
            fn = lambda i: (np.empty(shape, "f4"), np.int64(i))
            with lp.Loader(range(40), fn, batch_size=2, workers=1) as loader:
                for _ in range(2):
                    batches = list(loader.as_dataset())
                    assert [tuple(x.shape) for x, _ in batches] == [(2, *shape)] * 20
                    assert [y for _, labels in batches for y in labels.numpy()] == list(range(40))
        """,
        imported="tensorflow",
    ).check()


# ---- the memory of tensors ----


def test_tensors_lie_in_shared_memory(tf: Any, pool: lp.Pool) -> None:
    with lp.Loader(range(80), wide, batch_size=4, workers=pool) as loader:
        aliases = tensorflow_runtime.aliases_arrays()  # some versions always copy
        batches = 0
        for x, y in loader.as_dataset():
            for tensor in (x, y):
                assert lies_in_shared_memory(tensorflow_runtime.address_of(tensor)) or not aliases
            batches += 1
            del x, y, tensor
        statistics = loader.statistics()
    assert batches == 20
    assert (statistics.memory.batches_zero_copy, statistics.memory.batches_copied) == (20, 0)


@pytest.mark.parametrize("fn", [sample, wide])
@pytest.mark.parametrize("keep", ["list", "cache", "shuffle", "map"])
def test_who_keeps_tensors_neither_stops_the_pool_nor_sees_data_change(
    tf: Any, pool: lp.Pool, fn: Any, keep: str
) -> None:
    with lp.Loader(range(400), fn, batch_size=4, workers=pool) as loader:
        labels = loader.as_dataset()
        stages = {
            "list": lambda ds: ds,
            "cache": lambda ds: ds.cache(),
            "shuffle": lambda ds: ds.shuffle(100, seed=1),
            "map": lambda ds: ds.map(lambda *batch: batch if len(batch) > 1 else batch[0]),
        }
        kept = list(stages[keep](labels))
        assert len(kept) == 100
        # More batches than slots, while all of them are held.
        for _ in loader:
            pass
        seen = []
        for batch in kept:
            x, y = tf.nest.flatten(batch)
            first = x.numpy().reshape(len(y), -1)
            assert (first == y.numpy()[:, None]).all()
            seen += y.numpy().tolist()
        assert sorted(seen) == list(range(400))
        if keep != "shuffle":
            assert seen == list(range(400))
        del kept, batch, x, y, first, labels
        let_go()
        assert len(list(loader.as_dataset())) == 100


# ---- iterators ----


@pytest.mark.parametrize("fn", [sample, wide])
def test_several_iterators_at_once(tf: Any, pool: lp.Pool, fn: Any) -> None:
    def label(batch: Any) -> list[int]:
        return tf.nest.flatten(batch)[-1].numpy().tolist()

    with lp.Loader(range(50), fn, batch_size=4, workers=pool) as loader:
        dataset = loader.as_dataset()
        wanted = [list(range(start, min(50, start + 4))) for start in range(0, 50, 4)]
        assert [(label(a), label(b)) for a, b in zip(dataset, dataset, strict=True)] == [
            (w, w) for w in wanted
        ]
        assert [(label(a), label(b)) for a, b in tf.data.Dataset.zip((dataset, dataset))] == [
            (w, w) for w in wanted
        ]
        first = iter(dataset)
        next(first)
        assert [label(batch) for batch in dataset] == wanted
        assert label(next(first)) == wanted[1]
        assert len(list(dataset.concatenate(dataset))) == 2 * len(wanted)


@pytest.mark.parametrize("stage", ["map", "zip", "iterator"])
def test_the_dataset_holds_the_loader_and_dropping_all_ends_the_processes(
    tf: Any, stage: str
) -> None:
    loader = lp.Loader(range(40), wide, batch_size=4, workers=2)
    dataset = loader.as_dataset()
    pids = [worker.pid for worker in loader.statistics().workers]
    del loader
    kept: Any = dataset
    if stage == "map":
        kept = dataset.map(lambda x, y: y).batch(2, drop_remainder=True).prefetch(1).unbatch()
    elif stage == "zip":
        kept = tf.data.Dataset.zip((dataset.map(lambda x, y: y), tf.data.Dataset.range(100)))
    elif stage == "iterator":
        kept = iter(dataset)
    del dataset
    gc.collect()
    assert len(list(kept)) == 10
    assert set(pids) <= set(descendants(os.getpid()))
    del kept
    let_go()
    assert wait_gone(pids, 5) == []


def test_a_closed_loader_says_so(tf: Any) -> None:
    loader = lp.Loader(range(8), sample, batch_size=4, workers=1)
    dataset = loader.as_dataset()
    loader.close()
    with pytest.raises(tf.errors.UnknownError, match="closed"):
        list(dataset)
    with pytest.raises(lp.ClosedError):
        loader.as_dataset()


# ---- errors ----


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_function_arrives_with_its_remote_traceback_and_the_next_pass_is_whole(
    tf: Any, tmp_path: Any, workers: int
) -> None:
    flag = tmp_path / "fails"
    flag.touch()

    def fails_at_13(index: int) -> Any:
        if index == 13 and flag.exists():
            raise KeyError("thirteen")
        return wide(index)

    with lp.Loader(range(40), fails_at_13, batch_size=4, workers=workers) as loader:
        dataset = loader.as_dataset()
        seen = []
        with pytest.raises(tf.errors.OpError) as caught:
            for _, y in dataset:
                seen.append(int(y[0]))
        assert seen == [0, 4, 8]
        for text in ("KeyError", "thirteen", "index 13", "fails_at_13"):
            assert text in caught.value.message
        error = loader.last_error
        assert isinstance(error, lp.SampleError)
        assert isinstance(error, KeyError)
        assert (error.index, error.epoch) == (13, 0)
        assert "in fails_at_13" in error.remote_traceback
        flag.unlink()
        assert [int(y[0]) for _, y in dataset] == list(range(0, 40, 4))


def test_an_error_of_the_first_sample_is_raised_by_as_dataset_itself(
    tf: Any, pool: lp.Pool
) -> None:
    with (
        lp.Loader(range(4), lambda i: 1 / i, batch_size=2, workers=pool) as loader,
        pytest.raises(ZeroDivisionError) as caught,
    ):
        loader.as_dataset()
    assert isinstance(caught.value, lp.SampleError)


# ---- devices ----


@pytest.mark.parametrize("fn", [sample, wide])
def test_device_prefetches_to_that_device(tf: Any, pool: lp.Pool, fn: Any) -> None:
    with lp.Loader(range(40), fn, batch_size=4, workers=pool) as loader:
        seen = []
        for batch in loader.as_dataset(device="/CPU:1"):
            x, y = tf.nest.flatten(batch)
            assert x.device.endswith("CPU:1")
            assert y.device.endswith("CPU:1")
            seen += y.numpy().tolist()
            del batch, x, y
        assert seen == list(range(40))


# ---- the allocator ----


FAULTS = """
    import ctypes, resource
    import numpy as np
    import tensorflow as tf
    import loaderpool as lp

    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault for each page, however free memory lies

    def faults():
        def touch():
            np.empty(4 << 20, np.uint8).fill(1)
        touch(), touch()  # the first one is mapped, the second one has the heap grow
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt  # TensorFlow's own threads have some, too
        for _ in range(20):
            touch()
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    def spoil():  # what TensorFlow does
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 128 << 10), libc.mallopt(-1, 128 << 10)

    def make():
        return lp.Loader(range(4), lambda i: np.zeros(4), batch_size=2, workers=1)
"""


def count_faults(code: str) -> list[int]:
    ran = run_child(textwrap.dedent(FAULTS) + textwrap.dedent(code), imported="tensorflow")
    return [int(word) for word in ran.check().stdout.split()]


# Page faults of 20 arrays of 1024 pages. If each array is mapped anew, each page has a fault.
# Otherwise almost none has.
MAPPED = 20 * 100


def test_a_dataset_leaves_the_allocator_as_it_was(tf: Any) -> None:
    before, after, spoiled = count_faults(
        """
        before = faults()
        with make() as loader:
            list(loader.as_dataset())
            after = faults()
        spoil()
        print(before, after, faults())
        """
    )
    assert max(before, after) < MAPPED < spoiled


def test_a_dataset_has_the_length_of_the_batches_that_are_not_left_out(
    tf: Any, pool: lp.Pool
) -> None:
    with lp.Loader(range(40), batch_size=4, shuffle=True, workers=pool) as loader:
        expected = [batch.tolist() for batch in loader]
        loader.epoch = 0
        loader.skip_batches(range(3, 6))
        dataset = loader.as_dataset()
        assert int(dataset.cardinality()) == len(expected) - 3
        assert [batch.numpy().tolist() for batch in dataset] == expected[:3] + expected[6:]
