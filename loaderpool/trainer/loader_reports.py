"""`LoaderReports`: what a loader tells about itself, in numbers and in words."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from loaderpool.errors import ArgumentError
from loaderpool.settings.checks import read_path, read_seconds
from loaderpool.system.process import why_no_file, write_whole
from loaderpool.trainer.loader_core import LoaderCore

if TYPE_CHECKING:
    from loaderpool.trainer.epochs.statistics import Statistics
    from loaderpool.trainer.explain.explanation import Explanation


class LoaderReports:
    """Methods that report what a loader does. They change nothing."""

    _core: LoaderCore

    def explain(self, seconds: float | None = 60.0) -> Explanation:
        """Explain why training waits for data: the bottleneck, the evidence, and one change to try.

        Args:
            seconds: Seconds of training to analyze; `None`: about two minutes. Default: 60.
        """
        from loaderpool.trainer.explain.explanation import explain

        wanted_s = read_seconds("seconds", seconds)
        return explain(self._core.observer.observed(float("inf") if wanted_s is None else wanted_s))

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write everything known about the loader to one HTML file, without data or paths. Works after `close()`, too.

        Args:
            path: File to write, replaced if it exists; `OSError` if that fails. Its charts need matplotlib.
        """
        from loaderpool.trainer.report import document, loader_settings, report_content

        file = read_path("path", path)
        if problem := why_no_file(file, "report.html"):
            raise ArgumentError(f"path: {problem}")
        core = self._core
        settings = loader_settings(core.arguments, core.config, core.plan)
        content = report_content(core.observer.latest(), core.observer.calls(), self.statistics(), settings)
        write_whole(file, document(content).encode())

    def trace(self, path: str | os.PathLike[str], seconds: float | None = 30.0) -> None:
        """Write a timeline of the workers and the training, for https://ui.perfetto.dev.

        Args:
            path: File to write, `.json` or `.json.gz`, replaced if it exists; `OSError` if that fails.
            seconds: Seconds to look back; `None`: as far as recorded. Default: 30.

        Raises:
            ClosedError: If the loader is closed.
        """
        from loaderpool.trainer.tracing import check_trace_path, chrome_trace, write_trace

        wanted_s = read_seconds("seconds", seconds)
        file = read_path("path", path)
        if problem := check_trace_path(file):
            raise ArgumentError(f"path: {problem}")
        write_trace(file, chrome_trace(self._core.observer.recording(), wanted_s).text)

    def statistics(self) -> Statistics:
        """Return the counts since the loader was made."""
        from loaderpool.trainer.epochs.statistics import take_statistics

        core = self._core
        return take_statistics(core.tracker, core.engine, core.observer)
