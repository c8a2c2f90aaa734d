"""The one place that reads the time, so that tests can see every reading and clocks are never mixed."""

from __future__ import annotations

import time

monotonic_ns = time.monotonic_ns  # comparable between processes of one machine (CLOCK_MONOTONIC)
monotonic_s = time.monotonic
process_cpu_ns = time.process_time_ns
