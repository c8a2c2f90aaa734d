"""SVG figures for a report: shares of time, and the activity of workers and training lately.

The figures are part of the page and load nothing. Positions are percentages and heights are pixels,
so text stays readable on a phone. Text has the page's color, and the fills are visible on light and
on dark pages. States differ by pattern, not by color alone.
"""

from __future__ import annotations

import bisect
import html
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from loaderpool.errors import counted
from loaderpool.trainer.explain.window import Window
from loaderpool.trainer.tracing import SpanKind, Tracing

_WINDOW_NS = 10_000_000_000
# Share of the picture below which states are drawn together, as shares of their time. Smaller:
# files of a megabyte.
_FINEST = 1 / 120
_MOST_ROWS = 32  # rows of workers
# Share of a bar below which a state is left out, because it would be shown as 0%.
_LEAST_SHARE = 0.005
_LEFT = 18.0  # width of the labels, in percent
_ROW, _BAR = 20, 14  # pixels from row to row, and height of a bar
_TICKS = 5  # the largest number of ticks
_DOT = '<circle cx="3" cy="3" r="1.2" fill="#808080"/>'
_STRIPES = '<path d="M1.5 0V6M4.5 0V6" stroke="#c8503c" stroke-width="1.5"/>'
# Fill, pattern and label of each state. An empty pattern means a plain fill.
_STATES = {
    "task": ("#2f7fb8", "", "runs a task: your function, and copying its results"),
    "buffer": ("#b8791a",
               '<path d="M-1 7L7-1M-1 1L1-1M5 7L7 5" stroke="#b8791a" stroke-width="2"/>',
               "waits for a free batch buffer"),
    "idle": ("#808080", _DOT, "waits for a task"),
    "step": ("#4a8f3c", "", "training step"),
    "wait": ("#c8503c", _STRIPES, "waits for data"),
    "epoch": ("#9a5fb4", '<path d="M0 1.5H6M0 4.5H6" stroke="#9a5fb4" stroke-width="1.5"/>',
              "waits for the first batch of an epoch"),
    "make": ("#2f7fb8", "", "makes a batch in the main process"),
    "compute": ("#2f7fb8", "", "computes"),
    "other": ("#3f9a94", '<path d="M0 3H6M3 0V6" stroke="#3f9a94" stroke-width="1.2"/>',
              "waits within a task, such as for a file or a lock"),
    "cpu": ("#c8503c", _STRIPES, "waits for a CPU"),
    "hungry": ("#808080", _DOT, "waits for a task or a batch buffer"),
}  # fmt: skip
STYLE = "".join(
    f".lp-{name}{{fill:url(#lp-p-{name});stroke:{color};stroke-width:.5}}"
    if pattern
    else f".lp-{name}{{fill:{color}}}"
    for name, (color, pattern, _) in _STATES.items()
) + (
    ".lp-fig{margin:0 0 1.5rem} .lp-fig svg text{font:11px system-ui,sans-serif;fill:currentColor}"
    ".lp-fig ul{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin:.3rem 0;"
    "padding:0;font-size:13px}"
    ".lp-fig rect{shape-rendering:crispEdges} .lp-fig figcaption{font-size:13px}"
    ".lp-grid{stroke:currentColor;opacity:.25}"
)


class Part(NamedTuple):
    """A state of a row from one time to another, in ns. State "": nothing is known."""

    state: str
    begin: int
    end: int


class Timeline(NamedTuple):
    """The last seconds of a training: its rows by label, and their parts in order of time.

    The training's own row is the first.
    """

    begin: int  # start in ns, by the clock of `end`
    end: int
    is_now: bool  # True: `end` is the time of the report
    rows: dict[str, list[Part]]
    left_out: int  # the number of workers without a row


