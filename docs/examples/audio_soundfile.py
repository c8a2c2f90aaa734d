"""Load WAV files of different lengths with soundfile, in padded batches.

Buckets put sounds of similar length into the same batch, and so reduce the padding.
Install, in a clone: pip install . soundfile
"""

import tempfile
from pathlib import Path

import numpy as np
import soundfile as sf

import loaderpool as lp

RATE = 8000  # values per second


def write_sounds(folder):
    rng = np.random.default_rng(0)
    paths = []
    for number, seconds in enumerate(rng.uniform(0.25, 3, 160)):
        times = np.arange(int(seconds * RATE)) / RATE
        path = str(Path(folder, f"{number:03d}.wav"))
        sf.write(path, 0.5 * np.sin(2 * np.pi * rng.uniform(200, 800) * times), RATE)
        paths.append(path)
    return paths


def load(path):
    sound, _ = sf.read(path, dtype="float32")
    return {"sound": sound, "frames": len(sound)}


def length(path):
    return sf.info(path).frames  # reads the header of the file only


def padding_share(paths, buckets):
    with lp.Loader(
        paths, load, batch_size=8, shuffle=True, pad=True, buckets=buckets, workers=2
    ) as loader:
        frames = 0
        for batch in loader:
            assert batch["sound"].shape == (len(batch["frames"]), batch["frames"].max())
            frames += int(batch["frames"].sum())
        assert frames == sum(map(length, paths))  # every sound comes once
        return loader.statistics().padding_share


with tempfile.TemporaryDirectory() as folder:
    paths = write_sounds(folder)
    without = padding_share(paths, None)
    boundaries = [int(seconds * RATE) for seconds in (0.75, 1.25, 1.75, 2.25)]
    with_buckets = padding_share(paths, lp.Buckets([length(path) for path in paths], boundaries))

print(f"padding: {without:.0%} of the values in batches at random, {with_buckets:.0%} in buckets")
assert with_buckets < without / 2
