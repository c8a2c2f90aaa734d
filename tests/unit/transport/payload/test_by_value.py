"""The supervisor imports TensorFlow, JAX or torch only if the payload's own code uses it.

Modules with these names on `sys.path` record whether they are imported.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loaderpool.transport.payload.pickler import FRAMEWORKS
from loaderpool.transport.payload.ship import Shipment, ship
from tests.support.shipping_child import in_child

FAKES = {
    "tensorflow/__init__.py": """
        import keras
        class Tensor: ...
        def constant(x): return [x]
    """,
    "keras/__init__.py": "from keras import utils",
    "keras/utils.py": """
        class PyDataset:
            def __init__(self, workers=1, use_multiprocessing=False, max_queue_size=10):
                self._workers = workers
                self._use_multiprocessing = use_multiprocessing
                self._max_queue_size = max_queue_size
            workers = property(lambda self: self._workers)
            def _something_new(self): return "new"
            def on_epoch_end(self): pass
        Sequence = PyDataset
        def to_categorical(x): return [x == i for i in range(3)]
    """,
    "torch/__init__.py": """
        from torch import data
        class Tensor: ...
        def constant(x): return [x]
    """,
    "torch/data.py": """
        from typing import Generic, TypeVar
        T = TypeVar("T")
        class Dataset(Generic[T]):
            def __getitem__(self, index): raise NotImplementedError
            def __add__(self, other): return [self, other]
    """,
    "jax/__init__.py": "def constant(x): return [x]",
    "jax/numpy.py": "def constant(x): return [x]",
}
OF_PACKAGE = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}


class Project:
    """A directory of modules, importable here and in the child."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, **modules: str) -> None:
        self.write_files({f"{name}.py": text for name, text in modules.items()})

    def write_files(self, files: dict[str, str]) -> None:
        for path, text in files.items():
            file = self.directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    def load(self, name: str) -> Any:
        return importlib.import_module(name)

    def in_child(self, shipment: Shipment, expression: str) -> tuple[Any, list[str]]:
        return in_child(shipment, expression, self.directory)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    real = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.partition(".")[0] in FRAMEWORKS
    }
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    made = Project(tmp_path)
    made.write_files(FAKES)
    yield made
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.modules.update(real)


# -- functions


@pytest.mark.parametrize("framework", OF_PACKAGE)
def test_a_numpy_function_in_a_module_that_imports_a_framework_needs_no_framework(
    project: Project, framework: str
) -> None:
    project.write(
        data=f"""
        from __future__ import annotations
        import functools
        import numpy as np
        import {framework} as tf
        SCALE = 3
        def load(i):
            return helper(i) + offset()
        def helper(i):
            return np.full(2, i * SCALE).tolist()
        @functools.lru_cache
        def offset():
            return [SCALE]
        def build_model():
            return tf.constant(1)
        """
    )
    shipment = ship({"fn": project.load("data").load})
    assert OF_PACKAGE[framework] in shipment.without
    (result, imported), loaded = project.in_child(shipment, "(fn(2), 'data' in sys.modules)")
    assert result == [6, 6, 3] and not imported and loaded == []


@pytest.mark.parametrize("used", ["torch.constant(i)", "jnp.constant(i)"])
def test_a_function_that_uses_one_framework_needs_no_other(project: Project, used: str) -> None:
    project.write(
        data=f"""
        import tensorflow as tf, torch, jax, jax.numpy as jnp
        def load(i): return {used}
        def build(): return tf.constant(1)
        """
    )
    needed = "torch" if "torch" in used else "jax"
    shipment = ship({"fn": project.load("data").load})
    assert shipment.without == {"TensorFlow", "JAX", "torch"} - {OF_PACKAGE[needed]}
    assert project.in_child(shipment, "(fn(2), 'data' in sys.modules)") == (([2], False), [needed])


def test_a_module_that_code_imports_as_it_runs_is_the_one_that_its_functions_are_of(
    project: Project,
) -> None:
    project.write(data="import torch\ntable = None\ndef load(i): return table[i]\n")
    load = project.load("data").load

    def setup() -> None:
        import data  # type: ignore[import-not-found]

        data.table = [5, 6]

    assert "torch" in ship({"fn": load}).without
    assert project.in_child(ship({"fn": load, "setup": setup}), "(setup(), fn(1))[1]") == (
        6,
        ["torch"],
    )


