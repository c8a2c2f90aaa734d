"""Draws the pictures of README and site: `python docs/pictures.py`.

The charts show tables that the benchmark wrote. The picture of the orders shows the indices that
loaders give. A test compares the text stored in each picture with tables and loaders, so that no
picture is out of date.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent
OURS, OTHERS = "#1b6ca8", "#b8b8b8"
_RESULTS = "benchmarks/results.md"
_JPEG = "JPEG decode, resize, flip, batch 32 through tf.data"


class Bar(NamedTuple):
    """A bar of a chart, and the text at its end."""

    label: str
    value: float
    text: str


class Chart(NamedTuple):
    """A chart of horizontal bars."""

    file: str
    title: str
    bars: tuple[Bar, ...]
    line: tuple[float, str] | None = None  # value and label of a vertical line

    @property
    def data(self) -> str:
        """What it shows, as text that the picture's file holds, too."""
        line = [] if self.line is None else [f"line at {self.line[0]:g}: {self.line[1]}"]
        bars = (f"{bar.label}: {bar.text}" for bar in self.bars)
        return "; ".join([self.title, *bars, *line])


def table(page: str, mark: str) -> dict[str, dict[str, str]]:
    """Return a table between its marks on a page: cells by row and column."""
    text = (
        (DOCS / page)
        .read_text(encoding="utf-8")
        .partition(f"<!-- {mark}:begin -->")[2]
        .partition("<!-- ")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:1] == "|"
    ]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


def charts() -> Iterator[Chart]:
    """Yield all charts."""
    title = "Milliseconds for a batch of 32 JPEG images into tf.data, two CPUs. Lower is better."
    speed = table(_RESULTS, "speed")[_JPEG]
    pages = {
        "tf-data": "from_generator",
        "keras-pydataset": "PyDataset",
        "pytorch-dataloader": "DataLoader",
    }
    pages["grain"] = "Grain"
    yield _loaders("speed", title, speed, *pages.values())
    for page, before in pages.items():
        yield _loaders(f"migrate-{page}", title, speed, before)
    shares = {
        work: row["share of the limit's rate"] for work, row in table(_RESULTS, "limits").items()
    }
    bars = [
        Bar(work, float(share.strip("%")), share.replace("%", " %"))
        for work, share in shares.items()
    ]
    title = "Batches per second, in percent of bare processes. Higher is better."
    yield Chart("limits", title, tuple(bars), (100.0, "bare processes"))
    title = "Milliseconds from construction to the first batch. Lower is better."
    yield _costs("start", title, "times", "from construction")
    yield _costs(
        "memory",
        "Memory that four workers add to one process, in MB. Lower is better.",
        "memory",
        "",
    )


def _costs(file: str, title: str, mark: str, start: str) -> Chart:
    """Return a chart of the rows that begin so: loaderpool, and the best of the others where there is one."""
    bars = []
    for what, row in table(_RESULTS, mark).items():
        other = re.fullmatch(r"(.*) \((.+)\)", row["the best of the others"])
        if what.startswith(start) and other:
            label = re.sub(r"^an? |, 4 workers.*|^from construction to the ", "", what)
            texts = {"loaderpool": row["loaderpool"], other[2]: other[1]}
            bars += [
                Bar(f"{label}: {n}", float(text.replace(",", "").split()[0]), text)
                for n, text in texts.items()
            ]
    return Chart(file, title, tuple(bars))


def _loaders(file: str, title: str, row: dict[str, str], *others: str) -> Chart:
    return Chart(
        file,
        title,
        tuple(Bar(name, float(row[name]), f"{row[name]} ms") for name in (*others, "loaderpool")),
    )


class Panel(NamedTuple):
    """Panel of the picture of orders: the source indices of each batch of an epoch."""

    title: str
    batches: list[list[int]]

    @property
    def data(self) -> str:
        """Text of the batches, which the picture's file contains, too."""
        return f"{self.title}: {self.batches}"


