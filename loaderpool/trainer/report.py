"""One HTML file of what a loader knows of itself, for others: why training waits, settings, the last minutes."""

from __future__ import annotations

import dataclasses
import datetime
import html
import itertools
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from loaderpool.cache.setting import as_cache
from loaderpool.config import LoaderConfig
from loaderpool.errors import counted, readable_bytes, readable_number, readable_s
from loaderpool.plan.order import Plan
from loaderpool.system import capacity, clock
from loaderpool.trainer.explain.explanation import explain
from loaderpool.trainer.explain.window import Snapshot, window_of
from loaderpool.trainer.statistics import Statistics

_LIBRARIES = ("loaderpool", "numpy", "cloudpickle", "tensorflow", "keras", "torch", "jax", "ray")
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>loaderpool report</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
th,td{{text-align:left;vertical-align:top;padding-right:1rem}}</style></head><body>
<h1>loaderpool report</h1>
{explanation}
<h2>The loader</h2>
{settings}
<h2>Where it runs</h2>
{environment}
<h2>Steps, the latest first</h2>
{timeline}
<p>All other data is in this page as JSON, in the element <code>loaderpool-report</code>.</p>
<script type="application/json" id="loaderpool-report">{data}</script></body></html>
"""


def document(snapshots: Sequence[Snapshot], statistics: Statistics, settings: Mapping[str, str]) -> str:
    """Return a report as a page."""
    explanation = explain(window_of(snapshots, float("inf")))
    environment, timeline = _environment(), list(_timeline(snapshots))
    content = {
        "format": 3,  # raised when a key changes its meaning or goes away
        "explanation": {"headline": explanation.headline, **explanation.to_dict()},
        "settings": dict(settings),
        "environment": environment,
        "timeline": timeline,
        "statistics": dataclasses.asdict(statistics),
    }
    return _PAGE.format(
        explanation=explanation._repr_html_(),
        settings=_table(settings.items()),
        environment=_table(environment.items()),
        timeline=_table(map(_shown, reversed(timeline))),
        # No text in it can end the element that it stands in.
        data=json.dumps(content, separators=(",", ":"), default=str).replace("<", "\\u003c"),
    )


def _table(rows: Iterable[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{html.escape(text)}</td>" for text in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _timeline(snapshots: Sequence[Snapshot]) -> Iterator[dict[str, float]]:
    """Yield what was between each two snapshots in which steps were taken."""
    for first, last in itertools.pairwise(snapshots):
        new = last.since(first)
        if new.steps > 0 and new.seconds > 0:
            yield {
                "ago_s": (snapshots[-1].now_ns - last.now_ns) / 1e9,  # that it ended, before the latest one
                "steps": new.steps,
                "step_s": new.step_s,
                "wait_share": new.wait_share,
                "samples_per_s": new.samples_per_s,
                "workers": last.workers,
            }


def _shown(part: Mapping[str, float]) -> tuple[str, ...]:
    bar = "█" * round(20 * part["wait_share"])
    return (
        f"{part['ago_s']:.0f} s ago",
        f"{counted(part['steps'], 'step')} of {readable_s(part['step_s'])}",
        f"{readable_number(part['samples_per_s'])} samples/s",
        counted(part["workers"], "worker"),
        f"waited {part['wait_share']:.0%} {bar}",
    )


def _environment() -> dict[str, str]:
    """Return versions, and what the machine grants; no path, name of a user or name of a machine is in it."""
    versions = {each: str(getattr(sys.modules[each], "__version__", "?")) for each in _LIBRARIES if each in sys.modules}
    return {
        "written": f"{datetime.datetime.fromtimestamp(clock.wall_s(), datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        **versions,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPUs": f"{capacity.usable_cpu_count()} of {os.cpu_count()}; cgroup: {capacity.cgroup_cpu_quota() or 'none'}",
        "memory available": readable_bytes(capacity.available_memory_bytes()),
    }


def loader_settings(arguments: Mapping[str, Any], config: LoaderConfig, plan: Plan) -> dict[str, str]:
    """Return each setting as a text: functions and objects by their names and classes, and nothing of the data."""
    workers, cache = arguments["workers"], as_cache(arguments["cache"])
    told: dict[str, Any] = {
        "source": _name(type(arguments["source"])),
        "items": "unknown" if plan.is_open else "endless" if plan.is_endless else f"{plan.size:,}",
        **{
            name: _name(found)
            for name in ("fn", "batch_fn", "augment", "setup")
            if (found := arguments[name]) is not None
        },
        "workers": workers if isinstance(workers, (int, str, tuple)) else _name(type(workers)),
        "element_spec": arguments["element_spec"],
        "cache": None if cache is None else "in memory" if cache.in_memory else "on disk",
        **{name: value for name, value in config._asdict().items() if name != "workers"},
    }
    texts = {name: f"{value}" for name, value in told.items() if value is not None}
    return {name: text if len(text) <= 200 else f"{text[:200]} …" for name, text in texts.items()}


def _name(function: Any) -> str:
    """Return what a function or class is called; of an object that is called, its class."""
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if not isinstance(name, str):
        return _name(type(function))
    return f"{module}.{name}".removeprefix("builtins.") if isinstance(module, str) else name
