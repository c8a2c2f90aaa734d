"""WAV files of varied length, written on the spot, and the functions that read them."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np

import loaderpool as lp

SOUNDS = 150  # how many the fixture `sounds` has
LENGTHS: list[int] = np.random.default_rng(0).integers(50, 1001, SOUNDS).tolist()  # in frames


def write_sounds(folder: Path) -> list[str]:
    """Write `SOUNDS` mono files of 50 to 1000 frames of noise; returns their paths."""
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
    """The file's frames, louder or softer by chance, and how many they are."""
    with wave.open(path) as file:
        frames = np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return {"sound": frames * np.float32(rng.uniform(0.5, 2.0)), "frames": len(frames)}


# How a loader of the fixture `sounds` batches them: in four buckets.
BUCKETS = lp.Buckets(LENGTHS, [200, 400, 700], [8, 4, 3, 2])
BY_LENGTH: dict[str, Any] = {"buckets": BUCKETS, "pad": True, "shuffle": True, "seed": 5}
