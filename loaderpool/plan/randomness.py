"""Random streams that belong to a sample, not to the worker that happens to make it.

A stream is named by (seed, epoch, position in the global order), so it is the same for any number of workers, after a
crash, and when a ticket is redone. There are three for each sample, unrelated to one another: the `rng` handed to a
function that names it, and the global generators of `random` and `numpy.random` for code that draws from them.

The globals cost far more to seed than to look at, hence `GlobalsWatch`: they need no seeding for code that never draws
from them. `SavedGlobals` keeps the trainer's own state where samples are made in its process.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISpawnableSeedSequence

from loaderpool.plan.keys import stream_key

__all__ = ["BATCH_KIND", "SAMPLE_KIND", "GlobalsWatch", "SampleStreams", "SavedGlobals"]

SAMPLE_KIND, BATCH_KIND = 1, 2
"""Highest word of the Philox counter: a sample's stream and a batch's never meet, whatever their positions."""


class SampleStreams:
    """The same (seed, epoch, position) gives the same streams, whatever was drawn before and wherever it runs.

    One object serves one thread: its generator is a single one whose state is set anew (1 us; a new one takes 20).

    Args:
        seed: the loader's seed, from 0.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch: int | None = None
        self._spawning = _SampleSeeds()
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
        self._numpy_words = np.zeros(4, "<u8")
        self._numpy_seed = self._numpy_words.view("<u4")

    def generator(self, epoch: int, position: int, batch: bool = False) -> np.random.Generator:
        """The generator, at the start of a sample's own stream.

        It equals `Generator(Philox(key=k, counter=[0, 0, position, kind]))` with k = `stream_key("rng", seed, epoch)`
        and kind `SAMPLE_KIND` or `BATCH_KIND`; 2**128 blocks can be drawn before it meets the next position's stream.
        Generators that it spawns are keyed by the sample too.

        Args:
            epoch: which epoch, from 0.
            position: in the global order, 0 to 2**62; of a batch, that of its first row, which tells shards apart.
            batch: whether it is for a `batch_fn`, whose stream differs from that of the sample at this position.

        Returns:
            the same object each time, valid until the next call.
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
        of its own: equal seeds would make `random.random()` and `numpy.random.rand()` draw the same numbers.

        Args:
            epoch: which epoch, from 0.
            position: as for `generator`.
            batch: as for `generator`.
        """
        if epoch != self._epoch:
            self._set_epoch(epoch)
        kind = BATCH_KIND if batch else SAMPLE_KIND
        random.seed(self._python_key << 128 | kind << 64 | position)
        self._numpy_words[2] = position
        self._numpy_words[3] = kind
        np.random.seed(self._numpy_seed)

    def _set_epoch(self, epoch: int) -> None:
        key = stream_key("rng", self._seed, epoch)
        self._key[:] = _two_words(key)
        self._spawning.entropy, self._spawning.counter = key, self._counter
        self._python_key = stream_key("random", self._seed, epoch)
        self._numpy_words[:2] = _two_words(stream_key("numpy.random", self._seed, epoch))
        self._epoch = epoch


class _SampleSeeds(ISpawnableSeedSequence):
    """Makes `rng.spawn()` depend on the sample: NumPy's own would count the children of all samples of a worker."""

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


class GlobalsWatch:
    """Notices whether code drew from, or reseeded, `random` or `numpy.random`: in half a microsecond, changing nothing.

    It looks at some words of the generators' memory, after a check, here, that this memory is what `getstate` says.
    Where it is not (another Python, another NumPy) it compares the whole states: the same answer, at 60 us.

    Code that uses generators of its own is not noticed, nor is a state that is put back as it was.
    """

    def __init__(self) -> None:
        self._look_at_python = _python_peek() or random.getstate
        self._look_at_numpy = _numpy_peek() or _numpy_state
        self.arm()

    def arm(self) -> None:
        """From now on draws count."""
        self._python = self._look_at_python()
        self._numpy = self._look_at_numpy()

    def drew(self) -> bool:
        """Whether anything was drawn or reseeded since `arm()`; it stays armed."""
        return self._look_at_python() != self._python or self._look_at_numpy() != self._numpy


class SavedGlobals:
    """Puts `random` and `numpy.random` back as they were, cached Gaussians and all.

    The state is saved when this is made, by `save()`, and on entering it as a context manager; leaving restores it.
    """

    def __init__(self) -> None:
        self.save()

    def save(self) -> None:
        """Saves the present state in place of the one saved before."""
        self._python = random.getstate()
        self._bit_generator = _bit_generator()
        self._numpy: Any = np.random.get_state(legacy=False)

    def restore(self) -> None:
        """Restores the saved state; may be called any number of times."""
        random.setstate(self._python)
        if _bit_generator() is not self._bit_generator:  # swapped by numpy.random.set_bit_generator (NumPy 1.24)
            np.random.set_bit_generator(self._bit_generator)  # type: ignore[attr-defined]
        np.random.set_state(self._numpy)

    def __enter__(self) -> None:
        self.save()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


