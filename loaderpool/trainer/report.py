"""One HTML file of what a loader knows of itself, for others: an explanation, two pictures, and all of it as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import html
import io
import itertools
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loaderpool.cache.setting import as_cache
from loaderpool.config import LoaderConfig
from loaderpool.errors import readable_bytes, readable_s
from loaderpool.memory.call_times import CallTimes
from loaderpool.plan.order import Plan
from loaderpool.system import capacity, clock
from loaderpool.trainer.explain.explanation import explain, labelled, slow_items
from loaderpool.trainer.explain.window import Snapshot, window_of
from loaderpool.trainer.statistics import Statistics

_LIBRARIES = ("loaderpool", "numpy", "cloudpickle", "tensorflow", "keras", "torch", "jax", "ray")
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
th{text-align:left;vertical-align:top;padding-right:1rem;font-weight:600}svg{max-width:100%;height:auto;background:#fff}"""
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>loaderpool report</title><style>{style}</style></head><body>
<h1>{headline}</h1>
{explanation}
{pictures}
<h2>The loader</h2>
{settings}
<h2>Where it runs</h2>
{environment}
<p>All other data is in this page as JSON, in the element <code>loaderpool-report</code>.</p>
<script type="application/json" id="loaderpool-report">{data}</script></body></html>
"""


def report_content(
    snapshots: Sequence[Snapshot], calls: CallTimes, statistics: Statistics, settings: Mapping[str, str]
) -> dict[str, Any]:
    """Return all that a report tells, for JSON."""
    last, explanation = snapshots[-1], explain(window_of(snapshots, float("inf")))
    buckets = [{"below_s": (1 << place) / 1e9, "calls": count} for place, count in enumerate(calls.buckets) if count]
    slowest = [{**dataclasses.asdict(each), "name": each.name} for each in slow_items(calls)]
    looked_s = clock.wall_s() - (clock.monotonic_ns() - last.now_ns) / 1e9
    return {
        "format": 2,  # raised when a key changes its meaning or goes away
        "made": f"{datetime.datetime.fromtimestamp(clock.wall_s(), datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "headline": explanation.headline,
        "explanation": {**explanation.to_dict(), "lines": dict(labelled(explanation))},
        "settings": dict(settings),
        "environment": _environment(),
        "timeline": list(_timeline(snapshots)),
        "decisions": [{**dataclasses.asdict(each), "at_s": each.time_s - looked_s} for each in statistics.decisions],
        "calls": {"of": last.calls_of, "buckets": buckets, "slowest": slowest},
        "statistics": dataclasses.asdict(statistics),
    }


def document(content: Mapping[str, Any]) -> str:
    """Return a report's content as a page."""
    try:
        pictures = "\n".join(_pictures(content))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        pictures = "<p>Pictures need matplotlib: pip install 'loaderpool[cli]'.</p>"
    return _PAGE.format(
        style=_STYLE,
        headline=html.escape(content["headline"]),
        explanation=_table(content["explanation"]["lines"]),
        pictures=pictures,
        settings=_table(content["settings"]),
        environment=_table({"written": content["made"], **content["environment"]}),
        # No text in it can end the element that it stands in.
        data=json.dumps(content, separators=(",", ":"), default=str).replace("<", "\\u003c"),
    )


def _table(rows: Mapping[str, str]) -> str:
    cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>{''.join(cells)}</table>"


def _timeline(snapshots: Sequence[Snapshot]) -> Iterator[dict[str, float]]:
    """Yield what was between each two snapshots in which steps were taken; means are over its steps."""
    for first, last in itertools.pairwise(snapshots):
        new = last.since(first)
        if new.steps > 0 and new.seconds > 0:
            waiting_s = min(new.seconds, new.wait_s)
            yield {
                "begin_s": (first.now_ns - snapshots[-1].now_ns) / 1e9,  # before the latest one
                "end_s": (last.now_ns - snapshots[-1].now_ns) / 1e9,
                "steps": new.steps,
                "computing_s": (new.seconds - waiting_s) / new.steps,  # of a step: the consumer's own
                "waiting_s": waiting_s / new.steps,  # of a step: for data
                "samples": new.samples,
                "workers": last.workers,
            }


def _pictures(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield pictures as SVG: steps and waiting over time, and how long calls took."""
    import matplotlib.style  # which takes most of a second to import
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": "loaderpool"}]):
        for draw, has_news in ((_steps, content["timeline"]), (_calls, content["calls"]["buckets"])):
            if has_news:
                figure, file = Figure(figsize=(9, 3), layout="constrained"), io.StringIO()
                draw(figure.subplots(), content)
                figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
                yield f"<figure><svg{file.getvalue().partition('<svg')[2]}</figure>"


def _steps(axes: Any, content: Mapping[str, Any]) -> None:
    timeline = content["timeline"]
    edges = [edge for each in timeline for edge in (each["begin_s"], each["end_s"])]
    own = [1e3 * each["computing_s"] for each in timeline for _ in "be"]
    whole = [1e3 * (each["computing_s"] + each["waiting_s"]) for each in timeline for _ in "be"]
    axes.fill_between(edges, own, label="computing", linewidth=0)
    axes.fill_between(edges, own, whole, label="waiting for data", linewidth=0)
    for each in content["decisions"]:
        if edges[0] <= each["at_s"] <= edges[-1]:
            axes.axvline(each["at_s"], color="black", linestyle=":")
            text = f" {each['workers_before']} → {each['workers']} workers"
            axes.text(each["at_s"], 1.0, text, transform=axes.get_xaxis_transform(), va="bottom", fontsize=8)
    axes.set(xlabel="seconds before the latest sample", ylabel="ms per step", xlim=(edges[0], edges[-1]))
    # The first steps, which compile, have a look each, and would make all others flat.
    axes.set_ylim(0, 1.1 * max(whole[-1], *(whole[2 * at] for at, each in enumerate(timeline) if each["steps"] > 1), 0))
    axes.legend(frameon=False, loc="upper right")


def _calls(axes: Any, content: Mapping[str, Any]) -> None:
    calls = content["calls"]
    ends = [each["below_s"] for each in calls["buckets"]]
    halves = [end / 2 for end in ends]
    axes.bar(halves, [each["calls"] for each in calls["buckets"]], halves, align="edge", edgecolor="white")
    axes.set_xscale("log")
    slowest_s = max([ends[-1], *(1.1 * each["seconds"] for each in calls["slowest"])])
    axes.set_xlim(min(halves[0], 5e-5), max(slowest_s, 2e-2))  # 100 µs, 1 ms and 10 ms are always there
    ticks = [tick for power in range(-9, 4) if axes.get_xlim()[0] <= (tick := 10.0**power) <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [readable_s(tick) for tick in ticks])
    for each in calls["slowest"][:1]:
        axes.axvline(each["seconds"], color="C1")
        text = f"item {each['name']}: {readable_s(each['seconds'])} "
        axes.text(each["seconds"], 1.0, text, transform=axes.get_xaxis_transform(), ha="right", va="bottom")
    axes.set(xlabel=f"time per call (one {calls['of']})", ylabel="calls (one in eight is sampled)")


def _environment() -> dict[str, str]:
    """Return versions, and what the machine grants; no path, name of a user or name of a machine is in it."""
    versions = {each: str(getattr(sys.modules[each], "__version__", "?")) for each in _LIBRARIES if each in sys.modules}
    return {
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
