"""A report as one HTML file: no script that runs, nothing that is fetched, its numbers inside as JSON."""

from __future__ import annotations

import datetime
import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loaderpool.system.readable import readable_s, readable_size
from loaderpool.system.whole_file import write_whole
from loaderpool.trainer.explain.thresholds import WAITS_ABOVE

_ROWS = 16  # of a table of workers, several of which stand beside one another
_PICTURES_NEED = "Pictures need matplotlib: pip install 'loaderpool[cli]'"
# Numbers are cut to so many digits: a report of a thousand workers is below 500 kB.
_DIGITS = 5
_EXACT_FROM = 1e6  # times of day are
_NOTE = """<p class="note">{}. This file has numbers, settings, versions, names of functions and classes, and indices of
slow items; no data, and no paths of files. All of it is inside as JSON, in <code>#loaderpool-report</code>.</p>"""
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --grey: #6b7280; --grid: #d8dce2; --ground: #ffffff; --soft: #f3f5f8;
  --blue: #3b76af; --orange: #c4640c; --green: #2f855a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --grey: #9aa3af; --grid: #3a4048; --ground: #16191d;
  --soft: #20252b; --blue: #5b9bd5; --orange: #e8924a; --green: #4fae7d; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.headline { background: var(--soft); border-left: .3rem solid var(--orange); padding: .6rem .9rem; font-weight: 600; }
p.headline.fed { border-color: var(--green); }
p.note, td.note { color: var(--grey); }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td, code { overflow-wrap: anywhere; } code { background: var(--soft); padding: .05rem .25rem; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: system-ui, sans-serif !important; }
figcaption { color: var(--grey); font-size: .9rem; }
div.beside { display: flex; flex-wrap: wrap; gap: 0 2.5rem; align-items: flex-start; }
meter { width: 4.5rem; }
"""


def write_document(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a report's content as a page. Where it fails half-way, what stood there before stays.

    Raises:
        OSError: it cannot be written there.
    """
    write_whole(Path(path), document(content).encode())


def document(content: Mapping[str, Any]) -> str:
    """Return a report's content as a page."""
    content = _rounded(content)
    explanation, statistics = content["explanation"], dict(content["statistics"])
    hosts, decisions = statistics.pop("hosts"), statistics.pop("decisions")
    del statistics["workers"]  # they have their own table
    fed = " fed" if explanation["wait_share"] < WAITS_ABOVE else ""
    about = f"loaderpool {content['environment']['loaderpool']}, {content['made']}"
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>loaderpool report</title><style>{_STYLE}</style></head><body>",
        f'<h1>loaderpool report</h1><p class="headline{fed}">{html.escape(content["headline"])}</p>',
        _table(_told(explanation, content["headspace"])),
        *_slowest(content["calls"]["slowest"]),
        "<h2>Over time</h2>",
        *_pictures(content["timeline"], content["calls"]),
        *_workers(content["workers"]),
        *([f"<h2>Changes of their number</h2>{_records([_decided(each) for each in decisions])}"] if decisions else []),
        *([f"<h2>Hosts</h2>{_records(hosts)}"] if hosts else []),
        f"<h2>The loader</h2>{_table(content['settings'].items())}",
        f"<h2>Where it runs</h2>{_table(content['environment'].items())}",
        f"<h2>All statistics</h2>{_table(_flat(statistics))}",
        _NOTE.format(html.escape(about)),
        f'<script type="application/json" id="loaderpool-report">{_json(content)}</script></body></html>\n',
    ]
    return "\n".join(parts)


