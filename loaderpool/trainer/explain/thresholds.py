"""From where on a number counts: the thresholds of verdicts, which `loaderpool tune` has in common with them."""

from __future__ import annotations

# Fewer steps are those of caches that fill and code that compiles. More, and a short training hears nothing.
LEAST_STEPS = 20
# Of the time: with less waiting there is nothing to gain that the next run would not hide by its noise.
WAITS_ABOVE = 0.05
# Two rates this close are the same: each worker costs memory, and CPU time that the training wants too. Smaller, noise
# decides; larger, throughput is given away.
TOLERANCE = 0.05
# Above this share of CPU time the function computes: the rest is what other processes take, not waiting of its own.
COMPUTES_ABOVE = 0.75
# Below this share it hardly computes at all, so that the threads of a worker do not take turns.
BLOCKS_BELOW = 0.25
# Of CPUs, of workers' time: the part from which on they are full. Higher, and the moments between two tickets, or what
# else a machine does, would pass for room; lower, and room would be taken for none.
FULL = 0.85
# Waiting for a CPU while some are used by others: below this it is the ordinary turn-taking of a few processes.
CONTESTED = 0.15
# From here on, CPU time per sample grew because of the other workers and not by chance.
SLOWED_DOWN = 1.25
# One core copies some GB a second, a machine some ten of them; a function touches each delivered byte several times.
HEAVY_BYTES_PER_S = 0.5e9
# A batch in less time costs about as much to hand over (some 20 µs to 100 µs) as to make.
CHEAP_BATCH_S = 300e-6
# One cause of several explains a wait if it has at least this part of it: no other can have more.
MOST_OF_IT = 0.5
# Of the waiting, where workers are idle: calls that were slow before the median was known are not counted, nor those
# that still run. Less, and causes that are not counted may have more.
SLOW_CALLS_EXPLAIN = 1 / 3
# A number of workers that was so much smaller should have been slower by far more than noise.
FEWER_BY = 1.2
# Steps that found data ready: a mean of fewer may be that of one hiccup.
LEAST_READY_STEPS = 5
# Workers that are given back leave so much of what is needed, or the waiting would come back with the next slow sample.
SPARE = 1.15
# Of the rate that feeds the step, so much is enough: what is missing is well below `WAITS_ABOVE`, and noise in times
# does not add a worker.
FEEDS = 0.98
# Batches are made no larger than so many times: with larger ones a training is another one.
MOST_TIMES_LARGER = 4
# More threads than that in a worker have not been measured; each holds a result, and a connection where it reads.
MOST_THREADS = 64
# A consumer has the batch that it works on, and tf.data or a device some more on their way. Who has more keeps them.
USUALLY_LENT = 4
# Of the steps: batches that are copied out now and then are no habit.
COPIED_OFTEN = 0.1
