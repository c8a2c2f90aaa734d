"""Callbacks for Keras' `fit`.

`BackupCallback` saves model and loader. `ReportCallback` reports the time spent waiting for data.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from loaderpool.checks import whole_number
from loaderpool.errors import ArgumentError, StateError
from loaderpool.hints import known_names_only
from loaderpool.system.process import why_not_apart
from loaderpool.trainer.explain.explanation import explain
from loaderpool.trainer.explain.verdicts import Verdict
from loaderpool.trainer.explain.window import Snapshot
from loaderpool.trainer.loader import Loader

_Logs = dict[str, Any] | None  # metrics that Keras passes to a callback
_TRAINING = "training.json"
# Matches the names of a backup's files; other files are never deleted.
_is_ours = re.compile(r"training\.(json|new)|\d+-\d+\.weights\.h5").fullmatch


class BackupCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Save the model, its optimizer and the loader's position; resume when `fit` is called again.

    Create it before `as_dataset()`, and list it before callbacks that set `model.stop_training`. In
    a resumed epoch, loss and metrics are those of the remaining steps; `fit` prints their number.
    If saving is interrupted, the previous backup is kept. Pass the callback to `fit`::

        backup = BackupCallback(loader, "backup")
        model.fit(loader.for_keras(), epochs=10, callbacks=[backup])

    Args:
        loader: Loader that `fit` trains on.
        path: Directory for this backup alone, without other files; created if missing.
        save_freq: `"epoch"`, or a number of batches; the end of an epoch is always saved. Default:
            `"epoch"`.
        delete_checkpoint: Set to `False` to keep the backup when `fit` finishes. Default: `True`.

    Raises:
        ArgumentError: If `path` is a file, or a directory with other files.
        StateError: If the position cannot be saved. In `fit`: if the backup is damaged or belongs
            to another loader, or if the number of steps per epoch is unknown.
    """

    @known_names_only
    def __init__(
        self,
        loader: Loader,
        path: str | os.PathLike[str],
        save_freq: Literal["epoch"] | int = "epoch",
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(loader, Loader):
            raise ArgumentError(
                f"BackupCallback takes the loader itself and a path, got {type(loader).__name__}"
            )
        if save_freq != "epoch":
            save_freq = whole_number(
                "save_freq", save_freq, at_least=1, hint='batches between two backups, or "epoch"'
            )
        if problem := why_not_apart(Path(path), _is_ours):
            raise ArgumentError(f"BackupCallback: {problem}")
        loader.state_dict(batches_taken=0)  # raises StateError now if the position cannot be saved
        self._loader, self._path = loader, Path(path)
        self._save_freq, self._deletes = save_freq, delete_checkpoint
        self._reading: object = None  # log of the dataset's iteration whose steps are counted
        # Steps of the optimizer when that iteration began, when this epoch (or the rest of it)
        # began, and at the latest backup.
        self._began = self._epoch_began = self._saved = 0
        self._epoch = 0
        # Steps of this epoch done by an earlier process; the resumed epoch is shorter by them.
        self._before = 0
        loader._core.tracker.is_backed_up = True

    # ---- called by fit ----

    def on_train_begin(self, logs: _Logs = None) -> None:
        """Restore the backup, if there is one."""
        if self.params.get("steps") is None:
            raise StateError(
                "BackupCallback needs the number of steps in an epoch. Create it before "
                "loader.as_dataset(), and pass that dataset to fit without changes, or pass "
                "steps_per_epoch= to fit."
            )
        self._before = 0
        if not (self._path / _TRAINING).exists():
            return
        if not self.model.built:
            raise StateError(
                "fit() can restore a backup only into a built model. Add an Input, or call build()."
            )
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        try:
            training = json.loads((self._path / _TRAINING).read_bytes())
            self._loader.load_state_dict(training["loader"])
            self.model.load_weights(self._path / training["weights"])
            for state, saved in zip(self._seed_states(), training["seeds"], strict=True):
                state.assign(saved)
            self.model._initial_epoch, self._before = training["epoch"], training["step"]
        except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise StateError(
                f"The backup in {self._path} is damaged ({type(error).__name__}: {error}). Delete "
                "the directory to start again."
            ) from error

    def on_epoch_begin(self, epoch: int, logs: _Logs = None) -> None:
        """Record the optimizer's steps at the epoch's start; print a note if it is resumed."""
        self._epoch = epoch
        self._epoch_began = self._saved = self._steps()
        if self._before and self.params.get("verbose"):
            steps = self.params["steps"]
            print(
                f"Epoch {epoch + 1} resumes after step {self._before} of {steps}. Its loss and "
                f"metrics, also in History, are those of the remaining {steps - self._before} "
                "steps."
            )

    def on_train_batch_end(self, batch: int, logs: _Logs = None) -> None:
        """Save after every `save_freq` batches; end a resumed epoch after its last step."""
        if self._save_freq == "epoch" and not self._before:
            return  # `_steps()` would wait for the device
        steps = self._steps()
        done = self._before + steps - self._epoch_began
        is_over = done >= self.params["steps"]
        if self._save_freq != "epoch" and steps - self._saved >= self._save_freq and not is_over:
            self._save(self._epoch, done)
        if self._before and is_over:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: _Logs = None) -> None:
        """Save the end of the epoch."""
        if self._before:
            self.model.stop_training = False
        self._before = 0
        self._save(epoch + 1, 0)

    def on_train_end(self, logs: _Logs = None) -> None:
        """Delete the backup, unless `delete_checkpoint=False`."""
        if self._deletes:
            self._delete_all_but()

    # ---- saving ----

    def _steps(self) -> int:
        optimizer = self.model.optimizer
        # `iterations` counts updates. With gradient accumulation these are fewer than the steps.
        return int(getattr(optimizer, "_iterations", optimizer.iterations).numpy())

    def _seed_states(self) -> list[Any]:
        """Return the seeds of dropout and similar layers.

        Keras does not save them with the weights.
        """
        return [
            each
            for each in self.model.non_trainable_variables
            if each.path.endswith("seed_generator_state")
        ]

    def _save(self, epoch: int, step: int) -> None:
        steps, latest = self._steps(), self._loader._core.tracker.iterations.latest
        if latest is not self._reading:  # another iteration of the dataset has begun, in this epoch
            self._reading, self._began = latest, self._epoch_began
        state = self._loader.state_dict(batches_taken=steps - self._began)
        self._path.mkdir(parents=True, exist_ok=True)
        weights, training = self._path / f"{epoch}-{step}.weights.h5", self._path / _TRAINING
        self.model.save_weights(weights)
        seeds = [np.asarray(each).tolist() for each in self._seed_states()]
        content = {
            "epoch": epoch,
            "step": step,
            "loader": state,
            "seeds": seeds,
            "weights": weights.name,
        }
        written = training.with_suffix(".new")
        written.write_text(json.dumps(content), "utf-8")
        _sync(weights, written)
        written.replace(training)  # the new backup counts from here on
        _sync(self._path)
        self._delete_all_but(weights.name, _TRAINING)
        self._saved = steps

    def _delete_all_but(self, *kept: str) -> None:
        with contextlib.suppress(OSError):  # the next backup tries again
            # Delete the file that names the weights first.
            for name in sorted(os.listdir(self._path), reverse=True):
                if _is_ours(name) and name not in kept:
                    os.unlink(self._path / name)
            self._path.rmdir()  # removes the directory only if it is empty


