"""How much of two cores is left for CPU-bound Python once loaderpool deals it out?

Work: about 5 ms of pure Python a sample, in batches of 32, with two workers.
Baseline: two bare processes that only run the same function, and hand nothing to anybody.
Bar: at least 0.97 of them.
Verified: every batch's first and last result against the closed form of the recurrence, all rows of the first batches.
Command: scripts/bench/run cpu_bound

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    cpu_bound   bare               579 samples/s [572 .. 590]
    cpu_bound   loader             545 samples/s [529 .. 549]       0.94 x bare (best 0.93; bar ≥ 0.97) MISSED
"""

from __future__ import annotations

from bench.rated import limit, loader
from benchlib.model import Bar, Figure, Question

QUESTION = Question(
    name="cpu_bound",
    figures=(
        Figure("bare", "samples/s", "two bare processes"),
        Figure("loader", "samples/s", "CPU-bound Python, 5 ms a sample, 2 workers"),
    ),
    contestants={
        "bare": limit("bare", "bare", "cpu", counts_samples=True),
        "loader": loader("loader", "cpu", counts_samples=True),
    },
    bars=(Bar("loader", "bare", at_least=0.97),),
    seconds=3.2,
    warm_s=0.8,
)
