"""Random streams that belong to a sample, not to the worker that happens to make it.

A stream is named by (seed, epoch, position in the global order), so it is the same for any number of workers, after a
crash, and when a ticket is redone. There are four for each sample, unrelated to one another: the `rng` handed to a
function that names it, and the global generators of `random`, `numpy.random` and torch for code that draws from them.

This imports `numpy.random`, which NumPy 2 leaves out until it is asked for, and which is an eighth of what a supervisor
imports: so it is imported by who needs it, when it does.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISpawnableSeedSequence

from loaderpool.plan.permutation import stream_key

SAMPLE_KIND, BATCH_KIND = 1, 2
"""Highest word of the Philox counter: a sample's stream and a batch's never meet, whatever their positions."""


class SampleStreams:
    """Gives the same streams for the same (seed, epoch, position), whatever was drawn before and wherever it runs.

    One object serves one thread: its generator is a single one whose state is set again (1 us; a new one takes 20).
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch: int | None = None
        self._spawning = SpawnedSeeds()
        self._philox = np.random.Philox(self._spawning)  # type: ignore[arg-type]  # NumPy's stubs know its own only
        self._generator = np.random.Generator(self._philox)
        # Lists, not arrays: the setter reads them word by word, at 0.8 us instead of 1.8.
        self._key = [0, 0]
        self._counter = [0, 0, 0, 0]
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": self._key},
            "buffer": [0, 0, 0, 0],
            "buffer_pos": 4,  # the buffer is empty
            "has_uint32": 0,  # as is the half word that 32-bit draws leave behind
            "uinteger": 0,
        }
        self._python_key = 0
        self._torch_key = b""
        self._numpy_words = np.zeros(4, "<u8")
        self._numpy_seed = self._numpy_words.view("<u4")

    def generator(self, epoch: int, position: int, batch: bool = False) -> np.random.Generator:
        """Return the generator at the start of a sample's own stream: the same object each time, until the next call.

        It equals `Generator(Philox(key=k, counter=[0, 0, position, kind]))` with k = `stream_key("rng", seed, epoch)`
        and kind `SAMPLE_KIND` or `BATCH_KIND`; 2**128 blocks can be drawn before it meets the next position's stream.
        Generators that it spawns are keyed by the sample too. The stream of a `batch_fn` (`batch`) is at the position
        of its first row, which tells shards apart, and differs from that of the sample there.
        """
        if epoch != self._epoch:
            self._set_epoch(epoch)
        self._counter[2] = position
        self._counter[3] = BATCH_KIND if batch else SAMPLE_KIND
        self._philox.state = self._state
        self._spawning.children = 0
        return self._generator

    def seed_globals(self, epoch: int, position: int, batch: bool = False) -> None:
        """Reseeds `random` and legacy `numpy.random` for a sample, including the Gaussian that each may have cached.

        Both remain Mersenne Twisters, seeded with 256 bits that hold the whole of (key, kind, position). Each has a key
        of its own: equal seeds would make `random.random()` and `numpy.random.rand()` draw the same numbers. So is
        torch's generator on the CPU, where torch is imported; it takes 64 bits of a seed and uses 32.
        """
        if epoch != self._epoch:
            self._set_epoch(epoch)
        kind = BATCH_KIND if batch else SAMPLE_KIND
        random.seed(self._python_key << 128 | kind << 64 | position)
        self._numpy_words[2] = position
        self._numpy_words[3] = kind
        np.random.seed(self._numpy_seed)
        of_torch: Any = getattr(sys.modules.get("torch"), "default_generator", None)
        if of_torch is not None:
            words = struct.pack("<QQ", kind, position)
            seed = hashlib.blake2b(words, digest_size=8, key=self._torch_key).digest()
            of_torch.manual_seed(int.from_bytes(seed, "little"))

    def _set_epoch(self, epoch: int) -> None:
        key = stream_key("rng", self._seed, epoch)
        self._key[:] = _two_words(key)
        self._spawning.entropy, self._spawning.counter = key, self._counter
        self._python_key = stream_key("random", self._seed, epoch)
        self._numpy_words[:2] = _two_words(stream_key("numpy.random", self._seed, epoch))
        self._torch_key = stream_key("torch", self._seed, epoch).to_bytes(16, "little")
        self._epoch = epoch


class SpawnedSeeds(ISpawnableSeedSequence):
    """Makes `spawn()` of a generator depend on the sample.

    NumPy's own would count the children of all samples of a worker.
    """

    def __init__(self) -> None:
        self.entropy = 0
        self.counter: Sequence[int] = (0, 0, 0, 0)
        self.children = 0

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return self._seeds().generate_state(n_words, dtype)

    def spawn(self, n_children: int) -> Any:
        children = self._seeds().spawn(n_children)
        self.children += n_children
        return children

    def _seeds(self) -> np.random.SeedSequence:
        entropy = self.entropy << 128 | self.counter[3] << 64 | self.counter[2]
        return np.random.SeedSequence(entropy, n_children_spawned=self.children)


def _two_words(key: int) -> tuple[int, int]:
    """Return the lower and the upper half of 128 bits."""
    return key & (1 << 64) - 1, key >> 64