def _told(explanation: Mapping[str, Any], headspace: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    change = explanation["change"]
    yield "why", explanation["why"]
    if change:
        yield "change", _Code(change)
    if explanation["expect"]:
        yield "expect", explanation["expect"]
    if headspace["speedup"] is not None:
        yield "headspace", headspace["text"].partition(": ")[2]


def _slowest(items: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if not items:
        return
    yield "<h2>Slowest items</h2>"
    yield (
        '<p class="note">One is made again alone by the command, where <code>train:make_loader</code> stands for the '
        "module and the function that returns this loader.</p>"
    )
    rows = (
        f'<tr><td class="number">{item["name"]}</td><td class="number">{item["epoch"]}</td>'
        f'<td class="number">{html.escape(readable_s(item["seconds"]))}</td><td><code>'
        f"{html.escape(_replay(item))}</code></td></tr>"
        for item in items
    )
    heads = '<th class="number">item</th><th class="number">epoch</th><th class="number">took</th><th>replay</th>'
    yield f"<table><tr>{heads}</tr>{''.join(rows)}</table>"


def _replay(item: Mapping[str, Any]) -> str:
    if item["replay"] or item["generator"] is not None:
        return str(item["replay"])
    return f"loaderpool replay train:make_loader --index {item['index']} --epoch {item['epoch']}"


def _pictures(timeline: Sequence[Mapping[str, Any]], calls: Mapping[str, Any]) -> Iterable[str]:
    if not timeline:
        yield '<p class="note">There is nothing to show yet: it takes two looks, which are two seconds apart.</p>'
        if not calls["buckets"]:
            return
    try:
        from loaderpool.trainer.report import pictures  # matplotlib takes most of a second to import
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        yield f'<p class="note">{html.escape(_PICTURES_NEED)}</p>'
        return
    if timeline:
        caption = "Steps, and what they found: means between two looks, in the time in which batches were taken."
        yield _figure(pictures.draw_timeline(timeline), caption)
    if calls["buckets"]:
        yield "<h2>Calls of the function</h2>"
        caption = "How many calls took how long, counted in powers of two, since the loader was made."
        yield _figure(pictures.draw_calls(calls), caption)


def _figure(svg: str, caption: str) -> str:
    return f'<figure role="img" aria-label="{html.escape(caption)}">{svg}<figcaption>{caption}</figcaption></figure>'


def _workers(workers: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if not workers:
        return
    shares = [each["busy_share"] for each in workers if each["busy_share"] is not None]
    cpus = [each["cpus"] for each in workers if each["cpus"] is not None]
    yield "<h2>Workers</h2>"
    if shares:
        text = f"busy {sum(shares) / len(shares):.0%} of the time ({min(shares):.0%} to {max(shares):.0%})"
        used = f"; they used {sum(cpus):.2g} CPUs" if cpus else ""
        yield f"<p>{len(workers)}: {text}{used}.</p>"
    heads = "".join(f'<th class="number">{name}</th>' for name in ("worker", "busy", "", "CPU", "samples"))
    head = f"<tr>{heads}</tr>"
    tables = (workers[first : first + _ROWS] for first in range(0, len(workers), _ROWS))
    yield f'<div class="beside">{"".join(f"<table>{head}{_worker_rows(each)}</table>" for each in tables)}</div>'


def _worker_rows(workers: Iterable[Mapping[str, Any]]) -> str:
    return "".join(
        f'<tr><td class="number">{each["number"]}</td><td class="number">{_percent(each["busy_share"])}</td>'
        f"<td><meter value={each['busy_share'] or 0}></meter></td>"
        f'<td class="number">{_percent(each["cpus"])}</td>'
        f'<td class="number">{"-" if each["samples"] is None else format(each["samples"], ",")}</td></tr>'
        for each in workers
    )


def _decided(decision: Mapping[str, Any]) -> dict[str, str]:
    time = datetime.datetime.fromtimestamp(decision["time_s"], datetime.timezone.utc)
    workers = f"{decision['workers_before']} to {decision['workers']}"
    return {"when (UTC)": f"{time:%H:%M:%S}", "workers": workers, "because": decision["reason"]}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


class _Code(str):
    """A text that is code."""


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    return f"<table>{''.join(_row(name, value) for name, value in rows)}</table>"


def _row(name: str, value: Any) -> str:
    text = html.escape(_text(name, value))
    cell = f"<code>{text}</code>" if isinstance(value, _Code) else text
    return f"<tr><th>{html.escape(name)}</th><td>{cell}</td></tr>"


def _records(records: Sequence[Mapping[str, Any]]) -> str:
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in records[0])
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(_text(*each))}</td>' for each in record.items())}</tr>" for record in records
    )
    return f'<div class="beside"><table><tr>{heads}</tr>{rows}</table></div>'


def _text(name: str, value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(each) for each in value) or "none"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("bytes_per_s"):
        return f"{readable_size(value)}/s"
    if name.endswith(("_s", "cpu_s_per_sample")) and not name.endswith("per_s"):
        return readable_s(value)
    if name.startswith("bytes") or name.endswith("bytes"):
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _flat(values: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    """Yield what is in it by its name, as one writes it: `steps.mean_s`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif name != "slowest":  # which have their own table
            yield before + name, value


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if abs(value) < _EXACT_FROM else round(value, 1)
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return value


def _json(content: Mapping[str, Any]) -> str:
    """Return it so that no text in it can end the element that it stands in."""
    return json.dumps(content, separators=(",", ":"), default=str).replace("<", "\\u003c")
