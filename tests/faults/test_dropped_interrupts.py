"""A Ctrl-C comes also where Python, TensorFlow or Keras would drop the KeyboardInterrupt that it becomes."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import loaderpool as lp
from loaderpool.system import interrupts
from tests.support.child import run_child

# Both in the main thread of one process, after the first `as_dataset`.
_BEGIN = """
import signal, threading
import numpy as np
import loaderpool as lp

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loader = lp.Loader(range(8), lambda item: np.float32(item), batch_size=4, workers=1)
    dataset = loader.as_dataset()
"""
_TRY = """
    try:
"""
_EXCEPT = """
        threading.Event().wait(20)
    except KeyboardInterrupt:
        print("CAME")
"""
_KERAS = """
        from keras.src.utils.python_utils import pythonify_logs

        class Loss:
            def __float__(self):
                signal.raise_signal(signal.SIGINT)
                return 0.0

        assert pythonify_logs({"loss": Loss()}) == {"loss": 0.0}
"""
_TENSORFLOW = """
        import tensorflow as tf
        from tensorflow.python.ops import gen_dataset_ops

        to_come = [signal.SIGINT]

        class Dimensions(tuple):
            def __len__(self):
                if to_come:  # it is asked more than once
                    signal.raise_signal(to_come.pop())
                return 0

        shape = tf.TensorShape([])
        shape._dims = Dimensions()
        gen_dataset_ops.anonymous_iterator_v3(output_types=[tf.int64], output_shapes=[shape])
"""


@pytest.fixture
def ours() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.gate_handlers()
    yield
    signal.signal(signal.SIGINT, before)


def test_a_ctrl_c_where_others_drop_all_exceptions_comes_a_moment_later(tf: object) -> None:
    """In a step of Keras' `fit`, and where C++ reads a shape."""
    code = _BEGIN + "".join(_TRY + work + _EXCEPT for work in (_KERAS, _TENSORFLOW)) + "\n    loader.close()\n"
    assert run_child(code, imported="tensorflow").check().stdout.split() == ["CAME", "CAME"]


@contextmanager
def a_batch() -> Iterator[list[Any]]:
    with lp.Loader(range(8), lambda item: np.full(1000, item), batch_size=4, workers=1) as loader:
        yield [next(iter(loader))]


@contextmanager
def an_owner() -> Iterator[list[Any]]:
    owners = [np.zeros(1)]
    undoing = interrupts.Undoing(owners[0], bool)
    yield owners
    assert undoing is not None


@pytest.mark.parametrize("dying", [a_batch, an_owner])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("ours")
def test_a_ctrl_c_as_a_finalizer_begins_comes_behind_that(
    dying: Callable[[], AbstractContextManager[list[Any]]],
) -> None:
    begun: list[FrameType] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("loaderpool.") and not begun:
            begun.append(frame)
            signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)  # as Python does where the signal came in C++

    with dying() as held, pytest.raises(KeyboardInterrupt):
        sys.setprofile(profile)
        try:
            held.clear()
        finally:
            sys.setprofile(None)
        threading.Event().wait(20)
    assert begun


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_a_ctrl_c_where_the_collector_calls_jax_comes_a_moment_later() -> None:
    """JAX collects with Python, in a callback of the garbage collector, which drops exceptions."""
    child = run_child(
        """
        import gc, signal, threading, types
        from jax._src import lib
        from loaderpool.system import interrupts

        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.gate_handlers()
        to_come = [signal.SIGINT]
        lib._jax = types.SimpleNamespace(
            collect_garbage=lambda: signal.raise_signal(to_come.pop()) if to_come else None
        )
        try:
            gc.collect()
            assert not to_come
            threading.Event().wait(20)
        except KeyboardInterrupt:
            print("CAME")
        """
    ).check()
    assert (child.stdout, child.stderr) == ("CAME\n", "")


def test_the_finalizers_that_it_names_are_there() -> None:
    """A function that was renamed would be looked for in vain."""
    for module, name in interrupts.DROPPED_IN:
        if module.startswith("loaderpool."):
            path = Path(interrupts.__file__).parents[2] / f"{module.replace('.', '/')}.py"
            assert f"def {name}(" in path.read_text(encoding="utf-8"), (module, name)
