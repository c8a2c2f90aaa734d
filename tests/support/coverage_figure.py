"""Print the line coverage of the quick tests: `LOADERPOOL_COVERAGE=1 scripts/test --fast`.

Coverage is recorded in the test processes, during imports and the quick tests of `tests/unit` and
`tests/property`. Other tests mostly run code in child processes, so they are not measured, and not
slowed down. The result never fails a run.

`tests/conftest.py` imports this module before anything that imports the package.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_MEASURED = ("tests/unit/", "tests/property/")
_KEY = "measured lines"  # key in the output of a pytest-xdist process


class CoverageFigure:
    """Pytest plugin that measures this process, and adds the lines that other processes send."""

    def __init__(self, coverage: Any) -> None:
        self._coverage = coverage
        coverage.start()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self._coverage.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if not item.nodeid.startswith(_MEASURED) or item.get_closest_marker("slow"):
            return (yield)
        self._coverage.start()
        try:
            return (yield)
        finally:
            self._coverage.stop()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the lines of a process of pytest-xdist to the process that prints the figure."""
        if hasattr(session.config, "workeroutput"):
            data = self._coverage.get_data()
            lines = {file: data.lines(file) for file in data.measured_files()}
            session.config.workeroutput[_KEY] = lines

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        lines = getattr(node, "workeroutput", {}).get(_KEY, {})
        self._coverage.get_data().add_lines(lines)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        try:
            percent = self._coverage.report(file=io.StringIO())
        except Exception as error:  # a missing figure must not fail the run
            terminalreporter.write_line(f"coverage: not measured: {error}")
        else:
            terminalreporter.write_line(
                f"coverage: {percent:.1f} % of the package's lines, by the quick tests of "
                f"{' and '.join(_MEASURED)} in their own process (for information)"
            )


def _begin() -> CoverageFigure | None:
    if not os.environ.get("LOADERPOOL_COVERAGE"):
        return None
    try:
        from coverage import Coverage
    except ModuleNotFoundError:
        return None
    package = Path(__file__).parents[2] / "loaderpool"
    measured = Coverage(data_file=None, config_file=False, source=[str(package)])
    # Some tests set their own trace function, and many fork. Both would cause warnings.
    kinds = ["trace-changed", "no-data-collected", "module-not-measured"]
    measured.set_option("run:disable_warnings", kinds)
    return CoverageFigure(measured)


FIGURE = _begin()
