"""How busy other processes keep the machine's CPUs meanwhile: a ratio that they have spoilt shall say so itself."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

__all__ = ["BUSY_CPUS", "Others"]

# A desktop at rest stays below this; one other process that computes does not.
BUSY_CPUS = 0.25


class Others:
    """Counts the CPU time of all processes but this one and its descendants, from when this is made.

    Args:
        proc: the kernel's folder.
        pid: of this process.
        now_s: the clock.
    """

    def __init__(
        self, proc: Path = Path("/proc"), pid: int | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._proc, self._pid, self._now_s = proc, os.getpid() if pid is None else pid, now_s
        self._start_s, self._start = now_s(), self._others_ticks()

    def busy_cpus(self) -> float | None:
        """How many CPUs others kept busy on average; None where the kernel does not tell (it is no Linux).

        To be called while the descendants that have worked still live, or their parents have waited for them.
        """
        now = self._others_ticks()
        elapsed_s = self._now_s() - self._start_s
        if now is None or self._start is None or elapsed_s <= 0:
            return None
        return max(0.0, (now - self._start) / os.sysconf("SC_CLK_TCK") / elapsed_s)

    @property
    def cpus(self) -> int:
        """CPUs that the machine has."""
        return os.cpu_count() or 1

    def _others_ticks(self) -> int | None:
        try:
            words = (self._proc / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, words[:8])
        return user + nice + system + irq + softirq + steal - self._own_ticks()

    def _own_ticks(self) -> int:
        """CPU time of this process and its descendants, those included that have ended and were waited for."""
        ticks: dict[int, int] = {}
        children: dict[int, list[int]] = defaultdict(list)
        for folder in self._proc.iterdir():
            if not folder.name.isdigit():
                continue
            try:
                # The second field is the command's name in parentheses, in which anything may stand.
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:  # it has ended just now
                continue
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
            children[int(fields[1])].append(int(folder.name))
        total, waiting = 0, [self._pid]
        while waiting:
            pid = waiting.pop()
            total += ticks.get(pid, 0)
            waiting += children[pid]
        return total
