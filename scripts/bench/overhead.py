"""What does it cost that calls are timed, steps counted and tickets recorded, always, for explain() and trace?

Work: 5 ms of Python a sample, and JPEG files, with two workers; batches of 32 samples of 16 floats.
Baseline: the same loader with all of that taken out (`benchlib/uncounted`).
Bars: CPU time of trainer and workers for a batch, at most 1.005 times as much where functions work; of the trainer for
a tiny batch 0.3 us more, which is 1.15 times.
Verified: by the same loader in the other questions.
Command: scripts/bench/run overhead

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    overhead    cpu_off    114,821 us        [114,091 .. 119,120]
    overhead    cpu_on    115,758 us        [115,482 .. 116,859]  1.01 x cpu_off (best 1.01; bar ≤ 1.005) MISSED
    overhead    jpeg_off    49,867 us        [49,641 .. 50,033]
    overhead    jpeg_on    50,111 us        [49,974 .. 51,310]  1.00 x jpeg_off (best 1.01; bar ≤ 1.005)
    overhead    tiny_off    0.907 us        [0.87 .. 0.946]
    overhead    tiny_on    0.896 us        [0.851 .. 0.9]     0.99 x tiny_off (best 0.98; bar ≤ 1.15)
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchlib.fresh import print_result, run_fresh
from benchlib.images import render_images
from benchlib.model import Bar, Contestant, Figure, Measured, Question, Window, require

_UNCOUNTED = Path(__file__).resolve().parents[1] / "benchlib" / "uncounted"
_WORKS = {"cpu": "cpu", "jpeg": "jpeg", "tiny": "tiny32"}
_TURNS = 4


def _measured(work: str) -> Contestant:
    """Both by turns, in one run."""

    def contestant(window: Window) -> Measured:
        found: dict[str, list[float]] = {"off": [], "on": []}
        with tempfile.TemporaryDirectory() as folder:
            if work == "jpeg":
                render_images(Path(folder))
            for turn in range(_TURNS):
                for kind in found if turn % 2 else reversed(found):
                    found[kind].append(_cpu_us(work, kind, window))
        return Measured({f"{work}_{kind}": min(values) for kind, values in found.items()})

    return contestant


def _cpu_us(work: str, kind: str, window: Window) -> float:
    path = [str(_UNCOUNTED)] if kind == "off" else []
    given = os.environ.get("PYTHONPATH", "")
    here = str(Path(__file__).resolve().parents[1])
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [*path, here, str(Path(here).parent), given]))}
    command = [sys.executable, "-m", "bench.overhead", work, str(window.warm_s), str(window.seconds)]
    result = run_fresh(command, timeout_s=60 + 10 * window.seconds, name=f"{work} {kind}", environment=environment)
    require(result["is_counted"] == (kind == "on"), f"{kind}: counted: {result['is_counted']}")
    return float(result["cpu_us"])


def main() -> None:
    """Take batches of a work, and print the CPU time of one."""
    from benchlib.ours import loader
    from benchlib.works import WORKS

    work, warm_s, seconds = WORKS[_WORKS[sys.argv[1]]], float(sys.argv[2]), float(sys.argv[3])
    with loader(work, 2) as batches:

        def cpu_s() -> float:
            own_s = time.process_time()
            return own_s if work.is_tiny else own_s + sum(each.cpu_s for each in batches.statistics().workers)

        iterator = itertools.chain.from_iterable(itertools.repeat(batches))
        next(iterator)
        _take(iterator, warm_s)
        before_s = cpu_s()
        taken = _take(iterator, seconds)
        used_s = cpu_s() - before_s
        print_result({"cpu_us": 1e6 * used_s / taken, "is_counted": batches.statistics().steps.count > 0})


def _take(batches: Any, seconds: float) -> int:
    until_s, taken = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        next(batches)
        taken += 1
    return taken


QUESTION = Question(
    name="overhead",
    figures=tuple(
        Figure(f"{work}_{kind}", "us", f"{what}, {'all of it counted' if kind == 'with' else 'nothing counted'}")
        for work, what in {"cpu": "5 ms of Python a sample", "jpeg": "JPEG", "tiny": "tiny batches, trainer"}.items()
        for kind in ("off", "on")
    ),
    contestants={work: _measured(work) for work in _WORKS},
    bars=(
        Bar("cpu_on", "cpu_off", at_most=1.005),
        Bar("jpeg_on", "jpeg_off", at_most=1.005),
        Bar("tiny_on", "tiny_off", at_most=1.15),
    ),
    seconds=4.0,
)


if __name__ == "__main__":
    main()
