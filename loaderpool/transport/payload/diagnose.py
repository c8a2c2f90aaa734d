"""Error messages for a payload that cannot be pickled or loaded: the variable, and a fix."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
from cloudpickle import cloudpickle as internals

from loaderpool.sources.tables import hdf5_arguments
from loaderpool.system.interrupts import is_of_a_handler
from loaderpool.system.process import is_installed
from loaderpool.system.walk import CODE, CONTAINERS, is_users, parts_of
from loaderpool.transport.payload.in_memory import CURE, InMemoryError
from loaderpool.transport.payload.pickler import (
    OUT_OF_BAND_BYTES,
    PayloadPickler,
    is_multiprocessing,
)
from loaderpool.transport.pickling import PayloadUnpickler, out_of_band
from loaderpool.transport.reports import shown_name

_SOURCES = "loaderpool.sources."
# Modules of `multiprocessing` whose objects a process can only inherit from its parent.
_SHARED_IN = frozenset({"connection", "heap", "queues", "sharedctypes", "synchronize"})
# Deeper structures fail because of their depth. More levels would not help to find the variable.
_MOST_STEPS = 12


def describe_offender(payload: dict[str, object], error: Exception) -> str:
    """Return the message: the payload's key, the path to the object, its type, the reason, and
    advice.

    Called in the main process, only after an error: it pickles whole branches again, and runs code
    of the user's (`__reduce__`, `__getstate__`). `error` is the exception from pickling the
    payload.
    """
    found = _search(payload, _unpicklable, error)
    what = (
        f"{found}. Pickling it raised {type(found.error).__name__}: {str(found.error).rstrip('.')}"
    )
    return f"Cannot send this to the workers: {what}. {_advice(found)}"


def describe_unloadable(parts: Mapping[str, object], raised: str) -> str:
    """Return the variable that can be pickled but not loaded, and a fix; "" if none is found.

    Called in the main process, only after an error: it pickles and loads whole branches again.

    Args:
        parts: the parts of the payload, by the names that the user knows.
        raised: qualified name of the class of the exception that loading raised in another process.
    """

    def unloadable(on_path: AbstractSet[int]) -> _Why:
        why = _unloadable(on_path)

        def why_so(value: object) -> Exception | None:
            error = why(value)
            return error if error is not None and shown_name(type(error)) == raised else None

        return why_so

    # The source comes last, because searching it takes long.
    others = {name: part for name, part in parts.items() if name != "source"}
    with _silent_finalizers():
        found = _search({**others, **parts}, unloadable, None)
    if found.error is None:
        return ""
    return f"The cause is {found}, which can be pickled, but not loaded again. {_advice(found)}"


class _Offender(NamedTuple):
    """A variable that cannot be sent: the path to it, and the values on the path."""

    labels: list[str]  # "": a step that is not shown
    values: list[object]
    error: Exception | None

    def __str__(self) -> str:
        where = " → ".join(filter(None, self.labels)) or "the payload"
        return f"{where}, of type {shown_name(type(self.value))}"

    @property
    def value(self) -> object:
        """The value of the variable."""
        return self.values[-1]


# returns the reason why a value cannot be sent on its own
_Why = Callable[[object], "Exception | None"]


def _search(
    payload: Mapping[str, object],
    make_why: Callable[[AbstractSet[int]], _Why],
    error: Exception | None,
) -> _Offender:
    """Return the innermost part that cannot be sent on its own.

    Args:
        payload: parts by name.
        make_why: gets the ids of the objects on the path to a value, which are left out. A part
            that refers back to the whole is not the cause.
        error: reason why the payload cannot be sent.
    """
    labels: list[str] = []
    values: list[object] = []
    parts = list(payload.items())
    while len(labels) < _MOST_STEPS:
        on_path = set(map(id, values))
        why = make_why(on_path)
        reasons = ((label, value, why(value)) for label, value in parts if id(value) not in on_path)
        found = next((each for each in reasons if each[2] is not None), None)
        if found is None:
            break
        label, value, error = found
        if _is_too_deep(error) and [*map(type, values[-2:])] == [type(value)] * 2:
            break  # the next link of a chain
        labels.append(label)
        values.append(value)
        parts = _parts(value)
    end = _first_of_library(values)
    return _Offender(labels[:end], values[:end] or [payload], error)


def _first_of_library(values: list[object]) -> int:
    """Return the number of values of a path to show. The user cannot change parts inside a
    library's object.
    """
    count = len(values)
    for number in range(len(values), 0, -1):
        value = values[number - 1]
        if is_users(value):
            break
        named = value if isinstance(value, (type, types.FunctionType)) else type(value)
        if is_installed(str(named.__module__)) and not isinstance(value, np.ndarray):
            count = number
    return count


def _unpicklable(on_path: AbstractSet[int]) -> _Why:
    """Return a function that finds the reason why a value cannot be pickled.

    It stores no pickle, and copies no array.
    """
    pickler = _Pickler(_NullFile(), lambda _: None, on_path)

    def why(value: object) -> Exception | None:
        error = _raised(lambda: pickler.dump(value))
        pickler.clear_memo()
        return error

    return why


def _unloadable(on_path: AbstractSet[int]) -> _Why:
    """Return a function that finds the reason why a value cannot be loaded.

    The function returns None if the value cannot be pickled.
    """

    def why(value: object) -> Exception | None:
        buffers: list[memoryview] = []
        with io.BytesIO() as file:
            if _raised(lambda: _Pickler(file, buffers.append, on_path).dump(value)) is not None:
                return None
            file.seek(0)
            return _raised(lambda: _Unpickler(file, buffers, (), None).load())

    return why


@contextlib.contextmanager
def _silent_finalizers() -> Iterator[None]:
    """Silence errors in finalizers of objects that were loaded only in part."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = before


