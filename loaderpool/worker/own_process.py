"""Process-wide state that a worker shares with the user's code.

It includes the start and end as a worker, and the global random generators.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import operator
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from loaderpool.plan.generators import torch_generator
from loaderpool.system import machine
from loaderpool.system.interrupts import is_of_a_handler

if TYPE_CHECKING:
    from loaderpool.worker.torch_state import TorchState

_is_stray = False


def _note_stray() -> None:
    global _is_stray
    _is_stray = True


def end_stray(error: BaseException | None = None) -> None:
    """End this process if it is a child that the user's code forked from a worker; otherwise
    return.

    Called after every return from user code, before anything is written or sent, because slot,
    board and pipes belong to the worker. Children that end by themselves, as those of
    `multiprocessing` do, never get here.
    """
    if not _is_stray:
        return
    status = 0 if error is None else 1
    try:
        if isinstance(error, SystemExit) and isinstance(error.code, (int, type(None))):
            status = (error.code or 0) & 0xFF
        elif error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def become_worker(supervisor_pid: int, close_descriptors: Iterable[int] = ()) -> None:
    """Release what a new worker has inherited from the supervisor and the main process.

    Called first in a worker, which ends when the supervisor's thread ends.

    Args:
        supervisor_pid: the parent, whose death ends this process.
        close_descriptors: inherited descriptors that belong to other processes.
    """
    machine.die_with_parent(supervisor_pid)
    machine.raise_oom_score()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGCHLD"):  # otherwise this is Windows
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    for descriptor in close_descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    settle_process()


def settle_process() -> None:
    """Prepare this process for the user's code. Called however the process was started."""
    # Memory that the function frees is reused for the next sample. Fresh pages for each decoded
    # image would cost a third of the time.
    machine.keep_freed_blocks()
    # Printed lines appear at once, and are not lost in a buffer when the worker is ended.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    machine.at_forks(after_in_child=_note_stray)
    settle_libraries()
    gc.enable()


def settle_libraries() -> None:
    """Prevent imported libraries from starting threads of their own."""
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


def serve(run: Callable[[], None]) -> NoReturn:
    """Run `run`, the worker's main loop, and end the process with status 0 or 1."""
    status = 1
    try:
        run()
        status = 0
    except (BrokenPipeError, ConnectionResetError):  # the supervisor is gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        # The interpreter's own exit would wait for threads that the function has left running.
        machine.flush_standard_streams()
        os._exit(status)


# ---- global generators of `random`, `numpy.random` and torch ----

_NUMPY = "numpy.random.mtrand"  # NumPy 2 imports it on first use
_HEAD_BYTES = object.__basicsize__  # header of an object: reference count and type
# A Mersenne Twister has 624 words, and the number of the next one. Each draw increments this
# number, and after the last word all words change. So a few words and the number show whether code
# drew, and also whether it set another seed.
_ALL_WORDS_BYTES, _WORDS_BYTES, _NUMBER_BYTES = 624 * 4, 16 * 4, 4

Picture = tuple[Any, ...]
_BYTES_OF = operator.methodcaller("tobytes")


class GlobalsWatch:
    """Shows whether code drew from the global generators or reseeded them: two snapshots then
    differ.

    A snapshot copies a few bytes of the generators' objects without decoding them. This takes two
    microseconds; reading the states through their API takes 0.1 ms. Code that imports
    `numpy.random` or torch for the first time counts as if it had drawn, because the snapshots
    cannot be compared. The code's own generators are not noticed.

    Attributes:
        seen: the latest snapshot, if no user code has run since. None: take a new one.
    """

    def __init__(self) -> None:
        self.seen: Picture | None = None
        # the functions of `random` are methods of this object
        self._python = _memory_of(random._inst)[: _NUMBER_BYTES + _WORDS_BYTES]
        self._generator: np.random.BitGenerator | None = None  # bit generator of `numpy.random`
        # first words and number of the bit generator; empty: it is not an MT19937
        self._state: tuple[memoryview, ...] = ()
        self._owner = memoryview(b"")  # memory of the `RandomState`, which keeps a Gaussian
        self._torch: TorchState | None = None  # reads PyTorch's generator

    def look(self) -> Picture:
        """Return a snapshot of the generators."""
        gauss: float | None = random._inst.gauss_next  # type: ignore[attr-defined]
        torch = self._look_at_torch() if "torch" in sys.modules else None
        if _NUMPY not in sys.modules:
            return self._python.tobytes(), gauss, torch
        generator = np.random.mtrand._rand._bit_generator
        if generator is not self._generator:
            self._state = ()
            if isinstance(generator, np.random.MT19937):  # otherwise code has replaced it
                words = generator.ctypes.state_address
                self._state = (
                    _memory_at(words, _WORDS_BYTES),
                    _memory_at(words + _ALL_WORDS_BYTES, _NUMBER_BYTES),
                )
            self._generator, self._owner = generator, _memory_of(np.random.mtrand._rand)
        state = [*map(_BYTES_OF, self._state)] or pickle.dumps(generator.state)
        return self._python.tobytes(), gauss, torch, generator, state, self._owner.tobytes()

    def _look_at_torch(self) -> object:
        generator = torch_generator()
        if generator is None:
            return None
        if self._torch is None:
            # Imported here, because many programs have no PyTorch.
            from loaderpool.worker.torch_state import TorchState

            self._torch = TorchState()
        return self._torch.read(generator)

    def run(self, work: Callable[..., object], *arguments: object) -> tuple[Any, bool]:
        """Return the result of `work`, and True if `work` drew from the generators.

        If `work` raises, the exception is raised only if it did not draw. Otherwise the result is
        `(None, True)`, and the caller runs `work` again.
        """
        seen, self.seen = self.seen, None
        before = seen or self.look()
        try:
            result = work(*arguments)
        except Exception as error:  # not BaseException: a second run would swallow Ctrl-C
            end_stray(error)  # before the comparison: a fork reseeds `random`, which is no draw
            if is_of_a_handler(error) or self.look() == before:
                raise
            return None, True
        drew = self.look() != before
        self.seen = None if drew else seen
        return result, drew


class SavedGlobals:
    """Saves the global generators when it is created, and restores them.

    The Gaussians that they keep are included.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: dict[str, Any] = np.random.get_state(legacy=False)
        if "key" in self._numpy["state"]:  # `set_state` takes 2 us for a list, 100 us for an array
            self._numpy["state"]["key"] = self._numpy["state"]["key"].tolist()
        self._torch = torch_generator()
        self._torch_state = None if self._torch is None else self._torch.get_state()

    def restore(self) -> None:
        """Restore the saved state. May be called any number of times."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._torch is not None:
            self._torch.set_state(self._torch_state)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.restore()


class KeptGlobals(GlobalsWatch):
    """Restores the global generators after each of many blocks, one after the other.

    It saves and restores only changes. It must not be entered again inside a block.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saved: SavedGlobals
        self._before: Picture = ()  # snapshot of the saved state

    def __enter__(self) -> None:
        if self.look() != self._before:  # the first block, or a change between two blocks
            self._saved = SavedGlobals()
            self._before = self.look()  # again, because saving has imported `numpy.random`
        self.seen = self._before

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        seen, self.seen = self.seen, None
        if (kind is not None or seen is not self._before) and self.look() != self._before:
            self._saved.restore()


def _memory_of(instance: object) -> memoryview:
    """Return a memoryview of a CPython object, without its header. The caller keeps the object
    alive.
    """
    return _memory_at(id(instance) + _HEAD_BYTES, type(instance).__basicsize__ - _HEAD_BYTES)


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address))
