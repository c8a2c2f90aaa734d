"""loaderpool ends the wait for data in TensorFlow and Keras training.

Any Python preprocessing function runs in a pool of worker processes; batches reach `tf.data` through shared memory
without a copy, in an order that no number of workers changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderpool.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    ForeignProcessError,
    LoaderpoolError,
    MemoryLimitError,
    PoolBrokenError,
    SampleError,
    SampleTimeoutError,
    SetupError,
    SourceError,
    SpecMismatchError,
    SupervisorLostError,
    UnpicklableError,
    WorkerLostError,
    WorkersNotForkedWarning,
)
from loaderpool.loader import Loader
from loaderpool.loader_iterator import LoaderIterator
from loaderpool.pool import Pool
from loaderpool.ragged import RaggedArray
from loaderpool.spec import ArraySpec, ElementSpec

if TYPE_CHECKING:
    from loaderpool.memory.share import share
    from loaderpool.telemetry.statistics import Statistics, WorkerStatistics

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ArraySpec",
    "ClosedError",
    "ElementSpec",
    "ForeignProcessError",
    "Loader",
    "LoaderIterator",
    "LoaderpoolError",
    "MemoryLimitError",
    "Pool",
    "PoolBrokenError",
    "RaggedArray",
    "SampleError",
    "SampleTimeoutError",
    "SetupError",
    "SourceError",
    "SpecMismatchError",
    "Statistics",
    "SupervisorLostError",
    "UnpicklableError",
    "WorkerLostError",
    "WorkerStatistics",
    "WorkersNotForkedWarning",
    "__version__",
    "share",
]


def __getattr__(name: str) -> Any:
    if name in ("Statistics", "WorkerStatistics"):  # types to annotate with, which few programs name
        from loaderpool.telemetry import statistics

        return getattr(statistics, name)
    if name == "share":
        from loaderpool.memory.share import share

        return share
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