def orders() -> Iterator[Panel]:
    """Yield one epoch of each kind of order, for a source of 64 items."""
    import numpy as np

    import loaderpool as lp

    items, lengths = np.arange(64), np.random.default_rng(0).integers(1, 100, 64)
    weights = np.where(items < 48, 1.0, 9.0)
    mixed = lp.mix([items[:16], items[16:]], weights=[1, 1], stop=64)
    uneven = [items[start : start + 12][::-1] for start in range(0, 64, 12)]
    kinds: dict[str, tuple[object, dict[str, object]]] = {
        "the order of the source": (items, {}),
        "shuffle=True": (items, {"shuffle": True}),
        "Weighted: the last 16 items\nhave 9 times the weight": (
            items,
            {"order": lp.Weighted(weights)},
        ),
        "the same with\nreplacement=False": (
            items,
            {"order": lp.Weighted(weights, num_samples=48, replacement=False)},
        ),
        "given indices: items[::-2]": (items, {"order": items[::-2]}),
        "given batches of 12": (items, {"order": uneven, "batch_size": None}),
        "Blocks(rows=8, window=2)": (items, {"order": lp.Blocks(rows=8, window=2)}),
        "Buckets: items of similar\nlength (y: length)": (
            lengths,
            {"buckets": lp.Buckets(lengths, [25, 50, 75]), "shuffle": True},
        ),
        "TokenBudget(lengths, 400)\n(y: length)": (
            lengths,
            {"order": lp.TokenBudget(lengths, 400), "batch_size": None},
        ),
        "Packed(lengths, 150): one row\na batch (y: length)": (
            lengths,
            {"order": lp.Packed(lengths, 150), "batch_size": 1, "fn": np.zeros},
        ),
        "samples_per_item=4, shuffle=True\n(here a window of 4 items)": (
            items[:16],
            {
                "order": lp.Blocks(window=4),
                "samples_per_item": 4,
                "fn": lambda item: [4 * item + part for part in range(4)],
            },
        ),
        "mix of 16 and 48 items,\nhalf each": (mixed, {}),
    }
    for title, (source, settings) in kinds.items():
        settings.setdefault("batch_size", 8)
        if settings["batch_size"] is None:
            del settings["batch_size"]
        with lp.Loader(source, workers=0, **settings) as loader:
            if "Packed" in title:  # several items in a row
                numbers = range(len(loader))
                found = [lengths[loader.indices(0, number)].tolist() for number in numbers]
            else:
                found = [batch.tolist() for batch in loader]
            yield Panel(title, found)


def draw_orders() -> None:
    """Write the picture of the orders: a point for each sample, with a color for each batch."""
    from matplotlib.figure import Figure

    panels = [*orders()]
    columns = 3
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(7.6, 2.3 * rows), dpi=160, layout="constrained")
    axes = [*figure.subplots(rows, columns).flat]
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for panel, axis in zip(panels, axes, strict=False):
        position = 0
        for number, batch in enumerate(panel.batches):
            places = range(position, position + len(batch))
            axis.scatter(places, batch, s=7, color=(OURS, "#e08a1e")[number % 2])
            position += len(batch)
        axis.set_title(panel.title, fontsize=8.5, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=6.5)
    figure.supxlabel("position in the epoch; the color changes with each batch", fontsize=8.5)
    figure.supylabel("source index", fontsize=8.5)
    data = "; ".join(panel.data for panel in panels)
    figure.savefig(DOCS / "images" / "orders.png", metadata={"Description": data})


def draw(chart: Chart) -> None:
    """Write the picture of a chart."""
    from matplotlib.figure import Figure

    title = "\n".join(
        textwrap.fill(sentence, 66) for sentence in re.split(r"(?<=\.) ", chart.title)
    )
    labels = [textwrap.fill(bar.label, 30) for bar in chart.bars]
    lines = sum(label.count("\n") + 2 for label in labels) + 2 * title.count("\n") + 3
    figure = Figure(figsize=(5.6, 0.19 * lines), dpi=160, layout="constrained")
    axis = figure.add_subplot()
    is_alone = all("loaderpool" not in bar.label for bar in chart.bars)
    colors = [OURS if is_alone or "loaderpool" in bar.label else OTHERS for bar in chart.bars]
    bars = axis.barh(labels, [bar.value for bar in chart.bars], color=colors)
    texts = axis.bar_label(bars, [bar.text for bar in chart.bars], padding=4)
    axis.invert_yaxis()
    axis.margins(x=0.14, y=0.02)
    if chart.line is not None:
        value, label = chart.line
        axis.axvline(value, color="#404040", linestyle="--", linewidth=1)
        for text in texts:  # the line would cross some of them
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
        above = axis.get_xaxis_transform()
        axis.text(value, 1.0, label, transform=above, ha="center", va="bottom", fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(bottom=False, labelbottom=False, left=False)
    figure.savefig(DOCS / "images" / f"{chart.file}.png", metadata={"Description": chart.data})


if __name__ == "__main__":
    for each in charts():
        draw(each)
    draw_orders()
