"""A loader's batches as tensors of TensorFlow, PyTorch and JAX: the same bits, in the workers'
memory.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import loaderpool as lp
from tests.support import tensorflow_runtime
from tests.support.batches import Place, assert_same, copied, read
from tests.support.child import run_child
from tests.support.frameworks import Framework
from tests.support.processes import lies_in_shared_memory
from tests.support.samples import fail_at

pytestmark = pytest.mark.usefixtures("all_frameworks")
WIDE = (64, 65, 3)


class Pair(NamedTuple):
    left: Any
    right: Any


def in_32_bits(batch: Any, framework: Framework) -> Any:
    """Return the values as JAX has them: 64 bits are reduced to 32."""
    if framework.name != "jax":
        return batch
    if isinstance(batch, dict):
        return {key: in_32_bits(part, framework) for key, part in batch.items()}
    if isinstance(batch, tuple):
        parts = [in_32_bits(part, framework) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    narrow = {"int64": "i4", "uint64": "u4", "float64": "f4"}
    return batch.astype(narrow.get(batch.dtype.name, batch.dtype))


def tiny(index: int, rng: np.random.Generator) -> Any:
    return rng.random(16).astype(np.float32)


def odd(index: int, rng: np.random.Generator) -> Any:
    return {
        "a": rng.integers(0, 255, 3).astype(np.uint8),
        "b": np.float32(index),
        "c": np.bool_(index % 3 == 0),
    }


def nested(index: int, rng: np.random.Generator) -> Any:
    return Pair(
        {"x": rng.random((5, 7)), "i": index}, (np.int8(index % 100), np.float16(0.5 * index))
    )


def wide(index: int, rng: np.random.Generator) -> Any:
    return np.full(WIDE, index, np.float32), np.int64(index)


def empty(index: int) -> Any:
    return np.zeros((0, 3), np.float32), np.float32(index)


def varied(index: int, rng: np.random.Generator) -> Any:
    return rng.random((1 + index % 5, 3)).astype(np.float32), np.int32(index)


def bfloat(index: int) -> Any:
    return np.full(3, index, ml_dtypes.bfloat16)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tiny": (tiny, {"batch_size": 32}),
    "odd sizes": (odd, {"batch_size": 3}),
    "nested": (nested, {"batch_size": 7}),
    "wide": (wide, {"batch_size": 4}),
    "empty": (empty, {"batch_size": 4}),
    "padded": (varied, {"batch_size": 4, "pad": True}),
    "whole": (varied, {"batch_size": None}),
    "one bfloat16": (bfloat, {"batch_size": 1}),
}


@pytest.mark.corner
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_the_loaders_own_bits(
    framework: Framework, on: Place, kind: str, workers: int
) -> None:
    fn, settings = KINDS[kind]
    with lp.Loader(range(701), fn, shuffle=True, seed=5, **settings, **on(workers)) as loader:
        expected = [in_32_bits(batch, framework) for batch in read(loader, passes=2)]
        loader.epoch = 0
        view = framework.view(loader)
        found = [copied(framework.arrays(batch)) for _ in range(2) for batch in view]
        assert len(view) == len(loader)
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert_same(batch, other)


@pytest.mark.corner
def test_tensors_lie_in_shared_memory(framework: Framework, on: Place) -> None:
    with lp.Loader(range(80), wide, batch_size=4, **on(2)) as loader:
        for batches, batch in enumerate(framework.view(loader)):
            assert lies_in_shared_memory(framework.address(batch[0])), batches
        assert loader.statistics().memory.batches_copied == 0


@pytest.mark.parametrize(("fn", "batch_size"), [(odd, 1), (wide, 4)])
def test_who_keeps_tensors_neither_stops_the_pool_nor_sees_data_change(
    framework: Framework, on: Place, fn: Any, batch_size: int
) -> None:
    with lp.Loader(range(400), fn, batch_size=batch_size, **on(2)) as loader:
        expected = [in_32_bits(batch, framework) for batch in read(loader)]
        loader.epoch = 0
        kept = list(framework.view(loader))
        for _ in loader:  # more batches than slots, while all of them are held
            pass
        for batch, other in zip(kept, expected, strict=True):
            assert_same(framework.arrays(batch), other)
        del kept, batch
        gc.collect()
        tensorflow_runtime.let_go_of_arrays()
        for _ in loader:
            pass
        assert loader.statistics().memory.buffers_in_use <= 1


@pytest.mark.corner
def test_tensors_outlive_the_loader(framework: Framework) -> None:
    with lp.Loader(range(8), wide, batch_size=4, workers=1) as loader:
        kept = list(framework.view(loader))
    gc.collect()
    assert [framework.arrays(y).tolist() for _, y in kept] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [float(framework.arrays(x)[3, 1, 1, 1]) for x, _ in kept] == [3, 7]


def test_the_place_is_the_iterators_own(framework: Framework, on: Place) -> None:
    with lp.Loader(range(50), tiny, batch_size=4, shuffle=True, **on(2)) as loader:
        expected = read(loader, passes=2)
        loader.epoch = 0
        batches = iter(framework.view(loader))
        for _ in range(5):
            next(batches)
        state = batches.state_dict()
        batches.close()
        loader.load_state_dict(state)
        rest = [framework.arrays(batch) for batch in framework.view(loader)]
        assert_same([copied(batch) for batch in rest], expected[5:13])
        assert_same(
            [copied(framework.arrays(batch)) for batch in framework.view(loader)], expected[13:]
        )


def test_errors_come_as_they_are_behind_the_batches_before_them(
    framework: Framework, on: Place
) -> None:

    with lp.Loader(range(20), fail_at({11}), batch_size=4, **on(2)) as loader:
        batches: Iterator[Any] = iter(framework.view(loader))
        assert [framework.arrays(next(batches)).tolist() for _ in range(2)] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
        ]
        with pytest.raises(lp.SampleError, match="item 11 is bad"):
            next(batches)
        view = framework.view(loader)
    with pytest.raises(lp.ClosedError):
        next(iter(view))
    with pytest.raises(lp.ClosedError):
        framework.view(loader)


def words(index: int) -> Any:
    return np.array([f"w{index}", "ü"]), np.int32(index)


@pytest.mark.corner
def test_text_is_given_or_refused_by_name(framework: Framework, on: Place) -> None:
    with lp.Loader(range(6), words, batch_size=3, **on(1)) as loader:
        view = framework.view(loader)
        if framework.name == "tensorflow":
            found = [(x.numpy().tolist(), y.numpy().tolist()) for x, y in view]
            assert found[1] == ([[f"w{i}".encode(), "ü".encode()] for i in (3, 4, 5)], [3, 4, 5])
            return
        if framework.name == "torch":
            found = [(type(x), x.tolist(), y.tolist()) for x, y in view]
            assert found[1] == (np.ndarray, [[f"w{i}", "ü"] for i in (3, 4, 5)], [3, 4, 5])
            return
        with pytest.raises(
            lp.SpecMismatchError, match=rf"{framework.method}: component \[0\] is text \(str\)"
        ):
            next(iter(view))


@pytest.mark.corner
def test_ragged_components_are_given_or_refused_by_name(framework: Framework, on: Place) -> None:
    with lp.Loader(range(20), varied, batch_size=4, ragged=True, **on(2)) as loader:
        expected = read(loader)
        loader.epoch = 0
        if framework.name == "jax":
            with pytest.raises(
                lp.SpecMismatchError, match=r"as_jax: component \[0\] is ragged.*pad=True"
            ):
                next(iter(framework.view(loader)))
            return
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "The PyTorch API of nested tensors is in prototype stage"
            )
            found = [framework.arrays(batch) for batch in framework.view(loader)]
        assert_same(found, expected)


# Dtypes of ml_dtypes for which a framework has no tensors.
LACKS = {
    "torch": {"float8_e4m3b11fnuz", "int4", "uint2", "float4_e2m1fn"},
    "tensorflow": {"float8_e8m0fnu"},
    "jax": {"float6_e2m3fn"},
}
SMALL = [
    "float8_e4m3fn",
    "float8_e4m3b11fnuz",
    "float8_e8m0fnu",
    "int4",
    "uint2",
    "float4_e2m1fn",
    "float6_e2m3fn",
]


@pytest.mark.parametrize("dtype", [name for name in SMALL if hasattr(ml_dtypes, name)])
def test_small_dtypes_are_given_or_an_error(framework: Framework, on: Place, dtype: str) -> None:
    if dtype == "float6_e2m3fn" and framework.name != "jax":
        pytest.skip("as float4_e2m1fn or float8_e8m0fnu")
    most = 2 if dtype in ("uint2", "float8_e8m0fnu") else 4  # powers of two, or small ones
    with lp.Loader(
        range(20), lambda i: np.full(2, i % most + 1, getattr(ml_dtypes, dtype)), **on(1)
    ) as loader:
        batches = iter(framework.view(loader))
        if dtype in LACKS[framework.name]:
            with pytest.raises(
                lp.LoaderpoolError, match=rf"{framework.method}: the batch is {dtype}, and .*astype"
            ):
                next(batches)
            return
        found = next(batches)
        assert str(found.dtype).endswith(dtype) or dtype in str(found.dtype)
        values = (
            found.float().numpy()
            if framework.name == "torch"
            else framework.arrays(found).astype("f4")
        )
        assert values.tolist() == [[i % most + 1] * 2 for i in range(20)]


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"prefetch": -1}, lp.ArgumentError, r"prefetch must be at least 0"),
        ({"prefetch": 1.5}, lp.ArgumentError, r"prefetch must be an integer"),
        ({"sharding": "rows"}, (AttributeError, TypeError), r"sharding|platform"),
    ],
)
def test_a_wrong_argument_is_named(
    framework: Framework, on: Place, arguments: dict[str, Any], error: Any, told: str
) -> None:
    with lp.Loader(range(6), tiny, **on(0)) as loader, pytest.raises(error, match=told):
        framework.view(loader, **arguments)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_tensors_are_copied_to_a_device_ahead_of_the_step(
    tf: Any, on: Place, prefetch: int
) -> None:
    with lp.Loader(range(60), wide, batch_size=4, **on(2)) as loader:
        expected = read(loader, passes=2)
        loader.epoch = 0
        batches = iter(loader.tensors(device="/CPU:1", prefetch=prefetch))
        for number, (x, y) in enumerate(batches):
            assert x.device.endswith("CPU:1") and y.device.endswith("CPU:1")
            assert_same((x.numpy(), y.numpy()), expected[number])
            assert (
                batches.state_dict()["batches"] == (number + 1) % 15
                if "batches" in batches.state_dict()
                else True
            )
            if number == 7:
                state = batches.state_dict()
        loader.load_state_dict(state)
        rest = [
            copied((x.numpy(), y.numpy()))
            for x, y in loader.tensors(device="/CPU:1", prefetch=prefetch)
        ]
        assert_same(rest, expected[8:15])


def test_a_data_loader_takes_the_torch_view_as_it_is(on: Place) -> None:
    torch = pytest.importorskip("torch")
    with lp.Loader(range(60), words, batch_size=4, **on(2)) as loader:
        expected = read(loader)
        loader.epoch = 0
        view = loader.as_torch()
        assert isinstance(view, torch.utils.data.IterableDataset)
        found = [
            (text, number.numpy())
            for text, number in torch.utils.data.DataLoader(view, batch_size=None)
        ]
        assert_same([copied(batch) for batch in found], expected)
        for text, number in loader.as_torch(device="meta"):
            assert isinstance(text, np.ndarray) and number.device.type == "meta"


def test_libraries_that_skip_batches_get_an_error_with_the_fix() -> None:
    pytest.importorskip("torch")
    with lp.Loader(range(3), workers=0) as loader:
        batches = loader.as_torch()
        with pytest.raises(AttributeError, match=r"load_state_dict\(.*ignore_data_skip=True"):
            batches.dataset  # noqa: B018
        assert getattr(batches, "dataset", None) is None


def test_a_missing_framework_is_named() -> None:
    run_child(
        """
        import sys
        sys.modules |= {"torch": None, "jax": None, "tensorflow": None}
        import loaderpool as lp
        install = "TensorFlow: pip install 'loaderpool[tensorflow]'"
        said = {"as_torch": "torch", "as_jax": "jax", "tensors": install, "as_dataset": install}
        with lp.Loader(range(4), workers=0) as loader:
            for call, text in said.items():
                try:
                    getattr(loader, call)()
                except ImportError as error:
                    assert text in str(error), error
                else:
                    raise SystemExit("no error")
        """
    ).check()
