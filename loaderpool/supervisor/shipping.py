"""The user's function, source and hooks as bytes in the trainer, and as objects again in the supervisor.

The trainer may have TensorFlow loaded; the supervisor is a clean interpreter, which finds the trainer's `sys.path` and
working directory but never runs its `__main__` (docs/explanation/architecture.md, "Getting there").
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loaderpool.errors import UnpicklableError
from loaderpool.receiving import receive
from loaderpool.supervisor.by_value import FrameworkFreePickler
from loaderpool.supervisor.framework_imports import is_framework_loaded
from loaderpool.supervisor.offender import describe_offender, describe_shared_file
from loaderpool.supervisor.open_handles import OpenHandleError
from loaderpool.supervisor.packer import flat_bytes
from loaderpool.supervisor.packing import ItemError, Packing
from loaderpool.supervisor.reducers import PayloadPickler
from loaderpool.supervisor.shared_files import find_shared_file
from loaderpool.worker.lanes import LaneItems

__all__ = ["OUT_OF_BAND_BYTES", "Shipment", "describe_load_error", "ship", "unship"]

# Smaller: more buffers, each with an entry of the shipment's table and a view in the supervisor. Larger: more arrays
# are copied into the pickle and once more out of it, to where workers share a page only until one writes beside them.
OUT_OF_BAND_BYTES = 64 * 1024
_CALLED = ("make_generator", "fn", "batch_fn", "setup")  # what of a payload is called in the workers


@dataclass(frozen=True)
class Shipment:
    """A payload ready to travel. Ownership: `buffers` are views of the user's own arrays, which they keep alive."""

    pickled: bytes
    """One pickle of protocol 5."""
    buffers: tuple[memoryview, ...]
    """uint8[n] each, contiguous, at least `OUT_OF_BAND_BYTES` long, in the order in which the pickle asks for them."""
    packed_items: int = 0
    """Items of the source that are packed, see `packing`; they lie in buffers, too."""
    is_framework_free: bool = False
    """Code of modules that import TensorFlow or Keras is in the pickle by value, so that loading it imports neither."""


def ship(payload: dict[str, object], *, by_reference: bool = False) -> Shipment:
    """The payload as one pickle, so that its parts still share what they share, such as globals.

    Where its own code does not use TensorFlow, loading it does not import TensorFlow either, whatever the modules that
    the code comes from import. Runs in: the trainer.

    Args:
        payload: what the workers need, by name; the names are those that an error gives.
        by_reference: leave code in its modules, TensorFlow or not. For what follows an earlier shipment: classes are
            the same in both only if this is `not first.is_framework_free`.

    Raises:
        UnpicklableError: something in it cannot be pickled, or would be one open file for all workers; the message
            names the variable, the path to it, its type, and what to do. The cause is what pickling raised.
    """
    if not by_reference:
        _refuse_shared_files(payload)
    if is_framework_loaded() and not by_reference:
        try:
            return Shipment(*_pickled(payload, FrameworkFreePickler), is_framework_free=True)
        except MemoryError:
            raise
        except Exception:
            # It needs the framework, or a global that can be imported but not pickled (a lock, say): by reference then.
            pass
    try:
        return Shipment(*_pickled(payload, _payload_pickler))
    except MemoryError:
        raise
    except ItemError as error:
        found = describe_offender({error.place: error.item}, error.reason, _why_unpicklable)
        raise UnpicklableError(found) from error.reason
    except Exception as error:
        raise UnpicklableError(_describe(payload, error)) from error


def unship(pickled: bytes | memoryview, buffers: Sequence[memoryview]) -> dict[str, Any]:
    """The payload again; arrays of `Shipment.buffers` lie in the given memory, writable where the memory is.

    Runs in: the supervisor; imports the user's modules.

    Args:
        pickled: `Shipment.pickled`.
        buffers: the contents of `Shipment.buffers`, in their order.

    Raises:
        BaseException: whatever an import or a `__setstate__` of the user's raises; see `describe_load_error`.
    """
    payload: dict[str, Any] = receive(pickled, buffers)
    return payload


