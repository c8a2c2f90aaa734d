"""Arrays in files and stores."""

from __future__ import annotations

import tarfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

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

OPEN_IN_SETUP = "open it in `setup=`"
IN_A_DIRECTORY = "save it in a directory, or as a NumPy array"


def table() -> np.ndarray[Any, Any]:
    """Return 24 rows that all differ."""
    return np.arange(24 * 5, dtype=np.float32).reshape(24, 5)


# ---- zarr ----


def zarr_array(store: Any) -> Any:
    import zarr

    array = zarr.create_array(store=store, shape=(24, 5), chunks=(4, 5), dtype="float32")
    array[:] = table()
    return array


@case("zarr", "zarr", "array in a directory", works)
def zarr_directory(place: Path) -> Trial:
    array = zarr_array(str(place / "table.zarr"))
    return Trial(lambda item: array[item])


@case("zarr", "zarr", "in a ZIP file", works)
def zarr_zip(place: Path) -> Trial:
    import zarr

    with zarr.storage.ZipStore(place / "table.zip", mode="w") as store:
        zarr_array(store)
    array = zarr.open_array(zarr.storage.ZipStore(place / "table.zip", mode="r"))
    return Trial(lambda item: array[item])


@case("zarr", "zarr", "in a `MemoryStore`", works)
def zarr_memory(place: Path) -> Trial:
    import zarr

    array = zarr_array(zarr.storage.MemoryStore())
    return Trial(lambda item: array[item])


@case("zarr", "zarr", "as the source", works)
def zarr_source(place: Path) -> Trial:
    return Trial(None, zarr_array(str(place / "table.zarr")))


# ---- tensorstore ----


def tensorstore_array(kvstore: Any) -> Any:
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": kvstore}
    array = tensorstore.open(spec, create=True, dtype="float32", shape=[24, 5]).result()
    array[:].write(table()).result()
    return array


@case("tensorstore", "tensorstore", "array in a directory", works)
def tensorstore_directory(place: Path) -> Trial:
    array = tensorstore_array({"driver": "file", "path": str(place / "table")})
    return Trial(lambda item: array[item].read().result())


@case("tensorstore", "tensorstore", "as the source", works)
def tensorstore_source(place: Path) -> Trial:
    return Trial(None, tensorstore_array({"driver": "file", "path": str(place / "table")}))


@case(
    "tensorstore",
    "tensorstore",
    "array on `memory://`",
    refused_with("Save it in a directory|data is in the memory of this process"),
    IN_A_DIRECTORY,
)
def tensorstore_memory(place: Path) -> Trial:
    array = tensorstore_array("memory://")
    return Trial(lambda item: array[item].read().result())


# ---- HDF5 and NetCDF ----


@case(
    "h5py", "h5py", "`File`, `Dataset`", refused_with("HDF5"), "`lp.HDF5(path, key)` as the source"
)
def h5py_dataset(place: Path) -> Trial:
    import h5py

    import loaderpool as lp

    path = str(place / "table.h5")
    with h5py.File(path, "w") as file:
        file["table"] = table()
    dataset = h5py.File(path)["table"]
    cure = Trial(None, lp.HDF5(path, "table"))
    return Trial(lambda item: dataset[item], cure=cure, alike=[dataset.file])


@case(
    "h5py",
    "h5py",
    "file that a module opens on import",
    without_fork("the open HDF5 file"),
    OPEN_IN_SETUP,
)
def h5py_on_import(place: Path) -> Trial:
    import h5py

    path = str(place / "table.h5")
    with h5py.File(path, "w") as file:
        file["table"] = table()
    module = module_in(
        place,
        """
        import h5py
        opened = h5py.File({path})["table"]
        def read(item):
            return opened[item]
        """,
        path=path,
    )
    cure = opened_in_setup(lambda: h5py.File(path)["table"], lambda dataset, item: dataset[item])
    return Trial(module.read, cure=cure)


def xarray_dataset(place: Path, engine: str) -> Any:
    import xarray

    path = place / f"table-{engine}"
    dataset = xarray.Dataset({"table": (("row", "column"), table())})
    if engine == "zarr":
        dataset.to_zarr(path)
    else:
        dataset.to_netcdf(path, engine=engine)
    return xarray.open_dataset(path, engine=engine)


@case("xarray", "xarray", "lazy `Dataset` from netCDF4", works)
def xarray_netcdf4(place: Path) -> Trial:
    dataset = xarray_dataset(place, "netcdf4")
    return Trial(lambda item: dataset["table"][item].values)


