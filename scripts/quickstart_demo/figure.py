"""quickstart.png: what the images look like, what was measured, and that the network learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")  # no window: the script runs on servers, too

from matplotlib import pyplot
from matplotlib.axes import Axes

__all__ = ["Bar", "draw"]

_INK, _FAINT, _PLAIN, _OURS, _WRONG = "#1f2937", "#9ca3af", "#b6bfcc", "#0f766e", "#b91c1c"


@dataclasses.dataclass(frozen=True)
class Bar:
    """One contestant's numbers."""

    name: str
    samples_per_s: float
    wait_share: float  # 0..1
    wait_s: float  # the same in seconds


def draw(
    path: Path,
    *,
    pictures: Sequence[tuple[npt.NDArray[np.float32], int, int]],
    bars: Sequence[Bar],
    ratio: float,
    spread: str,
    accuracies: Sequence[float],
    caption: str,
) -> None:
    """`path` holds the figure.

    Args:
        path: a PNG file, replaced.
        pictures: float32[h, w, 3] in 0..1, its label, and the network's answer.
        bars: the baseline's and loaderpool's.
        ratio: how many times as many samples/s loaderpool had.
        spread: a few words on how far that ratio can be trusted.
        accuracies: on the test set after each epoch, 0..1.
        caption: the line at the bottom: where and how this was measured.
    """
    style: dict[Any, Any] = {
        "font.size": 10,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.edgecolor": _FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=(11.0, 6.5), dpi=130, facecolor="white")
        rows = figure.add_gridspec(
            2, 1, height_ratios=[1.0, 2.3], left=0.06, right=0.97, top=0.78, bottom=0.15, hspace=0.40
        )
        figure.text(0.06, 0.935, f"{ratio:.1f} times as many samples per second", size=17, weight="bold")
        subtitle = f"{spread} · the same Pillow and NumPy function feeds the same Keras network"
        figure.text(0.06, 0.893, subtitle, color="#4b5563")
        _draw_pictures(figure, rows[0], pictures)
        columns = rows[1].subgridspec(1, 3, width_ratios=[1.0, 1.0, 1.35], wspace=0.32)
        left, middle, right = (figure.add_subplot(columns[column]) for column in range(3))
        names = [bar.name for bar in bars]
        rates = [(bar.samples_per_s, f"{bar.samples_per_s:,.0f}") for bar in bars]
        waits = [(bar.wait_share, f"{100.0 * bar.wait_share:.0f} %\n({bar.wait_s:.0f} s)") for bar in bars]
        _draw_bars(left, "Training samples per second", names, rates)
        _draw_bars(middle, "Time waiting for data", names, waits)
        _draw_accuracy(right, accuracies)
        figure.text(0.06, 0.035, caption, size=8.5, color="#6b7280")
        figure.savefig(path)
        pyplot.close(figure)


def _draw_pictures(figure: Any, place: Any, pictures: Sequence[tuple[npt.NDArray[np.float32], int, int]]) -> None:
    for axes, (pixels, label, answer) in zip(
        place.subgridspec(1, len(pictures), wspace=0.08).subplots(squeeze=False)[0], pictures, strict=True
    ):
        axes.imshow(pixels)
        axes.set_axis_off()
        is_right = label == answer
        axes.set_title(
            str(answer) if is_right else f"{answer}, is {label}", size=10, pad=4, color=_OURS if is_right else _WRONG
        )
    heading = "The first test image of each class, and what the network says it is"
    figure.text(0.06, 0.835, heading, size=9, color="#6b7280")


def _draw_bars(axes: Axes, title: str, names: Sequence[str], values: Sequence[tuple[float, str]]) -> None:
    heights = [height for height, _ in values]
    patches = axes.bar(names, heights, width=0.6, color=[_PLAIN, _OURS])
    axes.bar_label(patches, [text for _, text in values], padding=3, size=13, weight="bold")
    axes.set_title(title, loc="left", size=10.5, weight="bold", pad=12)
    axes.set_ylim(0.0, max(heights) * 1.25)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0, pad=6)


def _draw_accuracy(axes: Axes, accuracies: Sequence[float]) -> None:
    epochs = range(1, len(accuracies) + 1)
    percents = [100.0 * accuracy for accuracy in accuracies]
    axes.plot(epochs, percents, color=_OURS, linewidth=2.2, marker="o", markersize=4.5, clip_on=False)
    axes.annotate(
        f"{percents[-1]:.1f} %",
        (epochs[-1], percents[-1]),
        xytext=(4, -24),
        textcoords="offset points",
        ha="right",
        size=13,
        weight="bold",
    )
    axes.set_title("Test accuracy, fit() on loaderpool", loc="left", size=10.5, weight="bold", pad=12)
    axes.set_ylim(0.0, 100.0)
    axes.set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
    axes.set_xticks(epochs)
    axes.set_xlabel("epoch")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
