"""A round of the storm: one loader, some passes, deaths all the while; every batch is compared with the twin's."""

from __future__ import annotations

import gc
import os
import random
import tempfile
import time
import traceback

import loaderpool as lp
from tests.support.processes import descendants, describe, wait_gone

from .companion import Companion
from .consumer import Consumer
from .killer import AnyKiller, Killer
from .rounds import Result, Round
from .shapes import Faults
from .streams import Twin
from .succession import Succession
from .watchdog import watched

__all__ = ["run_round", "take_passes"]

_PASSES = 2  # at least, so that an edge between epochs is met
_GONE_S = 10.0  # after close


def run_round(this: Round, deadline_s: float, stop_at_s: float = float("inf")) -> Result:
    """Storm one loader and its successors until all kills are spent.

    Args:
        this: what to do.
        deadline_s: of each pass; past it the watchdog ends this process.
        stop_at_s: no pass is begun after this, by the monotonic clock.
    """
    result = Result(this)
    started = time.monotonic()
    draw = random.Random(this.draws)
    what = f"round {this.number} ({this.shape.name}, {'' if this.is_ordered else 'un'}ordered, {this.workers} workers)"
    killer = Killer(this.budget, random.Random(draw.random()))
    with tempfile.TemporaryDirectory(prefix="loaderpool-stress-") as folder:
        faults = Faults(folder, os.getpid(), this.shape.faults_one_in)
        seed = draw.randrange(2**31)
        pool = lp.Pool(this.workers, restarts=None) if this.has_companion else None
        loaders = Succession(this, faults, seed, pool, killer, random.Random(draw.random()), result)
        companion = None if pool is None else Companion(pool, faults, seed)
        twin = Twin(this.shape, faults, seed)
        consumer = Consumer(loaders, twin, this, killer, random.Random(draw.random()), result, companion)
        killer.start()
        try:
            take_passes(consumer, killer, result, what, deadline_s, stop_at_s)
        except Exception:
            result.mismatches.append(f"pass {result.passes} raised\n{traceback.format_exc()}")
        finally:
            killer.stop()
        with watched(deadline_s, f"{what}, its end"):
            before_close = descendants(os.getpid())
            consumer.end()
            loaders.close()
            if pool is not None:
                pool.close()
            consumer.check_held("after close()")
            left = wait_gone(before_close, _GONE_S)
            result.mismatches += [f"left behind: {describe(pid)}" for pid in left]
        result.counts = killer.counts
        result.faults = faults.met
    del consumer, loaders, companion, pool
    gc.collect()
    result.seconds = time.monotonic() - started
    return result


def take_passes(
    consumer: Consumer,
    killer: AnyKiller,
    result: Result,
    what: str,
    deadline_s: float,
    stop_at_s: float = float("inf"),
) -> None:
    """Take passes until the killer is done, or something differs.

    Args:
        consumer: takes them.
        killer: at work.
        result: of the round.
        what: the round, for people.
        deadline_s: of each pass; past it the watchdog ends this process.
        stop_at_s: no pass is begun after this, by the monotonic clock.
    """
    while True:
        with watched(deadline_s, f"{what}, pass {result.passes}"):
            consumer.take_pass()
        is_late = time.monotonic() >= stop_at_s
        if result.mismatches or is_late or (result.passes >= _PASSES and killer.is_done):
            return
