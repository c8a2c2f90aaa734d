"""`Loader.report()`: one file with all measurements, of loaders that run, are closed, or have not
started.
"""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.trainer import counters
from tests.support.samples import slow_vector


def take(loader: lp.Loader, seconds: float) -> None:
    end = time.monotonic() + seconds
    for _ in loader:
        if time.monotonic() > end:
            return


def inside(path: Path) -> dict[str, Any]:
    (text,) = re.findall(
        r'<script type="application/json" id="loaderpool-report">(.*)</script>',
        path.read_text("utf-8"),
    )
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_loader_that_runs_tells_what_it_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_MARK_NS", 400_000_000)  # five times as many snapshots as usual
    path = tmp_path / "report.html"
    with lp.Loader(range(10**6), slow_vector, batch_size=8, workers=2) as loader:
        take(loader, 1.5)
        loader.report(str(path))
        running = inside(path)
        told = loader.statistics()
    assert running["settings"]["function"].startswith("tests.support.samples.slow_vector ")
    assert running["environment"]["loaderpool"] == lp.__version__
    assert running["environment"]["numpy"] == np.__version__
    assert all(each["samples"] > 10 for each in running["statistics"]["workers"])
    assert running["statistics"]["calls"]["timed"] > 5
    assert running["statistics"]["batches"] == told.batches
    assert running["explanation"]["verdict"] == loader.explain(None).verdict.name
    assert all(f">worker {number}</text>" in path.read_text("utf-8") for number in range(2))
    loader.report(path)
    assert "Call report() before close()" in path.read_text("utf-8")
    closed = inside(path)
    assert closed["statistics"]["steps"]["count"] == told.steps.count


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        (3, lp.ArgumentError, "path must be the path of a file, got 3 of type int"),
        (b"x.html", lp.ArgumentError, "path must be the path of a file, got b'x.html'"),
        ("", lp.ArgumentError, "path must be the path of a file, got ''"),
        ("none/x.html", OSError, "No such file or directory"),
    ],
)
def test_where_no_file_can_be_it_is_told(path: Any, error: type[Exception], words: str) -> None:
    with (
        lp.Loader(range(8), slow_vector, batch_size=4, workers=0) as loader,
        pytest.raises(error, match=words),
    ):
        loader.report(path)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_has_done_nothing_has_a_report(tmp_path: Path, workers: int) -> None:
    with lp.Loader(range(64), slow_vector, batch_size=8, workers=workers) as loader:
        loader.report(tmp_path / "before.html")
    loader.report(tmp_path / "behind.html")
    assert inside(tmp_path / "before.html")["explanation"]["headline"].startswith("WARM-UP")
    assert "Nothing has been recorded yet" in (tmp_path / "before.html").read_text("utf-8")
    assert inside(tmp_path / "behind.html")["statistics"]["batches"] == 0


def test_it_may_be_written_while_another_thread_takes_batches(tmp_path: Path) -> None:
    with lp.Loader(range(800), slow_vector, batch_size=8, workers=2) as loader:
        taken: list[int] = []
        thread = threading.Thread(target=lambda: taken.extend(len(batch) for batch in loader))
        thread.start()
        for _ in range(5):
            loader.report(tmp_path / "report.html")
        thread.join()
    assert sum(taken) == 800
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    assert inside(tmp_path / "report.html")["format"] == 4
