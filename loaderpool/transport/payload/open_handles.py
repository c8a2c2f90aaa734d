"""Files and connections that a module opened while it was imported, and that must not be used behind a fork.

HDF5 reads through a place in the file that all forked processes move together, and hands out the inherited file to
any code that opens the path again; a fork that uses an inherited SQLite connection can damage the database
(https://www.sqlite.org/howtocorrupt.html, "Carrying an open database connection across a fork()").
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class OpenHandleError(Exception):
    """Something is open that workers would inherit."""


def refuse_open_handles() -> None:
    """Raise where a module has left a file or a connection open.

    Runs in: the supervisor, after it has loaded a payload and before it forks. Costs nothing where neither library is
    there.

    Raises:
        OpenHandleError: there is one; names the module and the variable where they are found, and what is open.
    """
    found = [*_hdf5_files(), *_sqlite_connections()]
    if found:
        raise OpenHandleError("; ".join(found))


def _hdf5_files() -> Iterator[str]:
    h5py: Any = sys.modules.get("h5py")
    if not hasattr(h5py, "HLObject"):  # not there, or half imported
        return
    h5f = h5py.h5f
    # A file is open as long as anything in it is, also when its own object is gone.
    kinds = h5f.OBJ_FILE | h5f.OBJ_DATASET | h5f.OBJ_GROUP | h5f.OBJ_ATTR
    try:
        files = [h5py.h5i.get_file_id(handle) for handle in h5f.get_obj_ids(h5f.OBJ_ALL, kinds)]
        paths = {h5f.get_name(file).decode(errors="replace") for file in files if _is_on_disk(file, h5py)}
    except Exception:  # what cannot be looked at is not refused
        return
    if not paths:
        return
    for module, name, value in _globals_of_users():
        if isinstance(value, h5py.HLObject) and value:
            path = value.file.filename
            if path in paths:
                yield f"{module}.{name} holds the open HDF5 file {path}"
                paths.discard(path)
    yield from (f"the HDF5 file {path} is open" for path in sorted(paths))


def _is_on_disk(file: Any, h5py: Any) -> bool:
    return bool(file.get_access_plist().get_driver() != h5py.h5fd.CORE)


def _sqlite_connections() -> Iterator[str]:
    sqlite3: Any = sys.modules.get("sqlite3")
    if not hasattr(sqlite3, "Connection"):
        return
    for module, name, value in _globals_of_users():
        connection = value.connection if isinstance(value, sqlite3.Cursor) else value
        if isinstance(connection, sqlite3.Connection):
            path = _path_of(connection)
            if path:
                yield f"{module}.{name} holds a connection to the SQLite database {path}"


def _path_of(connection: Any) -> str:
    """Return a database's path; "" where it is in memory, and so each process's own, or the connection is closed."""
    try:
        return next((path for _, _, path in connection.execute("PRAGMA database_list") if path), "")
    except Exception:
        return ""


def _globals_of_users() -> Iterator[tuple[str, str, Any]]:
    """Module, name and value of the global variables of all modules but the installed ones."""
    import sysconfig  # looked at only where such a library is

    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    for module in list(sys.modules.values()):
        # Not by `isinstance` alone: some modules are replaced by objects that import more when they are asked.
        if type(module) is ModuleType and not str(vars(module).get("__file__") or "").startswith(installed):
            for name, value in list(vars(module).items()):
                yield module.__name__, name, value