@case("xarray", "xarray", "from h5netcdf", works)
def xarray_h5netcdf(place: Path) -> Trial:
    dataset = xarray_dataset(place, "h5netcdf")
    return Trial(lambda item: dataset["table"][item].values)


@case("xarray", "xarray", "from zarr", works)
def xarray_zarr(place: Path) -> Trial:
    dataset = xarray_dataset(place, "zarr")
    return Trial(lambda item: dataset["table"][item].values)


@case("xarray", "xarray", "`DataArray` as the source", works)
def xarray_source(place: Path) -> Trial:
    return Trial(None, xarray_dataset(place, "netcdf4")["table"])


@case(
    "xarray",
    "xarray",
    "`Dataset` as the source",
    refused_with("pass the variables to read as columns"),
    '`{name: dataset[name] for name in ["x", "y"]}` as the source',
)
def xarray_dataset_source(place: Path) -> Trial:
    dataset = xarray_dataset(place, "netcdf4")
    return Trial(None, dataset, cure=Trial(None, {name: dataset[name] for name in ["table"]}))


@case("netCDF4", "netCDF4", "`Dataset`", refused, OPEN_IN_SETUP)
def netcdf4_dataset(place: Path) -> Trial:
    import netCDF4

    path = str(place / "table.nc")
    with netCDF4.Dataset(path, "w") as dataset:
        dataset.createDimension("row", 24)
        dataset.createDimension("column", 5)
        dataset.createVariable("table", "f4", ("row", "column"))[:] = table()
    return handle(
        lambda: netCDF4.Dataset(path),
        lambda dataset, item: dataset["table"][item].filled(0),
    )


# ---- NumPy, ZIP and tar ----


@case("NumPy", "numpy", "`memmap`", works)
def numpy_memmap(place: Path) -> Trial:
    np.save(place / "table.npy", table())
    array = np.load(place / "table.npy", mmap_mode="r")
    return Trial(lambda item: array[item])


@case("NumPy", "numpy", "`.npz` file of `numpy.load`", refused, OPEN_IN_SETUP)
def numpy_npz(place: Path) -> Trial:
    path = place / "tables.npz"
    np.savez(path, **{str(item): table()[item] for item in range(24)})
    return handle(lambda: np.load(path), lambda file, item: file[str(item)])


@case("NumPy", "numpy", "`.npz` file that a module opens on import", works)
def numpy_npz_on_import(place: Path) -> Trial:
    path = str(place / "tables.npz")
    np.savez(path, **{str(item): np.full(50_000, item) for item in range(24)})
    module = module_in(
        place,
        """
        import numpy as np
        opened = np.load({path})
        def read(item):
            return opened[str(item % 24)]
        """,
        path=path,
    )
    return Trial(module.read, range(300))


@case("NumPy", "numpy", "as the source", works)
def numpy_npz_source(place: Path) -> Trial:
    np.savez(place / "columns.npz", table=table())
    return Trial(None, np.load(place / "columns.npz"))


