"""`ReportCallback` in `fit`: Keras' logs, and the printed lines."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp


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

    with lp.Loader(range(480), sample, batch_size=16, workers=workers) as loader:
        callbacks = [ReportCallback(loader), keras.callbacks.CSVLogger(tmp_path / "log.csv")]
        history = model.fit(loader.for_keras(), epochs=3, verbose=2, callbacks=callbacks).history
    assert len(history["data_wait"]) == len(history["samples_per_s"]) == 3
    assert all(0 < share <= 1 for share in history["data_wait"])
    assert all(20 < rate < 1000 for rate in history["samples_per_s"])
    with open(tmp_path / "log.csv") as file:
        assert [float(row["data_wait"]) for row in csv.DictReader(file)] == pytest.approx(
            history["data_wait"]
        )
    printed = capsys.readouterr()
    assert "data_wait:" in printed.out
    told = printed.err
    assert "Epoch 1: " in told
    assert "Why: " in told
    assert "Slowest items: " in told or not workers


def test_through_tf_data_and_verbose_0_prints_nothing(
    model: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    from loaderpool.adapters.keras import ReportCallback

    with lp.Loader(range(64), sample, batch_size=16, workers=1) as loader:
        capfd.readouterr()
        report = ReportCallback(loader, verbose=0)
        history = model.fit(loader.as_dataset(), epochs=2, verbose=0, callbacks=[report]).history
    assert len(history["data_wait"]) == 2
    told = capfd.readouterr()
    assert "Epoch" not in told.err + told.out
    assert "WARM" not in told.err + told.out


def test_another_loader_than_that_of_fit_is_reported_once(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from loaderpool.adapters.keras import ReportCallback

    with (
        lp.Loader(range(160), sample, batch_size=16, workers=0) as loader,
        lp.Loader(range(160), sample, batch_size=16, workers=0) as other,
    ):
        model.fit(loader.for_keras(), epochs=2, verbose=0, callbacks=[ReportCallback(other)])
    assert (
        capsys.readouterr().err.count(
            "no batch of epoch 1 came from its loader. Pass it the loader of fit"
        )
        == 1
    )
