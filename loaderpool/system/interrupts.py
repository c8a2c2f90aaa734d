"""Exceptions of signals' handlers, Ctrl-C first of all, come at a few chosen places of ours, and nowhere else.

Python runs a handler between any two bytecodes of the main thread, and what is half done there is lost where it raises.
So whatever begins, moves or ends something runs in a block of `InterruptsHeld`. In such a block handlers run

- out of a wait (`Session.wait`), at which everything that was begun is where its owner will find it;
- out of the user's own code, which is called in `InterruptsAllowed`;
- out of `checkpoint`, between the steps of long work;
- when the outermost block is left: by then the block's result is stored. `Undoing` ends what lost its owner.

The program's handlers get a gate in front of them, which stays: to set a handler costs each batch a system call.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # CPython's own, without stubs
import _thread
import collections
import contextlib
import functools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Literal

from loaderpool.system import machine

# The functions of `signal` look numbers and handlers up in enums, which costs ten times what the calls beneath them do.
_handler_of: Callable[[int], Any] = _signal.getsignal
_main_thread = threading.main_thread().ident  # of this process

# After this a finalizer has returned. Shorter: it may still run, and the signal is sent once more; longer is only felt.
_MOMENT_S = 0.005

_depth = 0  # blocks of `InterruptsHeld` that the main thread is in
_due: collections.deque[int] = collections.deque()  # signals whose handlers are to be run


class InterruptsHeld:
    """A block in which signals are noted; on leaving the outermost one their handlers run, which may raise.

    On other threads than the main one nothing is to do.
    """

    __slots__ = ()

    _then: ClassVar[Literal["tell", "send", "drop"]] = "tell"  # what becomes of a signal that came: the program is told

    def __enter__(self) -> None:
        global _depth
        if _thread.get_ident() == _main_thread:
            if list(map(_handler_of, _OFTEN)) != _seen:
                gate_handlers()
            _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        if _thread.get_ident() == _main_thread and _depth:
            _depth -= 1
            if _due and not _depth:
                if self._then == "tell":
                    _tell()
                elif self._then == "send":
                    for number in list(_due):
                        send_again(number)
                else:
                    _due.clear()


class LateInterruptsHeld(InterruptsHeld):
    """Of a finalizer, whose exceptions Python drops: a signal that came is sent again in a moment."""

    __slots__ = ()
    _then = "send"


class LastInterruptsHeld(InterruptsHeld):
    """Of the interpreter's end: a signal that came is dropped."""

    __slots__ = ()
    _then = "drop"


class InterruptsAllowed:
    """A part of a block of `InterruptsHeld` in which handlers run as signals come; they also run for earlier ones."""

    __slots__ = ("_held",)

    def __enter__(self) -> None:
        global _depth
        self._held = 0
        if _thread.get_ident() == _main_thread and _depth:
            self._held, _depth = _depth, 0
            if _due:
                try:
                    _tell()
                except BaseException:
                    _depth = self._held
                    raise

    def __exit__(self, *_: object) -> None:
        global _depth
        if self._held:
            _depth = self._held
            if list(map(_handler_of, _OFTEN)) != _seen:  # set by what ran here
                gate_handlers()


class _Gate:
    """A handler of the program's that runs when nothing of ours is half done, and where no exception is dropped."""

    __slots__ = ("__wrapped__",)

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.__wrapped__ = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _depth:
            if number not in _due:
                _due.append(number)
        elif is_dropped(frame):
            send_again(number)
        elif (caller := _caller_of_a_constructor(frame)) is not frame and sys.gettrace() is None:
            _run_in(caller, functools.partial(self._run, number))
        else:
            self._run(number, frame)

    def _run(self, number: int, frame: FrameType | None) -> None:
        if number in _due:
            _due.remove(number)
        try:
            self.__wrapped__(number, frame)
        except Exception as error:
            with contextlib.suppress(Exception):
                BaseException.__setattr__(error, _MARK, True)
            raise


_MARK = "__loaderpool_signal__"


def is_of_a_handler(error: BaseException) -> bool:
    """Whether a handler of a signal has raised this Exception: it is no failure of the code that it came out of."""
    return _MARK in vars(error)