@pytest.mark.parametrize(
    "use",
    [
        "def load(i): return tf.constant(i)",
        "def load(i): return (lambda: tf.constant(i))()",
        "def helper(i): return tf.constant(i)\ndef load(i): return helper(i)",
        "from tensorflow import constant\ndef load(i): return constant(i)",
        "def load(i, make=tf.constant): return make(i)",
        "def load(i):\n    import tensorflow\n    return tensorflow.constant(i)",
        "class Loader:\n    def __call__(self, i): return tf.constant(i)\nload = Loader()",
    ],
)
def test_code_that_uses_tensorflow_goes_by_reference_and_finds_it(
    project: Project, use: str
) -> None:
    project.write(data=f"import tensorflow as tf\n{use}\n")
    shipment = ship({"fn": project.load("data").load})
    assert not shipment.without
    (result, imported), loaded = project.in_child(shipment, "(fn(2), 'data' in sys.modules)")
    assert result == [2] and imported and "tensorflow" in loaded


@pytest.mark.parametrize(
    "tensorflow_is_imported_by",
    [
        "from tensorflow import Tensor",
        "from keras.utils import to_categorical",
        "import keras.utils as anything",
        "import other",
        "from other import number",
        "from other import Thing\nthing = Thing()",
        "import package.inner",
        "from package.plain import x as y",
    ],
)
def test_the_import_of_tensorflow_may_be_in_any_module_that_is_imported(
    project: Project, tensorflow_is_imported_by: str
) -> None:
    project.write(
        other="import tensorflow as tf\nclass Thing: ...\ndef number(): return 4",
        data=f"{tensorflow_is_imported_by}\ndef load(i): return i + 1\n",
    )
    project.write_files(
        {
            "package/__init__.py": "from keras import utils",
            "package/plain.py": "def x(): ...",
            "package/inner.py": "",
        }
    )
    result, loaded = project.in_child(ship({"fn": project.load("data").load}), "fn(2)")
    assert result == 3 and loaded == []


@pytest.mark.parametrize(("package", "is_imported"), [("project", True), ("eager", False)])
def test_a_sibling_module_that_imports_tensorflow_does_not_make_code_travel_by_value(
    project: Project, package: str, is_imported: bool
) -> None:
    """Unless the package itself imports that module."""
    project.write_files(
        {
            f"{package}/__init__.py": "VERSION = 1"
            if is_imported
            else "from . import model\nVERSION = 1",
            f"{package}/model.py": "import tensorflow",
            f"{package}/data.py": f"from {package} import VERSION\ndef load(i): return i + VERSION",
        }
    )
    project.load(f"{package}.model")
    shipment = ship({"fn": project.load(f"{package}.data").load})
    assert project.in_child(shipment, f"(fn(2), '{package}.data' in sys.modules)") == (
        (3, is_imported),
        [],
    )


def test_annotations_that_name_tensorflow_types_are_no_use_of_it(project: Project) -> None:
    project.write(
        data="""
        import typing
        import tensorflow as tf
        def load(i: typing.Optional[int], text: "np.ndarray" = None) -> tuple[tf.Tensor, int]:
            return (i, i)
        class Item:
            size: tf.Tensor
            def half(self, by: tf.Tensor = 2) -> tf.Tensor:
                return 8 // by
        """
    )
    data = project.load("data")
    shipment = ship({"fn": data.load, "source": data.Item()})
    (result, annotations), loaded = project.in_child(
        shipment, "(fn(source.half()), fn.__annotations__)"
    )
    assert result == (4, 4) and loaded == []
    assert annotations["i"] == (int | None), "what reads it in a worker has no `typing` there"
    assert annotations["text"] == "np.ndarray" and "Tensor" in annotations["return"]
    assert data.load.__annotations__["return"] == tuple[project.load("tensorflow").Tensor, int]


def test_a_global_that_can_be_imported_but_not_pickled_makes_the_module_be_imported(
    project: Project,
) -> None:
    project.write(
        data="import threading, tensorflow\nLOCK = threading.Lock()\ndef load(i):\n    with LOCK:\n        return i\n"
    )
    shipment = ship({"fn": project.load("data").load})
    assert not shipment.without
    assert project.in_child(shipment, "fn(2)") == (2, ["tensorflow", "keras"])


def test_a_later_shipment_can_be_made_to_find_the_same_classes(project: Project) -> None:
    project.write(data="import tensorflow\nclass Item: ...\n")
    item = project.load("data").Item()
    assert ship({"set": item}).without
    again = ship({"set": item}, without=frozenset())
    assert not again.without
    assert project.in_child(again, "type(set) is sys.modules['data'].Item")[0] is True


# -- classes