def zip_of_rows(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for item in range(24):
            archive.writestr(str(item), table()[item].tobytes())


@case("zipfile", "", "`ZipFile`", refused, OPEN_IN_SETUP)
def zipfile_captured(place: Path) -> Trial:
    path = place / "rows.zip"
    zip_of_rows(path)
    return handle(
        lambda: zipfile.ZipFile(path),
        lambda archive, item: np.frombuffer(archive.read(str(item)), np.float32),
    )


@case("tarfile", "", "`TarFile`", refused, OPEN_IN_SETUP + ", or use `lp.TarSamples(paths)`")
def tarfile_captured(place: Path) -> Trial:
    path = place / "rows.tar"
    with tarfile.open(path, "w") as archive:
        for item in range(24):
            member = tarfile.TarInfo(str(item))
            member.size = 20
            archive.addfile(member, BytesIO(table()[item].tobytes()))

    def read(archive: tarfile.TarFile, item: int) -> np.ndarray[Any, Any]:
        member = archive.extractfile(str(item))
        assert member is not None
        return np.frombuffer(member.read(), np.float32)

    return handle(lambda: tarfile.open(path), read)


# ---- other stores ----


def blosc2_file(place: Path) -> str:
    import blosc2

    path = str(place / "table.b2nd")
    blosc2.asarray(table(), urlpath=path, mode="w")
    return path


@case("Blosc2", "blosc2", "`NDArray`", refused, "import it and open the file in `setup=`")
def blosc2_array(place: Path) -> Trial:
    path = blosc2_file(place)

    def open_array() -> Any:
        import blosc2

        return blosc2.open(path)

    return handle(open_array, lambda array, item: array[item])


@case(
    "Blosc2",
    "blosc2",
    "module that the function uses",
    without_fork("a thread of .*blosc2"),
    "import it in `setup=`",
)
def blosc2_module(place: Path) -> Trial:
    import blosc2

    path = blosc2_file(place)
    return Trial(lambda item: blosc2.open(path)[item])


@case("TileDB", "tiledb", "array in a directory", without_fork("tiledb"), OPEN_IN_SETUP)
def tiledb_array(place: Path) -> Trial:
    import tiledb

    path = str(place / "table")
    tiledb.from_numpy(path, table()).close()

    def open_array() -> Any:
        import tiledb

        return tiledb.open(path)

    array = open_array()
    cure = opened_in_setup(open_array, lambda opened, item: opened[item])
    return Trial(lambda item: array[item], cure=cure)


def directory_of_rows(place: Path) -> Path:
    for item in range(24):
        (place / str(item)).write_bytes(table()[item].tobytes())
    return place


@case("fsspec", "fsspec", "local file system, `OpenFile`", works)
def fsspec_local(place: Path) -> Trial:
    import fsspec

    directory = directory_of_rows(place)
    files = fsspec.open_files([f"file://{directory}/{item}" for item in range(24)])

    def read(item: int) -> np.ndarray[Any, Any]:
        with files[item] as file:
            return np.frombuffer(file.read(), np.float32)

    return Trial(read)


@case(
    "fsspec",
    "fsspec",
    "`memory` file system",
    refused_with("Save it in a directory|data is in the memory of this process"),
    IN_A_DIRECTORY,
)
def fsspec_memory(place: Path) -> Trial:
    import fsspec

    system = fsspec.filesystem("memory")
    for item in range(24):
        system.pipe(f"/{item}", table()[item].tobytes())
    return Trial(lambda item: np.frombuffer(system.cat(f"/{item}"), np.float32))


@case("obstore", "obstore", "`LocalStore`", works)
def obstore_local(place: Path) -> Trial:
    from obstore.store import LocalStore

    store = LocalStore(directory_of_rows(place))
    return Trial(lambda item: np.frombuffer(store.get(str(item)).bytes(), np.float32))


@case("obstore", "obstore", "`MemoryStore`", refused_with("Cannot send this"), IN_A_DIRECTORY)
def obstore_memory(place: Path) -> Trial:
    from obstore.store import MemoryStore

    store = MemoryStore()
    for item in range(24):
        store.put(str(item), table()[item].tobytes())
    return Trial(lambda item: np.frombuffer(store.get(str(item)).bytes(), np.float32))


@case("dask", "dask", "array", works)
def dask_array(place: Path) -> Trial:
    import dask.array

    array = dask.array.from_array(table(), chunks=(4, 5)) * 2
    return Trial(lambda item: array[item].compute())


@case("dask", "dask", "as the source", works)
def dask_source(place: Path) -> Trial:
    import dask.array

    return Trial(None, dask.array.from_array(table(), chunks=(4, 5)) * 2)


@case("anndata", "anndata", "`AnnData` in memory", works)
def anndata_memory(place: Path) -> Trial:
    import anndata

    data = anndata.AnnData(table())
    return Trial(lambda item: np.asarray(data.X[item]))


@case("anndata", "anndata", "`AnnData` in backed mode", refused, OPEN_IN_SETUP)
def anndata_backed(place: Path) -> Trial:
    import anndata

    data = anndata.AnnData(table())
    data.obs_names = data.obs_names.astype(object)  # anndata 0.12 cannot write pandas 3 strings
    data.var_names = data.var_names.astype(object)
    data.write_h5ad(place / "table.h5ad")
    return handle(
        lambda: anndata.read_h5ad(place / "table.h5ad", backed="r"),
        lambda data, item: np.asarray(data.X[item]),
    )


@case("diskcache", "diskcache", "`Cache`", without_fork("SQLite database"), OPEN_IN_SETUP)
def diskcache_cache(place: Path) -> Trial:
    import diskcache

    cache = diskcache.Cache(str(place / "cache"))
    for item in range(24):
        cache[item] = table()[item]
    return Trial(lambda item: cache[item])
