"""A Ctrl-C arrives even if Python, TensorFlow or Keras would drop its KeyboardInterrupt."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.system import interrupts
from tests.support.child import run_child


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)],
    ids=["SIGTERM", "SIGINT"],
)
def test_what_a_handler_raises_in_a_batchs_finalizer_comes_at_the_next_batch(
    number: int, raised: type[BaseException]
) -> None:
    """Python drops exceptions in finalizers ("Exception ignored in"). Before a fix, 22 of 1,220
    were lost.
    """

    def handle(*_: object) -> None:
        raise raised(143)

    before = signal.signal(number, handle)
    try:
        with lp.Loader(range(64), np.float32, batch_size=4, workers=1) as loader:
            at = 0
            while _finalizer_was_interrupted(loader, at, number, raised):
                at += 1
            assert at > 0
            assert [batch[0] for batch in loader] == list(range(0, 64, 4))
    finally:
        signal.signal(number, before)


def _finalizer_was_interrupted(
    loader: lp.Loader, at: int, number: int, raised: type[BaseException]
) -> bool:
    """Send a signal at this call of ours in a batch's finalizer. Return False if the finalizer has
    fewer calls.
    """
    batches = iter(loader)
    batch = next(batches)
    begun: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/loaderpool/" in frame.f_code.co_filename:
            begun.append(frame.f_code.co_name)
            if len(begun) == at + 1:
                signal.raise_signal(number)

    try:
        sys.setprofile(profile)
        del batch
    finally:
        sys.setprofile(None)
    if len(begun) <= at:
        return False
    with pytest.raises(raised):
        next(batches)
        time.sleep(0.1)  # a signal that is sent again comes shortly after
    return True


def test_a_ctrl_c_where_others_drop_all_exceptions_comes_a_moment_later(tf: object) -> None:
    """In a step of Keras' `fit`, and while C++ reads a shape, in the main thread of a process with
    a dataset.
    """
    child = run_child(
        """
        import signal, threading
        import numpy as np
        import tensorflow as tf
        from keras.src.utils.python_utils import pythonify_logs
        from tensorflow.python.ops import gen_dataset_ops
        import loaderpool as lp

        to_come = []

        class Loss:
            def __float__(self):
                signal.raise_signal(to_come.pop())
                return 0.0

        class Dimensions(tuple):
            def __len__(self):
                if to_come:  # it is asked more than once
                    signal.raise_signal(to_come.pop())
                return 0

        def read_shape():
            shape = tf.TensorShape([])
            shape._dims = Dimensions()
            gen_dataset_ops.anonymous_iterator_v3(output_types=[tf.int64], output_shapes=[shape])

        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with lp.Loader(range(8), np.float32, batch_size=4, workers=1) as loader:
                dataset = loader.as_dataset()
                for work in (lambda: pythonify_logs({"loss": Loss()}), read_shape):
                    to_come.append(signal.SIGINT)
                    try:
                        work()
                        assert not to_come
                        threading.Event().wait(20)
                    except KeyboardInterrupt:
                        print("CAME")
        """,
        imported="tensorflow",
    ).check()
    assert child.stdout.split() == ["CAME", "CAME"]


def test_a_timeout_where_python_looks_for_a_module_comes_a_moment_later() -> None:
    """Python's search for a module calls `stat`, takes a TimeoutError for a missing file, and
    continues.
    """
    child = run_child(
        """
        import importlib._bootstrap_external as search
        import signal, threading
        from loaderpool.system import interrupts

        def expire(*_):
            raise TimeoutError("the alarm")

        def stat_with_an_alarm(path, stat=search._path_stat):
            if to_come:
                signal.raise_signal(to_come.pop())
            return stat(path)

        signal.signal(signal.SIGALRM, expire)
        interrupts.gate_handlers()
        to_come = [signal.SIGALRM]
        search._path_stat = stat_with_an_alarm
        try:
            import colorsys
            assert not to_come
            threading.Event().wait(20)
        except TimeoutError:
            print("CAME")
        """
    ).check()
    assert (child.stdout, child.stderr) == ("CAME\n", "")


def test_the_finalizers_that_it_names_are_there() -> None:
    """Otherwise a renamed function would never be found."""
    for module, name in interrupts.DROPPED_IN:
        if module.startswith("loaderpool."):
            path = Path(interrupts.__file__).parents[2] / f"{module.replace('.', '/')}.py"
            assert f"def {name}(" in path.read_text(encoding="utf-8"), (module, name)
