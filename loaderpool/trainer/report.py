"""One HTML file about a loader: why training waits, settings, versions and counts."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from typing import Any

from loaderpool.errors import readable_bytes, shortened
from loaderpool.system import capacity, clock
from loaderpool.trainer.explain.explanation import explain
from loaderpool.trainer.explain.window import Window
from loaderpool.trainer.statistics import Statistics
from loaderpool.trainer.timeline import STYLE, shares_figure, timeline, timeline_figure
from loaderpool.trainer.tracing import Tracing

_LIBRARIES = ("loaderpool", "numpy", "cloudpickle", "tensorflow", "keras", "torch", "jax", "ray")
# The colors are those of the surrounding page or notebook. Alone, the report follows the light or
# dark mode of the system.
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>loaderpool report</title><style>
:root:has(>body>.lp-report){{color-scheme:light dark}}
.lp-report{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
.lp-report pre{{font:inherit;white-space:pre-wrap}}
.lp-report td{{vertical-align:top;padding-right:1rem}} .lp-report td+td{{overflow-wrap:anywhere}}
{style}</style></head><body><main class="lp-report">
<h1>loaderpool report</h1>
<pre>{explanation}</pre>
<h2>Shares of time</h2>
{shares}
<h2>The last seconds</h2>
{timeline}
<h2>The loader</h2>
{settings}
<h2>Where it runs</h2>
{environment}
<p>All other data is in this page as JSON, in the element <code>loaderpool-report</code>.</p>
<script type="application/json" id="loaderpool-report">{data}</script></main></body></html>
"""


def document(
    window: Window,
    statistics: Statistics,
    settings: Mapping[str, Any],
    tracing: Tracing | None = None,
) -> str:
    """Return a report as an HTML page. Settings are shown as texts without data.

    `tracing`: None if the loader is closed, because its records are gone.
    """
    explanation, environment = explain(window), _environment()
    told = {
        name: shortened(f"{value}", 200) for name, value in settings.items() if value is not None
    }
    content = {
        "format": 4,  # incremented when a key changes its meaning or is removed
        "explanation": {"headline": explanation.headline, **explanation.to_dict()},
        "settings": told,
        "environment": environment,
        "statistics": dataclasses.asdict(statistics),
    }
    return _PAGE.format(
        explanation=html.escape(str(explanation)),
        style=STYLE,
        shares=shares_figure(window),
        timeline=_timeline(window, tracing),
        settings=_table(told),
        environment=_table(environment),
        # Escape "<", so that no text can end the script element.
        data=json.dumps(content, separators=(",", ":"), default=str).replace("<", "\\u003c"),
    )


def _timeline(window: Window, tracing: Tracing | None) -> str:
    if tracing is None:
        return (
            "<p>The records are gone, because the loader is closed. "
            "Call report() before close().</p>"
        )
    found = timeline(tracing, window.slots, window.slots_lent)
    if found is None:
        return "<p>Nothing has been recorded yet.</p>"
    nodes = (
        "<p>Workers on other nodes are not shown.</p>"
        if any(not w.pid for w in window.by_worker.values())
        else ""
    )
    return timeline_figure(found) + nodes


def _table(texts: dict[str, str]) -> str:
    rows = (
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>"
        for name, text in texts.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _environment() -> dict[str, str]:
    """Return versions and resources, without paths and without names of users or machines."""
    versions = {
        each: str(getattr(sys.modules[each], "__version__", "?"))
        for each in _LIBRARIES
        if each in sys.modules
    }
    return {
        "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(clock.wall_s())),
        **versions,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPUs": (
            f"{capacity.usable_cpu_count()} of {os.cpu_count()}; "
            f"cgroup: {capacity.cgroup_cpu_quota() or 'none'}"
        ),
        "memory available": readable_bytes(capacity.available_memory_bytes()),
    }
