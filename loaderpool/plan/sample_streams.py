"""Random streams that belong to a sample, not to the worker that makes the sample.

A stream has the name (seed, epoch, position in the global order). So it is the same for any number
of workers, after a crash, and when a ticket is repeated. Each sample has four unrelated streams:
the `rng` that is passed to a function with such a parameter, and the global generators of `random`,
`numpy.random` and torch, for code that draws from them.

This module imports `numpy.random`, which NumPy 2 imports only when it is used. That is an eighth of
a supervisor's imports. So callers import this module when they need it.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISpawnableSeedSequence

from loaderpool.plan.permutation import stream_key
from loaderpool.plan.stream_kinds import SAMPLE
from loaderpool.system.hashes import blake2b


class SampleStreams:
    """Generators whose streams depend only on (seed, epoch, position).

    Earlier draws and the process do not matter. One object serves one thread. It has a single
    generator and sets its state again (1 us; a new generator takes 20).
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch: int | None = None
        self._spawning = SpawnedSeeds()
        # NumPy's stubs allow only its own class of seed sequences.
        self._philox = np.random.Philox(self._spawning)  # type: ignore[arg-type]
        self._generator = np.random.Generator(self._philox)
        # Lists, not arrays, because the setter reads them word by word: 0.8 us instead of 1.8.
        self._key = [0, 0]
        self._counter = [0, 0, 0, 0]
        self._state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": self._key},
            "buffer": [0, 0, 0, 0],
            "buffer_pos": 4,  # the buffer is empty
            "has_uint32": 0,  # no half word is left from 32-bit draws
            "uinteger": 0,
        }
        self._python_key = 0
        self._torch_key = b""
        self._numpy_words = np.zeros(4, "<u8")
        self._numpy_seed = self._numpy_words.view("<u4")

    def generator(self, epoch: int, position: int, kind: int = SAMPLE) -> np.random.Generator:
        """Return the generator at the start of a sample's own stream.

        It is the same object each time and valid until the next call. It equals
        `Generator(Philox(key=k, counter=[0, 0, position, kind]))` with k = `stream_key("rng", seed,
        epoch)` and kind `SAMPLE`, `BATCH` or `ITEM`. After 2**128 blocks it would reach the next
        position's stream. Generators that it spawns also depend on the sample. A call of `batch_fn`
        uses the position of its first row, which differs between shards. Its stream is not that of
        the sample at this position, because the kinds differ.
        """
        if epoch != self._epoch:
            self._set_epoch(epoch)
        self._counter[2] = position
        self._counter[3] = kind
        self._philox.state = self._state
        self._spawning.children = 0
        return self._generator

    def seed_globals(self, epoch: int, position: int, kind: int = SAMPLE) -> None:
        """Reseed `random` and legacy `numpy.random` for a sample, and discard cached Gaussians.

        Both remain Mersenne Twisters, seeded with 256 bits that contain all of (key, kind,
        position). Each has its own key, because equal seeds would make `random.random()` and
        `numpy.random.rand()` draw the same numbers. If torch is imported, its generator on the CPU
        is reseeded too. It accepts 64 bits of a seed and uses 32.
        """
        if epoch != self._epoch:
            self._set_epoch(epoch)
        random.seed(self._python_key << 128 | kind << 64 | position)
        self._numpy_words[2] = position
        self._numpy_words[3] = kind
        np.random.seed(self._numpy_seed)
        of_torch = getattr(sys.modules.get("torch"), "default_generator", None)
        if of_torch is not None:
            words = struct.pack("<QQ", kind, position)
            seed = blake2b(words, digest_size=8, key=self._torch_key).digest()
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
    """Seed sequence that makes a generator's `spawn()` depend on the sample.

    With NumPy's own sequence, it would also depend on the worker's earlier samples.
    """

    def __init__(self) -> None:
        self.entropy = 0
        self.counter: Sequence[int] = (0, 0, 0, 0)
        self.children = 0

    def generate_state(
        self, n_words: int, dtype: Any = np.uint32
    ) -> npt.NDArray[np.uint32 | np.uint64]:
        return self._seeds().generate_state(n_words, dtype)

    def spawn(self, n_children: int) -> list[np.random.SeedSequence]:
        children = self._seeds().spawn(n_children)
        self.children += n_children
        return children

    def _seeds(self) -> np.random.SeedSequence:
        entropy = self.entropy << 128 | self.counter[3] << 64 | self.counter[2]
        return np.random.SeedSequence(entropy, n_children_spawned=self.children)


def _two_words(key: int) -> tuple[int, int]:
    """Return the lower and the upper half of 128 bits."""
    return key & (1 << 64) - 1, key >> 64
