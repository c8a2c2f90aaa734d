"""python -m quickstart_demo: makes the images, measures both contestants, trains to the end, draws quickstart.png.

With --ray: trains on a cluster of simulated nodes, of which one is killed, and compares the weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow's import: its start-up notes say nothing here
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
from rich.console import Console
from rich.table import Table

import loaderpool as lp

from .images import NotOurFolderError, ensure_folder, list_items
from .loading import CLASSES, Item, load, load_and_augment
from .others import BUSY_CPUS

if TYPE_CHECKING:
    from .contest import Contest

_BATCH_SIZE = 32
_SEED = 0
# The same text in a terminal, in a file and for the test that reads it: no colours of numbers, no wrapping.
_console = Console(highlight=False, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """How much is done."""

    folder: Path  # of the images
    figure: Path  # the PNG to write
    images: int  # in the folder, training and test together
    rounds: int  # epochs of each contestant
    epochs: int  # of the training that shows the accuracy
    ray: bool  # whether it is the show of a cluster


def main() -> None:
    """The demo from end to end; exit status 1 with one line where the folder is not its own."""
    settings = _parse()
    started_s = time.monotonic()
    try:
        made = ensure_folder(settings.folder, settings.images)
    except NotOurFolderError as error:
        sys.exit(f"quickstart: {error}")
    train, test = list_items(settings.folder)
    how = f"made in {time.monotonic() - started_s:.0f} s" if made else "already there"
    _say(f"{settings.folder}: {len(train):,} JPEG files for training, {len(test):,} for the test ({how})")
    if settings.ray:
        from . import more_machines

        more_machines.show(_console, train, settings.epochs)
        _say(f"{time.monotonic() - started_s:.0f} s in all; docs/how-to/more-machines.md: how to have it on real ones")
        return
    _compare(settings, train, test)
    _say(f"{settings.figure} shows it; {time.monotonic() - started_s:.0f} s in all")


def _compare(settings: _Settings, train: list[Item], test: list[Item]) -> None:
    # Not before the images are made: their processes import this module, and need no TensorFlow.
    import tensorflow as tf

    from . import contest, figure

    rounds = settings.rounds
    _say(f"training for {_count(rounds, 'epoch')} on each of from_generator and loaderpool, some batches in turn")
    result = contest.hold(train, rounds=rounds, batch_size=_BATCH_SIZE)
    contestants = (("from_generator", result.from_generator), ("loaderpool", result.loaderpool))
    table = Table(box=None, pad_edge=False)
    table.add_column("all turns")
    for heading in ("samples", "samples/s", "waiting for data", "that is"):
        table.add_column(heading, justify="right")
    for name, each in contestants:
        share = f"{100.0 * each.wait_share:.0f} %"
        table.add_row(name, f"{each.samples:,}", f"{each.samples_per_s:,.0f}", share, f"{each.wait_s:.1f} s")
    _console.print()
    _console.print(table)
    ratios = result.ratios
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f} in {_count(len(ratios), 'pair')} of turns"
    _say(
        f"{result.ratio:.2f} times as many samples/s (median; {spread}) with {_count(result.workers, 'worker')}, "
        f"which took {result.start_s:.1f} s to the first step; "
        f"{result.batches_lent} of {result.batches} batches reached TensorFlow without a copy"
    )
    others = _others(result)
    is_busy = result.others_busy_cpus is not None and result.others_busy_cpus >= BUSY_CPUS
    _say(f"{others}{', which workers lack: a quiet machine gives another ratio' if is_busy else ''}\n")

    accuracies, pictures = _train_to_the_end(settings, train, test)
    _say(f"test accuracy {accuracies[-1]:.3f}")
    figure.draw(
        settings.figure,
        pictures=pictures,
        bars=[figure.Bar(name, each.samples_per_s, each.wait_share, each.wait_s) for name, each in contestants],
        ratio=result.ratio,
        spread=f"The median of {spread}",
        accuracies=accuracies,
        caption=(
            f"{_count(result.workers, 'worker')} on {_count(result.cpus, 'CPU')} that also train · "
            f"batches of {_BATCH_SIZE} with prefetch{f' · {others}' if others else ''}\n"
            f"Python {platform.python_version()}, TensorFlow {tf.__version__}, NumPy {np.__version__}, "
            f"loaderpool {lp.__version__} · scripts/quickstart"
        ),
    )


def _others(result: Contest) -> str:
    """What other processes took meanwhile, a few words; empty where that is unknown."""
    busy = result.others_busy_cpus
    if busy is None:
        return ""
    return f"other processes kept {busy:.1f} of {_count(result.cpus, 'CPU')} busy meanwhile"


def _train_to_the_end(settings: _Settings, train: list[Item], test: list[Item]) -> tuple[list[float], list[Any]]:
    """The test accuracy after each epoch, and for each class the first test image, its label, the network's answer."""
    import keras

    from .network import make_network

    _say(f"training a new network for {_count(settings.epochs, 'epoch')} with fit() on loaderpool")
    with lp.Loader(test, load, batch_size=len(test)) as loader:
        images, labels = next(iter(loader))
        images, labels = images.copy(), labels.copy()
    with lp.Loader(train, load_and_augment, batch_size=_BATCH_SIZE, shuffle=True, seed=_SEED) as loader:
        network = make_network(total_steps=settings.epochs * len(loader))
        history = network.fit(
            loader.as_dataset(),
            epochs=settings.epochs,
            validation_data=(images, labels),
            shuffle=False,  # the loader does, anew each epoch
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=_say_epoch)],
        )
    firsts = [int(np.flatnonzero(labels == label)[0]) for label in range(CLASSES) if label in labels]
    answers = network.predict(images[firsts], verbose=0).argmax(axis=1)
    pictures = [(images[index], int(labels[index]), int(answer)) for index, answer in zip(firsts, answers, strict=True)]
    return list(history.history["val_accuracy"]), pictures


def _say_epoch(epoch: int, logs: dict[str, float]) -> None:
    _say(f"  epoch {epoch + 1:2}   accuracy {logs['accuracy']:.3f}   on the test set {logs['val_accuracy']:.3f}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _say(line: str) -> None:
    _console.print(line, markup=False)


def _parse() -> _Settings:
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("quickstart-data"), help="folder of the images")
    parser.add_argument("--figure", type=Path, default=Path("quickstart.png"), help="the PNG file to write")
    parser.add_argument("--small", action="store_true", help="200 images and 1 epoch: to see that it runs")
    parser.add_argument("--ray", action="store_true", help="three nodes, of which one is killed")
    arguments = parser.parse_args()
    images, rounds, epochs = (200, 1, 1) if arguments.small else (2000, 3, 8)
    if arguments.ray:
        epochs = 2
    return _Settings(arguments.data, arguments.figure, images, rounds, epochs, arguments.ray)


if __name__ == "__main__":
    main()
