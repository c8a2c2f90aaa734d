"""How long another process has been stopped (SIGSTOP; rule 12, docs/explanation/rules.md)."""

from __future__ import annotations

from loaderpool.system import clock, fault_points

# A process that is stopped for so long is ended. Shorter would end one that is looked at with a debugger for a moment;
# longer is a longer wait for what it was to do.
_LONGEST_S = 5.0
_LOOKS = 5


class StopWatch:
    """Sums up over looks, of which there is one each `look_ms`, how long a process has been stopped.

    A gap in our own time (Ctrl-Z stops us, too; a suspended machine) counts as no more than two looks.
    """

    def __init__(self) -> None:
        self._longest_ns = int(fault_points.setting("stopped_s", _LONGEST_S) * 1e9)
        self.look_ms = max(1, self._longest_ns // (_LOOKS * 1_000_000))
        self.runs()

    def runs(self) -> None:
        """Note that the process is not stopped now."""
        self._looked_ns, self._stopped_ns = clock.monotonic_ns(), 0

    def is_too_long(self) -> bool:
        """Note that the process is stopped now; returns whether it is to be ended for it."""
        now = clock.monotonic_ns()
        self._stopped_ns += min(now - self._looked_ns, 2_000_000 * self.look_ms)
        self._looked_ns = now
        return self._stopped_ns >= self._longest_ns
