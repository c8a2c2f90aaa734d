"""How much faster than `from_generator` do tiny batches come out of `tf.data`?

Work: that of `tiny`, read by `for batch in loader.as_dataset()`.
Baseline: a `from_generator` that computes nothing: it yields one ready-made batch again and again, 64-byte aligned, so
that TensorFlow does not even copy it; once with `prefetch` and once without, and the faster one counts. It is a process
of its own in each round, as it has two speeds. Beside it the ceiling: TensorFlow alone, repeating one tensor in C++.
Bar: at least 3 times its batches a second.
Verified: all numbers of the first 300 batches, and those of every 256th batch that was timed.
Command: scripts/bench/run tiny_tf

Last result
(2026-11-23, 2 x AMD EPYC, python 3.11.7, numpy 2.4.6, tensorflow-cpu 2.21.0):

    tiny_tf     from_generator  10,847 batches/s [10,494 .. 11,573]
    tiny_tf     ceiling         46,255 batches/s [42,978 .. 47,167]
    tiny_tf     as_dataset      38,211 batches/s [36,904 .. 38,568]  3.52 x from_generator (best 3.33; bar ≥ 3)
"""

from __future__ import annotations

from bench.rated import limit, loader
from benchlib.model import Bar, Figure, Question

QUESTION = Question(
    name="tiny_tf",
    figures=(
        Figure("from_generator", "batches/s", "from_generator of one ready-made batch"),
        Figure("ceiling", "batches/s", "TensorFlow's own iteration of one tensor"),
        Figure("as_dataset", "batches/s", "32 samples of 16 float32 through tf.data, 2 workers"),
    ),
    contestants={
        "from_generator": limit("from_generator", "from_generator", "tiny32"),
        "ceiling": limit("ceiling", "from_tensors", "tiny32"),
        "as_dataset": loader("as_dataset", "tiny32", "tf"),
    },
    bars=(Bar("as_dataset", "from_generator", at_least=3.0),),
    rounds=3,
    seconds=2.0,
)
