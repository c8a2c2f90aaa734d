"""A tuning result as a picture: samples per second over workers, or over threads by workers, beside the ideal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from loaderpool.system.readable import counted, readable_number
from loaderpool.tools.cli.options import answering_for
from loaderpool.tools.tuning import Recommendation, Setting

_INK, _GREY, _BLUE, _GREEN = "#222222", "#8a8a8a", "#2563a8", "#1a7f4b"
# Where the ideal runs far above what was reached, the measurements would be pressed flat: it leaves the picture there.
_LARGEST_HEADROOM = 2.0


def write_plot(path: Path, target: str, unit: str, cpus: int, recommendation: Recommendation) -> None:
    """Draw the result into a file, whose suffix says the format; no display and no global state of pyplot is used.

    Args:
        path: ends in .png, .svg or .pdf.
        target: what was measured.
        unit: what a row is called, in the plural.
        cpus: CPUs that may be used; the place is marked.
        recommendation: what to draw.
    """
    comparisons = recommendation.comparisons
    settings = [each.measurement.setting for each in comparisons]
    rates = [each.measurement.samples_per_s for each in comparisons]
    ideal = [rates[0] * each.ideal_speedup for each in comparisons]
    lows = [each.measurement.spread * each.measurement.samples_per_s for each in comparisons]
    # Evenly spaced: the counts double, and 0 must have its place too.
    places = list(range(len(settings)))
    chosen = settings.index(recommendation.setting)
    names_threads = recommendation.setting.names_threads

    figure = Figure(figsize=(max(7.2, 0.6 * len(settings)), 4.6), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for line in _lines(settings):
        is_last = line[-1] == places[-1]  # which has a line to show
        axes.plot(
            line, [ideal[place] for place in line], color=_GREY, linewidth=1.3, linestyle=(0, (5, 3)),
            marker="_" if len(line) == 1 else "", zorder=1, label="ideal" if is_last else None,
        )  # fmt: skip
        axes.errorbar(
            line,
            [rates[place] for place in line],
            yerr=[[lows[place] for place in line], [0.0] * len(line)],
            color=_BLUE,
            linewidth=2.0,
            marker="o",
            markersize=6,
            elinewidth=1.2,
            capsize=3,
            zorder=2,
            label="measured (bar: the slower round)" if is_last else None,
        )
    axes.plot(
        places[chosen], rates[chosen], "o", zorder=3, label="recommended",
        markersize=15, markeredgewidth=2.2, markerfacecolor="none", markeredgecolor=_GREEN,
    )  # fmt: skip
    for place, rate in zip(places, rates, strict=True):
        axes.annotate(
            readable_number(rate), (place, rate), (0, 12), textcoords="offset points", ha="center", color=_INK,
            fontsize=9, zorder=4,
            bbox={"boxstyle": "round,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )  # fmt: skip
    if names_threads:
        _name_threads(axes, settings)
    else:
        _name_workers(axes, [setting.workers for setting in settings], cpus)
    axes.set_xlim(-0.4, len(settings) - 0.6)
    axes.set_ylim(0, 1.15 * min(max(*ideal, *rates), _LARGEST_HEADROOM * max(rates)))
    axes.set_ylabel(f"{unit} per second", color=_INK)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_INK)
    axes.legend(loc="best", frameon=False, fontsize=9)
    sentences = [recommendation.reason, *([recommendation.excess] if recommendation.excess else [])]
    reason = textwrap.fill(" ".join(f"{each[:1].upper()}{each[1:]}." for each in sentences), 98)
    axes.set_title(
        f"{target}: use {recommendation.setting.arguments}", loc="left", pad=14 + 11 * len(reason.splitlines()),
        fontsize=12.5, fontweight="bold", color=_INK,
    )  # fmt: skip
    text = axes.annotate(
        reason, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", fontsize=8.5, color=_INK
    )
    text.set_in_layout(False)  # else a long line makes the axes narrow
    with answering_for(path):
        figure.savefig(path)


def _lines(settings: Sequence[Setting]) -> list[list[int]]:
    """Places that a line joins: all of them, or those of each number of workers where threads are varied."""
    if not settings[0].names_threads:
        return [list(range(len(settings)))]
    counts = dict.fromkeys(setting.workers for setting in settings)
    return [[place for place, setting in enumerate(settings) if setting.workers == count] for count in counts]


def _name_workers(axes: Axes, counts: list[int], cpus: int) -> None:
    """Name the places by numbers of workers, and mark the number of CPUs."""
    if cpus in counts:
        axes.axvline(counts.index(cpus), color=_GREY, linewidth=0.8, alpha=0.5, zorder=0)
        axes.annotate(
            counted(cpus, "CPU"), (counts.index(cpus), 0), (4, 5), xycoords=("data", "axes fraction"),
            textcoords="offset points", color=_GREY, fontsize=9,
        )  # fmt: skip
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    axes.set_xlabel("workers (0: in the training process)", color=_INK)


def _name_threads(axes: Axes, settings: Sequence[Setting]) -> None:
    """Name the places by numbers of threads, and below them by numbers of workers."""
    axes.set_xticks(range(len(settings)), [str(setting.threads) if setting.workers else "" for setting in settings])
    groups = _lines(settings)
    below = axes.secondary_xaxis(location=0)
    names = [Setting(settings[group[0]].workers).label for group in groups]
    below.set_xticks([(group[0] + group[-1]) / 2 for group in groups], [f"\n{name}" for name in names])
    below.tick_params("x", length=0, colors=_INK)
    below.spines["bottom"].set_visible(False)
    for group in groups[1:]:
        axes.axvline(group[0] - 0.5, color=_GREY, linewidth=0.8, alpha=0.5, zorder=0)
    below.set_xlabel("threads of each worker; workers (0: in the training process)", color=_INK)
