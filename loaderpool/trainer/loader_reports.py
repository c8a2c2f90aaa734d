"""`LoaderReports`: what a loader tells about itself, in numbers and in words."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from loaderpool.errors import ArgumentError
from loaderpool.settings.checks import read_path, read_seconds, whole_number
from loaderpool.settings.known_names import known_names_only
from loaderpool.system.whole_file import why_no_file
from loaderpool.trainer.loader_core import LoaderCore

if TYPE_CHECKING:
    from loaderpool.trainer.epochs.statistics import Statistics
    from loaderpool.trainer.explain.explanation import Explanation
    from loaderpool.trainer.explain.headspace import Headspace
    from loaderpool.trainer.explain.observed import Observed


class LoaderReports:
    """What can be asked of a loader beside batches; nothing here changes what it does."""

    _core: LoaderCore

    @known_names_only
    def explain(self, seconds: float | None = 60.0) -> Explanation:
        """Say why training waits for data, or that it does not: a verdict, its evidence, and one change to make.

        Only time in which batches are taken counts, and time between passes does not. Takes some milliseconds; may be
        called from any thread, also while a batch is waited for.

        Args:
            seconds: how far to look back; None: as far as is known, some two minutes.

        Raises:
            ArgumentError, ArgumentTypeError: it is no such number.
        """
        from loaderpool.trainer.explain.explanation import explain

        wanted_s = read_seconds("seconds", seconds)
        return explain(self._core.observer.observed(float("inf") if wanted_s is None else wanted_s))

    def headspace(self) -> Headspace:
        """Return how much shorter steps would be were data always ready: what is the most that data can bring?

        Steps that found data ready tell it, of the last minute, and a pause test, if there was one.
        """
        return self._headspace_in(self._core.observer.observed(60.0))

    def _headspace_in(self, observed: Observed) -> Headspace:
        from loaderpool.trainer.explain.headspace import headspace_of

        test = self._core.tracker.pause_test
        measured = (test.seconds, test.steps) if test is not None else ()
        return headspace_of(observed, *measured)

    @known_names_only
    def pause_test(self, steps: int = 16) -> None:
        """Have workers pause for some of the next steps, so that `headspace()` knows a step that nothing slows down.

        Before such steps the consumer waits until all slots are filled, up to 10 seconds; then it takes these batches
        while workers have nothing to do, and again until there were steps enough. Batches stay the same to the bit, in
        the same order, and training goes on with them: nothing is lost but the waiting. It is over by itself.

        Args:
            steps: that shall be measured, at least; each round takes at most as many as there are slots.

        Raises:
            ArgumentError: the loader runs in this process (workers=0), or batches are made on other machines: there
                are no workers here that could slow a step down. Or fewer than 1 step.
            ArgumentTypeError: no whole number.
        """
        self._core.begin_pause_test(whole_number("steps", steps, at_least=1))

    @known_names_only
    def report(self, path: str | os.PathLike[str]) -> None:
        """Write one HTML file of what is known of the loader: what `explain()` says, figures over time, statistics.

        It is for others, an issue say: below 500 kB, it needs no network, and its numbers are inside as JSON. It has
        settings, versions, names of functions and indices of slow items; no data, and no paths of files. Figures go
        back some two minutes. May be called from any thread, and behind `close()`.

        Args:
            path: of the file, which is replaced as a whole. Pictures in it need matplotlib.

        Raises:
            ArgumentError, ArgumentTypeError: it is no path, or a directory, or in one that does not exist.
            OSError: it cannot be written there.
        """
        from loaderpool.trainer.explain.explanation import explain
        from loaderpool.trainer.report.content import report_content
        from loaderpool.trainer.report.document import write_document
        from loaderpool.trainer.report.settings import loader_settings

        file = read_path("path", path)
        if problem := why_no_file(file, "report.html"):
            raise ArgumentError(f"path: {problem}")
        core = self._core
        observer = core.observer
        observed = observer.observed(float("inf"))
        explanation, headspace = explain(observed), self._headspace_in(observed)
        settings = loader_settings(core.arguments, core.config, core.plan)
        calls, calls_of, looks = observer.calls(), observer.about.calls_of, observer.looks()
        content = report_content(explanation, headspace, self.statistics(), calls, calls_of, looks, settings)
        write_document(file, content)

    @known_names_only
    def trace(self, path: str | os.PathLike[str], seconds: float | None = 30.0) -> None:
        """Write what happened in the last seconds as a trace: what each worker, each slot and the training was at.

        It is recorded all the time, whether a trace is wanted or not. https://ui.perfetto.dev shows the file, in which
        arrows lead from a slow sample, which has its source index, to the step that waited for it; `loaderpool trace
        merge` puts it beside the trace of a GPU. May be called from any thread, in passes and between them, while the
        loader is open. Takes some tenths of a second.

        Args:
            path: of the file, which is replaced; its name ends in .json, or in .json.gz and it is compressed.
            seconds: how far to look back; None: as far as is known, which is half a minute or more where a worker's
                batches take 8 ms each or longer.

        Raises:
            ArgumentError, ArgumentTypeError: it is no such number, or no such path.
            ClosedError: the loader was closed.
            OSError: the file cannot be written.
        """
        from loaderpool.trainer.tracing.chrome import chrome_trace
        from loaderpool.trainer.tracing.files import check_trace_path, write_trace

        wanted_s = read_seconds("seconds", seconds)
        file = read_path("path", path)
        if problem := check_trace_path(file):
            raise ArgumentError(f"path: {problem}")
        write_trace(file, chrome_trace(self._core.observer.recording(), wanted_s).text)

    def statistics(self) -> Statistics:
        """Return what was counted since the loader was made.

        Takes some 10 us for each worker; may be called from any thread. Why training waits is told by `explain()`.
        """
        from loaderpool.trainer.epochs.statistics import take_statistics

        core = self._core
        return take_statistics(core.tracker, core.engine, core.observer)
