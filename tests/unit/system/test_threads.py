"""Threads of this process: their ids, names, and the files whose code they run."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from loaderpool.system import machine

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel shows stacks in Linux's /proc alone"
)


@linux
def test_a_waiting_thread_has_the_files_of_its_code() -> None:
    begun, end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert begun.wait(10)
        assert thread.native_id in machine.thread_ids()
        names: list[str] = []
        while not names:  # empty while the thread runs
            names = [Path(file).name for file in machine.files_on_stack(thread.native_id)]
    finally:
        end.set()
        thread.join()
    assert any("python" in name for name in names)


def test_no_file_is_named_for_a_thread_that_is_gone() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert thread.native_id is not None
    assert machine.files_on_stack(thread.native_id) == []
