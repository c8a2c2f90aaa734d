"""How objects travel that cloudpickle refuses, copies whole, or would look for in a `__main__` that is not there."""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import io
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
from cloudpickle import cloudpickle as internals

from loaderpool.transport.pickling import out_of_band, reduce_view

TENSOR_KINDS = frozenset({"ArrayImpl", "TypedStorage", "UntypedStorage"})  # names of types, for `_reduce_tensor`


def _reduce_tensor(value: Any) -> Any:
    """Return how a tensor's storage, or an array of JAX, is pickled; NotImplemented: in its own way."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and type(value) is torch.storage.TypedStorage:
        return _typed_storage, (value._untyped_storage, value.dtype)
    if torch is not None and type(value) is torch.UntypedStorage:
        if value.device.type != "cpu":
            raise TypeError(f"a torch tensor on {value.device}, but workers use only the CPU; call .cpu()")
        return _untyped_storage, (torch.empty(0, dtype=torch.uint8).set_(value).numpy(),)
    if jax is not None and isinstance(value, jax.Array) and value.is_fully_addressable and not value.weak_type:
        array = np.asarray(value)
        # Of dtypes that are not its own NumPy pickles the bytes with the rest.
        return _jax_array, (array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}"), array.dtype)
    return NotImplemented


def _typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    make: Any = torch.storage.TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


def _untyped_storage(memory: npt.NDArray[np.uint8]) -> Any:
    import torch

    return torch.from_numpy(memory).untyped_storage()


def _jax_array(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> Any:
    """Return a JAX array on its default device; JAX begins its threads here, if they do not run yet."""
    import jax

    return jax.device_put(array.view(dtype))


_by_identity: Any = object.__eq__
LruCacheWrapper = type(functools.lru_cache(lambda: None))
_make_dispatcher: Callable[[Any], Any] = functools.singledispatch  # which mypy knows too well
_DISPATCHES = _make_dispatcher(len).__code__


class PayloadPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, and also: a `numpy.memmap` goes by path, cached functions of `__main__` go, open files do not."""

    met: set[int] | None = None  # takes the ids of objects that are told apart by identity alone, if it is wanted

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if self.met is not None and kind.__eq__ is _by_identity:
            self.met.add(id(obj))
        if kind is np.memmap:
            return _reduce_memmap(obj)
        if kind is memoryview:
            return reduce_view(obj)
        if kind is types.CodeType:
            return _reduce_code(obj)
        if type(kind).__name__ == "PyCArrayType" and not internals._should_pickle_by_reference(kind):
            raise TypeError("a ctypes array cannot be pickled; convert it with numpy.array(...)")
        if obj is dataclasses.MISSING:
            return "MISSING"  # by its name: as a copy it would be another one, and a field's default
        if kind is LruCacheWrapper:
            return _by_value_of_cached(obj) if self.is_by_value(obj) else NotImplemented
        if kind is functools.cached_property:
            return _cached_property, (obj.func, obj.attrname)  # up to Python 3.11 it holds a lock
        if kind is types.FunctionType and obj.__code__ is _DISPATCHES and self.is_by_value(obj):
            return _make_dispatcher, (len,), (obj.__wrapped__, dict(obj.registry)), None, None, _set_dispatcher
        if kind is io.TextIOWrapper and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would read the whole file and send its text; binary files it refuses, and so do we both.
            raise TypeError("cannot pickle an open text file")
        if kind.__name__ in TENSOR_KINDS and (reduced := _reduce_tensor(obj)) is not NotImplemented:
            return reduced
        if issubclass(kind, getattr(sys.modules.get("tqdm.std"), "tqdm", ())):
            raise TypeError("a progress bar cannot be pickled")  # sent, it would fail where it arrives
        return super().reducer_override(obj)

    def is_by_value(self, named: Any) -> bool:
        """Whether a function or class is to be sent itself, not its name."""
        return not is_found_by_name(named)


def why_unpicklable(part: object) -> Exception | None:
    """What pickling this part alone raises; None where it works. Nothing is kept of it and no array is copied."""
    try:
        PayloadPickler(_NullFile(), buffer_callback=out_of_band(lambda _: None, 0)).dump(part)
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        return error
    return None


class _NullFile:
    """A file for picklers that keeps nothing."""

    write = len


def is_found_by_name(named: Any) -> bool:
    """Whether another process finds a function or class by its module and name; its `__main__` is another one."""
    return named.__module__ != "__main__" and is_global(named)


def is_global(named: Any) -> bool:
    """Whether its module has a function or class under its name."""
    found: Any = sys.modules.get(named.__module__)
    for name in named.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is named


def _reduce_code(code: types.CodeType) -> Any:
    """Return code with its file, which tracebacks name, and in whose place cloudpickle 3.1.3 has <dynamic-code>."""
    make, arguments = internals._code_reduce(code)
    return make, (*arguments[:_FILE_NAME], "".join(code.co_filename), *arguments[_FILE_NAME + 1 :])


_FILE_NAME = 10  # of the arguments of `types.CodeType`, from Python 3.10 to 3.13


# Of itself a cached function is looked up by name where it arrives, which in `__main__` finds nothing. It is rebuilt
# with an empty cache. Where one has arrived, cloudpickle shall be able to send it, and the class it is in, back.


def _by_value_of_cached(cached: Any) -> Any:
    return _remake_cached_function, (cached.__wrapped__, cached.cache_parameters())


def _remake_cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    copyreg.pickle(LruCacheWrapper, _reduce_remade_function)
    return functools.lru_cache(**parameters)(function)


def _reduce_remade_function(cached: Any) -> Any:
    return cached.__qualname__ if is_found_by_name(cached) else _by_value_of_cached(cached)


def _cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


# What `functools.singledispatch` returns has a cache of weak references. It is made first, and filled then, for its
# functions may call it.


def _set_dispatcher(dispatcher: Any, state: tuple[Callable[..., Any], dict[type, Callable[..., Any]]]) -> None:
    default, registry = state
    functools.update_wrapper(dispatcher, default)
    for kind, function in registry.items():
        dispatcher.register(kind, function)


def _reduce_memmap(array: Any) -> Any:
    """Pickle by path, so that a large file is neither read nor copied; by value where the path is not enough."""
    root = array
    while isinstance(root.base, np.memmap):
        root = root.base
    if array._mmap is None or array.size == 0 or not _is_file_of(root):
        return NotImplemented
    start = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    if array.flags.c_contiguous or array.flags.f_contiguous:
        order = "C" if array.flags.c_contiguous else "F"
        mode = "r" if root.mode == "r" else "r+"  # "w+" would empty the file
        return np.memmap, (str(root.filename), array.dtype, mode, root.offset + start, array.shape, order)
    return np.ndarray, (array.shape, array.dtype, root, start, array.strides)


def _is_file_of(root: Any) -> bool:
    if root.filename is None or root.mode == "c":  # "c": what was written to it is not in the file
        return False
    try:
        return bool(os.stat(root.filename).st_size >= root.offset + root.nbytes)
    except OSError:  # deleted since: only the mapping has it
        return False
