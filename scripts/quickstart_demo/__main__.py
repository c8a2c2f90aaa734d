"""python -m quickstart_demo: makes the images, measures both contestants, trains to the end, draws quickstart.png."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow's import: its start-up notes say nothing here
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
from rich.console import Console
from rich.table import Table

import loaderpool as lp

from .images import NotOurFolderError, ensure_folder, list_items
from .loading import CLASSES, Item, load, load_and_augment

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
    rounds: int  # epochs of each contestant, in turn
    epochs: int  # of the training that shows the accuracy


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
    _compare(settings, train, test)
    _say(f"{settings.figure} shows it; {time.monotonic() - started_s:.0f} s in all")


def _compare(settings: _Settings, train: list[Item], test: list[Item]) -> None:
    # Not before the images are made: their processes import this module, and need no TensorFlow.
    import tensorflow as tf

    from . import figure
    from .training import make_traced_network, median_of, plain_dataset, train_measured

    rounds = settings.rounds
    _say(f"training for {_count(rounds, 'epoch')} on each of from_generator and loaderpool, in turn")
    networks = [make_traced_network(train, batch_size=_BATCH_SIZE, epochs=rounds) for _ in range(2)]
    plain_rounds, pooled_rounds = [], []
    batches = batches_lent = 0
    for number in range(rounds):
        plain_rounds.append(
            train_measured(
                networks[0],
                lambda seed=number: plain_dataset(train, load_and_augment, batch_size=_BATCH_SIZE, seed=seed),
                train,
            )
        )
        # A new loader each round, or it would read ahead while the other one is measured.
        with contextlib.ExitStack() as stack:
            loaders: list[lp.Loader] = []

            def pooled_dataset(seed: int = number) -> Any:
                loader = lp.Loader(train, load_and_augment, batch_size=_BATCH_SIZE, shuffle=True, seed=seed)
                loaders.append(stack.enter_context(loader))
                return loader.as_dataset()

            pooled_rounds.append(train_measured(networks[1], pooled_dataset, train))
            statistics, workers = loaders[0].statistics(), loaders[0].workers
        batches, batches_lent = batches + statistics.batches, batches_lent + statistics.batches_lent

    contestants = (("from_generator", median_of(plain_rounds)), ("loaderpool", median_of(pooled_rounds)))
    table = Table(box=None, pad_edge=False)
    table.add_column("median of the epochs" if rounds > 1 else "")
    for heading in ("samples", "samples/s", "waiting for data", "that is"):
        table.add_column(heading, justify="right")
    for name, result in contestants:
        table.add_row(
            name,
            f"{result.samples:,}",
            f"{result.samples_per_s:,.0f}",
            f"{result.wait_share:.0%}",
            f"{result.wait_s:.1f} s",
        )
    _console.print()
    _console.print(table)
    ratio = contestants[1][1].samples_per_s / contestants[0][1].samples_per_s
    _say(
        f"{ratio:.2f} times as many samples/s with {_count(workers, 'worker')}; "
        f"{batches_lent} of {batches} batches reached TensorFlow without a copy\n"
    )

    accuracies, pictures = _train_to_the_end(settings, train, test)
    _say(f"test accuracy {accuracies[-1]:.3f}")
    figure.draw(
        settings.figure,
        pictures=pictures,
        bars=[figure.Bar(name, each.samples_per_s, each.wait_share, each.wait_s) for name, each in contestants],
        accuracies=accuracies,
        caption=(
            f"{_count(workers, 'worker')} on {_count(os.cpu_count() or 1, 'CPU')} that also train · epochs of "
            f"{len(train):,} JPEG files in turn, the median of {rounds}, start-up counted · "
            f"both in batches of {_BATCH_SIZE} with prefetch\n"
            f"Python {platform.python_version()}, TensorFlow {tf.__version__}, NumPy {np.__version__}, "
            f"loaderpool {lp.__version__} · scripts/quickstart"
        ),
    )


def _train_to_the_end(settings: _Settings, train: list[Item], test: list[Item]) -> tuple[list[float], list[Any]]:
    """The test accuracy after each epoch, and for each class the first test image, its label, the network's answer."""
    import keras

    from .training import make_network

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
    arguments = parser.parse_args()
    images, rounds, epochs = (200, 1, 1) if arguments.small else (2000, 3, 8)
    return _Settings(arguments.data, arguments.figure, images, rounds, epochs)


if __name__ == "__main__":
    main()