def shares(window: Window) -> dict[str, dict[str, float]]:
    """Return the seconds of each state, for the training's and the workers' bar."""
    found: dict[str, dict[str, float]] = {}
    if window.seconds > 0:
        wait_s = min(window.wait_s, window.seconds)
        epoch_s = min(window.epoch_starts_s, wait_s) if window.workers else 0.0
        waits = {"wait": wait_s - epoch_s, "epoch": epoch_s} if window.workers else {"make": wait_s}
        found["training"] = {"step": window.seconds - wait_s, **waits}
    if window.busy_s + window.idle_s > 0:
        compute_s = min(window.cpu_s / max(1, window.threads), window.busy_s)
        cpu_s = min(window.queued_s, window.busy_s - compute_s)
        known = {"compute": compute_s, "cpu": cpu_s, "other": window.busy_s - compute_s - cpu_s}
        found["workers"] = {
            **(known if window.cpu_s else {"task": window.busy_s}),
            "hungry": window.idle_s,
        }
    return found


def timeline(tracing: Tracing, buffers: int, lent: int) -> Timeline | None:
    """Return the last seconds of one loader's training, or None if nothing is recorded.

    Args:
        tracing: Records of the loader and its pool.
        buffers: Slots of the loader's latest run; 0: unknown.
        lent: The largest recent number of slots in use by the consumer's arrays.
    """
    spans = tracing.spans(SpanKind.TASK, SpanKind.WAIT, SpanKind.MAKE, SpanKind.STEP)
    if not spans:
        return None
    now = tracing.now_ns
    ends = [span.ended_ns if span.kind is not SpanKind.STEP else span.begun_ns for span in spans]
    is_now = max(ends) > now - _WINDOW_NS or any(tracing.running.values())
    end = now if is_now else max(ends)
    begin = min(max(end - _WINDOW_NS, min(span.begun_ns for span in spans)), end - 1_000_000)
    rows: dict[str, list[Part]] = {}
    kinds = {SpanKind.WAIT: "wait", SpanKind.MAKE: "make", SpanKind.STEP: "step"}
    layers = {
        state: [(s.begun_ns, s.ended_ns) for s in spans if s.kind is kind]
        for kind, state in kinds.items()
    }
    rows["training"] = list(_flattened(layers, begin, end))
    tasks: dict[int, list[tuple[int, int]]] = defaultdict(list)  # start and end of tasks, by pid
    for span in spans:
        if span.kind is SpanKind.TASK:
            tasks[span.pid].append((span.begun_ns, span.ended_ns))
    for pid, since in tracing.running.items():
        if since:
            tasks[pid].append((since, now))
    held = _Held(tracing)
    for pid, number in sorted(tracing.workers.items(), key=lambda each: (each[1], each[0])):
        if of_worker := tasks.get(pid):
            # Nothing is known before a worker's first record, nor after the last one of a worker
            # that has ended.
            first, last = (
                min(of_worker)[0],
                end if pid in tracing.running else max(stop for _, stop in of_worker),
            )
            found = []
            for part in _flattened({"task": of_worker}, max(begin, first), min(end, last)):
                waits_for = (
                    "buffer"
                    if buffers and held.at(part.begin) + max(1, lent) >= buffers - 1
                    else "idle"
                )
                found.append(part if part.state else part._replace(state=waits_for))
            if found:
                rows[f"worker {number}"] = [*rows.get(f"worker {number}", ()), *found]
    labels = list(rows)[: _MOST_ROWS + 1]
    return Timeline(
        begin, end, is_now, {label: rows[label] for label in labels}, len(rows) - len(labels)
    )