def describe_load_error(error: BaseException, place: str = "the supervisor") -> str:
    """One or two sentences: what in the payload could not be loaded, the likely cause, and what to do.

    Runs in: the process in which `unship` failed, as it names that process's search path.

    Args:
        error: what `unship` raised.
        place: what that process is.
    """
    if isinstance(error, OpenHandleError):
        return (
            f"Importing the function's modules has left something open that workers must not inherit: {error}. Open it "
            "in setup=, which runs once in each worker; for the rows of an HDF5 file give loaderpool.HDF5(path, keys) "
            "as the source."
        )
    if isinstance(error, ModuleNotFoundError):
        return (
            f"The workers cannot import the module {error.name!r}, which the function or the source needs. They have "
            f"the trainer's sys.path and working directory, so it was probably made at run time, or sys.path or the "
            f"directory has changed since its import. Put the module in a directory on sys.path, or define the "
            f"function in the script itself. Here os.getcwd() is {_working_directory()!r} and sys.path is {sys.path!r}."
        )
    if isinstance(error, AttributeError):
        return (
            f"A function or class is not found by its name in its module ({error}). It was probably replaced, or set "
            f"in the module, while the trainer ran, or the file was changed since the trainer imported it. Restart the "
            f"trainer (the kernel, in a notebook), or give the function as a lambda or a local function: those are "
            f"sent by value."
        )
    if isinstance(error, ImportError):
        return f"An import in a module of yours failed in {place}, a clean interpreter without a GPU: {error}"
    return (
        f"Loading the function and the source in {place} raised {type(error).__name__}. Modules are imported "
        f"there anew, without what the script did before; the traceback shows the line."
    )


def _refuse_shared_files(payload: dict[str, object]) -> None:
    named = {name: part for name, part in _named_parts(payload).items() if name in _CALLED}
    found = find_shared_file(named)
    if found is not None:
        raise UnpicklableError(describe_shared_file(*found))


def _named_parts(payload: dict[str, object]) -> dict[str, object]:
    """The payload by the names that the user knows."""
    source = payload.get("source")
    if not isinstance(source, LaneItems):
        return payload
    return {**{name: part for name, part in payload.items() if name != "source"}, **source.parts}


def _describe(payload: dict[str, object], error: Exception) -> str:
    payload = _named_parts(payload)
    others = {name: part for name, part in payload.items() if name != "source"}
    # Its source may have been packed all right, and takes long to look through.
    suspects = payload if _why_unpicklable(others) is None else others
    return describe_offender(suspects, error, _why_unpicklable)


def _payload_pickler(file: Any, buffer_callback: Callable[[pickle.PickleBuffer], bool]) -> PayloadPickler:
    return PayloadPickler(file, protocol=5, buffer_callback=buffer_callback)


def _pickled(
    payload: dict[str, object], make_pickler: Callable[[Any, Callable[[pickle.PickleBuffer], bool]], PayloadPickler]
) -> tuple[bytes, tuple[memoryview, ...], int]:
    buffers: list[memoryview] = []

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        flat = flat_bytes(buffer)
        if flat is None or flat.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(flat)
        return False

    packing = Packing(OUT_OF_BAND_BYTES, _why_unpicklable)
    with io.BytesIO() as file:
        pickler = make_pickler(file, is_in_band)
        pickler.met = packing.met
        pickler.dump(packing.prepare(payload))
        return file.getvalue(), tuple(buffers), packing.packed


def _why_unpicklable(part: object) -> Exception | None:
    """What pickling this part alone raises; None where it works. Nothing is kept of it and no array is copied."""
    try:
        _payload_pickler(_Nowhere(), lambda buffer: flat_bytes(buffer) is None).dump(part)
    except MemoryError:
        raise
    except Exception as error:
        return error
    return None


class _Nowhere:
    """A file for picklers that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "(deleted)"
