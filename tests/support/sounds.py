"""WAV files of varied length, which are written here, and functions that read them."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

import loaderpool as lp

SOUNDS = 150  # number of files of the fixture `sounds`
# lengths in frames
LENGTHS: list[int] = np.random.default_rng(0).integers(50, 1001, SOUNDS).tolist()


def write_sounds(folder: Path) -> list[str]:
    """Write `SOUNDS` mono files of 50 to 1000 frames of noise, and return their paths."""
    rng = np.random.default_rng(0)
    paths = []
    for number, frames in enumerate(LENGTHS):
        path = folder / f"{number:04d}.wav"
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(rng.integers(1, 3000, frames, np.int16).tobytes())
        paths.append(str(path))
    return paths


def load_sound(path: str, rng: np.random.Generator) -> dict[str, Any]:
    """Return the file's frames at a random volume, and their number."""
    with wave.open(path) as file:
        frames = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return {"sound": frames * np.float32(rng.uniform(0.5, 2.0)), "frames": len(frames)}


# Settings of a loader of the fixture `sounds`, with four buckets.
BUCKETS = lp.Buckets(LENGTHS, [200, 400, 700], [8, 4, 3, 2])
BY_LENGTH: dict[str, Any] = {"buckets": BUCKETS, "pad": True, "shuffle": True, "seed": 5}
