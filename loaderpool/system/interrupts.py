"""Exceptions of signals' handlers, Ctrl-C first of all, come at a few chosen places of ours, and nowhere else.

Python runs a handler between any two bytecodes of the main thread, and what is half done there is lost where it raises.
So whatever begins, moves or ends something runs in a block of `InterruptsHeld`. In such a block handlers run

- out of a wait (`Session.wait_for`), at which everything that was begun is where its owner will find it;
- out of the user's own code, which is called in `InterruptsAllowed`;
- out of `checkpoint`, between the steps of long work;
- when the outermost block is left: by then the block's result is stored. `Undoing` ends what lost its owner.

SIGINT has a handler of ours in a block, and the program's outside, for programs look whether that is Python's own. Any
other handler gets a `_Gate` in front of it, which stays: to set handlers costs each batch a system call for each.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # CPython's own, without stubs
import _thread
import collections
import contextlib
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

from loaderpool.system import machine

# Each wait for a batch sets the handler four times. The functions of `signal` look numbers and handlers up in enums,
# which costs ten times what the calls beneath them do.
_SIGINT = int(signal.SIGINT)
_handler_of: Callable[[int], Any] = _signal.getsignal
_main_thread = threading.main_thread().ident  # of this process; to ask each time costs what setting a handler does

# After this a finalizer has returned. Shorter: it may still run, and the signal is sent once more; longer is only felt.
_MOMENT_S = 0.005

_outermost: InterruptsHeld | None = None  # the block that the main thread is in
_pending: collections.deque[int] = collections.deque()  # signals whose handlers are due


class InterruptsHeld:
    """A block in which signals are noted; on leaving it their handlers run, which may raise.

    On other threads than the main one nothing is to do. A block within another one is part of it: `with` gives the
    outermost, which knows what is pending.

    Args:
        wake: ends the wait that the block may be in, called by the signal's handler.
        then: what becomes of a signal that came: "tell" the program; "send" it again in a moment, for finalizers, whose
            exceptions Python drops; "drop" it, for the interpreter ends anyway.
    """

    __slots__ = ("_handler", "_outer", "_then", "_wake", "is_pending")

    def __init__(self, wake: Callable[[], None] | None = None, then: Literal["tell", "send", "drop"] = "tell") -> None:
        self._wake, self._then = wake, then
        self._handler: Any = None  # the program's of SIGINT; of the module `_signal`: SIG_IGN and SIG_DFL are numbers
        self._outer: InterruptsHeld | None = None
        self.is_pending = False

    def __enter__(self) -> InterruptsHeld:  # noqa: PYI034 - the outermost, not always self
        global _outermost
        if _thread.get_ident() != _main_thread:
            return self
        outer = _outermost
        if outer is not None:
            self._outer = outer
            self._wake, outer._wake = outer._wake, self._wake or outer._wake
            return outer
        if list(map(_handler_of, _OFTEN)) != _seen:
            gate_handlers()
        handler = _handler_of(_SIGINT)
        try:
            _outermost = self
            if callable(handler):
                self._handler = handler
                _signal.signal(_SIGINT, self._note)
            self.is_pending = bool(_pending)
        except BaseException:  # a Ctrl-C that came before it was held
            _outermost = None
            _signal.signal(_SIGINT, handler)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        global _outermost
        outer = self._outer
        if outer is not None:
            self._outer, outer._wake = None, self._wake
            return
        if _outermost is not self:
            return
        try:
            if self._handler is not None:
                _signal.signal(_SIGINT, self._handler)
            _outermost = None
        except BaseException:  # a Ctrl-C that came when it was no longer held
            _outermost = None
            raise
        if _pending:
            if self._then == "tell":
                _tell()
            elif self._then == "send":
                for number in list(_pending):
                    send_again(number)
            else:
                _pending.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if _outermost is None:  # two signals have come as the block was left
            _signal.signal(_SIGINT, self._handler)
            self._handler(number, frame)
        else:
            _hold(number)


class InterruptsAllowed:
    """A part of a block of `InterruptsHeld` in which signals do what the program says; tells of what came before."""

    __slots__ = ("_held",)

    def __enter__(self) -> None:
        global _outermost
        self._held = held = _outermost if _thread.get_ident() == _main_thread else None
        if held is None:
            return
        try:
            if held._handler is not None:
                _signal.signal(_SIGINT, held._handler)
            _outermost = None
            if _pending:
                held.is_pending = False
                _tell()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        global _outermost
        held = self._held
        if held is None:
            return
        _outermost = held
        handler = _handler_of(_SIGINT)  # the user's code may have set another one
        if handler is None or (held._handler is None and not callable(handler)):  # in C: it could not be put back
            held._handler = None
            return
        try:
            _signal.signal(_SIGINT, held._note)
        except BaseException:  # one more Ctrl-C, at this very call
            _signal.signal(_SIGINT, held._note)
            raise
        finally:
            if handler is not held._handler and getattr(handler, "__self__", None) is not held:
                held._handler = handler


class _Gate:
    """A handler of the program's that runs when nothing of ours is half done, and where no exception is dropped."""

    __slots__ = ("__wrapped__",)

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.__wrapped__ = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _outermost is not None:
            _hold(number)
        elif is_dropped(frame):
            send_again(number)
        else:
            if number in _pending:
                _pending.remove(number)
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