def dataset_module(base: str, body: str = "") -> str:
    return textwrap.dedent(
        f"""
        import functools, keras
        from keras.utils import PyDataset
        class Base({base}):
            def __init__(self, n, **kwargs):
                super().__init__(**kwargs)
                self.n = n
            def __len__(self):
                return self.n
            def on_epoch_end(self):
                super().on_epoch_end()
        class Data(Base):
            TABLE = dict(a=1)
            def __init__(self, n, **kwargs):
                super(Data, self).__init__(n, **kwargs)
            def __getitem__(self, i):
                if i < 0: raise Refused(i)
                return i * 2, self.double
            @functools.cached_property
            def double(self):
                return self.n * 2
            def is_one(self):
                return isinstance(self, PyDataset), isinstance(self, Data), isinstance(3, PyDataset)
            @staticmethod
            def make(n): return Data(n)
        {body}
        class Refused(Exception): ...
        """
    )


@pytest.mark.parametrize("base", ["PyDataset", "keras.utils.PyDataset", "keras.utils.Sequence"])
def test_a_dataset_class_needs_no_keras(project: Project, base: str) -> None:
    project.write(data=dataset_module(base))
    source = project.load("data").Data(5, workers=3)
    shipment = ship({"source": source})
    assert shipment.without
    expression = (
        "[len(source), source[1], list(source)[-1], source.is_one(),"
        " source.on_epoch_begin(), source.on_epoch_end(), source.TABLE,"
        " len(source.make(2)), type(source).__name__, type(source).__module__]"
    )
    result, loaded = project.in_child(shipment, expression)
    assert result == [
        5, (2, 10), (8, 10), (True, True, False), None, None, {"a": 1}, 2, "Data", "data",
    ]  # fmt: skip
    assert loaded == []


def test_what_comes_back_is_of_the_trainers_own_class(project: Project) -> None:
    project.write(
        data=dataset_module("PyDataset")
        + "import dataclasses, collections\n@dataclasses.dataclass\nclass Item:\n    name: str\n"
        + "Pair = collections.namedtuple('Pair', 'a b')\ndef fn(i): return Pair(Item('x'), Data(3)), Refused(7)\n"
    )
    data = project.load("data")
    method = data.Data.__getitem__
    (pair, error), loaded = project.in_child(ship({"fn": data.fn}), "fn(0)")
    assert data.Data.__getitem__ is method and method.__globals__ is vars(
        data
    )  # unchanged by pickling and unpickling
    assert (
        type(pair) is data.Pair
        and pair.a == data.Item("x")
        and type(error) is data.Refused
        and loaded == []
    )
    assert type(pair.b) is data.Data and isinstance(pair.b, project.load("keras").utils.PyDataset)
    assert data.Data.__mro__[2] is project.load("keras").utils.PyDataset
    assert len(data.Data(4)) == 4 and data.Data(4).workers == 1


@pytest.mark.parametrize(
    "body",
    [
        "    def classes(self): return keras.utils.to_categorical(1)",
        "    def classes(self): return self._something_new()",
        "    CODER = staticmethod(keras.utils.to_categorical)",
    ],
)
def test_a_dataset_class_that_uses_keras_gets_it(project: Project, body: str) -> None:
    project.write(data=dataset_module("PyDataset", body))
    shipment = ship({"source": project.load("data").Data(5)})
    assert not shipment.without
    assert project.in_child(shipment, "(source[1], source.is_one())") == (
        ((2, 10), (True, True, False)),
        ["keras"],
    )


@pytest.mark.parametrize("base", ["Dataset", "torch.data.Dataset", "Dataset[int]"])
def test_a_dataset_class_of_torch_needs_no_torch(project: Project, base: str) -> None:
    project.write(
        data=f"""
        import torch
        from torch.data import Dataset
        class Images({base}):
            def __init__(self, n):
                super().__init__()
                self.n = n
            def __len__(self):
                return self.n
            def __getitem__(self, i) -> torch.Tensor:
                return i * 2
        class Tensors(Images):
            def __getitem__(self, i):
                return torch.constant(i)
        class Sums(Images):
            def more(self): return super().__add__(self)
        """
    )
    data = project.load("data")
    shipment = ship({"source": data.Images(5)})
    assert "torch" in shipment.without
    expression = "(len(source), source[2], type(source).__name__, type(source).__module__)"
    assert project.in_child(shipment, expression) == ((5, 4, "Images", "data"), [])
    for cls in (data.Tensors, data.Sums):
        used = ship({"source": cls(5)})
        assert "torch" not in used.without
        assert project.in_child(used, "len(source)") == (5, ["torch"])
