"""What a whole process shares with the user's code: its start and end as a worker, its global random generators."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np

from loaderpool.system import machine
from loaderpool.system.interrupts import is_of_a_handler

_is_stray = False


def _note_stray() -> None:
    global _is_stray
    _is_stray = True


def end_stray(error: BaseException | None = None) -> None:
    """End this process where it is a worker's child; returns in every other one.

    Called wherever the user's code gives the word back to ours, before anything is written or told: slot, board and
    pipes are the worker's. A child that ends itself, as those of `multiprocessing` do, never comes here.
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
    """Cut the ties to supervisor and trainer that a fork leaves; `close_descriptors` are those of others.

    Runs in: a worker, first thing. The supervisor is single-threaded, so its one thread is the one whose end kills us.
    """
    machine.die_with_parent(supervisor_pid)
    machine.raise_oom_score()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    for descriptor in close_descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    settle_process()


def settle_process() -> None:
    """Set this process up for the user's code, whichever way it was started."""
    # What the function frees is there for the next sample: fresh pages for each decoded image cost a third of the time.
    machine.keep_freed_blocks()
    # What the function prints is seen at once, and not lost in a buffer when the worker is ended.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    machine.at_forks(after_in_child=_note_stray)
    settle_libraries()
    gc.enable()


def settle_libraries() -> None:
    """Have libraries that are imported by now start no threads of their own."""
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


def serve(run: Callable[[], None]) -> NoReturn:
    """Be a worker to the end, and end the process."""
    status = 1
    try:
        run()
        status = 0
    except (BrokenPipeError, ConnectionResetError):  # the supervisor is gone: all is over
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        # Not by the interpreter's own end, which would wait for threads that the function has left running.
        machine.flush_standard_streams()
        os._exit(status)


# ---- the global generators of `random`, `numpy.random` and torch ----

_NUMPY = "numpy.random.mtrand"  # NumPy 2 imports it when it is asked for
_HEAD_BYTES = object.__basicsize__  # of an object: how many refer to it, and its type
_TWISTER_BYTES = 625 * 4  # at `numpy.random.MT19937().ctypes.state_address`

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
        self._state: memoryview | None = None  # its memory
        self._owner = memoryview(b"")  # that of the object which keeps a Gaussian

    def look(self) -> Picture:
        """Return what the generators look like now."""
        gauss: Any = random._inst.gauss_next  # type: ignore[attr-defined]
        torch = _torch_state() if "torch" in sys.modules else None
        if _NUMPY not in sys.modules:
            return self._python.tobytes(), gauss, torch
        generator = np.random.mtrand._rand._bit_generator
        if generator is not self._generator:
            is_usual = isinstance(generator, np.random.MT19937)  # else code has put in another kind
            self._state = (
                _memory_at(generator.ctypes.state_address, _TWISTER_BYTES) if is_usual else None
            )
            self._generator, self._owner = generator, _memory_of(np.random.mtrand._rand)
        state = pickle.dumps(generator.state) if self._state is None else self._state.tobytes()
        return self._python.tobytes(), gauss, torch, generator, state, self._owner.tobytes()

    def run(self, work: Callable[..., Any], *arguments: Any) -> tuple[Any, bool]:
        """Return what `work` gives, and whether it drew; what it raises is raised only where it did not."""
        seen, self.seen = self.seen, None
        before = seen or self.look()
        try:
            result = work(*arguments)
        except Exception as error:  # not Ctrl-C: it would be gone with a second run
            end_stray(error)  # `random` is seeded again in a fork, which is no draw
            if is_of_a_handler(error) or self.look() == before:
                raise
            return None, True
        drew = self.look() != before
        self.seen = None if drew else seen
        return result, drew


class SavedGlobals:
    """Puts the global generators back as they were when this was made, the Gaussians they keep included."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=False)
        if "key" in self._numpy["state"]:  # of a list `set_state` takes 2 us, of an array 100
            self._numpy["state"]["key"] = self._numpy["state"]["key"].tolist()
        self._torch = _torch_generator()
        self._torch_state = None if self._torch is None else self._torch.get_state()

    def restore(self) -> None:
        """Restore the saved state; may be called any number of times."""
        random.setstate(self._python)
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


def _memory_of(instance: Any) -> memoryview:
    """Return what an object has in its own memory, but for its head. The caller keeps it alive."""
    return _memory_at(id(instance) + _HEAD_BYTES, type(instance).__basicsize__ - _HEAD_BYTES)


def _memory_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address))


def _torch_generator() -> Any:
    """Torch's global generator on the CPU; None where no code has imported torch, or not yet all of it."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _torch_state() -> bytes | None:
    generator = _torch_generator()
    state: bytes | None = None if generator is None else generator.get_state().numpy().tobytes()
    return state
