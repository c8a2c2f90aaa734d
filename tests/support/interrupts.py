"""Ctrl-C works wherever the tests run; and a Ctrl-C at a chosen bytecode of loaderpool's code.

Python raises KeyboardInterrupt between bytecodes. So a trace function sends SIGINT before the n-th
bytecode of the package, for each n. These are all places at which a real one can come, and some at
which none can.
"""

from __future__ import annotations

import _thread
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from loaderpool.system import interrupts

_OURS = "/loaderpool/"
# Time after which a Ctrl-C that came in a finalizer has been sent again, also on a busy machine.
_SENT_AGAIN_S = 0.5


def hear_ctrl_c() -> None:
    """Make SIGINT raise KeyboardInterrupt in this process, and end its children, as in a terminal.

    Under nohup, or with a shell's `&`, it is ignored at the start, and children inherit that.
    Children do not inherit a handler, but start with the default.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class CountBytecodes:
    """Counts the package's bytecodes in the main thread, and sends SIGINT before one of them.

    Args:
        at: number of that bytecode; 0: only count.
    """

    def __init__(self, at: int = 0) -> None:
        self.at, self.count, self.where = at, 0, ""

    def __enter__(self) -> CountBytecodes:  # noqa: PYI034 - Self is in typing from 3.11 on
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if _OURS not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        # Bytecodes without a line pass on an exception of a handler. Python never checks for
        # signals there, and an exception there would leave CPython 3.11 with a wrong reference
        # count.
        if event == "opcode" and frame.f_lineno is not None:
            self.count += 1
            if self.count == self.at:
                self.where = (
                    f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                )
                signal.raise_signal(signal.SIGINT)
        return self._step


def interrupted_at(at: int, work: Callable[[], object]) -> tuple[bool, str]:
    """Run a function with a Ctrl-C before the n-th bytecode of the package. Return whether it was
    raised, and where.
    """
    raised, again = False, 0
    start_thread = _thread.start_new_thread

    def counted(function: Callable[..., object], arguments: tuple[Any, ...]) -> int:
        nonlocal again
        again += function is interrupts._send
        return start_thread(function, arguments)

    _thread.start_new_thread = counted
    counter = CountBytecodes(at)
    try:
        with counter:
            work()
        if again:
            time.sleep(_SENT_AGAIN_S)
    except KeyboardInterrupt:
        raised = True
    finally:
        _thread.start_new_thread = start_thread
    return raised, counter.where
