"""Meta's SPDL: a pipeline whose one stage makes batches, in order.

- What holds the GIL runs in a `ProcessPoolExecutor`, what lets it go or waits in the pipeline's own threads: "Pipeline
  Parallelism" in https://facebookresearch.github.io/spdl/0.7.0/getting_started/parallelism.html.
- `output_order="input"`: as the others deliver. `concurrency` as many as workers, and twice as many with processes, so
  that none waits for its next task.
- `add_source(continuous=True)`, which keeps the pipeline running from epoch to epoch.
- Pillow lets the GIL go only in part: JPEG files were decoded 1.2 to 2 times as fast in processes.
(Docstrings of spdl 0.8: `PipelineBuilder.pipe`, `.add_source`, `.build`.)
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from spdl.pipeline import PipelineBuilder

from benchlib.work import Work
from benchlib.works import batch_at

SINK_BATCHES = 3


class Epochs:
    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline.get_iterator(timeout=60))


@contextmanager
def own(work: Work, workers: int) -> Iterator[Any]:
    make = functools.partial(batch_at, work.name)
    threads = 16 * workers if work.name == "threads" else workers
    with ExitStack() as stack:
        executor = None
        if not work.suits_threads:
            context = multiprocessing.get_context("forkserver")
            executor = stack.enter_context(ProcessPoolExecutor(workers, mp_context=context))
        builder = PipelineBuilder().add_source(range(work.batches), continuous=True)
        concurrency = threads if work.suits_threads else 2 * workers
        builder.pipe(make, executor=executor, concurrency=concurrency, output_order="input")
        pipeline = builder.add_sink(SINK_BATCHES).build(num_threads=threads)
        stack.enter_context(pipeline.auto_stop())
        yield Epochs(pipeline)
