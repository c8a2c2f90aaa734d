"""TensorFlow as the tests use it: three CPU devices, no GPU, and a way to make it drop arrays it no longer needs."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np

from loaderpool.system import ctrl_c

LOGICAL_CPUS = 3  # the host's own, and two more to place things on
_loaded: Any = None


def quieten() -> None:
    """TensorFlow logs nothing below an error, in this process and its children; to be called before its import."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")


def load() -> Any:
    """The `tensorflow` module, set up with `LOGICAL_CPUS` CPU devices and without GPUs.

    Raises:
        ImportError: it is not installed.
        RuntimeError: something used TensorFlow before and so fixed its devices; make that test use the `tf` fixture.
    """
    global _loaded
    if _loaded is None:
        quieten()
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS,
        )
        ctrl_c.watch()  # the first as_dataset of a process leaves two descriptors: now, not in a test
        # Half a million objects that live as long as the process: each collection that a test asks for, and the guard
        # against leaks, would look at them again, which takes longer than most tests.
        gc.collect()
        gc.freeze()
        _loaded = tf
    return _loaded


def let_go_of_arrays() -> None:
    """TensorFlow has dropped the NumPy arrays whose tensors are gone; nothing happens where it is not loaded.

    It keeps a list of arrays to release and goes through it only when some later eager tensor dies.
    """
    if _loaded is not None:
        _loaded.constant(0)  # made and dropped at once


def address_of(tensor: Any) -> int:
    """Where a CPU tensor's first element lies."""
    return int(np.asarray(memoryview(tensor)).ctypes.data)


def aliases_arrays() -> bool:
    """Whether from_generator looks at a well aligned array's memory, with nothing of loaderpool in the way.

    All versions do but TensorFlow 2.18 under NumPy 2, whose `numpy_compat.np_asarray` calls `astype` without `copy=`.
    """
    buffer = np.zeros(4096 + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    array = buffer[start : start + 4096].view(np.float32)
    tf = load()
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([array]), output_signature=tf.TensorSpec((1024,), tf.float32)
    )
    aliases = address_of(next(iter(dataset))) == array.ctypes.data
    if not aliases and not (
        tf.__version__.startswith("2.18.") and np.lib.NumpyVersion(np.__version__) >= "2.0.0"
    ):
        version = f"TensorFlow {tf.__version__} under NumPy {np.__version__}"
        raise AssertionError(f"{version} copies arrays: say so in the README")
    return aliases
