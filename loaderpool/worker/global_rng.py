"""The global generators of `random`, `numpy.random` and torch: whether code draws from them, and the caller's state."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from typing import Any

import numpy as np

_NUMPY = "numpy.random.mtrand"  # NumPy 2 imports it when it is asked for
_HEAD_BYTES = object.__basicsize__  # of an object: how many refer to it, and its type
_TWISTER_BYTES = 625 * 4  # at `numpy.random.MT19937().ctypes.state_address`
_IS_CPYTHON = sys.implementation.name == "cpython"

Picture = tuple[Any, ...]


class GlobalsWatch:
    """Shows whether code drew from the global generators, or reseeded them: then two looks are not equal.

    It takes the bytes of the generators' objects, whatever they mean, in a microsecond: to ask for the states takes 0.1
    ms. Code that imported `numpy.random` or torch first counts as if it had drawn: it cannot be told. Generators of the
    code's own are not noticed.

    Attributes:
        seen: the latest look, where no code of the user's has run since; None: look again.
    """

    def __init__(self) -> None:
        self.seen: Picture | None = None
        self._python = _memory_of(random._inst)  # the functions of `random` are its methods
        self._generator: Any = None  # of `numpy.random`, if it is of the usual kind
        self._state = self._owner = memoryview(b"")  # its memory, and that of the object which keeps a Gaussian

    def look(self) -> Picture:
        """Return what the generators look like now."""
        modules = sys.modules
        if not _IS_CPYTHON:
            return global_states()
        gauss: Any = random._inst.gauss_next  # type: ignore[attr-defined]
        torch = _torch_state() if "torch" in modules else None
        if _NUMPY not in modules:
            return self._python.tobytes(), gauss, torch
        generator = np.random.mtrand._rand._bit_generator
        if generator is not self._generator:
            if not isinstance(generator, np.random.MT19937):  # code has put in another kind
                return global_states()
            self._state = _memory_at(generator.ctypes.state_address, _TWISTER_BYTES)
            self._generator, self._owner = generator, _memory_of(np.random.mtrand._rand)
        return self._python.tobytes(), gauss, torch, generator, self._state.tobytes(), self._owner.tobytes()


class SavedGlobals:
    """Puts the global generators back as they were when this was made, the Gaussians they keep included."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=False)
        if "key" in self._numpy["state"]:  # of a list `set_state` takes 2 us, of an array 100
            self._numpy["state"]["key"] = self._numpy["state"]["key"].tolist()
        self._bit_generator = _bit_generator()
        self._torch = _torch_generator()
        self._torch_state = None if self._torch is None else self._torch.get_state()

    def restore(self) -> None:
        """Restore the saved state; may be called any number of times."""
        random.setstate(self._python)
        if _bit_generator() is not self._bit_generator:
            np.random.set_bit_generator(self._bit_generator)  # type: ignore[attr-defined]  # came with NumPy 1.24
        np.random.set_state(self._numpy)
        if self._torch is not None:
            self._torch.set_state(self._torch_state)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.restore()


class KeptGlobals(GlobalsWatch):
    """Leaves the global generators as they were before a block, for many blocks, one after the other.

    It saves and restores only what has changed. Not to be entered again inside a block.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saved: SavedGlobals
        self._before: Picture = ()  # what was saved

    def __enter__(self) -> None:
        if self.look() != self._before:  # the first block, or changed between two
            self._saved = SavedGlobals()
            self._before = self.look()  # again: saving has imported `numpy.random`
        self.seen = self._before

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        seen, self.seen = self.seen, None
        if (kind is not None or seen is not self._before) and self.look() != self._before:
            self._saved.restore()


def global_states() -> tuple[Any, ...]:
    """Return the whole states, to be compared; takes 0.1 ms."""
    numpy = pickle.dumps(np.random.get_state(legacy=False)) if _NUMPY in sys.modules else None
    return random.getstate(), numpy, _torch_state()


def _memory_of(instance: Any) -> memoryview:
    """Return what an object has in its own memory, but for its head. The caller keeps it alive."""
    return _memory_at(id(instance) + _HEAD_BYTES, type(instance).__basicsize__ - _HEAD_BYTES)


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address))


def _bit_generator() -> Any:
    return np.random.mtrand._rand._bit_generator


def _torch_generator() -> Any:
    """Torch's global generator on the CPU; None where no code has imported torch, or not yet all of it."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _torch_state() -> bytes | None:
    generator = _torch_generator()
    state: bytes | None = None if generator is None else generator.get_state().numpy().tobytes()
    return state