def _raised(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except MemoryError:
        raise
    except Exception as error:
        if is_of_a_handler(error):
            raise
        return error.with_traceback(None)
    return None


class _Pickler(PayloadPickler):
    """Leaves out the objects with certain ids."""

    def __init__(
        self, file: object, keep: Callable[[memoryview], object], left_out: AbstractSet[int]
    ) -> None:
        super().__init__(file, out_of_band(keep, OUT_OF_BAND_BYTES))
        self._left_out = left_out

    def persistent_id(self, obj: object) -> str | None:
        """Return a mark for an object that is left out."""
        return "left out" if id(obj) in self._left_out else None


class _Unpickler(PayloadUnpickler):
    def persistent_load(self, pid: object) -> None:
        """Return None in place of an object that was left out."""


class _NullFile:
    """A file for picklers that stores nothing."""

    write = len


def _parts(obj: object) -> list[tuple[str, object]]:
    """Return the parts that an object is pickled from, each with a label.

    The list is empty if the object's own code decides how to pickle it.
    """
    kind = type(obj)
    if isinstance(obj, np.ndarray):
        items = obj.ravel().tolist() if obj.dtype.hasobject else []
        return [(f"item {at} of the array", item) for at, item in enumerate(items)]
    if isinstance(obj, (type, types.FunctionType)):
        is_closed = internals._should_pickle_by_reference(obj)
    elif issubclass(kind, (*CODE, dict, *CONTAINERS)) or str(kind.__module__).startswith(_SOURCES):
        is_closed = False
    else:
        own = ("__reduce_ex__", "__reduce__", "__getstate__")
        is_closed = any(
            getattr(kind, name, None) is not getattr(object, name, None) for name in own
        )
    return (
        []
        if is_closed
        else [("" if part.is_hidden else part.label, part.value) for part in parts_of(obj)]
    )


def _advice(found: _Offender) -> str:
    offender, path, error = found.value, found.labels, found.error
    packages = {
        cls.__module__.partition(".")[0] for value in found.values for cls in type(value).__mro__
    }
    if isinstance(error, InMemoryError):
        return CURE
    if _is_too_deep(error):
        return (
            "Store the data in a flat list or in arrays, with indices instead of references "
            "between objects."
        )
    if isinstance(offender, types.GeneratorType):
        return (
            "A generator cannot be copied. Pass the generator function to Loader.from_generator, "
            "or pass a list of its items."
        )
    if "tqdm" in packages:
        return (
            "Remove the progress bar, and show progress in the training loop: for batch in "
            "tqdm(loader)."
        )
    if path[:1] == ["make_generator"]:
        return (
            "Open or create it in make_generator, so that each replica of the generator has its "
            "own."
        )
    if type(offender).__module__ == "h5py.h5r":
        return (
            "An HDF5 reference belongs to its open file. Pass the name of the dataset and the "
            "indices of the region, and open the file in setup=, which runs once in each worker."
        )
    if "h5py" in packages:
        opened = next(
            (each for each in reversed(found.values) if type(each).__module__.startswith("h5py.")),
            offender,
        )
        return (
            "An open HDF5 file cannot be sent to the workers. As the source, pass "
            f"loaderpool.HDF5({hdf5_arguments(opened)}), which each worker opens itself. In a "
            "function, open the file in setup=, which runs once in each worker."
        )
    if packages & {"netCDF4", "h5netcdf"}:
        return (
            "Open the file in setup=, which runs once in each worker. Or pass "
            "xarray.open_dataset(path)[name], which each worker opens itself."
        )
    if _is_shared(offender):
        return (
            "Only processes that multiprocessing starts can share it. To share locks, queues and "
            "values with workers, create them with manager = multiprocessing.Manager(), as "
            "manager.Lock() or manager.Value('i', 0). Put shared arrays into a "
            "multiprocessing.shared_memory.SharedMemory or a numpy.memmap. A value that changes "
            "between epochs can be a plain attribute, because each epoch uses your objects as they "
            "are when it begins."
        )
    if path[-1:] and path[-1].startswith("attribute ._authkey "):
        return "Capture its proxies, such as values = manager.dict(), and not the manager itself."
    if (
        isinstance(error, RecursionError)
        and is_users(offender)
        and hasattr(type(offender), "__getattr__")
    ):
        return (
            "Its __getattr__ probably reads an attribute that is not set before it is loaded. "
            "Raise AttributeError there for names that begin with _, or create the object in "
            "setup=, which runs once in each worker."
        )
    return "Open or create it in setup=, which runs once in each worker, or inside the function."


def _is_too_deep(error: BaseException | None) -> bool:
    """Return True if objects are nested too deeply. cloudpickle raises another error from the
    RecursionError.
    """
    return error is not None and isinstance(error.__cause__, RecursionError)


def _is_shared(offender: object) -> bool:
    """Return True for an object of `multiprocessing` that child processes inherit and share."""
    kind = type(offender)
    # A RawValue has a type of ctypes.
    wrapper = type(getattr(offender, "_wrapper", None))
    return any(
        is_multiprocessing(each) and each.__module__.partition(".")[2] in _SHARED_IN
        for each in (kind, wrapper)
    )
