"""loaderpool, as its README has it: the function as it is, `out` named where the function can write into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import loaderpool as lp
from benchlib.images import scale_into
from benchlib.work import Work

FACTS: dict[str, float] = {}


def loader(work: Work, workers: int | lp.Pool | lp.RayPool) -> lp.Loader:
    fn = scale_into if work.write is not None else work.fn
    options = lp.WorkerOptions(threads=work.threads)
    return lp.Loader(range(work.items), fn, batch_size=work.batch_size, workers=workers, worker_options=options)


def note_facts(loader: lp.Loader) -> None:
    statistics = loader.statistics()
    FACTS.update(slots=statistics.slots, copied=statistics.batches_copied)


@contextmanager
def own(work: Work, workers: int) -> Iterator[Any]:
    with loader(work, workers) as batches:
        yield batches
        note_facts(batches)


@contextmanager
def tf(work: Work, workers: int) -> Iterator[Any]:
    with loader(work, workers) as batches:
        yield batches.as_dataset()
        note_facts(batches)


@contextmanager
def tensors(work: Work, workers: int) -> Iterator[Any]:
    with loader(work, workers) as batches:
        yield batches.tensors()
        note_facts(batches)