_TWISTER_WORDS = 624
_WATCHED_WORD = _TWISTER_WORDS // 2
"""The index alone misses draws of exactly 624 words, after which it is back where it was and all words are new. This
word and the next, read as one, make a chance match one in 2**64. Not word 0: it is the same after every seeding."""


def _python_peek() -> Callable[[], object] | None:
    """What to call for a cheap look at `random`'s state, or None where its memory is not laid out as expected.

    CPython's `struct {PyObject_HEAD; int index; uint32_t state[624];}` (Modules/_randommodule.c).
    """
    instance: random.Random = random._inst
    start = object.__basicsize__
    if sys.implementation.name != "cpython" or type(instance).__basicsize__ < start + 4 * (_TWISTER_WORDS + 1):
        return None
    words = _words_at(id(instance) + start, _TWISTER_WORDS + 1)
    state = instance.getstate()[1]
    if words.tolist() != [state[-1], *state[:-1]]:
        return None
    pair = _as_one(words[1 + _WATCHED_WORD :][:2])
    # `gauss_next`: random.gauss() makes two numbers at a time, and returns the second without a draw.
    return lambda: (words[0], pair[0], instance.gauss_next)  # type: ignore[attr-defined]


def _numpy_peek() -> Callable[[], object] | None:
    """What to call for a cheap look at `numpy.random`'s state, or None where its memory is not laid out as expected.

    NumPy's `struct {uint32_t key[624]; int pos;}` (numpy/random/src/mt19937/mt19937.h).
    """
    globals_ = _random_state()
    generator = _bit_generator()
    has_gauss_offset = _has_gauss_offset()
    if type(globals_) is not np.random.RandomState or not isinstance(generator, np.random.MT19937):
        return None
    if has_gauss_offset is None:
        return None
    words = _words_at(generator.ctypes.state_address, _TWISTER_WORDS + 1)
    state: Any = generator.state["state"]
    if words.tolist() != [*state["key"].tolist(), state["pos"]]:
        return None
    has_gauss = _words_at(id(globals_) + has_gauss_offset, 1)
    pair = _as_one(words[_WATCHED_WORD:][:2])
    # The bit generator itself belongs to the picture (and is kept alive by it): code may put in another.
    return lambda: (globals_._bit_generator, words[_TWISTER_WORDS], pair[0], has_gauss[0])


def _has_gauss_offset() -> int | None:
    """Where a RandomState says that it has a cached Gaussian, or None: found, and tried, in one of our own.

    It must be looked at, for a second `numpy.random.normal()` returns that number without a draw. NumPy's
    `struct {bitgen_t *; int has_gauss; double gauss;}` (numpy/random/src/legacy) is a part of the object.
    """
    if sys.implementation.name != "cpython":
        return None
    trial = np.random.RandomState(0)
    state: Any = trial.get_state(legacy=False)
    marker = 0.6180339887498949
    trial.set_state({**state, "has_gauss": 1, "gauss": marker})
    offset = ctypes.string_at(id(trial), type(trial).__basicsize__).find(struct.pack("d", marker)) - 8
    if offset < 0 or offset % 4:
        return None
    seen = _words_at(id(trial) + offset, 1)
    looks = [seen[0]]
    for has_gauss in (0, 1):
        trial.set_state({**state, "has_gauss": has_gauss, "gauss": marker})
        looks.append(seen[0])
    trial.normal()
    return offset if [*looks, seen[0]] == [1, 0, 1, 0] else None


def _words_at(address: int, count: int) -> memoryview:
    """A view of `count` 32-bit words of memory, which the caller keeps alive."""
    return memoryview((ctypes.c_uint32 * count).from_address(address)).cast("B").cast("I")


def _as_one(two_words: memoryview) -> memoryview:
    """The same memory as a single 64-bit word."""
    return two_words.cast("B").cast("Q")


def _numpy_state() -> bytes:
    """The whole state of `numpy.random`, in a form that can be compared."""
    return pickle.dumps(np.random.get_state(legacy=False))


def _random_state() -> Any:
    """The RandomState behind the functions of `numpy.random`; None in a NumPy that keeps it elsewhere."""
    return getattr(np.random.mtrand, "_rand", None)


def _bit_generator() -> Any:
    """The bit generator behind the functions of `numpy.random`; None in a NumPy that keeps it elsewhere."""
    return getattr(_random_state(), "_bit_generator", None)


def _two_words(key: int) -> tuple[int, int]:
    """The lower and the upper half of 128 bits."""
    return key & (1 << 64) - 1, key >> 64
