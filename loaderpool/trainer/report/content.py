"""What a report tells, as plain numbers, texts, lists and dicts: what is on the page, and the JSON inside it."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from loaderpool.memory.call_times import CallTimes
from loaderpool.system import clock
from loaderpool.trainer.epochs.statistics import Statistics
from loaderpool.trainer.explain.explanation import Explanation, slow_items
from loaderpool.trainer.explain.headspace import Headspace
from loaderpool.trainer.explain.looks import Look
from loaderpool.trainer.report.environment import environment
from loaderpool.trainer.report.timeline import moments, worker_shares

_FORMAT_VERSION = 1  # of the JSON; raised when a key changes its meaning or goes away


def report_content(
    explanation: Explanation,
    headspace: Headspace,
    statistics: Statistics,
    calls: CallTimes,
    calls_of: str,
    looks: Sequence[Look],
    settings: Mapping[str, str],
) -> dict[str, Any]:
    """Return all that a report tells.

    Args:
        explanation: of all the time that looks are of.
        headspace: of the same time.
        statistics: of this moment.
        calls: how long calls took, in buckets.
        calls_of: what a call makes: a "sample", or a "batch".
        looks: that are kept, the latest last, at least one.
        settings: of the loader, by name.
    """
    return {
        "format": _FORMAT_VERSION,
        "made": datetime.datetime.fromtimestamp(clock.wall_s(), datetime.timezone.utc).isoformat(timespec="seconds"),
        "headline": explanation.headline,
        "explanation": explanation.to_dict(),
        "headspace": {
            **dataclasses.asdict(headspace),
            "bound_s": headspace.bound_s,
            "speedup": headspace.speedup,
            "text": str(headspace),
        },
        "settings": dict(settings),
        "environment": environment(),
        "timeline": [dataclasses.asdict(each) for each in moments(looks)],
        "workers": [dataclasses.asdict(each) for each in worker_shares(looks)],
        "calls": {
            "of": calls_of,
            "buckets": [
                {"below_s": (1 << bucket) / 1e9, "calls": count} for bucket, count in enumerate(calls.buckets) if count
            ],
            "slowest": [{**dataclasses.asdict(each), "name": each.name} for each in slow_items(calls)],
        },
        "statistics": dataclasses.asdict(statistics),
    }
