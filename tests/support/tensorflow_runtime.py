"""TensorFlow for tests: three CPU devices, no GPU, and a function that makes it drop unused
arrays.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np

from loaderpool.system import ctrl_c

LOGICAL_CPUS = 3  # the host's own CPU, and two more devices for tests
_loaded: Any = None


def quieten() -> None:
    """Make TensorFlow log errors only, in this process and its children. Call it before the
    import.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")


def load() -> Any:
    """Return the `tensorflow` module, set up with `LOGICAL_CPUS` CPU devices and without GPUs.

    Raises:
        ImportError: it is not installed.
        RuntimeError: something has used TensorFlow before, so its devices are fixed. That test must
            use the fixture `tf`.
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
        # the first as_dataset of a process opens two descriptors, which must not count as leaks of
        # a test
        ctrl_c.watch()
        # Half a million objects live as long as the process. Otherwise each garbage collection,
        # also of the guard against leaks, would visit them, which takes longer than most tests.
        gc.collect()
        gc.freeze()
        _loaded = tf
    return _loaded


def let_go_of_arrays() -> None:
    """Make TensorFlow drop the NumPy arrays whose tensors are gone. Does nothing if TensorFlow is
    not loaded.

    TensorFlow keeps a list of arrays to release, and processes it only when a later eager tensor is
    deleted.
    """
    if _loaded is not None:
        _loaded.constant(0)  # created and deleted at once


def address_of(tensor: Any) -> int:
    """Return the address of a CPU tensor's first element."""
    return int(np.asarray(memoryview(tensor)).ctypes.data)


def aliases_arrays() -> bool:
    """Return True if from_generator uses an aligned array's memory without a copy, in this version.

    All versions do, except TensorFlow 2.18 with NumPy 2, whose `numpy_compat.np_asarray` calls
    `astype` without `copy=`.
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