class _Held:
    """The number of slots with batches in progress, or finished and not delivered, over time."""

    def __init__(self, tracing: Tracing) -> None:
        # Start and last batch of each ticket, by run and epoch, then by first batch.
        begun: dict[tuple[int, int], dict[int, tuple[int, int]]] = defaultdict(dict)
        for row in tracing.tickets:
            of_run = begun[row["run"], row["epoch"]]
            at = min(row["began_ns"], of_run.get(row["batch"], (row["began_ns"], 0))[0])
            of_run[row["batch"]] = at, row["batch"] + row["count"] - 1
        delivered = {
            (row["run"], row["epoch"], batch): row["ended_ns"]
            for row in tracing.deliveries
            for batch in range(row["batch"], row["batch"] + row["count"])
        }
        # An abandoned run holds no slots once a later run delivers.
        starts = {row["run"]: row["ended_ns"] for row in reversed(tracing.deliveries)}
        self._taken: list[int] = []
        self._released: list[int] = []
        for (run, epoch), of_run in begun.items():
            over = min((at for later, at in starts.items() if later > run), default=1 << 63)
            taken = 1 << 63
            for _, (at, last) in sorted(of_run.items(), reverse=True):
                taken = min(taken, at)  # slots are assigned in the order of the batches
                self._taken.append(taken)
                self._released.append(max(taken, delivered.get((run, epoch, last), over)))
        self._taken += [since for since in tracing.running.values() if since]
        self._taken.sort()
        self._released.sort()

    def at(self, time: int) -> int:
        return bisect.bisect_right(self._taken, time) - bisect.bisect_right(self._released, time)


def _flattened(layers: dict[str, list[tuple[int, int]]], begin: int, end: int) -> Iterator[Part]:
    """Yield the parts of a time in order. If layers overlap, the first one is used."""
    edges = []
    for number, spans in enumerate(layers.values()):
        for start, stop in spans:
            if (start := max(start, begin)) < (stop := min(stop, end)):
                edges += [(start, number, 1), (stop, number, -1)]
    states, is_open, since, before = [*layers], [0] * len(layers), begin, ""
    for at, group in itertools.groupby(sorted(edges), key=lambda edge: edge[0]):
        for _, number, change in group:
            is_open[number] += change
        state = next((state for state, count in zip(states, is_open, strict=True) if count), "")
        if state != before:
            if at > since:
                yield Part(before, since, at)
            since, before = at, state
    if end > since:
        yield Part(before, since, end)


def _drawn(parts: Sequence[Part], least: float) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yield times with the shares of their states.

    A long part is yielded alone, short ones together.
    """
    group: list[Part] = []
    for part in parts:
        is_long = part.end - part.begin >= least
        if group and (is_long or part.begin - group[0].begin >= least):
            yield group[0].begin, group[-1].end, _shares(group)
            group.clear()
        if is_long:
            yield part.begin, part.end, {part.state: 1.0}
        else:
            group.append(part)
    if group:
        yield group[0].begin, group[-1].end, _shares(group)


def _shares(parts: Sequence[Part]) -> dict[str, float]:
    """Return each state's share of the time of these parts, in the order of `_STATES`."""
    sums = dict.fromkeys(_STATES, 0)
    for part in parts:
        if part.state:
            sums[part.state] += part.end - part.begin
    whole = sum(part.end - part.begin for part in parts)
    return {state: ns / whole for state, ns in sums.items() if ns}


# -- SVG --


def shares_figure(window: Window) -> str:
    """Return the figure with the shares of time; a sentence if there is nothing to show."""
    bars = shares(window)
    if not bars:
        return "<p>No batch has been taken yet.</p>"
    found, told, legends = [], [], []
    for number, (label, seconds) in enumerate(bars.items()):
        whole, at = sum(seconds.values()), 0.0
        parts = {
            state: each / whole for state, each in seconds.items() if each >= _LEAST_SHARE * whole
        }
        row = [_label(label, number * _ROW)]
        for state, share in parts.items():
            row.append(_rect(state, at, share, number * _ROW, _BAR))
            at += share
        told.append(_in_words(label, parts))
        found.append(_row(told[-1], row))
        legends.append(_legend(parts, label))
    caption = "The workers' bar adds the time of all workers."
    return _figure("Shares of time", ". ".join(told), found, len(bars) * _ROW, caption, legends)


