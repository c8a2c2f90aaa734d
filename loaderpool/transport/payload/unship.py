"""What `ship` has pickled as objects again, and why it could not be loaded.

Runs in: the supervisor (a clean worker, a reader), which never need what pickles.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from loaderpool.system import role
from loaderpool.transport.payload.open_handles import OpenHandleError
from loaderpool.transport.pickling import Importing, receive, unwatched


def unship(
    pickled: bytes | memoryview, buffers: Sequence[memoryview], importing: Importing = unwatched
) -> dict[str, Any]:
    """Return the payload again; arrays of `Shipment.buffers` lie in the given memory, writable where the memory is.

    Imports the user's modules.

    Args:
        pickled: `Shipment.pickled`.
        buffers: the contents of `Shipment.buffers`, in their order.
        importing: the context of each import that the payload itself asks for.

    Raises:
        BaseException: whatever an import or a `__setstate__` of the user's raises; see `describe_load_error`.
    """
    payload: dict[str, Any] = receive(pickled, buffers, importing)
    return payload


def describe_load_error(error: BaseException, place: str = "the supervisor") -> str:
    """Return one or two sentences: what in the payload could not be loaded, the likely cause, and what to do.

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
    if isinstance(error, ModuleNotFoundError) and role.node():
        return (
            f"Node {role.node()} does not have the module {error.name!r}, which the function or the source needs. Have "
            f'it go along, RayPool(runtime_env={{"py_modules": [{(error.name or "").partition(".")[0]}]}}) or '
            'runtime_env={"working_dir": "."}, install it on each node (runtime_env={"pip": [...]} does), or define '
            f"the function in the script itself. There os.getcwd() is {_working_directory()!r} and sys.path is "
            f"{sys.path!r}."
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


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "(deleted)"