# All that a handler may be set for. Of these each block looks whether they have another one, of all as a pass or a
# loader begins. A notebook sets that of SIGINT for each cell.
_OFTEN = [
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTERM")
    if hasattr(signal, name)
]
_ALL = list(map(int, signal.valid_signals()))
_seen: list[Any] = [None] * len(_OFTEN)  # the handlers of `_OFTEN`


def gate_handlers() -> None:
    """Have the handlers that the program has now wait for blocks of `InterruptsHeld`. A handler may raise in it."""
    global _seen
    if _thread.get_ident() == _main_thread:
        for number in _ALL:
            handler = _handler_of(number)
            if callable(handler) and type(handler) is not _Gate:
                _signal.signal(number, _Gate(handler))
        _seen = list(map(_handler_of, _OFTEN))


def is_left_to_python(number: int) -> bool:
    """Whether the program has left the handler of SIGINT to Python, which raises KeyboardInterrupt."""
    handler = _handler_of(number)
    return getattr(handler, "__wrapped__", handler) is signal.default_int_handler


def _tell() -> None:
    """Do what the program does about signals that came, each in its turn: the first exception ends it."""
    for _ in range(len(_due)):
        number = _due.popleft()
        handler = _handler_of(number)
        if callable(handler):
            handler(number, sys._getframe(2))
        else:  # user code in the block has set SIG_IGN, or SIG_DFL, which ends the process
            signal.raise_signal(number)


def _after_fork() -> None:
    global _main_thread, _depth
    before, _main_thread = _main_thread, _thread.get_ident()
    if before != _main_thread:  # a thread has forked, in whose child no main thread is there to leave the block
        _depth = 0
        _due.clear()


machine.at_forks(after_in_child=_after_fork)


def checkpoint() -> None:
    """Run the handlers of signals that came in this block; called where nothing is half done."""
    if _due:
        with InterruptsAllowed():  # which does nothing on other threads
            pass


# In these functions, and in what they call, an exception is dropped: by others, or by Python in finalizers.
DROPPED_IN = {
    ("keras.src.utils.python_utils", "pythonify_logs"),  # `except: pass`, after each step of a fit
    ("tensorflow.python.framework.tensor_shape", "__getitem__"),  # called from C++, which may crash, too
    ("tensorflow.python.framework.tensor_shape", "__len__"),
    ("jax._src.lib", "_xla_gc_callback"),  # called by the garbage collector
    ("importlib._bootstrap_external", "find_spec"),  # `except OSError`, which a TimeoutError is, too
    ("importlib._bootstrap_external", "get_code"),
    ("_weakrefset", "_remove"),
    ("weakref", "__call__"),  # of `finalize`
    ("weakref", "remove"),
    ("loaderpool.sources.files", "__del__"),
    ("loaderpool.core.session", "__del__"),
    ("loaderpool.core.session", "_on_death"),
    ("loaderpool.system.interrupts", "_follow"),
    ("loaderpool.system.ctrl_c", "_count"),
    ("loaderpool.memory.adoption", "_freeze_all"),
    ("loaderpool.memory.forks", "_before"),
    ("loaderpool.memory.forks", "_in_trainer"),
}


def is_dropped(frame: FrameType | None) -> bool:
    """Whether an exception that is raised in this frame comes to one that drops it."""
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in DROPPED_IN:
            return True
        frame = frame.f_back
    return False


def _caller_of_a_constructor(frame: FrameType | None) -> FrameType | None:
    """Return the frame, or the one that has an error of TensorFlow's constructed in it.

    Before Python 3.12 pybind11 makes a RuntimeError of what is raised there.
    """
    while frame is not None and frame.f_code.co_name == "__init__":
        made = frame.f_locals.get("self")
        if not (isinstance(made, BaseException) and type(made).__module__.startswith("tensorflow")):
            break
        frame = frame.f_back
    return frame


def _run_in(caller: FrameType | None, handler: Callable[[FrameType], None]) -> None:
    """Run a handler in a frame below: where an error arrives in it, or at its next line."""

    def trace(traced: FrameType, event: str, _: Any) -> Any:
        sys.settrace(None)
        traced.f_trace = None
        handler(traced)

    if caller is not None:
        caller.f_trace = trace
        sys.settrace(lambda *_: None)


