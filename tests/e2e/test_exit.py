"""The interpreter ends at once, with the right status and without output, whatever tf.data is
doing.

Each case is a process of its own. `run_child` fails if the process hangs or leaves a process
behind. Tests of the exit start new interpreters. Tests of Ctrl-C, which the script catches, fork a
process that has imported TensorFlow.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import run_child

# Duration of a call of `fn` that must not be waited for: far longer than a test may run.
STUCK_S = 600

_BEGIN = """
import sys, threading, time
import numpy as np
import tensorflow as tf
import loaderpool as lp

def quick(index):
    return np.full((256, 256), index, np.float32), np.int64(index)

def tiny(index):
    return np.int64(index)

def stuck_from_40_on(index):
    if index >= 40:
        time.sleep(STUCK_S)
    return quick(index)
"""

# Only one or two states of each kind, because TensorFlow's import takes longer than all of them.
STATES = {
    "generators wait for a slow function, are idle, unread and at their end, and a batch is still held": """
        slow = lp.Loader(range(100), stuck_from_40_on, batch_size=4, workers=2)
        iterator = iter(slow.as_dataset())
        for _ in range(10):
            next(iterator)
        loader = lp.Loader(range(100), quick, batch_size=4, workers=2)
        dataset = loader.as_dataset()
        ended, idle, unread = iter(dataset), iter(dataset), iter(dataset)
        assert sum(1 for _ in ended) == 25
        held = next(idle)
        threading.Event().wait(0.5)  # tf.data's prefetch asks for the eleventh
        """,
    "prefetches never rest, of a pool's batches and of those made in this process": """
        loader = lp.Loader(range(100), tiny, batch_size=4, workers=2)
        busy = loader.as_dataset(epochs=None).map(lambda x: x + 1, num_parallel_calls=2).prefetch(10_000)
        here = lp.Loader(range(100), quick, batch_size=4, workers=0)
        iterators = iter(busy), iter(here.as_dataset(epochs=None).map(lambda x, y: y).prefetch(10_000))
        for iterator in iterators:
            next(iterator)
        """,
}


QUICK, *SLOW = STATES

# On some processors and in some builds, TensorFlow's import logs lines about oneDNN or CUDA at any
# log level.
_ANNOUNCEMENTS = re.compile(
    r"^(WARNING: All log messages before absl::InitializeLog\(\)|I0000 ).*\n", re.MULTILINE
)


def run(code: str, timeout_s: float = 60.0, imported: str | None = None) -> Any:
    script = textwrap.dedent(_BEGIN).replace("STUCK_S", str(STUCK_S)) + textwrap.dedent(code)
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    result = run_child(script, timeout_s=timeout_s, env=env, imported=imported)
    return dataclasses.replace(result, stderr=_ANNOUNCEMENTS.sub("", result.stderr))


@pytest.mark.parametrize(
    "state", [QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_the_interpreter_ends_in_silence_when(tf: Any, state: str) -> None:
    result = run(textwrap.dedent(STATES[state]) + "\nprint('the end')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "the end\n", "")


@pytest.mark.slow
def test_the_exit_status_and_the_error_of_a_training_that_raises_are_the_users(tf: Any) -> None:
    result = run(
        """
        import keras

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 3:
                    raise RuntimeError("the callback's own")

        model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
        loader = lp.Loader(range(100), quick, batch_size=4, workers=2)
        model.fit(loader.as_dataset(epochs=None), steps_per_epoch=20, epochs=3, verbose=0, callbacks=[Stop()])
        """
    )
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("RuntimeError: the callback's own")
    assert result.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_sys_exit_in_the_middle_of_a_loop_has_its_status(tf: Any) -> None:
    # Not while the function hangs: the loop's iterator is deleted before the interpreter ends, and
    # TensorFlow cannot cancel a call into Python. So leaving a loop waits for the requested batch.
    result = run(
        """
        for count, _ in enumerate(lp.Loader(range(400), quick, batch_size=4, workers=2).as_dataset()):
            if count == 9:
                sys.exit(7)
        """
    )
    assert (result.returncode, result.stderr) == (7, "")


@pytest.fixture
def impatient(tmp_path: Path) -> Path:
    """Set the time from Ctrl-C until a wait for a batch is aborted to half a second, instead of
    five.
    """
    (tmp_path / "ctrl_c_patience_s").write_text("0.5")
    return tmp_path


def test_ctrl_c_through_tf_data_is_one_keyboard_interrupt_and_the_next_pass_is_whole(
    tf: Any, impatient: Path
) -> None:
    """Ctrl-C comes half a second after the function hangs, in `fit`, and in a loop without
    prefetch.
    """
    result = run(
        f"""
        import os, signal
        import keras
        trainer = os.getpid()
        os.environ["LOADERPOOL_FAULTS"] = {str(impatient)!r}

        def slow_from_40_on(index):
            if index == 40:
                time.sleep(0.5)
                os.kill(trainer, signal.SIGINT)
            if index >= 40:
                time.sleep({STUCK_S})
            return quick(index)

        def fit(loader):
            model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
            model.compile(optimizer="sgd", loss="mse")
            model.fit(loader.as_dataset(), verbose=0)

        def loop(loader):
            for _ in loader.as_dataset(prefetch=0):
                pass

        for train in fit, loop:
            loader = lp.Loader(range(100), slow_from_40_on, batch_size=4, workers=2)
            try:
                train(loader)
            except KeyboardInterrupt:
                print("interrupted")
            loader.close()
            again = lp.Loader(range(40), quick, batch_size=4, workers=2)
            print(sum(1 for _ in again.as_dataset()))
        """,
        imported="tensorflow",
    )
    assert (result.returncode, result.stdout) == (0, "interrupted\n10\n" * 2)
    assert "Traceback" not in result.stderr


def test_ctrl_c_through_tf_data_is_left_to_a_handler_of_the_program(tf: Any) -> None:
    result = run(
        """
        import os, signal
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))

        def slow(index):
            time.sleep(0.02)
            return quick(index)

        loader = lp.Loader(range(100), slow, batch_size=4, workers=2)
        dataset = loader.as_dataset(prefetch=0)
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
        print(sum(1 for _ in dataset), len(seen))
        """,
        imported="tensorflow",
    )
    assert (result.returncode, result.stdout) == (0, "25 1\n")


def test_a_wait_that_began_before_a_ctrl_c_which_the_program_has_met_goes_on(
    tf: Any, impatient: Path
) -> None:
    """An interrupt belongs to the wait during which it came, or to none. A slow batch later is not
    aborted.
    """
    result = run(
        f"""
        import os, signal
        os.environ["LOADERPOOL_FAULTS"] = {str(impatient)!r}

        def slow(index):
            time.sleep(2 if index == 40 else 0)
            return quick(index)

        loader = lp.Loader(range(80), slow, batch_size=4, workers=2)
        batches = iter(loader.as_dataset(prefetch=2))
        seen = [next(batches) for _ in range(6)]  # by now tf.data waits for the slow one
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            print("met", end=" ")
        seen.extend(batches)
        print(len(seen))
        """,
        imported="tensorflow",
    )
    assert (result.returncode, result.stdout) == (0, "met 20\n"), result.stderr
