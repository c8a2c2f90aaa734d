"""Tables and databases."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from libraries_cases.arrays import IN_A_DIRECTORY, OPEN_IN_SETUP, table
from libraries_cases.case import (
    Trial,
    case,
    handle,
    module_in,
    opened_in_setup,
    refused,
    refused_with,
    without_fork,
    works,
)


def columns() -> dict[str, Any]:
    return {
        "number": np.arange(24),
        "value": np.arange(24) / 7,
        "name": [f"row {item}" for item in range(24)],
    }


@case("pandas", "pandas", "`DataFrame`, also as the source", works)
def pandas_frame(place: Path) -> Trial:
    import pandas as pd

    frame = pd.DataFrame(columns())
    return Trial(lambda row: float(row["value"]) + frame["value"].iloc[int(row["number"])], frame)


@case("Polars", "polars", "`DataFrame`", works)
def polars_frame(place: Path) -> Trial:
    import polars as pl

    frame = pl.DataFrame(columns()).filter(pl.col("number") >= 0)
    return Trial(lambda item: frame.row(item)[1])


@case("Polars", "polars", "`LazyFrame`", works)
def polars_lazy_frame(place: Path) -> Trial:
    import polars as pl

    pl.DataFrame(columns()).write_parquet(place / "table.parquet")
    frame = pl.scan_parquet(place / "table.parquet")
    return Trial(lambda item: frame.filter(pl.col("number") == item).collect()["value"][0])


@case(
    "Polars",
    "polars",
    "operation that a module runs on import",
    without_fork("polars"),
    "run it in `setup=`",
)
def polars_on_import(place: Path) -> Trial:
    module = module_in(
        place,
        """
        import polars as pl
        frame = pl.DataFrame({"a": range(24)}).filter(pl.col("a") >= 0)
        def read(item):
            return frame["a"][item]
        """,
    )
    return Trial(module.read)


def parquet(place: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = str(place / "table.parquet")
    pq.write_table(pa.table(columns()), path, row_group_size=6)
    return path


@case("PyArrow", "pyarrow", "`Table`", works)
def pyarrow_table(place: Path) -> Trial:
    import pyarrow as pa

    data = pa.table(columns())
    return Trial(lambda item: data["value"][item].as_py())


@case("PyArrow", "pyarrow", "`dataset`", works)
def pyarrow_dataset(place: Path) -> Trial:
    import pyarrow.dataset

    data = pyarrow.dataset.dataset(parquet(place))
    return Trial(lambda item: data.take([item])["value"][0].as_py())


@case(
    "PyArrow",
    "pyarrow",
    "`ParquetFile`, `memory_map`",
    refused,
    OPEN_IN_SETUP + ", or use `lp.ParquetRows(paths)`",
)
def pyarrow_parquet_file(place: Path) -> Trial:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = parquet(place)
    return handle(
        lambda: pq.ParquetFile(path),
        lambda file, item: file.read_row_group(item // 6)["value"][item % 6].as_py(),
        alike=[pa.memory_map(path)],
    )


@case("GeoPandas", "geopandas", "`GeoDataFrame`", works)
def geopandas_frame(place: Path) -> Trial:
    import geopandas

    points = geopandas.points_from_xy(np.arange(24), np.arange(24) / 7)
    frame = geopandas.GeoDataFrame({"number": range(24)}, geometry=points)
    return Trial(lambda item: frame.geometry.iloc[item].y)


@case(
    "Rtree",
    "rtree",
    "`Index` in memory",
    refused_with("data is in the memory of this process"),
    "save it in a file, and open that in `setup=`",
)
def rtree_memory(place: Path) -> Trial:
    from rtree import index

    path = str(place / "boxes")

    def filled(made: Any) -> Any:
        for item in range(24):
            made.insert(item, (item, item, item + 0.5, item + 0.5))
        return made

    def found(boxes: Any, item: int) -> np.ndarray[Any, Any]:
        return np.array(sorted(boxes.intersection((item, item, item, item))))

    filled(index.Index(path)).close()
    in_memory = filled(index.Index())
    return Trial(
        lambda item: found(in_memory, item),
        cure=opened_in_setup(lambda: index.Index(path), found),
    )


def sqlite_file(place: Path) -> Path:
    path = place / "table.db"
    rows = [(item, item / 7) for item in range(24)]
    with sqlite3.connect(path) as connection:
        connection.execute("create table rows (number integer, value real)")
        connection.executemany("insert into rows values (?, ?)", rows)
    return path


@case("sqlite3", "", "`Connection`", refused, OPEN_IN_SETUP)
def sqlite_connection(place: Path) -> Trial:
    path = sqlite_file(place)
    query = "select value from rows where number = ?"
    return handle(
        lambda: sqlite3.connect(path),
        lambda opened, item: opened.execute(query, (item,)).fetchone()[0],
    )


@case("DuckDB", "duckdb", "connection", refused, OPEN_IN_SETUP)
def duckdb_connection(place: Path) -> Trial:
    import duckdb

    path = parquet(place)
    query = f"select value from '{path}' where number = ?"

    def connect() -> Any:
        import duckdb

        return duckdb.connect()

    assert duckdb.__version__
    return handle(connect, lambda opened, item: opened.execute(query, [item]).fetchone()[0])


@case("SQLAlchemy", "SQLAlchemy", "`Engine`", refused, OPEN_IN_SETUP)
def sqlalchemy_engine(place: Path) -> Trial:
    import sqlalchemy

    path = sqlite_file(place)
    query = sqlalchemy.text("select value from rows where number = :number")

    def read(engine: Any, item: int) -> float:
        with engine.connect() as opened:
            return float(opened.execute(query, {"number": item}).scalar())

    return handle(lambda: sqlalchemy.create_engine(f"sqlite:///{path}"), read)


@case("lmdb", "lmdb", "`Environment`", refused, OPEN_IN_SETUP)
def lmdb_environment(place: Path) -> Trial:
    import lmdb

    paths = [str(place / name) for name in ("captured", "cure")]
    for path in paths:  # a process can open a path once
        with lmdb.open(path) as environment, environment.begin(write=True) as transaction:
            for item in range(24):
                transaction.put(str(item).encode(), table()[item].tobytes())

    def read(environment: Any, item: int) -> np.ndarray[Any, Any]:
        with environment.begin() as transaction:
            return np.frombuffer(transaction.get(str(item).encode()), np.float32)

    trial = handle(lambda: lmdb.open(paths[0], readonly=True, lock=False), read)
    trial.cure = opened_in_setup(lambda: lmdb.open(paths[1], readonly=True, lock=False), read)
    return trial


@case("plyvel", "plyvel", "`DB`", refused, "LevelDB allows one process: use LMDB")
def plyvel_database(place: Path) -> Trial:
    import plyvel

    database = plyvel.DB(str(place / "rows"), create_if_missing=True)
    for item in range(24):
        database.put(str(item).encode(), table()[item].tobytes())
    return Trial(lambda item: np.frombuffer(database.get(str(item).encode()), np.float32))


@case("sqlitedict", "sqlitedict", "`SqliteDict`", refused, OPEN_IN_SETUP)
def sqlitedict_dict(place: Path) -> Trial:
    import sqlitedict

    path = str(place / "rows.sqlite")
    with sqlitedict.SqliteDict(path) as rows:
        for item in range(24):
            rows[str(item)] = table()[item]
        rows.commit()
    return handle(
        lambda: sqlitedict.SqliteDict(path, flag="r"),
        lambda rows, item: rows[str(item)],
    )


@case("Lance", "pylance", "`LanceDataset`", without_fork("lance"), OPEN_IN_SETUP)
def lance_dataset(place: Path) -> Trial:
    import lance
    import pyarrow as pa

    path = str(place / "table.lance")
    lance.write_dataset(pa.table(columns()), path)

    def open_dataset() -> Any:
        import lance

        return lance.dataset(path)

    data = open_dataset()

    def read(dataset: Any, item: int) -> float:
        return float(dataset.take([item])["value"][0].as_py())

    return Trial(lambda item: read(data, item), cure=opened_in_setup(open_dataset, read))


@case("LanceDB", "lancedb", "table", refused, OPEN_IN_SETUP)
def lancedb_table(place: Path) -> Trial:
    import lancedb
    import pyarrow as pa

    path = str(place / "database")
    lancedb.connect(path).create_table("rows", pa.table(columns()))

    def open_table() -> Any:
        import lancedb

        return lancedb.connect(path).open_table("rows")

    def read(opened: Any, item: int) -> float:
        found = opened.search().where(f"number = {item}").to_arrow()
        return float(found["value"][0].as_py())

    return handle(open_table, read)


@case("Deep Lake", "deeplake", "dataset in a directory", without_fork("deeplake"), OPEN_IN_SETUP)
def deeplake_dataset(place: Path) -> Trial:
    import deeplake

    path = f"file://{place}/table"
    data = deeplake.create(path)
    data.add_column("value", deeplake.types.Float64())
    data.append({"value": [item / 7 for item in range(24)]})
    data.commit()

    def open_dataset() -> Any:
        import deeplake

        return deeplake.open_read_only(path)

    opened = open_dataset()
    cure = opened_in_setup(open_dataset, lambda data, item: data[item]["value"])
    return Trial(lambda item: opened[item]["value"], cure=cure)


@case(
    "Deep Lake",
    "deeplake",
    "dataset on `mem://`",
    refused_with("Save it in a directory|memory"),
    IN_A_DIRECTORY,
)
def deeplake_memory(place: Path) -> Trial:
    import deeplake

    data = deeplake.create("mem://table")
    data.add_column("value", deeplake.types.Float64())
    data.append({"value": [item / 7 for item in range(24)]})
    data.commit()
    return Trial(lambda item: data[item]["value"])
