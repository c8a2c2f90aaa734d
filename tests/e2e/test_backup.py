"""A training that is killed within an epoch and started again ends with the weights of an
uninterrupted one.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from tests.e2e.test_resume import WithHook
from tests.support.child import ChildResult, run_child

TRAIN = """
import json, os, signal, sys
import numpy as np
import keras, tensorflow as tf
import loaderpool as lp
from loaderpool.adapters.keras import BackupCallback
from tests.support.processes import status_of_fork

class Kill(keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.left = after
    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)

def augment(item, rng):
    x = rng.normal(size=6).astype(np.float32) + item % 5
    return x, np.float32(x.sum() > 12)

def make_model(**how):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3),
                              keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True), **how)
    return model

def killed(kind, path, kill_after):
    # A fork, before TensorFlow is used: to import it takes longer than to train.
    return status_of_fork(lambda: [with_two_devices(), train(kind, path, kill_after)])

def with_two_devices():
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )

def train(kind, path, kill_after=0):
    loader = lp.Loader(range(90), augment, batch_size=4, shuffle=True, seed=2, workers=2)  # 23 batches an epoch
    backup = BackupCallback(loader, path, save_freq=5)
    callbacks = [backup, Kill(kill_after)] if kill_after else [backup]
    if kind == "mirrored":
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            model = make_model()
    else:
        model = make_model(steps_per_execution=3 if kind == "executions" else 1)
    if kind == "steps":
        model.fit(loader.as_dataset(epochs=None), steps_per_epoch=10, epochs=5, callbacks=callbacks, verbose=0)
    else:
        model.fit(loader.as_dataset(), epochs=3, callbacks=callbacks, verbose=0)
    loader.close()
    weights = np.concatenate([np.ravel(each) for each in model.get_weights()])
    return weights.tolist(), int(model.optimizer.iterations.numpy())
"""
KINDS = {
    "executions": 10,
    "steps": 27,
    "mirrored": 30,
}  # number of batches after which it is killed


def trained(code: str, folder: Path) -> ChildResult:
    return run_child(TRAIN + code, cwd=folder, timeout_s=110, imported="tensorflow")


@pytest.mark.slow
def test_a_killed_training_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    code = f"print([killed(kind, kind, after) for kind, after in {KINDS}.items()])"
    assert trained(code, tmp_path).check().stdout.splitlines()[-1] == str(
        [-signal.SIGKILL.value] * len(KINDS)
    )
    for kind in KINDS:
        training = json.loads((tmp_path / kind / "training.json").read_text())
        (weights,) = (tmp_path / kind).glob("*.weights.h5")
        assert training["weights"] == weights.name
        assert training["loader"]["position"] > 0 and training["step"] > 0, (
            "in the middle of an epoch"
        )
    twice = f"[[train(kind, kind), train(kind, kind + '-whole')] for kind in {list(KINDS)!r}]"
    code = f"with_two_devices()\nprint(json.dumps({twice}))"
    result = trained(code, tmp_path).check()
    for kind, (again, whole) in zip(KINDS, json.loads(result.stdout.splitlines()[-1]), strict=True):
        assert again[1] == whole[1], f"{kind}: another number of steps"
        assert again[0] == whole[0], f"{kind}: other weights"
    assert not [path for path in tmp_path.iterdir() if path.name in KINDS], (
        "deleted when fit is through"
    )


def test_the_history_of_the_epoch_in_which_it_goes_on_is_of_its_rest_and_fit_says_so(
    tmp_path: Path, tf: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import keras

    from loaderpool.adapters.keras import BackupCallback

    class Crash(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 4:
                raise RuntimeError("crash")

    def fit(*callbacks: Any, verbose: int) -> Any:
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(
            keras.optimizers.SGD(0.0), "mae"
        )  # the model returns 0, so the loss of a batch is its mean item
        with lp.Loader(
            range(16), lambda i: (np.zeros(1), np.float64(i)), batch_size=2, workers=0
        ) as loader:
            backup = BackupCallback(loader, tmp_path / "backup", save_freq=3)
            return model.fit(
                loader.as_dataset(), epochs=2, callbacks=[backup, *callbacks], verbose=verbose
            ).history

    with pytest.raises(RuntimeError, match="crash"):
        fit(Crash(), verbose=2)
    assert "resumes" not in capsys.readouterr().out
    losses = fit(verbose=2)["loss"]
    assert losses == pytest.approx([np.mean(range(6, 16)), np.mean(range(16))])
    out = capsys.readouterr().out
    assert out.count("resumes") == 1
    assert "Epoch 1 resumes after step 3 of 8. " in out and "those of the remaining 5 steps" in out
    with pytest.raises(RuntimeError, match="crash"):
        fit(Crash(), verbose=0)
    fit(verbose=0)
    assert "resumes" not in capsys.readouterr().out


def test_a_mistake_in_its_arguments_is_told(tmp_path: Path, tf: Any) -> None:
    from loaderpool.adapters.keras import BackupCallback

    with lp.Loader(range(8), batch_size=2, workers=0) as loader:
        for wrong, error in (
            (0, lp.ArgumentError),
            (-3, lp.ArgumentError),
            ("batch", lp.ArgumentError),
        ):
            with pytest.raises(error, match="save_freq"):
                BackupCallback(loader, tmp_path, save_freq=wrong)  # type: ignore[arg-type]

        (tmp_path / "best.weights.h5").touch()
        for path, says in (
            (tmp_path, r"has other files \(best"),
            (tmp_path / "best.weights.h5", "cannot be used"),
        ):
            with pytest.raises(lp.ArgumentError, match=says):
                BackupCallback(loader, path)

    with (
        lp.Loader.from_sequence(WithHook(), workers=0) as loader,
        pytest.raises(lp.StateError, match="on_epoch_end"),
    ):
        BackupCallback(loader, tmp_path / "backup")
    assert os.listdir(tmp_path) == ["best.weights.h5"]


def test_a_damaged_backup_is_an_error_of_one_sentence_and_other_files_are_never_deleted(
    tmp_path: Path, tf: Any
) -> None:
    import keras

    from loaderpool.adapters.keras import BackupCallback

    def fit(also: str = "", **how: bool) -> None:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with lp.Loader(
            range(4), lambda i: (np.zeros(1), np.zeros(1)), batch_size=2, workers=0
        ) as loader:
            callbacks = [BackupCallback(loader, tmp_path / "backup", **how)]
            for each in filter(None, [also]):
                (tmp_path / "backup" / each).touch()
            model.fit(loader.for_keras(), epochs=2, verbose=0, callbacks=callbacks)

    fit(delete_checkpoint=False)
    training, weights = (
        tmp_path / "backup" / "training.json",
        tmp_path / "backup" / "2-0.weights.h5",
    )
    whole = training.read_bytes()
    for file, content in (
        (training, whole[:9]),
        (training, b"{}"),
        (training, b"[]"),
        (weights, b""),
        (weights, None),
    ):
        training.write_bytes(whole)
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(
            lp.StateError, match=r"The backup in .* is damaged \(.*\)\. Delete the directory"
        ):
            fit()
    training.unlink()
    fit(also="best.weights.h5")
    assert os.listdir(tmp_path / "backup") == ["best.weights.h5"]
