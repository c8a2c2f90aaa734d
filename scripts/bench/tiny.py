"""What does the engine cost by itself? Samples so small that making them is nothing, read as NumPy batches.

Work: one call of about 1 us a sample of 16 float32, in batches of 32, with two workers.
Baseline: two bare processes that only run the same function; they neither stack the samples nor hand them over.
Bar: at least 0.4 of them.
Verified: the first and the last number of every batch, and all numbers of the first 300 batches.
Command: scripts/bench/run tiny

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    tiny        bare            81,844 batches/s [81,687 .. 82,891]
    tiny        loader          59,701 batches/s [58,794 .. 60,404]  0.73 x bare (best 0.73; bar ≥ 0.4)
"""

from __future__ import annotations

from bench.rated import limit, loader
from benchlib.model import Bar, Figure, Question

QUESTION = Question(
    name="tiny",
    figures=(
        Figure("bare", "batches/s", "two bare processes"),
        Figure("loader", "batches/s", "32 samples of 16 float32, 1 us a sample, 2 workers"),
    ),
    contestants={"loader": loader("loader", "tiny32"), "bare": limit("bare", "bare", "tiny32")},
    bars=(Bar("loader", "bare", at_least=0.4),),
    rounds=5,
    seconds=2.0,
)
