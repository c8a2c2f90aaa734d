"""`PayloadPickler`: pickles function, source and hooks as a whole.

It handles objects that cloudpickle refuses, copies whole, or looks up in `__main__`. Loading the
pickle imports no TensorFlow, JAX or torch, unless the user's code refers to one of them.

The pickler visits all objects that the payload's code refers to, so it notices such a reference
itself. It then raises `FrameworkNeededError`, and `ship` retries. In the retry, modules that import
only that framework are pickled by reference. All functions of a module are pickled in the same way,
because otherwise the module's globals would exist twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import io
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Generic, TypeVar

import numpy as np
from cloudpickle import cloudpickle as internals

from loaderpool.plan.generators import is_generator, is_generator_kind, number_of_global
from loaderpool.system.annotations import Named
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.system.process import is_installed
from loaderpool.system.walk import LruCacheWrapper, is_found_by_name
from loaderpool.transport.payload import in_memory
from loaderpool.transport.pickling import VIEW_REFUSED, CodePickler, generator_at, global_generator

# ---- frameworks ----

# Package -> framework that it is, or always imports. A missing package costs the supervisor an
# import (TensorFlow: 2 s, 490 MB; torch: 1 to 4 s, 230 MB; JAX: 0.5 s). With a superfluous one,
# functions of modules that use it are pickled by value.
FRAMEWORKS: Mapping[str, str] = {
    **dict.fromkeys(
        ("keras", "keras_cv", "keras_hub", "keras_nlp", "keras_tuner", "tensorflow",
         "tensorflow_addons", "tensorflow_hub", "tensorflow_io", "tensorflow_probability",
         "tensorflow_text", "tf_keras"),
        "TensorFlow",
    ),
    **dict.fromkeys(("equinox", "flax", "haiku", "jax", "jaxlib", "optax"), "JAX"),
    **dict.fromkeys(
        ("fastai", "kornia", "lightning", "pytorch_lightning", "timm", "torch", "torchaudio",
         "torchmetrics", "torchvision"),
        "torch",
    ),
}  # fmt: skip

# Packages that are not searched, to save time: the frameworks are built on NumPy, and the other
# packages import no framework.
_NEVER_IMPORTS_ONE = frozenset(
    {"__main__", "cloudpickle", "loaderpool", "ml_dtypes", "numpy", "scipy"}
)


def framework_of(module_name: object) -> str:
    """Return the framework, such as "TensorFlow", that contains a module or is always imported by
    its package; otherwise "".
    """
    return FRAMEWORKS.get(module_name.partition(".")[0], "") if isinstance(module_name, str) else ""


def loaded_frameworks() -> frozenset[str]:
    """Return the frameworks that this process has imported.

    The user's modules are imported already, so they need no other framework.
    """
    return frozenset(framework for name, framework in FRAMEWORKS.items() if name in sys.modules)


def home_of(value: object) -> str:
    """Return the name of the module that must be imported to get `value`. Runs no code of the
    value.
    """
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        # Not getattr, which would load a lazy module, such as `from tensorflow import keras`.
        attributes = object.__getattribute__(value, "__dict__")
        name = kind.__module__ if framework_of(kind.__module__) else attributes.get("__name__")
    elif issubclass(kind, (type, types.FunctionType, types.BuiltinFunctionType)):
        name = getattr(value, "__module__", None)
    else:
        name = kind.__module__
    return name if isinstance(name, str) else ""


class FrameworkImports:
    """Search for modules that import one of these frameworks, with its results.

    Modules may import more later, so create a new instance for each use.
    """

    def __init__(self, frameworks: AbstractSet[str]) -> None:
        self._frameworks, self._known = frameworks, dict[str, bool]()

    def of(self, module_name: str) -> bool:
        """Return True if the module has such a framework among its globals.

        The user's modules that it imports count, too.
        """
        if not self._frameworks:
            return False
        if module_name not in self._known:
            self._known[module_name] = self._search(module_name)
        return self._known[module_name]

    def _search(self, root: str) -> bool:
        package = root.partition(".")[0]
        seen, waiting = {root}, [root]
        while waiting:
            name = waiting.pop()
            if framework_of(name) in self._frameworks:
                return True
            module = sys.modules.get(name)
            if isinstance(module, types.ModuleType) and _is_followed(name, package):
                # Importing a.b imports a.
                found = {name.rpartition(".")[0], *_homes_of_globals(name, module)}
                waiting += found - seen
                seen |= found
        return False


def _is_followed(name: str, package: str) -> bool:
    """Return True if the search enters a module.

    It enters the user's own modules, and the package in which it started.
    """
    top = name.partition(".")[0]
    if not top or top in FRAMEWORKS or top in sys.stdlib_module_names or top in _NEVER_IMPORTS_ONE:
        return False
    return top == package or not is_installed(name)


def _homes_of_globals(name: str, module: types.ModuleType) -> Iterator[str]:
    for key, value in list(vars(module).items()):
        home = home_of(value)
        if (
            home == f"{name}.{key}"
            and isinstance(value, types.ModuleType)
            and not _imports_submodule(module, key)
        ):
            continue
        yield home


def _imports_submodule(package: types.ModuleType, key: str) -> bool:
    """Return True if the package's own code imports its submodule `key`.

    Python sets a submodule as an attribute of its package, whatever code imported it. Without this
    distinction, an empty `project/__init__.py` would seem to import TensorFlow as soon as the
    script has imported `project.model`.
    """
    try:
        spec = package.__spec__
        # `__spec__` or the code may be missing, which raises.
        names = spec.loader.get_code(spec.name).co_names  # type: ignore[union-attr]
    except Exception as error:
        if is_of_a_handler(error):
            raise
        # There is no code to check. Pickling by value is always correct; the other result could
        # import TensorFlow.
        return True
    wanted = (key, f"{package.__name__}.{key}")
    return any(name == each or name.startswith(f"{each}.") for name in names for each in wanted)


_Item_co = TypeVar("_Item_co", covariant=True)


class PyDatasetStandIn:
    """Replacement for `keras.utils.PyDataset` (and the older `Sequence`) with everything that most
    subclasses use.

    The real class creates the instances in the main process, and only their `__dict__` is pickled.
    A class that uses more of its base than is defined here is pickled without this replacement (see
    `PayloadPickler`).
    """

    def __init__(
        self, workers: int = 1, use_multiprocessing: bool = False, max_queue_size: int = 10
    ) -> None:
        self._workers = workers
        self._use_multiprocessing = use_multiprocessing
        self._max_queue_size = max_queue_size

    def __getitem__(self, index: int) -> object:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        count: int = len(self)  # type: ignore[arg-type]  # the subclass has it
        return (self[index] for index in range(count))

    def on_epoch_begin(self) -> None:
        """Do nothing, as in Keras."""

    def on_epoch_end(self) -> None:
        """Do nothing, as in Keras."""


class DatasetStandIn(Generic[_Item_co]):
    """Replacement for `torch.utils.data.Dataset`. It has all that subclasses use, except the sum of
    two datasets.
    """

    def __getitem__(self, index: object) -> _Item_co:
        raise NotImplementedError("a Dataset needs __getitem__")


# Keyed by the framework's name in `FRAMEWORKS` and the name of the class.
_STAND_INS: dict[tuple[str, str], type] = {
    ("TensorFlow", "PyDataset"): PyDatasetStandIn,
    ("TensorFlow", "Sequence"): PyDatasetStandIn,
    ("torch", "Dataset"): DatasetStandIn,
}


def stand_in_of(framework: str, name: str) -> type | None:
    """Return the replacement for a framework's class of this name, or None if there is none."""
    return _STAND_INS.get((framework, name))


