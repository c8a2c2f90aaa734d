"""Run your Python preprocessing function in parallel worker processes and feed the batches to
Keras, TensorFlow, PyTorch or JAX.

Workers return batches through shared memory. Batches are bit-identical for any number of workers.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from loaderpool.errors import *  # noqa: F403  # public names, listed in `__all__` of that module
from loaderpool.errors import __all__ as _ERRORS

if TYPE_CHECKING:  # for type checkers; at run time, these names are imported when they are used
    from loaderpool.cache.setting import Cache as Cache
    from loaderpool.config import Blocks as Blocks
    from loaderpool.config import Buckets as Buckets
    from loaderpool.config import Limits as Limits
    from loaderpool.config import Packed as Packed
    from loaderpool.config import Shard as Shard
    from loaderpool.config import TokenBudget as TokenBudget
    from loaderpool.config import Weighted as Weighted
    from loaderpool.element.spec import ArraySpec as ArraySpec
    from loaderpool.element.spec import RaggedArray as RaggedArray
    from loaderpool.ray.pool import RayPool as RayPool
    from loaderpool.sources.combine import mix as mix
    from loaderpool.sources.combine import zip_sources as zip_sources
    from loaderpool.sources.files import FileSource as FileSource
    from loaderpool.sources.hdf5 import HDF5 as HDF5
    from loaderpool.sources.parquet import ParquetRows as ParquetRows
    from loaderpool.sources.stream import WorkerInfo as WorkerInfo
    from loaderpool.sources.stream import interleave as interleave
    from loaderpool.sources.tar import TarSamples as TarSamples
    from loaderpool.sources.text import JsonLines as JsonLines
    from loaderpool.sources.text import TextLines as TextLines
    from loaderpool.sources.tfrecord import TFRecords as TFRecords
    from loaderpool.sources.tfrecord import parse_example as parse_example
    from loaderpool.trainer.loader import Loader as Loader
    from loaderpool.trainer.pool import Pool as Pool
    from loaderpool.trainer.replay import replay as replay
    from loaderpool.trainer.statistics import Statistics as Statistics
    from loaderpool.transport.payload.sharing import share as share

__version__ = "0.1.0"

# Modules that are imported when a name is used. A supervisor imports this package too and needs
# none of the main process's modules. The first batch waits for the supervisor's start.
_MODULES = {
    "cache.setting": "Cache",
    "element.spec": "ArraySpec RaggedArray",
    "ray.pool": "RayPool",
    "config": "Blocks Buckets Limits Packed Shard TokenBudget Weighted",
    "sources.combine": "mix zip_sources",
    "sources.files": "FileSource",
    "sources.hdf5": "HDF5",
    "sources.parquet": "ParquetRows",
    "sources.stream": "WorkerInfo interleave",
    "sources.tar": "TarSamples",
    "sources.text": "JsonLines TextLines",
    "sources.tfrecord": "parse_example TFRecords",
    "trainer.statistics": "Statistics",
    "trainer.loader": "Loader",
    "trainer.pool": "Pool",
    "trainer.replay": "replay",
    "transport.payload.sharing": "share",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = ["__version__", *_ERRORS, *sorted(_HOMES, key=str.lower)]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        from loaderpool.hints import no_attribute

        raise AttributeError(no_attribute(f"module {__name__!r}", name, __all__))
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


# A frozen executable, which is not Python, has started this program again as a child process.
if "LOADERPOOL_START" in os.environ:
    from loaderpool.transport.child_process import become_child

    become_child()
