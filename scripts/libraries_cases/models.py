"""Models, and libraries for numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from libraries_cases.arrays import table
from libraries_cases.case import (
    OPENED,
    Trial,
    case,
    handle,
    not_reproducible,
    opened_in_setup,
    refused,
    refused_with,
    without_fork,
    works,
)

AS_ARRAY = "capture a NumPy array"
FROM_RNG = "[seed it from `rng`](#randomness)"


def labels() -> np.ndarray[Any, Any]:
    return (table().sum(axis=1) > 300).astype(np.int64)


@case("PyTorch", "torch", "tensors and modules on the CPU", works)
def torch_module(place: Path) -> Trial:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(5, 2).eval()
    rows = torch.from_numpy(table())

    def predict(item: int) -> Any:
        with torch.no_grad():
            return model(rows[item]).numpy()

    return Trial(predict)


@case("PyTorch", "torch", "`Generator`, global generator: [random](#randomness)", works)
def torch_generator(place: Path) -> Trial:
    import torch

    generator = torch.Generator().manual_seed(0)
    return Trial(
        lambda item: (torch.rand(3, generator=generator) + torch.rand(3)).numpy(), is_random=True
    )


@case(
    "TensorFlow", "tensorflow-cpu", "tensors", without_fork("the runtime of TensorFlow"), AS_ARRAY
)
def tensorflow_tensor(place: Path) -> Trial:
    import tensorflow as tf

    rows = tf.constant(table())
    return Trial(lambda item: rows[item].numpy())


@case("JAX", "jax", "arrays and keys", without_fork("the runtime of JAX"), AS_ARRAY)
def jax_array(place: Path) -> Trial:
    import jax.numpy as jnp

    rows = jnp.asarray(table())
    return Trial(lambda item: np.asarray(rows[item] * 2))


@case("JAX", "jax", "functions", works)
def jax_functions(place: Path) -> Trial:
    import jax.numpy as jnp

    rows = table()
    return Trial(lambda item: np.asarray(jnp.sin(rows[item])))


@case("scikit-learn", "scikit-learn", "estimators, pipelines", works)
def sklearn_pipeline(place: Path) -> Trial:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(table(), labels())
    return Trial(lambda item: model.predict_proba(table()[item : item + 1])[0])


@case("LightGBM", "lightgbm", "`Booster`", works)
def lightgbm_booster(place: Path) -> Trial:
    import lightgbm

    data = lightgbm.Dataset(table(), labels())
    booster = lightgbm.train({"objective": "binary", "min_data_in_leaf": 1, "verbose": -1}, data, 3)
    return Trial(lambda item: booster.predict(table()[item : item + 1], num_threads=1)[0])


@case("XGBoost", "xgboost", "`Booster`", works)
def xgboost_booster(place: Path) -> Trial:
    import xgboost

    booster = xgboost.train(
        {"objective": "binary:logistic", "nthread": 1}, xgboost.DMatrix(table(), labels()), 3
    )
    return Trial(lambda item: booster.predict(xgboost.DMatrix(table()[item : item + 1]))[0])


@case("Faiss", "faiss-cpu", "`Index`", works)
def faiss_index(place: Path) -> Trial:
    import faiss

    index = faiss.IndexFlatL2(5)
    index.add(table())
    return Trial(lambda item: index.search(table()[item : item + 1], 3)[1][0])


@case("hnswlib", "hnswlib", "`Index`", works)
def hnswlib_index(place: Path) -> Trial:
    import hnswlib

    index = hnswlib.Index("l2", 5)
    index.init_index(24)
    index.add_items(table(), num_threads=1)
    return Trial(lambda item: index.knn_query(table()[item], k=3, num_threads=1)[0][0])


def onnx_model(place: Path) -> str:
    """Write a model that adds its input to itself."""
    import onnx
    from onnx import TensorProto, helper

    node = helper.make_node("Add", ["x", "x"], ["y"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [5]) for name in "xy"]
    graph = helper.make_graph([node], "double", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, str(place / "model.onnx"))
    return str(place / "model.onnx")


@case(
    "ONNX Runtime", "onnxruntime", "`InferenceSession`", refused, "import and create it in `setup=`"
)
def onnxruntime_session(place: Path) -> Trial:
    path = onnx_model(place)

    def open_session() -> Any:
        import onnxruntime

        return onnxruntime.InferenceSession(path)

    return handle(open_session, lambda session, item: session.run(None, {"x": table()[item]})[0])


@case(
    "ONNX Runtime",
    "onnxruntime",
    "module that the function uses",
    without_fork("a thread of onnxruntime"),
    "import and create it in `setup=`",
)
def onnxruntime_module(place: Path) -> Trial:
    import onnxruntime

    path = onnx_model(place)

    def setup() -> None:
        OPENED["session"] = onnxruntime.InferenceSession(path)

    def read(item: int) -> Any:
        return OPENED["session"].run(None, {"x": table()[item]})[0]

    def open_session() -> Any:
        import onnxruntime

        return onnxruntime.InferenceSession(path)

    cure = opened_in_setup(
        open_session, lambda session, item: session.run(None, {"x": table()[item]})[0]
    )
    return Trial(read, setup=setup, cure=cure)


@case("Numba", "numba", "`njit` functions, which each worker compiles", works)
def numba_function(place: Path) -> Trial:
    import numba

    @numba.njit
    def total(row: Any) -> Any:
        result = 0.0
        for value in row:
            result += value * value
        return result

    rows = table()
    return Trial(lambda item: total(rows[item]))


@case("Numba", "numba", "typed `List` and `Dict`, `jitclass`", refused, "create them in `setup=`")
def numba_typed_list(place: Path) -> Trial:
    import numba
    from numba.typed import Dict, List

    @numba.experimental.jitclass([("number", numba.int64)])
    class Counter:
        def __init__(self, number: int) -> None:
            self.number = number

    words = Dict.empty(numba.int64, numba.float64)

    def make_list() -> Any:
        made = List()
        for item in range(24):
            made.append(item / 7)
        return made

    return handle(make_list, lambda made, item: made[item], alike=[words, Counter(3)])


@case("Numba", "numba", "`numpy.random` inside `njit`", not_reproducible, FROM_RNG)
def numba_random(place: Path) -> Trial:
    import numba

    @numba.njit
    def draw() -> Any:
        return np.random.normal()

    @numba.njit
    def draw_seeded(seed: Any) -> Any:
        np.random.seed(seed)
        return np.random.normal()

    def seeded(item: int, rng: np.random.Generator) -> Any:
        return draw_seeded(int(rng.integers(2**32)))

    return Trial(lambda item: draw(), is_random=True, cure=Trial(seeded, is_random=True))


@case("SciPy", "scipy", "distributions with `random_state`: [random](#randomness)", works)
def scipy_distribution(place: Path) -> Trial:
    from scipy import stats

    distribution = stats.norm(3.0, 2.0)
    distribution.random_state = np.random.RandomState(0)
    return Trial(lambda item: distribution.rvs(), is_random=True)


@case(
    "SciPy",
    "scipy",
    "`qmc.Sobol`",
    not_reproducible,
    "draw all points first: `points = sobol.random(n)`",
)
def scipy_sobol(place: Path) -> Trial:
    from scipy.stats import qmc

    sobol = qmc.Sobol(2, rng=0)
    points = qmc.Sobol(2, rng=0).random(32)
    cure = Trial(lambda item: points[item])
    return Trial(lambda item: sobol.random()[0], is_random=True, cure=cure)


@case("SciPy", "scipy", "sparse array as the source", works)
def scipy_sparse_source(place: Path) -> Trial:
    from scipy import sparse

    return Trial(None, sparse.csr_array(table()))


@case(
    "SciPy",
    "scipy",
    "sparse array as the result",
    refused_with("sparse"),
    "return `rows.toarray()`",
)
def scipy_sparse(place: Path) -> Trial:
    from scipy import sparse

    rows = sparse.csr_array(table())
    cure = Trial(lambda item: rows[[item]].toarray()[0])
    return Trial(lambda item: rows[[item]], cure=cure)
