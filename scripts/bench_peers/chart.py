"""A PNG with a small bar chart for each row: throughput beside the row's limit, or time."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from .rounds import Results
from .rows import Row
from .table import value_text

__all__ = ["draw"]

OURS, PEER, LIMIT = "#1b6ca8", "#b8b8b8", "#e0a63a"
COLUMNS = 3
OUT_OF_SIGHT = 8


def draw(results: Results, file: Path, caption: str) -> None:
    """Write the chart. Runs without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in {result.row.key: result.row for result in results.values()}.values() if row.kind != "growth"]
    lines = -(-len(rows) // COLUMNS)
    figure, axes = pyplot.subplots(lines, COLUMNS, figsize=(5.2 * COLUMNS, 2.6 * lines), squeeze=False)
    for place, axis in enumerate(axes.flat):
        if place < len(rows):
            _draw_row(axis, results, rows[place])
        else:
            axis.axis("off")
    figure.tight_layout(rect=(0, 0.4 / lines / 2.6, 1, 1))
    figure.text(0.01, 0.002, textwrap.fill(caption, 220), fontsize=7, color="#555555")
    figure.savefig(file, dpi=80)
    pyplot.close(figure)


def _draw_row(axis: Any, results: Results, row: Row) -> None:
    found = [result for (key, _), result in results.items() if key == row.key and result.rounds]
    is_rate = row.figure == "rate"
    ours = results.get((row.key, "loaderpool"))
    if is_rate and ours and ours.rounds:
        # A limit that is out of sight would leave no room for the others.
        reach = OUT_OF_SIGHT * ours.median("rate")
        found = [result for result in found if result.median("rate") < reach or result.contestant not in row.limits]
    found.sort(key=lambda result: result.median(row.figure), reverse=not is_rate)
    names = [result.contestant.replace("_", " ") for result in found]
    values = [result.median(row.figure) for result in found]
    colours = [
        OURS if result.contestant == "loaderpool" else LIMIT if result.contestant in row.limits else PEER
        for result in found
    ]
    low = [value - min(result.values(row.figure)) for value, result in zip(values, found, strict=True)]
    high = [max(result.values(row.figure)) - value for value, result in zip(values, found, strict=True)]
    axis.barh(names, values, color=colours, xerr=[low, high], error_kw={"lw": 0.8, "ecolor": "#444444"})
    # Times reach from microseconds to seconds; rates of one row are within what a linear axis shows.
    if not is_rate and values and max(values) > 30 * max(min(values), 1e-9):
        axis.set_xscale("log")
    for place, result in enumerate(found):
        axis.annotate(
            value_text(result).partition(" [")[0], (values[place] + high[place], place), (4, 0),
            textcoords="offset points", va="center", fontsize=6.5,
        )  # fmt: skip
    axis.margins(x=0.2)
    axis.tick_params(labelsize=7)
    unit = "batches/s, more is better" if is_rate else f"{row.unit}, less is better"
    axis.set_title(f"{row.what}\n{row.view}: {unit}", fontsize=8, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
