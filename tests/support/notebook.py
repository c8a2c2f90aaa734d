"""A real Jupyter kernel that runs cells, interrupts them like the stop button, and returns their
errors. It never hangs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]
_START_S = 60.0
_CELL_S = 60.0  # limit for one cell; TensorFlow's import is in one
_POLL_S = 0.2
_PATIENCE_S = 15.0  # time before the stop button is pressed again


class Cell(NamedTuple):
    """Result of a cell."""

    printed: str
    error: str  # name of the exception; empty: there was none
    text: str  # text of the exception
    presses: int  # number of times that the stop button was pressed


class Notebook:
    """A running kernel."""

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager, self._client = manager, client

    def run(self, code: str, interrupt_after_s: float | None = None) -> Cell:
        """Run a cell.

        Args:
            code: code of the cell.
            interrupt_after_s: time from the output GO to the press of the stop button, which is repeated if
                nothing happens; None: it is not pressed.

        Raises:
            AssertionError: it did not end within a minute.
        """
        request = self._client.execute(code)
        printed, error, text, presses = "", "", "", 0
        deadline_s = time.monotonic() + _CELL_S
        press_s = deadline_s
        while time.monotonic() < deadline_s:
            if interrupt_after_s is not None and "GO" in printed:
                time.sleep(interrupt_after_s)
                self._manager.interrupt_kernel()
                interrupt_after_s, presses = None, 1
                press_s = time.monotonic() + _PATIENCE_S
            if presses and time.monotonic() > press_s:
                self._manager.interrupt_kernel()
                presses, press_s = presses + 1, time.monotonic() + _PATIENCE_S
            try:
                message = self._client.get_iopub_msg(timeout=_POLL_S)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "error":
                error, text = content["ename"], "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return Cell(printed, error, text, presses)
        raise AssertionError(f"the cell did not end: {code}\nit has printed: {printed}")


@contextlib.contextmanager
def notebook() -> Iterator[Notebook]:
    """Context with a kernel of this interpreter. Skips the test if Jupyter is missing."""
    for name in ("ipykernel", "jupyter_client"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'loaderpool[test]'")
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import KernelManager

    manager: Any = KernelManager()
    manager._kernel_spec = KernelSpec(
        argv=[
            sys.executable,
            "-Xfrozen_modules=off",
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
        ],
        language="python",
    )
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["KERAS_BACKEND"] = "tensorflow"
    manager.start_kernel(env=environment)
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=_START_S)
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
