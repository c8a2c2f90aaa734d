"""Ctrl-C is heard wherever the tests run; and one at a chosen bytecode of loaderpool's code, again and again.

Python raises KeyboardInterrupt between bytecodes. So a trace function that sends SIGINT when the n-th bytecode of our
modules is about to run, for each n, tries all places at which a real one can come, and some at which none can.
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
# A Ctrl-C that came in a finalizer has been sent again by then, however busy the machine is.
_SENT_AGAIN_S = 0.5


def hear_ctrl_c() -> None:
    """SIGINT raises KeyboardInterrupt in this process and ends its children, as it does in a terminal.

    Under nohup, or with a shell's `&`, it is ignored from the start, and children inherit that. No child inherits a
    handler: it begins with the default.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class CountBytecodes:
    """Counts our bytecodes that the main thread runs, and sends SIGINT before one of them.

    Args:
        at: which one; 0: only count.
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
        # Without a line are the bytecodes with which a handler passes an exception on. No signal is ever looked for
        # there, and what is raised there nevertheless leaves CPython 3.11 with one reference to the other one too many.
        if event == "opcode" and frame.f_lineno is not None:
            self.count += 1
            if self.count == self.at:
                self.where = (
                    f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                )
                signal.raise_signal(signal.SIGINT)
        return self._step


def interrupted_at(at: int, work: Callable[[], object]) -> tuple[bool, str]:
    """Run it with a Ctrl-C before our n-th bytecode: whether that was raised, and where."""
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
