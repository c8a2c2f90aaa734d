"""A CUDA driver that is none (`cuda_stand_in.c`), compiled and taken for one: it counts what none would forgive.

In this process it sees the calls of the driver; a child in which it is preloaded has it see each change of a mapping,
too, in all its processes.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loaderpool.system import cuda_driver
from tests.support.child import ChildResult, run_child

__all__ = ["CODES", "StandIn", "compile_stand_in", "preloaded", "run_with_gpu"]

_SOURCE = Path(__file__).with_suffix(".c")
_VARIABLE = "LOADERPOOL_CUDA_STAND_IN"

# What it may be told to answer.
CODES = {
    "INVALID_VALUE": 1,
    "OUT_OF_MEMORY": 2,
    "NOT_INITIALIZED": 3,
    "DEINITIALIZED": 4,
    "NO_DEVICE": 100,
    "INVALID_CONTEXT": 201,
    "CONTEXT_IS_DESTROYED": 709,
    "HOST_MEMORY_ALREADY_REGISTERED": 712,
    "HOST_MEMORY_NOT_REGISTERED": 713,
    "NOT_PERMITTED": 800,
    "NOT_SUPPORTED": 801,
}


def compile_stand_in(directory: Path) -> Path:
    """The library, made by the C compiler of this machine."""
    library = directory / "libcuda_stand_in.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(_SOURCE), "-pthread"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise AssertionError("these tests need a C compiler named cc (apt install gcc)") from None
    except subprocess.CalledProcessError as error:
        raise AssertionError(error.stderr) from None
    return library


class StandIn:
    """The library in this process, in whose place `cuda_driver` finds it.

    Attributes:
        violations: how often something was done that a GPU's driver does not allow, or does not survive.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._library: Any = ctypes.CDLL(self.path)
        self._library.stand_in_bytes.restype = self._library.stand_in_most_bytes.restype = ctypes.c_size_t
        self._library.stand_in_is_registered.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def begin(self, active: bool = True) -> None:
        """Nothing was called yet, and there is one device, which a framework uses (or does not yet)."""
        self._library.stand_in_reset()
        self.set_active(active)

    def set_active(self, active: bool, device: int = 0) -> None:
        self._library.stand_in_set_active(device, int(active))

    def set_devices(self, count: int) -> None:
        self._library.stand_in_set_devices(count)

    def set_initialised(self, is_initialised: bool) -> None:
        self._library.stand_in_set_initialised(int(is_initialised))

    def set_us_per_gib(self, microseconds: int) -> None:
        """How long a registration takes."""
        self._library.stand_in_set_us_per_gib(microseconds)

    def fail(self, call: str, code: str | None, after: int = 0) -> None:
        """Have a call fail from now on, behind so many more that go well; None: no more."""
        assert self._library.stand_in_fail(call.encode(), 0 if code is None else CODES[code], after)

    def calls(self, call: str) -> int:
        count: int = self._library.stand_in_calls(call.encode())
        assert count >= 0
        return count

    @property
    def violations(self) -> int:
        return int(self._library.stand_in_violations())

    @property
    def ranges(self) -> int:
        """How many ranges are registered."""
        return int(self._library.stand_in_ranges())

    @property
    def nbytes(self) -> int:
        """How many bytes are registered."""
        return int(self._library.stand_in_bytes())

    @property
    def most_bytes(self) -> int:
        """How many were at once."""
        return int(self._library.stand_in_most_bytes())

    def retained(self, device: int = 0) -> int:
        """How often a device's context is retained."""
        return int(self._library.stand_in_retained(device))

    @property
    def is_balanced(self) -> bool:
        """Whether this thread is as it was before the calls."""
        return not self._library.stand_in_depth() and not self._library.stand_in_capture_mode()

    def sees(self, array: Any) -> bool:
        """Whether a copy of this array to the device would come straight out of its memory."""
        return bool(self._library.stand_in_is_registered(array.__array_interface__["data"][0], array.nbytes))


def preloaded(active: bool = True) -> StandIn:
    """The library that `run_with_gpu` has preloaded in this process, taken for the driver."""
    stand_in = StandIn(os.environ[_VARIABLE])
    cuda_driver.LIBRARY = stand_in.path
    stand_in.begin(active)
    return stand_in


def run_with_gpu(
    library: Path, code: Callable[[], object], *, timeout_s: float = 60.0, **variables: str
) -> ChildResult:
    """The function has run in a child with a GPU, in which nothing was done that a GPU's driver does not forgive.

    It sees nothing of the module around it.
    """
    source = f"{textwrap.dedent(inspect.getsource(code))}\n\n{code.__name__}()\n"
    env = {"LD_PRELOAD": str(library), _VARIABLE: str(library), **variables}
    result = run_child(source, timeout_s=timeout_s, env=env).check()
    assert "STAND-IN" not in result.stderr, result.stderr
    return result
