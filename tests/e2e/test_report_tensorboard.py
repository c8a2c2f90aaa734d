"""`ReportCallback(tensorboard=...)`: what TensorBoard finds, read back by TensorBoard's own reader."""

from __future__ import annotations

import io
import os
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.support.child import run_child

pytest.importorskip("tensorboard", reason="pip install 'loaderpool[tensorboard]'")

SCALARS = {"data_wait", "samples_per_s", "step_s", "workers", "workers_busy", "call_s"}  # ready_step_s: if any was


def sample(item: int) -> Any:
    time.sleep(0.002)
    return np.full(4, item, np.float32), np.float32(item)


@pytest.fixture
def keras(tf: Any) -> Any:
    import keras

    return keras


def model_of(keras: Any) -> Any:
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile(loss="mse")
    return made


def read_back(directory: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    """Scalars by tag, as steps and values, and texts by tag, of one run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    run = EventAccumulator(str(directory))
    run.Reload()
    scalars: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, str] = {}
    for tag in run.Tags()["tensors"]:
        plugin = run.SummaryMetadata(tag).plugin_data.plugin_name
        found = [(each.step, make_ndarray(each.tensor_proto).item()) for each in run.Tensors(tag)]
        if plugin == "text":
            texts[tag] = found[-1][1].decode()
        elif plugin == "scalars":
            scalars[tag] = found
    return scalars, texts


def test_scalars_of_each_epoch_and_the_explanation_are_there(keras: Any, tmp_path: Path) -> None:
    from loaderpool.adapters.keras import ReportCallback

    with lp.Loader(range(640), sample, batch_size=16, workers=1) as loader:
        report = ReportCallback(loader, verbose=0, tensorboard=tmp_path / "logs")
        history = model_of(keras).fit(loader.for_keras(), epochs=3, verbose=0, callbacks=[report]).history
    scalars, texts = read_back(tmp_path / "logs" / "loaderpool")
    assert {tag.removeprefix("loaderpool/") for tag in scalars} >= SCALARS
    assert len(scalars) <= 8
    for name in ("data_wait", "samples_per_s"):
        assert [step for step, _ in scalars[f"loaderpool/{name}"]] == [0, 1, 2]
        assert [value for _, value in scalars[f"loaderpool/{name}"]] == pytest.approx(history[name])
    assert [value for _, value in scalars["loaderpool/workers"]] == [1, 1, 1]
    assert all(0.002 <= value < 0.1 for _, value in scalars["loaderpool/call_s"])
    text = texts["loaderpool/explanation"]
    assert text.startswith(f"**{loader.explain().verdict.value.upper()}")
    assert "| slowest item | epoch | seconds |" in text


def test_beside_keras_own_callback_nothing_is_there_twice(keras: Any, tmp_path: Path) -> None:
    from loaderpool.adapters.keras import ReportCallback

    with lp.Loader(range(640), sample, batch_size=16, workers=1) as loader:
        own = keras.callbacks.TensorBoard(tmp_path)
        callbacks = [ReportCallback(loader, verbose=0, tensorboard=own), own]
        model_of(keras).fit(loader.for_keras(), epochs=2, verbose=0, callbacks=callbacks)
    ours, _ = read_back(tmp_path / "loaderpool")
    theirs, _ = read_back(tmp_path / "train")
    assert {"epoch_data_wait", "epoch_samples_per_s"} <= set(theirs)
    assert {tag.removeprefix("loaderpool/") for tag in ours} >= SCALARS - {"data_wait", "samples_per_s"}
    assert not {"loaderpool/data_wait", "loaderpool/samples_per_s"} & set(ours)


def test_a_second_training_goes_on_in_the_same_run(keras: Any, tmp_path: Path) -> None:
    from loaderpool.adapters.keras import ReportCallback

    model = model_of(keras)
    with lp.Loader(range(640), sample, batch_size=16, workers=1) as loader:
        report = ReportCallback(loader, verbose=0, tensorboard=str(tmp_path))
        model.fit(loader.for_keras(), epochs=1, verbose=0, callbacks=[report])
        model.fit(loader.for_keras(), initial_epoch=1, epochs=2, verbose=0, callbacks=[report])
    assert len(list((tmp_path / "loaderpool").iterdir())) == 2
    scalars, _ = read_back(tmp_path / "loaderpool")
    assert [step for step, _ in scalars["loaderpool/data_wait"]] == [0, 1]


def test_where_nothing_can_be_written_the_training_goes_on(keras: Any, tmp_path: Path) -> None:
    from loaderpool.adapters.keras import ReportCallback

    (tmp_path / "loaderpool").write_text("in the way", encoding="utf-8")
    lines = io.StringIO()
    with lp.Loader(range(640), sample, batch_size=16, workers=1) as loader:
        report = ReportCallback(loader, file=lines, tensorboard=tmp_path)
        history = model_of(keras).fit(loader.for_keras(), epochs=2, verbose=0, callbacks=[report]).history
    assert len(history["loss"]) == len(history["data_wait"]) == 2
    assert "nothing is written for TensorBoard: [Errno 17] File exists" in lines.getvalue()


@pytest.mark.parametrize("wrong", [7, b"logs", "", "gs://bucket/logs"])
def test_it_takes_a_local_directory_or_keras_callback(keras: Any, wrong: Any) -> None:
    from loaderpool.adapters.keras import ReportCallback

    with (
        lp.Loader(range(64), sample, batch_size=16, workers=0) as loader,
        pytest.raises((lp.ArgumentError, lp.ArgumentTypeError), match="ReportCallback's tensorboard must be a"),
    ):
        ReportCallback(loader, tensorboard=wrong)


def test_without_the_package_it_says_what_to_install(keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from loaderpool.adapters.keras import ReportCallback

    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Without("tensorboard"), *sys.meta_path])
    with (
        lp.Loader(range(64), sample, batch_size=16, workers=0) as loader,
        pytest.raises(ImportError, match=r"needs tensorboard, .*pip install 'loaderpool\[tensorboard\]'"),
    ):
        ReportCallback(loader, tensorboard="logs")


class _Without:
    """Finds no such package."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_tensorflow_is_not_imported_where_it_is_installed(tmp_path: Path) -> None:
    code = """
        import sys
        from loaderpool.adapters.event_file import EventFile
        file = EventFile(directory)
        file.write_scalars({"a": 1.0}, 0)
        file.write_text("b", "text", 0)
        assert "tensorflow" not in sys.modules
    """
    run_child(f"directory = {str(tmp_path)!r}\n" + textwrap.dedent(code)).check()
    assert read_back(tmp_path)[0] == {"a": [(0, 1.0)]}


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_tensorflow_is_not_needed(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    code = f"""
        import sys
        sys.modules["tensorflow"] = None
        import time
        import keras
        import numpy as np
        import loaderpool as lp
        from loaderpool.adapters.keras import ReportCallback

        def sample(item):
            time.sleep(0.002)
            return np.full(4, item, np.float32), np.float32(item)

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(loss="mse")
        with lp.Loader(range(640), sample, batch_size=16, workers=1) as loader:
            report = ReportCallback(loader, tensorboard={str(tmp_path)!r})
            model.fit(loader.for_keras(), epochs=2, verbose=0, callbacks=[report])
        assert sys.modules["tensorflow"] is None
    """
    run_child(textwrap.dedent(code), env={**os.environ, "KERAS_BACKEND": backend}, timeout_s=110).check()
    scalars, texts = read_back(tmp_path / "loaderpool")
    assert [step for step, _ in scalars["loaderpool/data_wait"]] == [0, 1]
    assert "loaderpool/explanation" in texts
