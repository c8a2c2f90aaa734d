"""What the kernel counts of a process, where it can be read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from loaderpool.system import capacity


def test_cpu_time_of_a_process_is_what_its_own_clock_says() -> None:
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    before = time.process_time()
    told = capacity.process_cpu_s(os.getpid())
    assert before <= told <= time.process_time()


def test_what_storage_read_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    assert capacity.disk_read_bytes(os.getpid()) >= int(told["read_bytes"])
    text = "rchar: 6976\nwchar: 5\nsyscr: 10\nsyscw: 0\nread_bytes: 8192\nwrite_bytes: 7\ncancelled_write_bytes: 0\n"
    monkeypatch.setattr(capacity, "read_file", lambda path: text)
    assert capacity.disk_read_bytes(17) == 8192
