"""python -m quickstart_demo: makes images, measures two contestants, trains, and draws
quickstart.png.

With --ray: trains on a cluster of simulated nodes, kills one of them, and compares the weights.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault(
    "TF_CPP_MIN_LOG_LEVEL", "2"
)  # set before TensorFlow is imported, so that it logs nothing at its start
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
import psutil

import loaderpool as lp

from .images import Item, NotOurFolderError, ensure_folder, list_items, load, load_and_augment

_BATCH_SIZE = 32
_PLAIN, _OURS = "#b6bfcc", "#0f766e"
_BUSY_CPUS = 0.25  # an idle desktop stays below this; another process that computes does not


say = functools.partial(print, flush=True)  # without a delay, also into a file


def main() -> None:
    """Run the demo. If the folder was not made by it, print one line and return 1."""
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=Path("quickstart-data"), help="folder of the images"
    )
    parser.add_argument(
        "--figure", type=Path, default=Path("quickstart.png"), help="the PNG file to write"
    )
    parser.add_argument(
        "--small", action="store_true", help="200 images and 1 epoch: to see that it runs"
    )
    parser.add_argument("--ray", action="store_true", help="three nodes, of which one is killed")
    options = parser.parse_args()
    started_s = time.monotonic()
    try:
        made = ensure_folder(options.data, 200 if options.small else 2000)
    except NotOurFolderError as error:
        sys.exit(f"quickstart: {error}")
    train, test = list_items(options.data)
    how = f"made in {time.monotonic() - started_s:.0f} s" if made else "already there"
    say(
        f"{options.data}: {len(train):,} JPEG files for training, {len(test):,} for the test ({how})"
    )
    # Imported here, because this imports TensorFlow, which the processes that make images do not
    # need.
    if options.ray:
        from . import more_machines

        more_machines.show(train, epochs=2)
        say(
            f"{time.monotonic() - started_s:.0f} s in all; docs/guide/scale/ray-cluster.md: how to have it on real ones"
        )
        return
    _compare(options.figure, train, test, *((1, 1) if options.small else (3, 8)))
    say(f"{options.figure} shows it; {time.monotonic() - started_s:.0f} s in all")


def _compare(path: Path, train: list[Item], test: list[Item], rounds: int, epochs: int) -> None:
    import tensorflow as tf

    from . import contest

    say(
        f"training for {_count(rounds, 'epoch')} on each of from_generator and loaderpool, some batches in turn\n"
    )
    busy = psutil.cpu_percent(1.0) / 100.0 * (psutil.cpu_count() or 1)
    result = contest.hold(train, rounds=rounds, batch_size=_BATCH_SIZE)
    rates: dict[str, float] = {}
    waits: dict[str, float] = {}
    say(f"{'all turns':14}  samples  samples/s  waiting for data  that is")
    for name, turns in (("from_generator", result.plain), ("loaderpool", result.ours)):
        samples, elapsed_s, wait_s = (sum(column) for column in zip(*turns, strict=True))
        # The median of the turns, so that a short burst of other work has little effect.
        rates[name], waits[name] = (
            statistics.median(turn.samples_per_s for turn in turns),
            100.0 * wait_s / elapsed_s,
        )
        say(f"{name:14}  {samples:7,}  {rates[name]:9,.0f}  {waits[name]:14.0f} %  {wait_s:5.1f} s")
    ratios, cpus = result.ratios, _count(os.cpu_count() or 1, "CPU")
    ratio = statistics.median(ratios)
    spread = f"median of {ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} pairs of turns"
    if len(ratios) == 1:
        spread = "one pair of turns"
    say(
        f"{ratio:.2f} times as many samples/s ({spread}) with {_count(result.workers, 'worker')}, "
        f"which took {result.start_s:.1f} s to the first step; "
        f"{result.batches_zero_copy} of {result.batches} batches reached TensorFlow without a copy"
    )
    others = f"other processes kept {busy:.1f} of {cpus} busy before"
    say(
        f"{others}{', which workers lack: a quiet machine gives another ratio' if busy >= _BUSY_CPUS else ''}\n"
    )
    accuracies = _train_to_the_end(train, test, epochs)
    say(f"test accuracy {accuracies[-1]:.3f}")
    title = f"{ratio:.1f} times as many samples per second\n{spread}, with the same function and network"
    caption = (
        f"{_count(result.workers, 'worker')} on {cpus} that also train · batches of {_BATCH_SIZE} with prefetch · "
        f"{others}\nPython {platform.python_version()}, TensorFlow {tf.__version__}, NumPy {np.__version__}, "
        f"loaderpool {lp.__version__} · scripts/quickstart"
    )
    _draw(path, rates, waits, accuracies, title, caption)


def _train_to_the_end(train: list[Item], test: list[Item], epochs: int) -> list[float]:
    """Train for all epochs, and return the test accuracy after each."""
    import keras

    from .contest import make_network

    def say_epoch(epoch: int, logs: dict[str, float]) -> None:
        say(
            f"  epoch {epoch + 1:2}   accuracy {logs['accuracy']:.3f}   on the test set {logs['val_accuracy']:.3f}"
        )

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
            shuffle=False,  # the loader shuffles, differently in each epoch
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=say_epoch)],
        )
    return list(history.history["val_accuracy"])


def _draw(
    path: Path, rates: Mapping[str, float], waits: Mapping[str, float], accuracies: Sequence[float], title: str,
    caption: str,
) -> None:  # fmt: skip
    """Draw each contestant's samples per second and share of waiting, and the accuracies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.5), dpi=130, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, name, values in (
        (left, "Training samples per second", rates), (middle, "Percent of the time waiting for data", waits)
    ):  # fmt: skip
        bars = axes.bar(list(values), list(values.values()), width=0.6, color=[_PLAIN, _OURS])
        axes.bar_label(bars, fmt="%.0f", size=13, weight="bold")
        axes.set_title(name, loc="left", size=10.5, weight="bold")
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.margins(y=0.15)
        axes.set_yticks([])
    right.plot(range(1, len(accuracies) + 1), accuracies, color=_OURS, linewidth=2.2, marker="o")
    right.set_title("Test accuracy, fit() on loaderpool", loc="left", size=10.5, weight="bold")
    right.set(ylim=(0.0, 1.0), xlabel="epoch", xticks=range(1, len(accuracies) + 1))
    right.grid(axis="y", color="#e5e7eb")
    figure.suptitle(title, size=13, weight="bold")
    figure.supxlabel(caption, size=8.5, color="#6b7280")
    figure.savefig(path)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


if __name__ == "__main__":
    main()
