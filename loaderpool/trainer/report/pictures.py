"""Pictures of a report as SVG, in the colours of its page: steps, rate, slots, workers over time; times of calls."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from loaderpool.system.readable import readable_s

# Colours stand for those of the page, which has others by day and by night: `var(--ink)`.
_COLOURS = {"ink": "#0000a1", "grey": "#0000a2", "grid": "#0000a3", "blue": "#0000a4", "orange": "#0000a5",
            "green": "#0000a6", "ground": "#0000a7"}  # fmt: skip
_INK, _GREY, _GRID, _BLUE, _ORANGE, _GREEN, _GROUND = _COLOURS.values()
_WIDTH = 9.0  # inches
# Text stays text, and ids hang on nothing but the picture.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "loaderpool", "font.size": 9.0, "axes.edgecolor": _GREY,
          "xtick.color": _INK, "ytick.color": _INK, "axes.labelcolor": _INK, "text.color": _INK,
          "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}  # fmt: skip
_NAMED_ITEMS = 3
_ROOM_FOR_ITEMS = 1.5  # above the highest bar, so that no name is written across one

_Moments = Sequence[Mapping[str, Any]]


def draw_timeline(moments: _Moments) -> str:
    """Return a picture of what was between looks: a panel for steps, one for the rate, and two for slots and workers.

    Args:
        moments: of a report's content, at least one. Without worker processes the last two panels are left out.
    """
    has_workers = any(each["workers"] for each in moments)
    panels = (_steps, _rate, _slots, _workers) if has_workers else (_steps, _rate)
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(_WIDTH, 1.7 * len(panels) + 0.5), layout="constrained")
        for axes, panel in zip(figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], panels, strict=True):
            panel(axes, moments)
            _finish(axes)
            for each in moments:
                if each["epochs"]:
                    axes.axvline(each["begin_s"], color=_GREY, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
        axes.set_xlim(moments[0]["begin_s"], moments[-1]["end_s"])
        axes.set_xlabel("seconds before the latest look; a dotted line: an epoch has begun")
        return _as_svg(figure, "timeline")


def draw_calls(calls: Mapping[str, Any]) -> str:
    """Return a picture of how long calls took, with the slowest items named.

    Args:
        calls: of a report's content, with at least one bucket.
    """
    buckets = calls["buckets"]
    with matplotlib.style.context(["default", _STYLE]):
        figure = Figure(figsize=(_WIDTH, 2.6), layout="constrained")
        axes = figure.subplots()
        ends = [each["below_s"] for each in buckets]
        counts = [each["calls"] for each in buckets]
        axes.bar(
            [end / 2 for end in ends], counts, [end / 2 for end in ends], align="edge", color=_BLUE, edgecolor=_GROUND
        )
        axes.set_xscale("log", base=2)
        named = calls["slowest"][:_NAMED_ITEMS]
        for number, item in enumerate(named):
            top = 1 - 0.12 * number
            axes.axvline(item["seconds"], color=_ORANGE, linewidth=1.2, ymax=top)
            axes.annotate(
                f"item {item['name']}: {readable_s(item['seconds'])} ", (item["seconds"], top),
                xycoords=("data", "axes fraction"), ha="right", va="top", color=_ORANGE,
            )  # fmt: skip
        axes.set_ylim(top=max(counts) * _ROOM_FOR_ITEMS)
        first, last = ends[0] / 2, max([ends[-1], *(1.1 * item["seconds"] for item in named)])
        axes.set_xlim(first, last)
        ticks = _powers_of_two(first, last)
        axes.set_xticks(ticks, [readable_s(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"time of a call, which makes one {calls['of']}")
        axes.set_ylabel("calls (one in eight)")
        _finish(axes)
        return _as_svg(figure, "calls")


def _powers_of_two(first: float, last: float) -> list[float]:
    """Return places for some ticks, each at the end of a bucket."""
    places = [first]
    while places[-1] * 2 <= last:
        places.append(places[-1] * 2)
    return places[:: -(-len(places) // 12)]


def _steps(axes: Axes, moments: _Moments) -> None:
    computing = [1e3 * each["computing_s"] for each in moments]
    whole = [1e3 * (each["computing_s"] + each["waiting_s"]) for each in moments]
    _area(axes, moments, [0.0] * len(whole), computing, _BLUE, "computing")
    _area(axes, moments, computing, whole, _ORANGE, "waiting for data")
    axes.set_ylabel("ms a step")


def _rate(axes: Axes, moments: _Moments) -> None:
    _area(axes, moments, [0.0] * len(moments), [each["samples_per_s"] for each in moments], _BLUE, "")
    axes.set_ylabel("samples/s")


def _slots(axes: Axes, moments: _Moments) -> None:
    lent = [each["slots_lent"] for each in moments]
    both = [each["slots_lent"] + each["slots_ready"] for each in moments]
    _area(axes, moments, [0.0] * len(lent), lent, _BLUE, "lent to the training")
    _area(axes, moments, lent, both, _GREEN, "finished, not taken yet")
    _line(axes, moments, [each["slots"] for each in moments], "all")
    axes.set_ylabel("slots")


def _workers(axes: Axes, moments: _Moments) -> None:
    _line(axes, moments, [each["workers"] for each in moments], "")
    axes.set_ylabel("workers")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _area(axes: Axes, moments: _Moments, low: Sequence[float], high: Sequence[float], colour: str, label: str) -> None:
    axes.fill_between(_edges(moments), _twice(low), _twice(high), color=colour, linewidth=0, label=label or None)


def _line(axes: Axes, moments: _Moments, values: Sequence[float], label: str) -> None:
    axes.plot(_edges(moments), _twice(values), color=_INK, linewidth=1.2, label=label or None)


def _edges(moments: _Moments) -> list[float]:
    return [edge for each in moments for edge in (each["begin_s"], each["end_s"])]


def _twice(values: Sequence[float]) -> list[float]:
    """Return each value for the begin and for the end of its moment."""
    return [value for each in values for value in (each, each)]


def _finish(axes: Axes) -> None:
    axes.set_ylim(bottom=0, top=1.08 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 0.96), ncols=3, borderaxespad=0, handlelength=1.2)


def _as_svg(figure: Figure, name: str) -> str:
    """Return the picture as an element of a page: no prolog, ids of its own, colours by the page's names."""
    figure.patch.set_visible(False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg[svg.index("<svg") :], count=2)
    svg = re.sub(r'<g id="[^"]*"', "<g", re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL))
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\1{name}-", svg)
    for colour, value in _COLOURS.items():
        svg = svg.replace(value, f"var(--{colour})")
    return svg
