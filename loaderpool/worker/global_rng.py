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


class GlobalsWatch:
    """Notices whether code drew from the global generators, or reseeded them; takes a microsecond.

    It compares the bytes of the generators' objects, whatever they mean: to ask for the states takes 0.1 ms. Code that
    imported `numpy.random` or torch first counts as if it had drawn: it cannot be told. Generators of the code's own
    are not noticed.
    """

    def __init__(self) -> None:
        self._python = _memory_of(random._inst)  # the functions of `random` are its methods
        self._generator: Any = None  # of `numpy.random`, if it is of the usual kind
        self._numpy: tuple[memoryview, ...] = ()  # its memory, and that of the object which keeps a Gaussian
        self.arm()

    def arm(self) -> None:
        """Count draws from now on."""
        self._armed = self._picture()

    def drew(self) -> bool:
        """Whether anything was drawn or reseeded since `arm()`, or may have been."""
        return self._armed != self._picture()

    def _picture(self) -> tuple[Any, ...]:
        if not _IS_CPYTHON:
            return global_states()
        numpy = self._numpy_picture() if _NUMPY in sys.modules else None
        torch = _torch_state() if "torch" in sys.modules else None
        return self._python.tobytes(), random._inst.gauss_next, numpy, torch  # type: ignore[attr-defined]

    def _numpy_picture(self) -> Any:
        generator = np.random.mtrand._rand._bit_generator
        if generator is not self._generator:
            if not isinstance(generator, np.random.MT19937):  # code has put in another kind
                return pickle.dumps(np.random.get_state(legacy=False))
            state = _memory_at(generator.ctypes.state_address, _TWISTER_BYTES)
            self._generator, self._numpy = generator, (state, _memory_of(np.random.mtrand._rand))
        state, owner = self._numpy
        return generator, state.tobytes(), owner.tobytes()


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


class KeptGlobals:
    """Leaves the global generators as they were before a block, for many blocks, one after the other.

    It saves and restores only what the watch has seen to change. Not to be entered again inside a block.
    """

    def __init__(self) -> None:
        self._saved = SavedGlobals()  # first: this imports `numpy.random`, so that it is no news
        self._watch = GlobalsWatch()

    def __enter__(self) -> None:
        if self._watch.drew():  # between the blocks
            self._saved = SavedGlobals()
            self._watch.arm()

    def __exit__(self, *error: object) -> None:
        if self._watch.drew():
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
