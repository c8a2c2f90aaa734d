"""What the kernel counts of a process, where it can be read."""

from __future__ import annotations

import os
import time

from loaderpool.system import capacity


def test_cpu_time_of_a_process_is_what_its_own_clock_says() -> None:
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    before = time.process_time()
    told = capacity.process_cpu_s(os.getpid())
    assert before <= told <= time.process_time()