# Smaller: more buffers, each with an entry in the shipment's table and a view in the supervisor.
# Larger: more arrays are copied into the pickle and out of it, to pages that workers share only
# until one of them writes to its neighbours.
OUT_OF_BAND_BYTES = 64 * 1024
# Fewer items are not packed (see `packing`). A packed item takes 1 to 2 us longer to read. Any
# other item takes three to six times the size of its pickle, in every worker that reads it.
LEAST_ITEMS = 1000


class FrameworkNeededError(Exception):
    """The payload's own code or data refers to this framework (the argument). Never leaves
    `ship`.
    """


# Kinds of objects of which only the home module is checked. For other objects, the contents are
# checked.
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_by_identity: object = object.__eq__


class PayloadPickler(CodePickler):
    """cloudpickle's pickler, with more rules.

    A `numpy.memmap` is pickled by path. Cached functions of `__main__` are pickled. Open files are
    refused.

    Loading the pickle does not import `frameworks`; if that is impossible, pickling raises
    FrameworkNeededError. Functions and classes of modules that import one of them are pickled by
    value, with only the globals they use. A Keras `PyDataset` or a torch `Dataset` as a base class
    is replaced (see `stand_in_of`).

    Args:
        file: file for the pickle.
        buffer_callback: as for `pickle`.
        frameworks: frameworks that loading must not import.
        numbers_generators: True if random generators are pickled as numbers, in the order of their
            pickling.
        imports: earlier results about modules that import these frameworks.

    Attributes:
        generators: the generators that are pickled as numbers. Their states are not in the pickle.
        makes_on_loading: True if unpickling runs code of a class, which may create other
            generators.
    """

    def __init__(
        self,
        file: object,
        buffer_callback: Callable[[Any], object],
        frameworks: AbstractSet[str] = frozenset(),
        numbers_generators: bool = False,
        imports: FrameworkImports | None = None,
    ) -> None:
        super().__init__(file, buffer_callback=buffer_callback)
        self.generators = list[object]()
        self.makes_on_loading = False
        self._numbers_generators = numbers_generators
        self._are_generators: dict[type, bool] = {}  # keyed by type
        self._frameworks, self.imports = frameworks, imports or FrameworkImports(frameworks)
        self.met: set[int] = set()  # ids of pickled objects that are compared by identity
        # Results of `marks_of`, keyed by type.
        self._marks: dict[type, tuple[bytes, ...] | None] = {}
        # modules that are pickled, and modules of functions and classes pickled by name
        self.homes: set[str] = set()

    def reducer_override(self, obj: object) -> object:
        kind = type(obj)
        if not issubclass(kind, _NAMED):
            return self._reduce(obj, kind)
        reduced = self._reduce_named(obj, kind)
        if reduced is NotImplemented or issubclass(kind, types.ModuleType):
            self.homes.add(home_of(obj))
        return reduced

    def _reduce_named(self, obj: Any, kind: type) -> object:
        if not self._frameworks:
            return self._reduce(obj, kind)
        if self._stand_in_of(obj) is not None:
            return stand_in_of, (framework_of(obj.__module__), obj.__name__)
        home = home_of(obj)
        self._refuse(home)
        if issubclass(kind, types.ModuleType):
            self._refuse_module(home)
        reduced = self._reduce(obj, kind)
        if reduced is NotImplemented and self.imports.of(home):
            if issubclass(kind, type):
                reduced = self._dynamic_class_reduce(obj)
            elif issubclass(kind, types.FunctionType):
                reduced = self._dynamic_function_reduce(obj)
        if isinstance(reduced, tuple) and len(reduced) > 2:
            self._check_code(obj)
            self._spell_out_annotations(reduced[2])
        return reduced

    def _reduce(self, obj: Any, kind: type) -> object:
        if kind.__eq__ is _by_identity:
            self.met.add(id(obj))
        are_generators = self._are_generators.get(kind)
        if are_generators is None:
            are_generators = self._are_generators[kind] = is_generator_kind(kind)
        if are_generators and is_generator(obj):
            return self._reduce_generator(obj)
        if kind not in self._marks:
            self._marks[kind] = in_memory.marks_of(kind)
            self.makes_on_loading |= _runs_code_on_loading(kind)
        if (marks := self._marks[kind]) is not None:
            in_memory.refuse(obj, marks)
        if kind is np.memmap:
            return _reduce_memmap(obj)
        if kind is np.ndarray:
            return _reduce_repeating(obj)
        if kind is memoryview:
            raise TypeError(VIEW_REFUSED)
        if kind is types.CodeType:
            return _reduce_code(obj)
        if kind.__name__ == "Connection" and is_multiprocessing(kind):
            # The pickle would contain only the number of the descriptor.
            raise TypeError("the number of its descriptor would be another file's")
        if type(kind).__name__ == "PyCArrayType" and not internals._should_pickle_by_reference(
            kind
        ):
            raise TypeError("a ctypes array cannot be pickled; convert it with numpy.array(...)")
        if obj is dataclasses.MISSING:
            # Pickled by name, because a copy would not be `MISSING`, and so count as the default of
            # a field.
            return "MISSING"
        if kind is LruCacheWrapper:
            is_by_value = self.is_by_value(obj)
            return (
                (_cached_function, (obj.__wrapped__, obj.cache_parameters()))
                if is_by_value
                else NotImplemented
            )
        if kind is functools.cached_property:
            return _cached_property, (obj.func, obj.attrname)  # up to Python 3.11 it holds a lock
        if kind is io.TextIOWrapper and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would read the whole file and send its text. Binary files are refused by
            # both.
            raise TypeError("cannot pickle an open text file")
        return super().reducer_override(obj)

    def _reduce_generator(self, generator: object) -> object:
        number = number_of_global(generator)
        # A copy would not be seeded with the global generators of the worker.
        if number is not None:
            return global_generator, (number,)
        if not self._numbers_generators:
            return super().reducer_override(generator)
        self.generators.append(generator)
        return generator_at, (len(self.generators) - 1,)

    def is_by_value(self, named: Named) -> bool:
        """Return True if a function or class is pickled by value, not by name."""
        return not is_found_by_name(named) or self.imports.of(named.__module__)

    def _refuse(self, home: str) -> None:
        """Raise `FrameworkNeededError` if this module belongs to a framework.

        Called for the home module of each object in use.
        """
        if framework_of(home) in self._frameworks:
            raise FrameworkNeededError(framework_of(home))

    def _refuse_module(self, name: str) -> None:
        """Raise `FrameworkNeededError` if this module imports a framework.

        The module is used as a whole, or imported by code as it runs. So the worker needs the real
        module, with the framework.
        """
        if self.imports.of(name):
            raise FrameworkNeededError(
                next(each for each in self._frameworks if FrameworkImports({each}).of(name))
            )

    def _check_code(self, obj: Named) -> None:
        if isinstance(obj, types.FunctionType):
            for name in _imported_inside(obj.__code__):
                self._refuse_module(name)
            return
        for base in obj.__mro__:
            stand_in = self._stand_in_of(base)
            if stand_in is not None:
                lacking = set(dir(base)) - set(dir(stand_in))
                if any(not lacking.isdisjoint(code.co_names) for code in _codes_of(obj)):
                    raise FrameworkNeededError(framework_of(base.__module__))
                return

    def _stand_in_of(self, obj: object) -> type | None:
        if not isinstance(obj, type):
            return None
        framework = framework_of(obj.__module__)
        return stand_in_of(framework, obj.__name__) if framework in self._frameworks else None

    def _spell_out_annotations(self, state: Iterable[object]) -> None:
        """Replace annotations with types of a framework by text.

        A function `def f(x) -> tf.Tensor` does not use TensorFlow.
        """
        # In cloudpickle this is (attributes, slots) of a function, or (namespace, {}) of a class.
        for part in state:
            if isinstance(part, dict) and (hints := part.get("__annotations__")):
                found = {
                    name: repr(hint) if self._names_framework(hint) else hint
                    for name, hint in hints.items()
                }
                part["__annotations__"] = found

    def _names_framework(self, hint: object) -> bool:
        parts = getattr(hint, "__args__", None) or ()
        return framework_of(home_of(hint)) in self._frameworks or any(
            map(self._names_framework, parts)
        )


