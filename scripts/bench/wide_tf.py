"""How near to the speed of memory do large batches come through `tf.data`?

Work: that of `wide`, read by `for batch in loader.as_dataset()`.
Baseline: the two bare processes of `wide`.
Bar: at least 0.7 of them, with `out`.
Verified: all numbers of the first batches, and the first and last number of every batch that was timed.
Command: scripts/bench/run wide_tf

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    wide_tf     bare               720 batches/s [668 .. 730]
    wide_tf     out                511 batches/s [494 .. 537]       0.71 x bare (best 0.74; bar ≥ 0.7)
    wide_tf     return             524 batches/s [506 .. 535]
"""

from __future__ import annotations

from bench.rated import limit, loader
from benchlib.model import Bar, Figure, Question

QUESTION = Question(
    name="wide_tf",
    figures=(
        Figure("bare", "batches/s", "two bare processes into reused buffers"),
        Figure("out", "batches/s", "38.5 MB batches through tf.data, fn writes into out, 2 workers"),
        Figure("return", "batches/s", "38.5 MB batches through tf.data, fn returns an array, 2 workers"),
    ),
    contestants={
        "out": loader("out", "wide", "tf"),
        "bare": limit("bare", "rows", "wide"),
        "return": loader("return", "wide_return", "tf"),
    },
    bars=(Bar("out", "bare", at_least=0.7),),
    rounds=3,
    seconds=1.5,
)
