"""`TorchState`: the state of PyTorch's global generator, which shows whether code drew from it.

Imported only if PyTorch is.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import numpy as np

from loaderpool.system.interrupts import FailuresIgnored

# Memory of a CPU generator from its Mersenne Twister on: the seed and the number of words left; the
# number of the next word, and the first 16 of 624 words, which are enough (see `own_process`); a
# float32 and a float64 that were drawn in advance, and for each a byte that is 0 if there is none.
# The bytes in between have no meaning.
_HEAD, _WORDS, _FIRST_WORD = slice(0, 13), slice(16, 84), 20
_FLOAT, _HAS_FLOAT, _DOUBLE, _HAS_DOUBLE = slice(2520, 2524), 2524, slice(2528, 2536), 2536
_BYTES = 2537
# `get_state` returns the words as uint64, from this byte on.
_STATE_WORDS = slice(24, 24 + 624 * 8)
# The words are found by their first bytes, among the first bytes of the generator. It is larger, so
# the search reads no other memory.
_COMPARED, _SEARCHED = 16, 256


class TorchState:
    """Reads the state of a CPU generator.

    `get_state` makes a tensor, which takes 2 us, and up to 25 us in a loop over batches, where its
    code has left the processor's caches. So the state is read from the generator's memory, if a
    test of another generator has shown that it is there.
    """

    def __init__(self) -> None:
        self._address = 0  # address of the latest generator
        self._memory = memoryview(b"")
        self._parts: tuple[memoryview, ...] = ()

    def read(self, generator: Any) -> object:
        """Return the state of a generator, for comparisons with other results of this method."""
        place = _place()
        return _official(generator) if place is None else self.read_at(place, generator)

    def read_at(self, place: int, generator: Any) -> object:
        """Return the state in the memory of a generator, from this byte on."""
        address = generator._cdata + place
        if address != self._address:
            self._address = address
            memory = memoryview((ctypes.c_ubyte * _BYTES).from_address(address)).cast("B")
            self._memory = memory
            self._parts = memory[_HEAD], memory[_WORDS], memory[_FLOAT], memory[_DOUBLE]
        head, words, of_float, of_double = self._parts
        has_float, has_double = self._memory[_HAS_FLOAT], self._memory[_HAS_DOUBLE]
        return (
            head.tobytes(),
            words.tobytes(),
            has_float and of_float.tobytes(),
            has_double and of_double.tobytes(),
        )


def _official(generator: Any) -> bytes:
    state: bytes = generator.get_state().numpy().tobytes()
    return state


@functools.cache
def _place() -> int | None:
    """Return the first byte of the Mersenne Twister in a CPU generator.

    Returns None if this version of PyTorch stores the state in another way.
    """
    with FailuresIgnored():
        torch = sys.modules["torch"]
        generator = torch.Generator()
        words = np.frombuffer(_official(generator)[_STATE_WORDS], np.uint64).astype(np.uint32)
        wanted = words.tobytes()[:_COMPARED]
        for at in range(_FIRST_WORD, _SEARCHED, 4):
            if ctypes.string_at(generator._cdata + at, _COMPARED) == wanted:
                place = at - _FIRST_WORD
                return place if _is_state(torch, generator, place) else None
    return None


def _is_state(torch: Any, generator: Any, place: int) -> bool:
    """Return True if the memory at `place` changes exactly when the state of a generator does."""
    first, reader = generator.get_state(), TorchState()
    found: list[tuple[object, object]] = []
    # A draw of one number draws another one in advance. A draw of many numbers drops it.
    draws = [(size, dtype) for size in (0, 1, 1, 1, 100) for dtype in ("float32", "float64")]
    for start in (first, None, first):
        if start is not None:
            generator.set_state(start)
        for size, dtype in draws:
            torch.randn(size, dtype=getattr(torch, dtype), device="cpu", generator=generator)
            found.append((reader.read_at(place, generator), _official(generator)))
    memories, states = zip(*found, strict=True)
    return [*map(memories.index, memories)] == [*map(states.index, states)]
