"""python -m quickstart_demo: makes the images, measures both contestants, trains to the end, draws quickstart.png.

With --ray: trains on a cluster of simulated nodes, of which one is killed, and compares the weights.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow's import: its start-up notes say nothing here
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
import psutil

import loaderpool as lp

from .images import Item, NotOurFolderError, ensure_folder, list_items, load, load_and_augment

_BATCH_SIZE = 32
_INK, _FAINT, _PLAIN, _OURS = "#1f2937", "#9ca3af", "#b6bfcc", "#0f766e"
_STYLE: dict[Any, Any] = {
    "font.size": 10, "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "axes.edgecolor": _FAINT, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
_BUSY_CPUS = 0.25  # a desktop at rest stays below this; one other process that computes does not


def main() -> None:
    """The demo from end to end; exit status 1 with one line where the folder is not its own."""
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("quickstart-data"), help="folder of the images")
    parser.add_argument("--figure", type=Path, default=Path("quickstart.png"), help="the PNG file to write")
    parser.add_argument("--small", action="store_true", help="200 images and 1 epoch: to see that it runs")
    parser.add_argument("--ray", action="store_true", help="three nodes, of which one is killed")
    options = parser.parse_args()
    started_s = time.monotonic()
    try:
        made = ensure_folder(options.data, 200 if options.small else 2000)
    except NotOurFolderError as error:
        sys.exit(f"quickstart: {error}")
    train, test = list_items(options.data)
    how = f"made in {time.monotonic() - started_s:.0f} s" if made else "already there"
    say(f"{options.data}: {len(train):,} JPEG files for training, {len(test):,} for the test ({how})")
    # What follows imports TensorFlow, which the processes that make the images need not.
    if options.ray:
        from . import more_machines

        more_machines.show(train, epochs=2)
        say(f"{time.monotonic() - started_s:.0f} s in all; docs/how-to/more-machines.md: how to have it on real ones")
        return
    _compare(options.figure, train, test, *((1, 1) if options.small else (3, 8)))
    say(f"{options.figure} shows it; {time.monotonic() - started_s:.0f} s in all")


def _compare(path: Path, train: list[Item], test: list[Item], rounds: int, epochs: int) -> None:
    import tensorflow as tf

    from . import contest

    say(f"training for {_count(rounds, 'epoch')} on each of from_generator and loaderpool, some batches in turn\n")
    busy = psutil.cpu_percent(1.0) / 100.0 * (psutil.cpu_count() or 1)
    result = contest.hold(train, rounds=rounds, batch_size=_BATCH_SIZE)
    rates: dict[str, float] = {}
    waits: dict[str, tuple[float, float]] = {}
    say(f"{'all turns':14}  samples  samples/s  waiting for data  that is")
    for name, turns in (("from_generator", result.plain), ("loaderpool", result.ours)):
        samples, elapsed_s, wait_s = (sum(column) for column in zip(*turns, strict=True))
        # The median of the turns, as one burst of other work shall count little.
        rates[name], waits[name] = statistics.median(turn.samples_per_s for turn in turns), (wait_s / elapsed_s, wait_s)
        say(f"{name:14}  {samples:7,}  {rates[name]:9,.0f}  {100.0 * wait_s / elapsed_s:14.0f} %  {wait_s:5.1f} s")
    ratios, cpus = result.ratios, _count(os.cpu_count() or 1, "CPU")
    ratio = statistics.median(ratios)
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f} in {_count(len(ratios), 'pair')} of turns"
    say(
        f"{ratio:.2f} times as many samples/s (median; {spread}) with {_count(result.workers, 'worker')}, "
        f"which took {result.start_s:.1f} s to the first step; "
        f"{result.batches_lent} of {result.batches} batches reached TensorFlow without a copy"
    )
    others = f"other processes kept {busy:.1f} of {cpus} busy before"
    say(f"{others}{', which workers lack: a quiet machine gives another ratio' if busy >= _BUSY_CPUS else ''}\n")
    accuracies = _train_to_the_end(train, test, epochs)
    say(f"test accuracy {accuracies[-1]:.3f}")
    _draw(
        path,
        rates=rates,
        waits=waits,
        title=f"{ratio:.1f} times as many samples per second",
        subtitle=f"The median of {spread} · the same Pillow and NumPy function feeds the same Keras network",
        accuracies=accuracies,
        caption=(
            f"{_count(result.workers, 'worker')} on {cpus} that also train · batches of {_BATCH_SIZE} with prefetch · "
            f"{others}\nPython {platform.python_version()}, TensorFlow {tf.__version__}, NumPy {np.__version__}, "
            f"loaderpool {lp.__version__} · scripts/quickstart"
        ),
    )


def _train_to_the_end(train: list[Item], test: list[Item], epochs: int) -> list[float]:
    """The test accuracy after each epoch."""
    import keras

    from .contest import make_network

    def say_epoch(epoch: int, logs: dict[str, float]) -> None:
        say(f"  epoch {epoch + 1:2}   accuracy {logs['accuracy']:.3f}   on the test set {logs['val_accuracy']:.3f}")

    say(f"training a new network for {_count(epochs, 'epoch')} with fit() on loaderpool")
    with lp.Loader(test, load, batch_size=len(test)) as loader:
        images, labels = next(iter(loader))
        images, labels = images.copy(), labels.copy()
    with lp.Loader(train, load_and_augment, batch_size=_BATCH_SIZE, shuffle=True, seed=0) as loader:
        network = make_network(total_steps=epochs * len(loader))
        history = network.fit(
            loader.as_dataset(),
            epochs=epochs,
            validation_data=(images, labels),
            shuffle=False,  # the loader does, in another order each epoch
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=say_epoch)],
        )
    return list(history.history["val_accuracy"])


def _draw(
    path: Path, *, rates: Mapping[str, float], waits: Mapping[str, tuple[float, float]], title: str, subtitle: str,
    accuracies: Sequence[float], caption: str,
) -> None:  # fmt: skip
    """Draw the PNG file: samples per second and the wait (share, seconds) of each contestant, accuracies in 0..1."""
    import matplotlib

    matplotlib.use("Agg")  # no window: the script runs on servers, too
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        figure = pyplot.figure(figsize=(11.0, 4.5), dpi=130, facecolor="white")
        columns = figure.add_gridspec(
            1, 3, width_ratios=[1.0, 1.0, 1.35], left=0.06, right=0.97, top=0.72, bottom=0.21, wspace=0.32
        )
        figure.text(0.06, 0.91, title, size=17, weight="bold")
        figure.text(0.06, 0.845, subtitle, color="#4b5563")
        left, middle, right = (figure.add_subplot(columns[column]) for column in range(3))
        _draw_bars(left, "Training samples per second", {name: (rate, f"{rate:,.0f}") for name, rate in rates.items()})
        texts = {name: (share, f"{100.0 * share:.0f} %\n({seconds:.0f} s)") for name, (share, seconds) in waits.items()}
        _draw_bars(middle, "Time waiting for data", texts)
        _draw_accuracy(right, [100.0 * accuracy for accuracy in accuracies])
        figure.text(0.06, 0.05, caption, size=8.5, color="#6b7280")
        figure.savefig(path)
        pyplot.close(figure)


def _draw_bars(axes: Any, title: str, values: Mapping[str, tuple[float, str]]) -> None:
    heights = [height for height, _ in values.values()]
    patches = axes.bar(list(values), heights, width=0.6, color=[_PLAIN, _OURS])
    axes.bar_label(patches, [text for _, text in values.values()], padding=3, size=13, weight="bold")
    axes.set_title(title, loc="left", size=10.5, weight="bold", pad=12)
    axes.set_ylim(0.0, max(heights) * 1.25)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0, pad=6)


def _draw_accuracy(axes: Any, percents: Sequence[float]) -> None:
    epochs = range(1, len(percents) + 1)
    axes.plot(epochs, percents, color=_OURS, linewidth=2.2, marker="o", markersize=4.5, clip_on=False)
    axes.annotate(
        f"{percents[-1]:.1f} %", (epochs[-1], percents[-1]), xytext=(4, -24), textcoords="offset points", ha="right",
        size=13, weight="bold",
    )  # fmt: skip
    axes.set_title("Test accuracy, fit() on loaderpool", loc="left", size=10.5, weight="bold", pad=12)
    axes.set_ylim(0.0, 100.0)
    axes.set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
    axes.set_xticks(epochs)
    axes.set_xlabel("epoch")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def say(line: str) -> None:
    """Print a line at once, into a file as well."""
    print(line, flush=True)


if __name__ == "__main__":
    main()