def send_again(number: int = signal.SIGINT) -> None:
    """Have a signal that came where nothing can be raised, as in a finalizer, come once more in a moment."""
    if number not in _due:
        _due.append(number)  # the next block is told, if it is left before that
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
        _thread.start_new_thread(_send, (number,))


def _send(number: int) -> None:
    time.sleep(_MOMENT_S)
    # Where the program has taken its handler away meanwhile, nothing is done.
    handler = _handler_of(number)
    if number in _due and _main_thread is not None and callable(handler):
        if type(handler) is not _Gate:  # set meanwhile: it does not note that the program is told
            with contextlib.suppress(ValueError):
                _due.remove(number)
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(_main_thread, number)
        else:
            signal.raise_signal(number)  # handled by the main thread in any case


# ---- what is undone with its owner ----
#
# A Ctrl-C may end a finalizer at its first bytecode. So the owner's death is noted by a call in C. What follows is done
# at once in Python, or, where a Ctrl-C broke that off, as the next thing begins or is closed.

_registered: dict[int, Undoing] = {}  # by their reference to the owner; keeps each until it is done
_orphans: collections.deque[weakref.ref[Any]] = collections.deque()
_note_death = _orphans.append


class Undoing:
    """Undoes something once: by a call, or when its owner is collected. Not at the interpreter's exit.

    To be made in the block of `InterruptsHeld` in which the thing is begun.

    Args:
        owner: with whose end it is undone.
        undo: never raises; may run in a finalizer, on any thread, and must not refer to the owner.
    """

    __slots__ = ("_follower", "_owner", "_undo")

    def __init__(self, owner: Any, undo: Callable[[], object]) -> None:
        if _orphans:
            undo_orphans()
        self._undo: Callable[[], object] | None = undo
        self._follower: weakref.ref[Any] | None = weakref.ref(owner, _follow)
        died = weakref.ref(owner, _note_death)  # of two references the younger is called first
        self._owner: weakref.ref[Any] | None = died
        _registered[id(died)] = self

    def now(self) -> None:
        """Undo it, unless that was done, and what has lost its owner."""
        with InterruptsHeld():
            self._do()
            undo_orphans()

    def owner(self) -> Any:
        """The owner with whose end it is undone; None: it was."""
        reference = self._owner
        return None if reference is None else reference()

    def forget(self) -> None:
        """Note that nothing is left to undo. A Ctrl-C may come anywhere in it: then it is undone, or forgotten."""
        owner = self._owner
        if owner is not None:
            _registered.pop(id(owner), None)
            self._undo = self._owner = self._follower = None  # no call comes of a reference that is gone

    def _do(self) -> None:
        undo = self._undo
        if undo is not None:
            self.forget()
            undo()


def undo_orphans() -> None:
    """Undo what has lost its owner, where a Ctrl-C kept that from being done at once."""
    if not _orphans:
        return
    with InterruptsHeld(), contextlib.suppress(IndexError):  # there are no more, or another thread took it
        while True:
            orphan = _orphans.popleft()  # held, so that no younger one has its id
            undoing = _registered.get(id(orphan))
            if undoing is not None:
                undoing._do()


def _follow(_: object, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
    try:
        if is_finalizing():  # modules may be gone already
            return
        with LateInterruptsHeld():
            undo_orphans()
    except KeyboardInterrupt:  # before the block was entered
        send_again()


# ---- what tells waits of a Ctrl-C ----

waits_told_by: Any = None
"""The module `ctrl_c`, from its `watch` on; None: waits of other threads are not told of signals."""


# ---- the interpreter's end ----

_is_exiting = False


def note_exit() -> None:
    """Note that the interpreter ends: all pools are closed now."""
    global _is_exiting
    _is_exiting = True


def wait_for_the_end() -> None:
    """A daemon thread of the program's that wants a batch at exit goes with the interpreter, without a word.

    A thread of TensorFlow's must return instead, for the interpreter's end waits for that.
    """
    thread = threading.current_thread()
    if _is_exiting and thread.daemon and not isinstance(thread, threading._DummyThread):
        threading.Event().wait()
