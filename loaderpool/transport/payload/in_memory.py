"""Objects whose data is in this process's memory and not in their pickle.

In another process, most of them read as zeros, as empty or as missing files, and some crash it. So
the pickler refuses them, before anything is sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping

from loaderpool.system.interrupts import is_of_a_handler

# Marks by package and class; derived classes count, too. A mark is a byte string in the pickle of
# an object whose data is in memory. A class without marks always has its data in memory. Module
# names are left out, because libraries move classes.
_STORES: Mapping[tuple[str, str], tuple[bytes, ...]] = {
    ("deeplake", "DatasetView"): (b"mem://",),
    ("fsspec", "AbstractFileSystem"): (
        b"fsspec.implementations.memory",
        b"memory://",
        # options target_protocol="memory" and remote_protocol="memory"
        b"_protocol\x94\x8c\x06memory",
    ),
    ("fsspec", "MemoryFileSystem"): (),
    ("icechunk", "IcechunkStore"): (b"in_memory_object_store",),
    ("icechunk", "Repository"): (b"in_memory_object_store",),
    ("icechunk", "Session"): (b"in_memory_object_store",),
    ("kuzu", "Database"): (b":memory:",),
    ("lance", "LanceDataset"): (b"memory://",),
    ("lance", "LanceFragment"): (b"memory://",),
    ("obstore", "MemoryStore"): (),
    ("rasterio", "MemoryFile"): (),
    # Settings of an index: one in memory, and one in a file that is emptied when it is loaded.
    ("rtree", "Index"): (b"\x07storage\x94K\x00", b"\x09overwrite\x94\x88"),
    ("tensorstore", "KvStore"): (b"memory_key_value_store",),
    ("tensorstore", "TensorStore"): (b"memory_key_value_store",),
    ("tiledb", "Array"): (b"mem://",),
    ("torchcodec", "AudioDecoder"): (),
    ("torchcodec", "VideoDecoder"): (),
    ("upath", "MemoryPath"): (),
}

CURE = (
    "Save it in a directory, and open that in the workers, or read it into NumPy arrays, "
    "which all workers share."
)  # fmt: skip


class InMemoryError(TypeError):
    """The data of an object is in this process's memory, and its pickle is only a name."""

    def __init__(self) -> None:
        super().__init__("its data is in the memory of this process, and its pickle is only a name")


def marks_of(kind: type) -> tuple[bytes, ...] | None:
    """Return the marks of a class in `_STORES`, or None if it is not a store."""
    for base in kind.__mro__:
        marks = _STORES.get((str(base.__module__).partition(".")[0], base.__name__))
        if marks is not None:
            return marks
    return None


def refuse(obj: object, marks: tuple[bytes, ...]) -> None:
    """Raise `InMemoryError` if a store is in memory.

    The store is first pickled on its own. This takes a few hundred bytes, except for arrays in a
    `TensorStore`.
    """
    try:
        pickled = pickle.dumps(obj, 5) if marks else b""
    except Exception as error:
        if is_of_a_handler(error):
            raise
        return  # the calling pickler will raise the same error
    if not marks or any(mark in pickled for mark in marks):
        raise InMemoryError