# All that a handler may be set for. Of the last five each block looks whether they have another one; of the others as
# a pass or a loader begins.
_OFTEN = [
    int(getattr(signal, name))
    for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGTERM")
    if hasattr(signal, name)
]
_ALL = [int(number) for number in signal.valid_signals() if number != _SIGINT]
_seen: list[Any] = [None] * len(_OFTEN)  # the handlers of `_OFTEN`


def gate_handlers() -> None:
    """Have the handlers that the program has now wait for blocks of `InterruptsHeld`. A handler may raise in it."""
    global _seen
    if _thread.get_ident() != _main_thread:
        return
    for number in _ALL:
        handler = _handler_of(number)
        if callable(handler) and type(handler) is not _Gate:
            _signal.signal(number, _Gate(handler))
    _seen = list(map(_handler_of, _OFTEN))


def _hold(number: int) -> None:
    if number not in _pending:
        _pending.append(number)
    held = _outermost
    if held is not None:
        held.is_pending = True
        if held._wake is not None:
            held._wake()


def _tell() -> None:
    """Do what the program does about signals, in the frame that has left the block."""
    for _ in range(len(_pending)):  # in a finalizer each is noted once more
        number = _pending.popleft()
        handler = _handler_of(number)
        if callable(handler):
            handler(number, sys._getframe(2))
        else:  # user code in the block has set SIG_IGN, or SIG_DFL, which ends the process
            signal.raise_signal(number)


def _after_fork() -> None:
    global _main_thread, _outermost
    before, _main_thread = _main_thread, _thread.get_ident()
    if before == _main_thread:
        return
    # A thread has forked, in whose child no main thread is there to leave the block.
    held, _outermost = _outermost, None
    _pending.clear()
    if held is not None and held._handler is not None:
        _signal.signal(_SIGINT, held._handler)


machine.at_forks(after_in_child=_after_fork)


def checkpoint() -> None:
    """Tell the program of signals that came in this block; called where nothing is half done."""
    held = _outermost
    if held is not None and held.is_pending:
        with InterruptsAllowed():  # which does nothing on other threads
            pass


# In these functions, and in what they call, an exception is dropped: by others, or by Python in finalizers.
DROPPED_IN = {
    ("keras.src.utils.python_utils", "pythonify_logs"),  # `except: pass`, behind each step of a fit
    ("tensorflow.python.framework.tensor_shape", "__getitem__"),  # called from C++, which may crash, too
    ("tensorflow.python.framework.tensor_shape", "__len__"),
    ("jax._src.lib", "_xla_gc_callback"),  # called by the garbage collector
    ("_weakrefset", "_remove"),
    ("weakref", "__call__"),  # of `finalize`
    ("weakref", "remove"),
    ("loaderpool.sources.files", "__del__"),
    ("loaderpool.sources.hdf5", "__del__"),
    ("loaderpool.core.lending", "_on_death"),
    ("loaderpool.system.interrupts", "_follow"),
    ("loaderpool.trainer.autotune.pool_workers", "forget_dead"),
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


def send_again(number: int = _SIGINT) -> None:
    """Have a signal that came where nothing can be raised, as in a finalizer, come once more in a moment."""
    if number == _SIGINT:
        if number in _pending:
            _pending.remove(number)
    elif number not in _pending:
        _pending.append(number)  # the next block is told, if it is left before that
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
        _thread.start_new_thread(_send, (_main_thread, number))


def _send(thread: int | None, number: int) -> None:
    time.sleep(_MOMENT_S)
    if number != _SIGINT:
        if number in _pending:  # where the program has taken its handler away meanwhile, nothing is done
            _thread.interrupt_main(number)  # type: ignore[arg-type]  # a number is enough
    elif thread is not None:
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(thread, _SIGINT)
        else:
            signal.raise_signal(signal.SIGINT)  # handled by the main thread in any case


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
        with InterruptsHeld(then="send"):
            undo_orphans()
    except KeyboardInterrupt:  # before the block was entered
        send_again()


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
