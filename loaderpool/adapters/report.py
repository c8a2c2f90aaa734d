"""`ReportCallback`: how long `fit` waited for data, in Keras' logs and for TensorBoard, and why, where it changes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

import keras

from loaderpool.errors import ArgumentError, ArgumentTypeError
from loaderpool.settings.known_names import known_names_only
from loaderpool.sources.extras import import_extra
from loaderpool.trainer.explain.explanation import explain, labelled
from loaderpool.trainer.loader import Loader

if TYPE_CHECKING:
    from loaderpool.adapters.event_file import EventFile
    from loaderpool.trainer.explain.explanation import Explanation
    from loaderpool.trainer.explain.looks import Look
    from loaderpool.trainer.explain.observed import Observed
    from loaderpool.trainer.explain.verdicts import Verdict


# Stand in Keras' logs, by their names there.
_LOGGED = ("data_wait", "samples_per_s")
# In the first one the model is compiled, and files come from cold disks.
_PAUSED_EPOCH = 2


class ReportCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds `data_wait` and `samples_per_s` to the logs of each epoch, and says why training waits for data.

        model.fit(loader.for_keras(), epochs=10, callbacks=[ReportCallback(loader)])

    `data_wait` is the share of the epoch's steps, 0.0 to 1.0, in which data was waited for. It stands where all metrics
    do: in the progress bar, in `History`, and in what CSVLogger, TensorBoard and others write, if they come behind it
    in the list. A line is printed when the verdict is another one than an epoch before, and `loader.explain()` at the
    end of the training.

    With `tensorboard` TensorBoard has a run `loaderpool` of it, with scalars of each epoch and the explanation as text
    at the end. TensorFlow is not needed for that.

    With `headspace=True` workers pause for some steps of the second epoch (`Loader.pause_test`), and a line says how
    much shorter steps would be were data always ready. The same batches are trained on.

    It has no method for batches, for which Keras would have the device wait in each step. What goes wrong in it is
    printed, and ends no training.

    Args:
        loader: that `fit` takes its batches from.
        verbose: 0: nothing is printed.
        file: where lines go; None: stderr.
        tensorboard: a local directory, below which it writes to `loaderpool`; or the `keras.callbacks.TensorBoard` of
            the same list, behind this callback, for that one's directory. That one writes what stands in the logs, as
            `epoch_data_wait`, so this one does not. None: nothing is written.
        headspace: whether there is a pause test; none where batches are not made by workers of this machine.

    Raises:
        ArgumentError, ArgumentTypeError: it is no loader, or another argument is wrong.
        ImportError: `tensorboard` is given, and the package of that name is not installed.
    """

    @known_names_only
    def __init__(
        self,
        loader: Loader,
        verbose: int = 1,
        file: IO[str] | None = None,
        tensorboard: str | os.PathLike[str] | keras.callbacks.TensorBoard | None = None,
        headspace: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(loader, Loader):
            raise ArgumentTypeError(f"ReportCallback takes the loader itself, got {type(loader).__name__}")
        if verbose not in (0, 1, 2):
            raise ArgumentError(f"ReportCallback's verbose must be 0, which prints nothing, or 1, got {verbose!r}")
        if not isinstance(headspace, bool):
            raise ArgumentTypeError(f"ReportCallback's headspace must be True or False, got {headspace!r}")
        if file is not None and not hasattr(file, "write"):
            raise ArgumentTypeError(f"ReportCallback's file must be an open text file, got {file!r}")
        self._loader, self._verbose, self._file = loader, verbose, file
        self._begun: Look | None = None
        self._told: Verdict | None = None
        self._epoch = self._epochs = 0  # the present one's number, and how many there were
        self._has_headspace = headspace
        self._left_out = _LOGGED if isinstance(tensorboard, keras.callbacks.TensorBoard) else ()
        self._events = None if tensorboard is None else _event_file(tensorboard)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Measure from here."""
        with self._ending_no_training():
            self._epoch = epoch
            self._begun = self._loader._core.observer.now()
            self._epochs += 1
            if self._has_headspace and self._epochs == _PAUSED_EPOCH:
                try:
                    self._loader.pause_test()
                except ArgumentError as error:  # no workers
                    self._say(f"\nReportCallback: no headspace: {error}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add what was measured to the logs; say why, if that is news."""
        with self._ending_no_training():
            if self._begun is None:
                return
            observed = self._loader._core.observer.since(self._begun)
            scalars = _scalars(observed)
            if isinstance(logs, dict):
                logs.update((name, scalars[name]) for name in _LOGGED if name in scalars)
            wanted = {f"loaderpool/{name}": scalars[name] for name in scalars if name not in self._left_out}
            self._write(lambda events: events.write_scalars(wanted, epoch))
            if not observed.samples:
                self._tell_of_none(epoch)
                return
            explanation = explain(observed)
            if explanation.verdict is not self._told:
                self._told = explanation.verdict
                self._say(f"\nEpoch {epoch + 1}: {explanation.headline}")
            if self._has_headspace and self._epochs == _PAUSED_EPOCH:
                self._say(f"\nEpoch {epoch + 1}: {self._loader.headspace()}")

    def _write(self, write: Callable[[EventFile], None]) -> None:
        """Write for TensorBoard. Where that fails nothing more is written, and all else goes on."""
        if self._events is None:
            return
        try:
            write(self._events)
        except OSError as error:
            self._events = None
            self._say(f"\nReportCallback: nothing is written for TensorBoard: {error}")

    def _tell_of_none(self, epoch: int) -> None:
        if self._epochs == 1:
            self._say(
                f"\nReportCallback: no batch of epoch {epoch + 1} came from its loader: give it the one whose batches "
                "fit takes"
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Print the whole explanation, and leave it to TensorBoard."""
        with self._ending_no_training():
            explanation = self._loader.explain()
            self._say(f"\n{explanation}")
            text = _markdown(explanation)
            self._write(lambda events: events.write_text("loaderpool/explanation", text, self._epoch))
            self._write(lambda events: events.end())

    @contextlib.contextmanager
    def _ending_no_training(self) -> Iterator[None]:
        """Have what goes wrong in the block be printed, if that can be done."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(Exception):
                self._say(f"\nReportCallback: {type(error).__name__}: {error}")

    def _say(self, text: str) -> None:
        if self._verbose:
            print(text, file=self._file or sys.stderr, flush=True)


def _scalars(observed: Observed) -> dict[str, float]:
    """Return what was measured of an epoch, by name."""
    if observed.seconds <= 0:
        return {}
    worked_s = observed.busy_s + observed.idle_s
    calls = observed.calls
    told = {
        "data_wait": observed.wait_share,
        "samples_per_s": observed.samples_per_s,
        "step_s": observed.step_s or None,
        "ready_step_s": observed.ready_step_s,
        "workers": observed.workers,
        "workers_busy": observed.busy_s / worked_s if worked_s > 0 else None,
        "call_s": calls.sum_ns / 1e9 / calls.calls if calls.calls > 0 else None,
    }
    return {name: value for name, value in told.items() if value is not None}


def _markdown(explanation: Explanation) -> str:
    told = [f"**{explanation.headline}**"]
    told += [f"{label}: `{text}`" if label == "Change" else f"{label}: {text}" for label, text in labelled(explanation)]
    if explanation.slowest:
        rows = "\n".join(f"| {item.name} | {item.epoch} | {item.seconds:.3g} |" for item in explanation.slowest)
        told.append(f"| slowest item | epoch | seconds |\n|---|---|---|\n{rows}")
    return "\n\n".join(told)


def _event_file(given: Any) -> EventFile:
    place = given.log_dir if isinstance(given, keras.callbacks.TensorBoard) else given
    if not isinstance(place, (str, os.PathLike)) or isinstance(os.fspath(place), bytes):
        raise ArgumentTypeError(
            "ReportCallback's tensorboard must be a directory or a keras.callbacks.TensorBoard, got "
            f"{type(given).__name__}"
        )
    directory = os.fspath(place)
    if not directory or "://" in directory or os.path.isfile(directory):
        raise ArgumentError(f"ReportCallback's tensorboard must be a local directory, got {directory!r}")
    import_extra("tensorboard", what="ReportCallback(tensorboard=...)", extra="tensorboard")
    from loaderpool.adapters.event_file import EventFile

    return EventFile(os.path.join(directory, "loaderpool"))
