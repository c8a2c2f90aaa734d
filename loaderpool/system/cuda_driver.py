"""The CUDA driver, where this process uses a GPU: page-locks memory, so that the device copies straight out of it.

The driver is never loaded or initialised here, and no context is made: a framework that uses a GPU has done all that,
and where none has, nothing is to be locked. Only calls of the driver are used: a call of the runtime library that fails
leaves its error behind for the framework, which reports it at some later call of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

LIBRARY = "libcuda.so.1"

_NOT_LOADED = getattr(os, "RTLD_NOLOAD", 0)  # only what the process has loaded already
_FOR_ALL_CONTEXTS = 1  # CU_MEMHOSTREGISTER_PORTABLE
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_DEINITIALIZED, _NOT_REGISTERED = 4, 713


_used_by: int | None = None  # the process that has called the driver; none of its forks may


class CudaError(Exception):
    """The driver refused a call.

    Attributes:
        code: its number.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def is_unregistered(self) -> bool:
        """Whether it says that memory is not locked any more, or that the driver has ended."""
        return self.code in (_DEINITIALIZED, _NOT_REGISTERED)


class NoContextError(Exception):
    """This process has no CUDA context (yet), and why."""


class CudaContext:
    """A context that some framework of this process has made, kept until `release`. Not for forks of the process."""

    def __init__(self, library: Any, device: int) -> None:
        self._library, self._device = library, device
        self._handle = ctypes.c_void_p()
        _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(self._handle), device)

    def release(self) -> None:
        """Let the context go; the framework has it still, or had it. Never raises."""
        with contextlib.suppress(CudaError):
            _call(self._library, "cuDevicePrimaryCtxRelease_v2", self._device)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory for all devices. Takes about 0.1 s a GB.

        Args:
            address: of a page.
            nbytes: whole pages, of which none is registered.

        Raises:
            CudaError: it is not locked.
        """
        with self._current():
            pointer, size = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
            _call(self._library, "cuMemHostRegister_v2", pointer, size, ctypes.c_uint(_FOR_ALL_CONTEXTS))

    def unregister(self, address: int) -> None:
        """Have memory be as it was before `register`. May wait for what the device does.

        Raises:
            CudaError: it may still be locked, unless the error says otherwise.
        """
        with self._current():
            _call(self._library, "cuMemHostUnregister", ctypes.c_void_p(address))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """This thread has the context, and a graph that is captured now, on any thread, is not spoiled."""
        mode, popped = ctypes.c_int(_CAPTURE_RELAXED), ctypes.c_void_p()
        _call(self._library, "cuCtxPushCurrent_v2", self._handle)
        try:
            _call(self._library, "cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                yield
            finally:
                with contextlib.suppress(CudaError):  # what was to be done is done, or has its own error
                    _call(self._library, "cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            with contextlib.suppress(CudaError):
                _call(self._library, "cuCtxPopCurrent_v2", ctypes.byref(popped))


def find_context() -> CudaContext:
    """Return a context that is active in this process. Takes microseconds where there is none.

    Raises:
        NoContextError: there is none.
    """
    global _used_by
    if _used_by not in (None, os.getpid()):
        raise NoContextError("a forked child cannot use its parent's GPU")
    try:
        library = ctypes.CDLL(LIBRARY, mode=_NOT_LOADED)
    except OSError:
        raise NoContextError(f"no framework of this process has loaded the CUDA driver ({LIBRARY})") from None
    _used_by = os.getpid()
    count, device, flags, is_active = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    try:
        _call(library, "cuDeviceGetCount", ctypes.byref(count))
        for ordinal in range(count.value):
            _call(library, "cuDeviceGet", ctypes.byref(device), ordinal)
            _call(library, "cuDevicePrimaryCtxGetState", device.value, ctypes.byref(flags), ctypes.byref(is_active))
            if is_active.value:
                return CudaContext(library, device.value)
    except CudaError as error:
        raise NoContextError(f"no CUDA context can be used: {error}") from None
    raise NoContextError(
        "no framework of this process has begun to use a GPU yet" if count.value else "no CUDA device is visible"
    )


def _call(library: Any, name: str, *arguments: Any) -> None:
    try:
        code = getattr(library, name)(*arguments)
    except AttributeError:  # a driver of before 2018
        raise CudaError(-1, f"this driver has no {name}") from None
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        raise CudaError(code, f"{name} says {text.value.decode() if text.value else code}")