def _sync(*paths: Path) -> None:
    """Flush files to the disk, so that the backup survives a crash of the machine."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ReportCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Add `data_wait` and `samples_per_s` to the logs, and report why training waits for data.

    `data_wait` is the share of the epoch spent waiting for data, 0.0 to 1.0. A line on stderr
    reports each new bottleneck, and `loader.explain()` is printed at the end. List it before
    `CSVLogger`, `TensorBoard` and others that write logs::

        model.fit(loader.for_keras(), epochs=10, callbacks=[ReportCallback(loader)])

    Args:
        loader: Loader that `fit` trains on.
        verbose: 0 prints nothing. Default: 1.
    """

    @known_names_only
    def __init__(self, loader: Loader, verbose: int = 1) -> None:
        super().__init__()
        if not isinstance(loader, Loader):
            raise ArgumentError(
                f"ReportCallback takes the loader itself, got {type(loader).__name__}"
            )
        # The class has no batch methods, because Keras would make the device wait in each step.
        self._loader, self._verbose = loader, verbose
        self._begun: Snapshot  # counters at the start of the epoch
        self._told: Verdict | None = None
        self._has_warned = False  # True: it was reported that `fit` uses another loader

    def on_epoch_begin(self, epoch: int, logs: _Logs = None) -> None:
        """Start measuring the epoch."""
        self._begun = self._loader._core.observer.now()

    def on_epoch_end(self, epoch: int, logs: _Logs = None) -> None:
        """Add the measurements to the logs, and report a new bottleneck."""
        observed = self._loader._core.observer.since(self._begun)
        if isinstance(logs, dict) and observed.seconds > 0:
            logs.update(data_wait=observed.wait_share, samples_per_s=observed.samples_per_s)
        if observed.samples:
            explanation = explain(observed)
            if explanation.verdict is not self._told:
                self._told = explanation.verdict
                self._say(f"Epoch {epoch + 1}: {explanation.headline}")
        elif not self._has_warned:
            self._has_warned = True
            self._say(
                f"ReportCallback: no batch of epoch {epoch + 1} came from its loader. Pass it the "
                "loader of fit."
            )

    def on_train_end(self, logs: _Logs = None) -> None:
        """Print `loader.explain()`."""
        self._say(str(self._loader.explain()))

    def _say(self, text: str) -> None:
        if self._verbose:
            # The stream may be closed, or its terminal gone.
            with contextlib.suppress(OSError, ValueError):
                print(f"\n{text}", file=sys.stderr, flush=True)
