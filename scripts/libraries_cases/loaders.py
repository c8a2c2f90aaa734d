"""Data sets in the formats of other loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from libraries_cases.arrays import table
from libraries_cases.case import Trial, case, refused_with, works


@case("PyTorch", "torch", "`Dataset` as the source", works)
def torch_dataset(place: Path) -> Trial:
    import torch
    from torch.utils.data import TensorDataset

    rows = torch.from_numpy(table())
    return Trial(lambda sample: sample[0].numpy(), TensorDataset(rows))


@case(
    "PyTorch",
    "torch",
    "`IterableDataset` as the source",
    refused_with("IterableDataset"),
    "`lp.Loader.from_generator(dataset.__iter__, copies=1)`",
)
def torch_iterable_dataset(place: Path) -> Trial:
    from torch.utils.data import IterableDataset

    class Rows(IterableDataset):
        def __iter__(self) -> Any:
            return iter(table())

    rows = Rows()
    return Trial(None, rows, cure=Trial(None, rows.__iter__, is_stream=True))


@case("datasets", "datasets", "`Dataset` as the source, in any format", works)
def datasets_dataset(place: Path) -> Trial:
    import datasets

    data = datasets.Dataset.from_dict({"row": table().tolist()}).with_format("numpy")
    return Trial(lambda row: row["row"], data)


@case(
    "datasets",
    "datasets",
    "`IterableDataset` as the source",
    refused_with("IterableDataset"),
    "`lp.Loader.from_generator(dataset.__iter__, copies=1)`",
)
def datasets_iterable_dataset(place: Path) -> Trial:
    import datasets

    data = datasets.Dataset.from_dict({"number": list(range(24))}).to_iterable_dataset()
    return Trial(None, data, cure=Trial(None, data.__iter__, is_stream=True))


@case("ArrayRecord", "array-record", "`ArrayRecordDataSource` as the source", works)
def array_record_source(place: Path) -> Trial:
    from array_record.python import array_record_data_source, array_record_module

    path = str(place / "rows.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for row in table():
        writer.write(row.tobytes())
    writer.close()
    source = array_record_data_source.ArrayRecordDataSource([path])
    return Trial(lambda record: np.frombuffer(record, np.float32), source)


@case("Grain", "grain", "`MapDataset` as the source", works)
def grain_map_dataset(place: Path) -> Trial:
    import grain

    dataset = grain.MapDataset.source(table()).seed(0).shuffle()
    return Trial(lambda row: row * 2, dataset)


@case("WebDataset", "webdataset", "`WebDataset` in `from_generator`", works)
def webdataset_stream(place: Path) -> Trial:
    import webdataset

    path = str(place / "rows.tar")
    with webdataset.TarWriter(path) as writer:
        for item in range(24):
            writer.write({"__key__": f"{item:03}", "npy": table()[item]})
    dataset = webdataset.WebDataset(path, shardshuffle=False).decode()

    def rows() -> Any:
        for sample in dataset:
            yield sample["npy"]

    return Trial(None, rows, is_stream=True)


@case("LitData", "litdata", "`StreamingDataset` as the source", works)
def litdata_dataset(place: Path) -> Trial:
    import litdata

    litdata.optimize(
        fn=litdata_row,
        inputs=list(range(24)),
        output_dir=str(place / "rows"),
        chunk_bytes="1MB",
        num_workers=1,
    )
    return Trial(lambda row: row["row"], litdata.StreamingDataset(str(place / "rows")))


def litdata_row(item: int) -> dict[str, Any]:
    return {"row": table()[item]}


@case("MosaicML Streaming", "mosaicml-streaming", "`LocalDataset` as the source", works)
def mds_dataset(place: Path) -> Trial:
    from streaming import LocalDataset, MDSWriter

    with MDSWriter(out=str(place / "rows"), columns={"row": "ndarray:float32:5"}) as writer:
        for row in table():
            writer.write({"row": row})
    return Trial(lambda row: row["row"], LocalDataset(str(place / "rows")))