# Methods that decide how an object is unpickled, and packages whose objects create no generators
# when unpickled.
_LOADING = ("__setstate__", "__reduce__", "__reduce_ex__")
_MAKES_NONE = sys.stdlib_module_names | {"loaderpool", "numpy", "pandas", "torch"}


def _runs_code_on_loading(kind: type) -> bool:
    if str(kind.__module__).partition(".")[0] in _MAKES_NONE:
        return False
    return any(type(getattr(kind, name, None)) is types.FunctionType for name in _LOADING)


def is_multiprocessing(kind: type) -> bool:
    """Return True if a class belongs to `multiprocessing`, or to its copy `multiprocess`."""
    return str(kind.__module__).partition(".")[0] in ("multiprocessing", "multiprocess")


@functools.lru_cache(maxsize=1000)  # each epoch calls this for the same code
def _imported_inside(code: types.CodeType) -> tuple[str, ...]:
    here = [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]
    inside = (_imported_inside(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return (*here, *itertools.chain.from_iterable(inside))


def _codes_of(cls: type) -> Iterator[types.CodeType]:
    for value in vars(cls).values():
        for function in (
            value,
            *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel", "func")),
        ):
            if isinstance(function, types.FunctionType):
                yield function.__code__


def _reduce_code(code: types.CodeType) -> object:
    """Return the parts of a code object, with its file name for tracebacks.

    cloudpickle 3.1.3 replaces the name by <dynamic-code>.
    """
    make, arguments = internals._code_reduce(code)
    return make, (*arguments[:_FILE_NAME], "".join(code.co_filename), *arguments[_FILE_NAME + 1 :])


_FILE_NAME = 10  # index among the arguments of `types.CodeType`, from Python 3.10 to 3.15


# A cached function would be looked up by name when it is loaded, which fails for `__main__`. So it
# is created again, with an empty cache.


def _cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> object:
    return functools.lru_cache(**parameters)(function)


def _cached_property(
    function: Callable[[Any], Any], name: str | None
) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _reduce_memmap(array: np.memmap[Any, Any]) -> object:
    """Pickle a memmap by path, so that a large file is neither read nor copied.

    It is pickled by value if the path is not enough.
    """
    root = array
    while isinstance(root.base, np.memmap):
        root = root.base
    is_mapped = array._mmap is not None  # type: ignore[attr-defined]  # NumPy's stubs omit it
    if not is_mapped or array.size == 0 or not _is_file_of(root):
        return NotImplemented
    start = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    if array.flags.c_contiguous or array.flags.f_contiguous:
        order = "C" if array.flags.c_contiguous else "F"
        mode = "r" if root.mode == "r" else "r+"  # "w+" would empty the file
        return np.memmap, (
            str(root.filename),
            array.dtype,
            mode,
            root.offset + start,
            array.shape,
            order,
        )
    return np.ndarray, (array.shape, array.dtype, root, start, array.strides)


def _reduce_repeating(array: np.ndarray[Any, Any]) -> object:
    """Pickle windows over an array, or a broadcast array, as a view of the base array.

    By value, windows of 24 rows would take 24 times the memory of the array.
    """
    if array.nbytes < OUT_OF_BAND_BYTES or array.flags.forc:
        return NotImplemented
    start = array.__array_interface__["data"][0]
    shown: object = NotImplemented
    base = array.base
    while base is not None:
        if type(base) is np.ndarray and base.nbytes < array.nbytes:
            offset = start - base.__array_interface__["data"][0]
            arguments = base, array.shape, array.dtype, offset, array.strides
            # The base may be too short, not contiguous, or of a kind without buffers.
            with contextlib.suppress(ValueError, TypeError, BufferError):
                _view_of(*arguments)
                shown = _view_of, arguments
        # NumPy puts an object between the windows and the array.
        base = getattr(base, "base", None)
    return shown


def _view_of(
    base: np.ndarray[Any, Any],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    offset: int,
    strides: tuple[int, ...],
) -> np.ndarray[Any, Any]:
    buffer = memoryview(base.data).toreadonly()
    view: np.ndarray[Any, Any] = np.ndarray(shape, dtype, buffer, offset, strides)
    return view


def _is_file_of(root: np.memmap[Any, Any]) -> bool:
    if root.filename is None or root.mode == "c":  # with "c", writes do not reach the file
        return False
    try:
        return bool(os.stat(root.filename).st_size >= root.offset + root.nbytes)
    except OSError:  # deleted since: only the mapping has the data
        return False
