"""loaderpool, as its README has it: the function as it is, `out` named where the function can write into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import loaderpool as lp
from bench_peers.work import Array, Work
from bench_peers.works import WORKS, scale_into

FACTS: dict[str, float] = {}


def scale(item: int, out: Array | None) -> Array | None:
    """The wide work's sample, into the slot; at the first call, which finds the form, there is none."""
    if out is None:
        return WORKS["wide"].fn(item)
    scale_into(item, out)
    return None


def loader(work: Work, workers: int, **settings: Any) -> lp.Loader:
    fn = scale if work.write is not None else work.fn
    if work.name == "threads":
        settings["worker_options"] = lp.WorkerOptions(threads=16)
    return lp.Loader(range(work.items), fn, batch_size=work.batch_size, workers=workers, **settings)


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
