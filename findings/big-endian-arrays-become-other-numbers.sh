#!/usr/bin/env bash
# ormsgpack 1.13.1, soundfile 0.14.0, pyarrow 26.0.1 (Tensor), pydicom 3.0.2 (set_pixel_data) and
# imagecodecs 2026.3.6 (JPEG 2000), also through tifffile 2026.3.3: a NumPy array in big-endian
# order, as nibabel and tifffile.memmap() return it from big-endian files, is stored as other
# numbers, without an error.
#
# Expected: the numbers of the array, or an error, as orjson, pyarrow.array() and the PNG and JPEG
# XL encoders of imagecodecs have.
# Seen: the bytes are taken for native ones. ormsgpack does not call `default` either, as it does
# for other arrays that it cannot pack. With tifffile, byteorder=">" is enough: an array in native
# order comes back as other numbers if the compression is JPEG 2000, and right with zlib.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6 \
    ormsgpack==1.13.1 soundfile==0.14.0 pyarrow==26.0.1 tifffile==2026.3.3 imagecodecs==2026.3.6 \
    pydicom==3.0.2 orjson==3.13.0
cd "$folder"
"$folder/venv/bin/python" - <<'CODE'
import imagecodecs
import numpy as np
import orjson
import ormsgpack
import pyarrow
import pydicom
import soundfile
import tifffile


def through_msgpack(array):
    packed = ormsgpack.packb(array, np.ndarray.tolist, ormsgpack.OPT_SERIALIZE_NUMPY)
    return np.array(ormsgpack.unpackb(packed))


def through_wav(array):
    subtype = {"i2": "PCM_16", "i4": "PCM_32", "f4": "FLOAT", "f8": "DOUBLE"}[array.dtype.str[1:]]
    soundfile.write("sound.wav", array, 8000, subtype=subtype)
    return soundfile.read("sound.wav", dtype=array.dtype.name)[0]


def through_tensor(array):
    return pyarrow.Tensor.from_numpy(array).to_numpy()


def through_dicom(array):
    image = pydicom.Dataset()
    image.SOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    image.file_meta = pydicom.dataset.FileMetaDataset()
    image.set_pixel_data(array, "MONOCHROME2", 16)
    image.save_as("image.dcm", enforce_file_format=True)
    return pydicom.dcmread("image.dcm").pixel_array


def through_jpeg2000(array):
    return imagecodecs.jpeg2k_decode(imagecodecs.jpeg2k_encode(array, level=0))


def through_tiff(array, byteorder=None, compression="jpeg2000"):
    tifffile.imwrite("image.tif", array, byteorder=byteorder, compression=compression)
    return tifffile.imread("image.tif")


cases = [
    (through_msgpack, ["i2", "i4", "i8", "u2", "f4", "f8"]),
    (through_wav, ["i2", "i4", "f4", "f8"]),
    (through_tensor, ["i2", "i4", "i8", "u2", "f4", "f8"]),
    (through_dicom, ["u2", "i2"]),
    (through_jpeg2000, ["u2"]),
    (through_tiff, ["u2"]),
]
for store, kinds in cases:
    for kind in kinds:
        native = np.arange(64, dtype=kind)
        if kind[0] == "f":
            native /= 64
        if store in (through_dicom, through_jpeg2000, through_tiff):
            native = native.reshape(8, 8)
        big = native.astype(f">{kind}")
        assert np.array_equal(big, native)
        assert np.array_equal(store(native), native)
        seen = store(big)
        print(f"{store.__name__}, >{kind}:", big.ravel()[1:4], "->", seen.ravel()[1:4])
        assert np.array_equal(seen, big.view(native.dtype)) and not np.array_equal(seen, big)

native = np.arange(64, dtype="u2").reshape(8, 8)
assert np.array_equal(through_tiff(native, byteorder=">"), native.byteswap())
assert np.array_equal(through_tiff(native, byteorder=">", compression="zlib"), native)

big = native.astype(">u2")
refusing = {
    "orjson": lambda: orjson.dumps(big, option=orjson.OPT_SERIALIZE_NUMPY),
    "pyarrow.array": lambda: pyarrow.array(big[0]),
    "imagecodecs, PNG": lambda: imagecodecs.png_encode(big),
    "imagecodecs, JPEG XL": lambda: imagecodecs.jpegxl_encode(big),
}
for name, store in refusing.items():
    try:
        store()
    except (orjson.JSONEncodeError, pyarrow.ArrowNotImplementedError, ValueError) as error:
        print(f"{name}: {type(error).__name__}: {error}")
    else:
        raise SystemExit(f"{name} takes big-endian arrays by now")
CODE
