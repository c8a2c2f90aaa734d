"""What does the engine cost by itself? Samples so small that making them is nothing, read as NumPy batches.

Work: one call of about 1 us a sample of 16 float32, in batches of 32, with two workers.
Baseline: two bare processes that only run the same function; they neither stack the samples nor hand them over.
Bar: at least 0.4 of them.
Verified: the first and the last number of every batch, and all numbers of the first 300 batches.
Command: scripts/bench/run tiny

Last result
(2026-11-22, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    tiny        bare            51,630 batches/s [51,607 .. 52,162]
    tiny        loader          34,897 batches/s [34,137 .. 35,173]  0.68 x bare (best 0.67; bar ≥ 0.4)
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
