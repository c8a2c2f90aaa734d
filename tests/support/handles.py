"""Kinds of files that users keep open, and an object that opens one again when it is unpickled."""

from __future__ import annotations

import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROWS = 30
# values of a row: its bytes take several reads, between which another process can move the position
_VALUES = 20_000


class Kind(NamedTuple):
    """A library's file of `ROWS` rows. All values of a row are its number."""

    library: str  # library that reads the file
    write: Callable[[str], object]
    open: Callable[[str], Any]
    read: Callable[[Any, int], Any]


def _rows() -> np.ndarray[Any, Any]:
    return np.repeat(np.arange(ROWS, dtype=np.int16), _VALUES).reshape(ROWS, _VALUES)


def _write_zip(path: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number, row in enumerate(_rows()):
            archive.writestr(str(number), row.tobytes())


def _write_tar(path: str) -> None:
    with tarfile.open(path, "w") as archive:
        for number, row in enumerate(_rows()):
            member = tarfile.TarInfo(str(number))
            member.size = row.nbytes
            archive.addfile(member, BytesIO(row.tobytes()))


def _open_plain(path: str) -> Any:
    return open(path, "rb")


def _read_plain(file: Any, number: int) -> Any:
    file.seek(number * _VALUES * 2)
    time.sleep(0.001)  # meanwhile, other processes would move a shared position
    return np.frombuffer(file.read(_VALUES * 2), np.int16)


def _write_sound(path: str) -> None:
    import soundfile

    soundfile.write(path, _rows().ravel(), 8000, format="WAV", subtype="PCM_16")


def _open_sound(path: str) -> Any:
    import soundfile

    return soundfile.SoundFile(path)


def _read_sound(file: Any, number: int) -> Any:
    file.seek(number * _VALUES)
    return file.read(_VALUES, dtype="int16")


def _write_volume(path: str) -> None:
    import nibabel

    nibabel.Nifti1Image(_rows().T[:, None, None], np.eye(4)).to_filename(path)


def _open_volume(path: str) -> Any:
    import nibabel

    volume = nibabel.load(path, keep_file_open=True)
    np.asarray(volume.dataobj[..., 0])  # opens the file
    return volume


def _write_frames(path: str) -> None:
    from PIL import Image

    first, *others = [Image.fromarray(row.reshape(100, -1).astype(np.uint8)) for row in _rows()]
    first.save(path, "TIFF", save_all=True, append_images=others)


def _open_frames(path: str) -> Any:
    from PIL import Image

    return Image.open(path)


def _read_frame(image: Any, number: int) -> Any:
    image.seek(number)
    return np.asarray(image)


def _write_raster(path: str) -> None:
    import rasterio

    rows = _rows()
    profile = {"driver": "GTiff", "dtype": "int16", "count": 1, "height": ROWS, "width": _VALUES}
    place = rasterio.Affine(1, 0, 0, 0, -1, 0)
    with rasterio.open(path, "w", transform=place, **profile) as file:
        file.write(rows, 1)


def _open_raster(path: str) -> Any:
    import rasterio

    return rasterio.open(path)


def _read_raster(file: Any, number: int) -> Any:
    return file.read(1, window=((number, number + 1), (0, _VALUES)))


def _write_netcdf(path: str) -> None:
    import netCDF4

    with netCDF4.Dataset(path, "w", format="NETCDF3_CLASSIC") as file:
        file.createDimension("row", ROWS)
        file.createDimension("value", _VALUES)
        file.createVariable("rows", "i2", ("row", "value"))[:] = _rows()


def _open_netcdf(path: str) -> Any:
    import netCDF4

    return netCDF4.Dataset(path)


KINDS = {
    "plain": Kind("numpy", lambda path: _rows().tofile(path), _open_plain, _read_plain),
    "zip": Kind(
        "numpy",
        _write_zip,
        zipfile.ZipFile,
        lambda file, number: np.frombuffer(file.read(str(number)), np.int16),
    ),
    "tar": Kind(
        "numpy",
        _write_tar,
        tarfile.open,
        lambda file, number: np.frombuffer(file.extractfile(str(number)).read(), np.int16),
    ),
    "npz": Kind(
        "numpy",
        lambda path: np.savez(path, **dict(zip(map(str, range(ROWS)), _rows(), strict=True))),
        np.load,
        lambda file, number: file[str(number)],
    ),
    "wav": Kind("soundfile", _write_sound, _open_sound, _read_sound),
    "nii": Kind(
        "nibabel",
        _write_volume,
        _open_volume,
        lambda volume, number: np.asarray(volume.dataobj[..., number]),
    ),
    "tiff": Kind("PIL", _write_frames, _open_frames, _read_frame),
    "tif": Kind("rasterio", _write_raster, _open_raster, _read_raster),
    "nc": Kind("netCDF4", _write_netcdf, _open_netcdf, lambda file, number: file["rows"][number]),
}


def row_in(kind: str, handle: Any, number: int) -> int:
    """Return the row's number if it was read right, otherwise -1."""
    try:
        row = np.asarray(KINDS[kind].read(handle, number))
    except Exception:  # a wrong checksum, or the end of the file
        return -1
    return number if row.size == _VALUES and (row == number).all() else -1


class Opened:
    """An open file, which is opened again when it is unpickled, as in the documentation of
    pickle.
    """

    def __init__(self, kind: str, path: str) -> None:
        self.kind, self.path = kind, path
        self.handle = KINDS[kind].open(path)

    def __getstate__(self) -> dict[str, Any]:
        return {"kind": self.kind, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> int:
        return row_in(self.kind, self.handle, number)

    def __call__(self, number: int) -> int:
        return self[number]

    def rows(self, shard: Any) -> Iterator[int]:
        for number in shard:
            yield self[number]


def write_module(folder: Path, name: str, kind: str, path: str) -> None:
    """Write a module that opens the file when it is imported."""
    (folder / f"{name}.py").write_text(
        f"from tests.support import handles\n"
        f"handle = handles.KINDS[{kind!r}].open({path!r})\n"
        f"def fn(number):\n"
        f"    return handles.row_in({kind!r}, handle, number)\n"
    )
