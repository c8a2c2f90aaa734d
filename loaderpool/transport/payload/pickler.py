"""How objects travel that cloudpickle refuses, copies whole, or would look for in a `__main__` that is not there."""

from __future__ import annotations

import copyreg
import functools
import io
import os
import sys
import types
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import cloudpickle
import numpy as np
from cloudpickle import cloudpickle as internals

from loaderpool.transport.payload.tensors import KINDS as TENSOR_KINDS
from loaderpool.transport.payload.tensors import reduce_tensor

_by_identity: Any = object.__eq__
_LruCacheWrapper = type(functools.lru_cache(lambda: None))
_make_dispatcher: Callable[[Any], Any] = functools.singledispatch  # which mypy knows too well
_DISPATCHES = _make_dispatcher(len).__code__


class PayloadPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, and also: a `numpy.memmap` goes by path, cached functions of `__main__` go, open files do not."""

    met: set[int] | None = None
    """Takes the ids of the objects that are told apart by identity alone, where a caller asks for them."""
    stand_ins: Mapping[int, Any] | None = None
    """What goes in the place of objects that variables and attributes hold, by their ids."""
    holders: AbstractSet[int] = frozenset()
    """Ids of the objects of which attributes are such."""
    looked_at: AbstractSet[int] = frozenset()
    """Ids of what was looked into before these were chosen."""
    strangers: list[types.FunctionType]
    """Functions that travel by value, and were not: they may do anything with what they hold."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if self.met is not None and kind.__eq__ is _by_identity:
            self.met.add(id(obj))
        if self.stand_ins:
            reduced = self._reduce_holder(obj, kind)
            if reduced is not None:
                return reduced
        if kind is np.memmap:
            return _reduce_memmap(obj)
        if kind is _LruCacheWrapper:
            return self._reduce_cached_function(obj)
        if kind is functools.cached_property:
            return _reduce_cached_property(obj)
        if kind is types.FunctionType and obj.__code__ is _DISPATCHES and self.is_by_value(obj):
            state = obj.__wrapped__, dict(obj.registry)
            return _make_dispatcher, (len,), state, None, None, _set_dispatcher
        if kind is io.TextIOWrapper and obj not in (sys.stdout, sys.stderr):
            # cloudpickle would read the whole file and send its text; binary files it refuses, and so do we both.
            raise TypeError("cannot pickle an open text file")
        if kind.__name__ in TENSOR_KINDS:
            reduced = self._reduce_tensor(obj)
            if reduced is not NotImplemented:
                return reduced
        if issubclass(kind, getattr(sys.modules.get("tqdm.std"), "tqdm", ())):
            raise TypeError("a progress bar counts in one process")  # sent, it would fail where it arrives
        return super().reducer_override(obj)

    def _reduce_holder(self, obj: Any, kind: type) -> Any:
        """Return how an object travels that holds what is replaced; None: as any."""
        if kind is types.CellType:
            try:
                stand_in = self._stand_in(obj.cell_contents)
            except ValueError:  # empty
                return None
            return None if stand_in is obj.cell_contents else (internals._make_cell, (stand_in,))
        if kind is functools.partial:
            cls, arguments, (function, values, named, attributes) = obj.__reduce__()
            return cls, arguments, (function, self._each(values), self._each(named), attributes)
        if id(obj) not in self.holders:
            return None
        cls, arguments, state, *others = obj.__reduce_ex__(5)
        # A dict, or a pair of one and of slots.
        state = tuple(map(self._each, state)) if isinstance(state, tuple) else self._each(state)
        return (cls, arguments, state, *others)

    def _dynamic_function_reduce(self, function: Any) -> Any:
        reduced = super()._dynamic_function_reduce(function)
        if self.stand_ins:
            if id(function) not in self.looked_at:
                self.strangers.append(function)
            slots = reduced[2][1]
            for name in ("__globals__", "__defaults__", "__kwdefaults__"):
                slots[name] = self._each(slots[name])
        return reduced

    def _each(self, values: Any) -> Any:
        """Return the values, of which some are replaced."""
        if isinstance(values, dict):
            return {key: self._stand_in(value) for key, value in values.items()}
        return tuple(map(self._stand_in, values)) if isinstance(values, tuple) else values

    def _stand_in(self, value: Any) -> Any:
        return value if self.stand_ins is None else self.stand_ins.get(id(value), value)

    def _reduce_tensor(self, tensor: Any) -> Any:
        return reduce_tensor(tensor)

    def _reduce_cached_function(self, cached: Any) -> Any:
        return _by_value_of_cached(cached) if self.is_by_value(cached) else NotImplemented

    def is_by_value(self, named: Any) -> bool:
        """Whether a function or class is to be sent itself, not its name."""
        return not _is_found_by_name(named)


def _is_found_by_name(named: Any) -> bool:
    if named.__module__ == "__main__":  # another one there
        return False
    found: Any = sys.modules.get(named.__module__)
    for name in named.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is named


# Of itself a cached function is looked up by name where it arrives, which in `__main__` finds nothing. It is rebuilt
# with an empty cache. Where one has arrived, cloudpickle shall be able to send it, and the class it is in, back.


def _by_value_of_cached(cached: Any) -> Any:
    return _remake_cached_function, (cached.__wrapped__, cached.cache_parameters())


def _remake_cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    copyreg.pickle(_LruCacheWrapper, _reduce_remade_function)
    return functools.lru_cache(**parameters)(function)


def _reduce_remade_function(cached: Any) -> Any:
    return cached.__qualname__ if _is_found_by_name(cached) else _by_value_of_cached(cached)


# Up to Python 3.11 a cached property holds a lock, which cannot be pickled.


def _reduce_cached_property(cached: functools.cached_property[Any]) -> Any:
    return _remake_cached_property, (cached.func, cached.attrname)


def _remake_cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    copyreg.pickle(functools.cached_property, _reduce_cached_property)
    remade = functools.cached_property(function)
    if name is not None:
        remade.__set_name__(object, name)
    return remade


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
        return _reopen, (str(root.filename), array.dtype, mode, root.offset + start, array.shape, order)
    return _view, (root, array.dtype, array.shape, array.strides, start)


def _is_file_of(root: Any) -> bool:
    if root.filename is None or root.mode == "c":  # "c": what was written to it is not in the file
        return False
    try:
        return bool(os.stat(root.filename).st_size >= root.offset + root.nbytes)
    except OSError:  # deleted since: only the mapping has it
        return False


def _reopen(path: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], order: Any) -> Any:
    return np.memmap(path, dtype=dtype, mode=mode, offset=offset, shape=shape, order=order)


def _view(root: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Any:
    return np.ndarray(shape, dtype, buffer=root, offset=start, strides=strides)
