"""`share` with a name: one copy of data for all processes of a job on a machine.

The process that makes the data writes them into a memory file, followed by a header. The file is
then final. All processes, including this one, map the file read-only, and build the value from the
header.
"""

from __future__ import annotations

import functools
import io
import itertools
import marshal
import os
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.cache.identity import describe_code
from loaderpool.checks import check_signature
from loaderpool.errors import ArgumentError, UnpicklableError, brief
from loaderpool.memory.adoption import address_of, find_file
from loaderpool.memory.holders import Held, Name, finish, job_key, obtain, read_final
from loaderpool.sources.packed import same
from loaderpool.system import abilities, machine, ranks
from loaderpool.system.hashes import checksum
from loaderpool.system.interrupts import InterruptsHeld
from loaderpool.system.walk import is_global
from loaderpool.transport.payload.packing import shared
from loaderpool.transport.pickling import CodePickler, out_of_band, receive

# Values that this process has, and a text that identifies the function of each, by key.
_values: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_made_by: dict[str, str] = {}


def share_by_name(make: Callable[[], object], name: str) -> object:
    """Return the result of `make` in memory that all processes of the job share; see `share`."""
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"share: name must be a text that is not empty, got {brief(name)}")
    if not callable(make):
        raise ArgumentError(
            f"share: with a name, pass a function that returns the data, got {brief(make)}. Only "
            "one process of the machine calls it: lp.share(lambda: data, name=...)"
        )
    check_signature("data", make, "", ())
    if not abilities.can_fork_workers():
        return shared(make())
    shown = f"share(name={brief(name)})"
    key, made_by = job_key("share", ranks.job(), name), describe_code(make)
    value = _values.get(key)
    if value is None:
        with InterruptsHeld():
            held = obtain(Name(key, shown, made_by), functools.partial(_write, make, name))
            value = _read(held, shown)
        _made_by[key] = made_by
        value = _values.setdefault(key, value)
    elif _made_by[key] != made_by:
        raise ArgumentError(
            f"{shown}: this process has the data of {_made_by[key]}, and now passed {made_by}. "
            "Pass another name, or the same function. If you have changed it, as in a notebook, "
            "delete the earlier result first"
        )
    return value


def _write(make: Callable[[], Any], name: str) -> tuple[int, bytes]:
    """Call `make`, and write its result into a memory file.

    Return the descriptor of the final file, and the `info` for `read_final`.
    """
    # The keys of the packings follow from the name, so that the pickles are the same in each run.
    first = int(checksum([name.encode("utf-8", "surrogatepass")])[:12], 16)
    value = shared(make(), itertools.count(first))
    arrays = [value] if isinstance(value, np.ndarray) else value.arrays
    start = min(map(address_of, arrays))
    file = find_file(start, 1)
    assert file is not None  # `shared` has put the data into a file
    if not file.is_shared:
        # Another thread has forked meanwhile, so later writes went to private memory. Copy them.
        machine.write_memory(file.descriptor, 0, start, file.nbytes)
    places: list[tuple[int, int]] = []

    def keep(buffer: memoryview) -> None:
        places.append((address_of(buffer) - start, buffer.nbytes))

    with io.BytesIO() as stream:
        _ByName(stream, 5, out_of_band(keep, 1)).dump(_recipe(value))
        header = marshal.dumps((stream.getvalue(), places))
    nbytes, descriptor = file.nbytes, machine.above_standard(os.dup(file.descriptor))
    try:
        # Drop all mappings through which the file could be changed. This also frees the objects
        # that `make` has returned, unless the user keeps them.
        del value, arrays, file
        machine.return_freed_blocks()
        return descriptor, finish(descriptor, nbytes, header)
    except BaseException:
        os.close(descriptor)
        raise


def _recipe(value: object) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and its arguments. Their pickle builds the value in other processes."""
    if isinstance(value, np.ndarray):
        # Use bytes, because the pickle of an array of times would contain the data.
        flat = value.reshape(-1).view(np.uint8) if value.size else np.empty(0, np.uint8)
        return _as_array, (flat, value.dtype, value.shape)
    return same, (value,)


def _as_array(
    flat: npt.NDArray[np.uint8], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=flat)
    array.flags.writeable = False
    return array


def _read(held: Held, shown: str) -> object:
    """Return the value that a file contains."""
    block, header = read_final(held)
    pickled, places = marshal.loads(header)
    try:
        recipe, arguments = receive(pickled, [block[at : at + size] for at, size in places])
    except (AttributeError, ImportError) as error:
        raise UnpicklableError(
            f"{shown}: the data hold a class that this process lacks ({error}). "
            "Define it before the call of share, in all processes. If this is a worker, call share "
            "in the main process, and use its value in fn"
        ) from error
    return recipe(*arguments)


class _ByName(CodePickler):
    """Pickles classes and functions of the script by name, because all processes run the script."""

    def reducer_override(self, obj: Any) -> object:
        if (
            isinstance(obj, (type, types.FunctionType))
            and obj.__module__ in ("__main__", "__mp_main__")
            and is_global(obj)
        ):
            return _of_script, (obj.__qualname__,)
        return super().reducer_override(obj)


def _of_script(name: str) -> object:
    return functools.reduce(getattr, name.split("."), sys.modules["__main__"])
