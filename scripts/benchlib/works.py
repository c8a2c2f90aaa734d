"""The kinds of work, by name."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchlib import images, samples
from benchlib.work import Array, Work, make_batch

__all__ = ["WORKS", "batch_at"]

TINY_ITEMS = 2**24  # every index below is exact in float32, so that a batch tells which items it is made of


def _waiting(workers: int) -> Work:
    return Work(
        f"io{workers}", f"20 ms of waiting a sample, {workers} workers", samples.wait_for_it, (1,), np.int64, 16,
        10**5, workers=workers, ideal=workers / samples.SLEEP_S, suits_threads=True,
    )  # fmt: skip


def _threads(name: str, batch_size: int) -> Work:
    return Work(
        name, "20 ms of waiting a sample, 2 workers x 16 threads", samples.wait_for_it, (1,), np.int64, batch_size,
        10**5, threads=16, ideal=32 / samples.SLEEP_S, suits_threads=True,
    )  # fmt: skip


def _tiny(batch_size: int) -> Work:
    return Work(
        f"tiny{batch_size}", f"16 floats a sample, batch {batch_size}", samples.tiny, (samples.TINY_WIDTH,),
        np.float32, batch_size, min(TINY_ITEMS // batch_size, 2 * 10**6), is_tiny=True,
    )  # fmt: skip


_WIDE = Work(
    "wide", "38.5 MB batches of float32", images.scale, images.SHAPE, np.float32, 64, 10**4,
    write=images.write, suits_threads=True,
)  # fmt: skip
_STEP = (samples.STEP_WIDTH,)
WORKS = {
    work.name: work
    for work in (
        Work("cpu", "5 ms of Python a sample, batch 32", samples.compute, (2,), np.int64, 32, 10**4),
        Work(
            "jpeg", "JPEG decode, resize, flip, batch 32", images.decode, (*images.JPEG_SIZE, 3), np.uint8, 32, 10**4,
            token=images.first_byte, items_of=images.decoded_items,
        ),
        _tiny(32),
        _tiny(1),
        _WIDE,
        dataclasses.replace(_WIDE, name="wide_return", write=None),
        _waiting(16),
        _waiting(32),
        _waiting(256),
        _threads("threads", 16),
        _threads("threads8", 8),
        _threads("threads32", 32),
        Work(
            "straggler", "1 sample in 64 costs 50 times more, batch 8", samples.straggle, (2,), np.int64, 8, 10**5,
            period=samples.STRAGGLER_EVERY // 8,
        ),
        Work(
            "step", "samples that compute, beside a training step", samples.ponder, _STEP, np.float32, 32, 2**12,
            workers=1,
        ),
        Work(
            "shortstep", "samples that wait, beside a short training step", samples.nap, _STEP, np.float32, 32, 2**15,
            workers=16, ideal=16 / samples.NAP_S, suits_threads=True,
        ),
        Work("busystep", "samples that compute, beside a training step", samples.fret, _STEP, np.float32, 32, 2**15),
    )
}  # fmt: skip


def batch_at(name: str, position: int) -> Array:
    """A whole batch of a work, for those who map a function over batches: what travels is a name and a number."""
    return make_batch(WORKS[name], position)