def timeline_figure(found: Timeline) -> str:
    """Return the figure with the last seconds."""
    whole = found.end - found.begin
    height, lines, told = len(found.rows) * _ROW, [], []
    for ago, where in _ticks(whole):
        x = f"{_LEFT + (100 - _LEFT) * where:.5g}%"
        anchor = "end" if where > 0.97 else "middle"
        text = f"−{ago:g} s" if ago else ("now" if found.is_now else "end")
        lines.append(f'<line class="lp-grid" x1="{x}" x2="{x}" y1="0" y2="{height}"/>')
        lines.append(f'<text x="{x}" y="{height + 12}" text-anchor="{anchor}">{text}</text>')
    for number, (label, parts) in enumerate(found.rows.items()):
        y = number * _ROW
        row = [_label(label, y)]
        for begin, end, by_state in _drawn(parts, whole * _FINEST):
            at, bottom = (begin - found.begin) / whole, float(y + _BAR)
            for state, share in by_state.items():
                bottom -= share * _BAR
                if state:
                    row.append(_rect(state, at, (end - begin) / whole, bottom, share * _BAR))
        told.append(_in_words(label, _shares(parts)))
        lines.append(_row(told[-1], row))
    title = f"The last {whole / 1e9:.3g} s"
    caption = "Bars that are divided across their height are shares of many short tasks and waits."
    if not found.is_now:
        caption += " Nothing was recorded after the end."
    if found.left_out:
        caption += f" {counted(found.left_out, 'more worker')} not shown; trace() shows all."
    states = {part.state for parts in found.rows.values() for part in parts}
    legend = _legend([state for state in _STATES if state in states])
    return _figure(title, ". ".join(told), lines, height + 16, caption, [legend])


def _ticks(whole_ns: int) -> Iterator[tuple[float, float]]:
    """Yield times before the end in seconds, and their positions, from 0 to 1."""
    seconds = whole_ns / 1e9
    steps = (digit * 10.0**power for power in range(-9, 4) for digit in (1, 2, 5))
    step = next((each for each in steps if seconds / each <= _TICKS), seconds)
    for number in range(int(seconds / step) + 1):
        yield round(number * step, 9), 1 - number * step / seconds


def _label(text: str, y: float) -> str:
    return f'<text x="0" y="{y + 11}">{html.escape(text)}</text>'


def _rect(state: str, at: float, share: float, y: float, height: float) -> str:
    x, width = _LEFT + (100 - _LEFT) * at, (100 - _LEFT) * share
    return (
        f'<rect class="lp-{state}" x="{x:.5g}%" y="{y:.4g}" '
        f'width="{width:.4g}%" height="{height:.3g}"/>'
    )


def _row(title: str, parts: Iterable[str]) -> str:
    return f"<g><title>{html.escape(title)}</title>{''.join(parts)}</g>"


def _in_words(label: str, by_state: dict[str, float]) -> str:
    told = [f"{_STATES[state][2]} {share:.0%}" for state, share in by_state.items() if state]
    return f"{label}: {', '.join(told) or 'nothing recorded'}"


def _legend(states: Iterable[str], of: str = "") -> str:
    """Return a list of the states' patterns and names.

    If `states` is a dict, the list also has its shares.
    """
    by_state = states if isinstance(states, dict) else {}
    items = []
    for state in states:
        square = f'<rect class="lp-{state}" width="14" height="12"/>'
        swatch = f'<svg width="14" height="12" aria-hidden="true">{square}</svg>'
        text = f"{_STATES[state][2]}{f': {by_state[state]:.0%}' if by_state else ''}"
        items.append(
            f'<li><svg width="14" height="12" aria-hidden="true">{swatch}</svg> {text}</li>'
        )
    return f"<ul>{f'<li><b>{of}</b></li>' if of else ''}{''.join(items)}</ul>"


def _figure(
    title: str, told: str, parts: Iterable[str], height: int, caption: str, legends: Iterable[str]
) -> str:
    patterns = "".join(
        f'<pattern id="lp-p-{name}" width="6" height="6" '
        f'patternUnits="userSpaceOnUse">{pattern}</pattern>'
        for name, (_, pattern, _) in _STATES.items()
        if pattern
    )
    return (
        f'<figure class="lp-fig"><svg role="img" width="100%" height="{height}">'
        f"<title>{html.escape(title)}</title><desc>{html.escape(told)}</desc>"
        f"<defs>{patterns}</defs>{''.join(parts)}</svg>{''.join(legends)}"
        f"<figcaption>{caption}</figcaption></figure>"
    )
