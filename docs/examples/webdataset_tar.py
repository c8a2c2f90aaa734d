"""Shuffle the samples of all WebDataset tar files, not only those in a buffer.

`lp.TarSamples` finds every sample when it is created, and then reads any of them directly.
Install, in a clone: pip install . pillow
"""

import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import loaderpool as lp

SAMPLES = 40  # of each tar file


def write_tar_files(folder):
    rng = np.random.default_rng(0)
    for part in range(3):
        with tarfile.open(Path(folder, f"photos-{part}.tar"), "w") as tar:
            for number in range(part * SAMPLES, (part + 1) * SAMPLES):
                png = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, (32, 48, 3), np.uint8)).save(png, "PNG")
                # The members of a sample follow each other. Their names differ after the dot only.
                for extension, data in (
                    ("png", png.getvalue()),
                    ("cls", str(number % 10).encode()),
                ):
                    member = tarfile.TarInfo(f"{number:04d}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return sorted(Path(folder).glob("*.tar"))


def decode(sample):
    with Image.open(io.BytesIO(sample["png"])) as image:
        pixels = np.asarray(image.convert("RGB"), np.float32) / 255
    return pixels, int(sample["cls"]), int(sample["__key__"])


seen, files_of_a_batch = [], []
with (
    tempfile.TemporaryDirectory() as folder,
    lp.Loader(
        lp.TarSamples(write_tar_files(folder)), decode, batch_size=30, shuffle=True, workers=2
    ) as loader,
):
    for pixels, labels, numbers in loader:
        assert pixels.shape == (30, 32, 48, 3)
        assert (labels == numbers % 10).all()
        files_of_a_batch.append(len(set((numbers // SAMPLES).tolist())))
        seen += numbers.tolist()

print(
    f"{len(seen)} samples, each once; the first batch has samples of {files_of_a_batch[0]} tar files"
)
assert sorted(seen) == list(range(3 * SAMPLES))
assert files_of_a_batch[0] == 3
