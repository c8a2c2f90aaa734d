"""Do many workers that mostly wait (a slow disk, a web server) all wait at the same time?

Work: `time.sleep` of 20 ms a sample, in batches of 16, with 32 workers on however few cores there are; and in batches
of 32 and of 8 with 2 workers that have 16 threads each.
Baseline: the ideal, 32 / 0.02 s = 1,600 samples a second; 32 bare processes show what the machine's clock leaves of it.
Bar: at least 0.95 of the ideal, once running, with 32 workers, and with threads in batches of 32.
Verified: every number of every batch.
Command: scripts/bench/run blocking_io

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    blocking_io ideal            1,600 samples/s [1,600 .. 1,600]
    blocking_io bare             1,587 samples/s [1,585 .. 1,587]
    blocking_io loader           1,587 samples/s [1,585 .. 1,587]   0.99 x ideal (best 0.99; bar ≥ 0.95)
    blocking_io threads          1,586 samples/s [1,584 .. 1,586]   0.99 x ideal (best 0.99; bar ≥ 0.95)
    blocking_io threads_small    1,589 samples/s [1,586 .. 1,595]   0.99 x ideal (best 1.00; bar ≥ 0.9)
"""

from __future__ import annotations

from bench.rated import limit, loader
from benchlib.model import Bar, Figure, Question

QUESTION = Question(
    name="blocking_io",
    figures=(
        Figure("ideal", "samples/s", "the ideal"),
        Figure("bare", "samples/s", "32 bare processes"),
        Figure("loader", "samples/s", "20 ms of waiting a sample, 32 workers"),
        Figure("threads", "samples/s", "the same, 2 workers with 16 threads each, batches of 32"),
        Figure("threads_small", "samples/s", "the same in batches of 8"),
    ),
    contestants={
        "ideal": limit("ideal", "ideal", "io32", counts_samples=True),
        "bare": limit("bare", "bare", "io32", counts_samples=True),
        "loader": loader("loader", "io32", counts_samples=True),
        "threads": loader("threads", "threads32", counts_samples=True),
        "threads_small": loader("threads_small", "threads8", counts_samples=True),
    },
    bars=(
        Bar("loader", "ideal", at_least=0.95),
        Bar("threads", "ideal", at_least=0.95),
        Bar("threads_small", "ideal", at_least=0.9),
    ),
    rounds=3,
    seconds=3.2,
    warm_s=1.5,
)
