"""`ReportCallback` in `fit`: what stands in Keras' logs, what is printed, what goes wrong without ending anything."""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.trainer.explain.observed import Observed


def sample(item: int) -> Any:
    time.sleep(0.002)
    return np.full(4, item, np.float32), np.float32(item)


@pytest.fixture
def model(tf: Any) -> Any:
    import keras

    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile(loss="mse")
    return made


@pytest.mark.parametrize("workers", [0, 1])
def test_what_data_cost_stands_in_history_csv_and_the_progress_bar(
    model: Any, workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import keras

    from loaderpool.adapters.keras import ReportCallback

    lines = io.StringIO()
    with lp.Loader(range(480), sample, batch_size=16, workers=workers) as loader:
        callbacks = [ReportCallback(loader, file=lines), keras.callbacks.CSVLogger(tmp_path / "log.csv")]
        history = model.fit(loader.for_keras(), epochs=3, verbose=2, callbacks=callbacks).history
    assert len(history["data_wait"]) == len(history["samples_per_s"]) == 3
    assert all(0 < share <= 1 for share in history["data_wait"])
    assert all(20 < rate < 1000 for rate in history["samples_per_s"])
    with open(tmp_path / "log.csv") as file:
        assert [float(row["data_wait"]) for row in csv.DictReader(file)] == pytest.approx(history["data_wait"])
    assert "data_wait:" in capsys.readouterr().out
    told = lines.getvalue()
    assert "Epoch 1: " in told
    assert "Why: " in told
    assert "Slowest items: " in told or not workers


def test_through_tf_data(model: Any) -> None:
    from loaderpool.adapters.keras import ReportCallback

    with lp.Loader(range(480), sample, batch_size=16, workers=1) as loader:
        report = ReportCallback(loader, verbose=0)
        history = model.fit(loader.as_dataset(), epochs=2, verbose=0, callbacks=[report]).history
        assert loader._core.observer.observed(60).by_tf_data
    assert len(history["data_wait"]) == 2


def test_verbose_0_prints_nothing(model: Any, capfd: pytest.CaptureFixture[str]) -> None:
    from loaderpool.adapters.keras import ReportCallback

    with lp.Loader(range(64), sample, batch_size=16, workers=1) as loader:
        capfd.readouterr()
        model.fit(loader.for_keras(), epochs=2, verbose=0, callbacks=[ReportCallback(loader, verbose=0)])
    told = capfd.readouterr()
    assert "Epoch" not in told.err + told.out
    assert "WARM" not in told.err + told.out


def test_what_goes_wrong_in_it_ends_no_training(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from loaderpool.adapters import report

    def broken(observed: Observed) -> Any:
        raise ZeroDivisionError("no time")

    monkeypatch.setattr(report, "explain", broken)
    lines = io.StringIO()
    with lp.Loader(range(64), sample, batch_size=16, workers=1) as loader:
        history = model.fit(
            loader.for_keras(), epochs=2, verbose=0, callbacks=[report.ReportCallback(loader, file=lines)]
        ).history
    assert len(history["loss"]) == len(history["data_wait"]) == 2
    assert "ReportCallback: ZeroDivisionError: no time" in lines.getvalue()


@pytest.mark.parametrize("is_printable", [True, False])
def test_nor_does_a_loader_that_was_closed_or_a_file_that_was(model: Any, is_printable: bool) -> None:
    from loaderpool.adapters.keras import ReportCallback

    lines = io.StringIO()
    report = ReportCallback(lp.Loader(range(64), sample, batch_size=16, workers=1), file=lines, headspace=True)
    report._loader.close()
    if not is_printable:
        lines.close()
    data = np.ones((32, 4), np.float32), np.ones(32, np.float32)
    history = model.fit(*data, epochs=3, verbose=0, callbacks=[report]).history
    assert len(history["loss"]) == 3
    assert not is_printable or "ReportCallback: ClosedError: " in lines.getvalue()


def test_it_takes_a_loader(tf: Any) -> None:
    from loaderpool.adapters.keras import ReportCallback

    with pytest.raises(lp.ArgumentTypeError, match="takes the loader itself, got list"):
        ReportCallback([1])
    with pytest.raises(lp.ArgumentTypeError, match="verbos"):
        ReportCallback([1], verbos=1)
    with pytest.raises(AttributeError, match=r"it is in loaderpool\.adapters\.keras"):
        lp.ReportCallback  # noqa: B018


@pytest.mark.parametrize(
    "wrong", [{"verbose": "x"}, {"headspace": "yes"}, {"file": "log.txt"}, {"tensorboard": __file__}], ids=str
)
def test_a_wrong_argument_is_told_when_it_is_made(tf: Any, wrong: dict[str, Any]) -> None:
    from loaderpool.adapters.keras import ReportCallback

    with (
        lp.Loader(range(8), sample, batch_size=4, workers=0) as loader,
        pytest.raises((lp.ArgumentError, lp.ArgumentTypeError), match=f"ReportCallback's {next(iter(wrong))} must be"),
    ):
        ReportCallback(loader, **wrong)


def test_where_tensorboard_cannot_be_written_that_is_told_once_and_all_else_is_told(model: Any) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'loaderpool[tensorboard]'")
    from loaderpool.adapters.keras import ReportCallback

    lines = io.StringIO()
    with lp.Loader(range(480), sample, batch_size=16, workers=0) as loader:
        report = ReportCallback(loader, file=lines, tensorboard="/proc/none")
        model.fit(loader.for_keras(), epochs=2, verbose=0, callbacks=[report])
    assert lines.getvalue().count("nothing is written for TensorBoard") == 1
    assert "Epoch 1: " in lines.getvalue()


def test_another_loader_than_that_of_fit_is_told_once(model: Any) -> None:
    from loaderpool.adapters.keras import ReportCallback

    lines = io.StringIO()
    with (
        lp.Loader(range(160), sample, batch_size=16, workers=0) as loader,
        lp.Loader(range(160), sample, batch_size=16, workers=0) as other,
    ):
        model.fit(loader.for_keras(), epochs=2, verbose=0, callbacks=[ReportCallback(other, file=lines)])
    assert lines.getvalue().count("no batch of epoch 1 came from its loader") == 1


def test_a_pause_in_the_second_epoch_tells_the_headspace_and_changes_no_weight(tf: Any) -> None:
    import keras

    from loaderpool.adapters.keras import ReportCallback

    def weights(**settings: Any) -> tuple[list[Any], str]:
        keras.utils.set_random_seed(3)
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        made.compile(keras.optimizers.SGD(1e-9), "mse")
        lines = io.StringIO()
        with lp.Loader(range(640), sample, batch_size=16, shuffle=True, workers=2) as loader:
            report = ReportCallback(loader, file=lines, **settings)
            made.fit(loader.for_keras(), epochs=3, verbose=0, callbacks=[report])
        return made.get_weights(), lines.getvalue()

    paused, told = weights(headspace=True)
    assert "Epoch 2: HEADSPACE: at best" in told
    assert "workers at rest" in told
    plain, _ = weights()
    for one, other in zip(paused, plain, strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_workers_there_is_no_headspace_and_training_goes_on(model: Any) -> None:
    from loaderpool.adapters.keras import ReportCallback

    lines = io.StringIO()
    with lp.Loader(range(160), sample, batch_size=16, workers=0) as loader:
        model.fit(
            loader.for_keras(), epochs=2, verbose=0, callbacks=[ReportCallback(loader, file=lines, headspace=True)]
        )
    assert "no headspace: batches are made in this process" in lines.getvalue()
