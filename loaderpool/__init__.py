"""loaderpool ends the wait for data in TensorFlow and Keras training.

Any Python preprocessing function runs in a pool of worker processes; batches reach `tf.data` through shared memory
without a copy, in an order that no number of workers changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loaderpool.errors import (
    ArgumentError,
    ArgumentTypeError,
    CacheError,
    CacheWarning,
    ClosedError,
    ClusterError,
    ClusterLostError,
    ClusterWarning,
    DataNotVisibleError,
    ForeignProcessError,
    HostLostError,
    LargeDataWarning,
    LoaderpoolError,
    MemoryLimitError,
    PoolBrokenError,
    SampleError,
    SampleTimeoutError,
    SetupError,
    SourceError,
    SourceLostError,
    SourceReadError,
    SpecMismatchError,
    StateError,
    SupervisorLostError,
    UnpicklableError,
    WorkerLostError,
    WorkersNotForkedWarning,
)
from loaderpool.sources.worker_info import WorkerInfo, worker_info

if TYPE_CHECKING:
    from loaderpool.cache.setting import Cache
    from loaderpool.element.ragged import RaggedArray
    from loaderpool.element.spec import ArraySpec, ElementSpec
    from loaderpool.memory.share import share
    from loaderpool.ray.pool import RayPool
    from loaderpool.settings.groups import Auto, Buckets, Limits, Shard, WorkerOptions
    from loaderpool.sources.csv_rows import Csv
    from loaderpool.sources.hdf5 import HDF5
    from loaderpool.sources.indexed_files import IndexedFiles
    from loaderpool.sources.interleave import interleave
    from loaderpool.sources.json_lines import JsonLines
    from loaderpool.sources.mix import mix
    from loaderpool.sources.parquet_rows import ParquetRows
    from loaderpool.sources.tar_samples import TarSamples
    from loaderpool.sources.text_lines import TextLines
    from loaderpool.sources.tf_example import parse_example
    from loaderpool.sources.tfrecords import TFRecords
    from loaderpool.sources.zipped import zip_sources
    from loaderpool.trainer.check_source import check_source
    from loaderpool.trainer.engine.engine_statistics import HostStatistics, WorkerStatistics
    from loaderpool.trainer.epochs.statistics import Statistics
    from loaderpool.trainer.loader import Loader
    from loaderpool.trainer.loader_iterator import LoaderIterator
    from loaderpool.trainer.pool import Pool
    from loaderpool.trainer.replay import replay

__version__ = "0.1.0"

__all__ = [
    "HDF5",
    "ArgumentError",
    "ArgumentTypeError",
    "ArraySpec",
    "Auto",
    "Buckets",
    "Cache",
    "CacheError",
    "CacheWarning",
    "ClosedError",
    "ClusterError",
    "ClusterLostError",
    "ClusterWarning",
    "Csv",
    "DataNotVisibleError",
    "ElementSpec",
    "ForeignProcessError",
    "HostLostError",
    "HostStatistics",
    "IndexedFiles",
    "JsonLines",
    "LargeDataWarning",
    "Limits",
    "Loader",
    "LoaderIterator",
    "LoaderpoolError",
    "MemoryLimitError",
    "ParquetRows",
    "Pool",
    "PoolBrokenError",
    "RaggedArray",
    "RayPool",
    "SampleError",
    "SampleTimeoutError",
    "SetupError",
    "Shard",
    "SourceError",
    "SourceLostError",
    "SourceReadError",
    "SpecMismatchError",
    "StateError",
    "Statistics",
    "SupervisorLostError",
    "TFRecords",
    "TarSamples",
    "TextLines",
    "UnpicklableError",
    "WorkerInfo",
    "WorkerLostError",
    "WorkerOptions",
    "WorkerStatistics",
    "WorkersNotForkedWarning",
    "__version__",
    "check_source",
    "interleave",
    "mix",
    "parse_example",
    "replay",
    "share",
    "worker_info",
    "zip_sources",
]

# Imported when named. A supervisor imports this package, too, and needs nothing of the trainer's; its start is what the
# first batch waits for.
_ON_DEMAND = {
    "ArraySpec": "element.spec",
    "Auto": "settings.groups",
    "Buckets": "settings.groups",
    "Cache": "cache.setting",
    "Csv": "sources.csv_rows",
    "ElementSpec": "element.spec",
    "HDF5": "sources.hdf5",
    "HostStatistics": "trainer.engine.engine_statistics",
    "IndexedFiles": "sources.indexed_files",
    "JsonLines": "sources.json_lines",
    "Limits": "settings.groups",
    "Loader": "trainer.loader",
    "LoaderIterator": "trainer.loader_iterator",
    "ParquetRows": "sources.parquet_rows",
    "Pool": "trainer.pool",
    "RaggedArray": "element.ragged",
    "RayPool": "ray.pool",
    "Shard": "settings.groups",
    "Statistics": "trainer.epochs.statistics",
    "TFRecords": "sources.tfrecords",
    "TarSamples": "sources.tar_samples",
    "TextLines": "sources.text_lines",
    "WorkerOptions": "settings.groups",
    "WorkerStatistics": "trainer.engine.engine_statistics",
    "check_source": "trainer.check_source",
    "interleave": "sources.interleave",
    "mix": "sources.mix",
    "parse_example": "sources.tf_example",
    "replay": "trainer.replay",
    "share": "memory.share",
    "zip_sources": "sources.zipped",
}


# What needs a framework or a library, and who looks for it here.
_ELSEWHERE = {
    "BackupCallback": "loaderpool.adapters.keras",
    "LoaderState": "loaderpool.adapters.tensorflow",
    "PrometheusCollector": "loaderpool.adapters.prometheus",
    "ReportCallback": "loaderpool.adapters.keras",
}


def __getattr__(name: str) -> Any:
    module = _ON_DEMAND.get(name)
    if module is None:
        home = _ELSEWHERE.get(name)
        hint = f"; it is in {home}" if home else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
