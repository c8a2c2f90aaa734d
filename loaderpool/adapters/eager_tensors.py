"""`Loader.tensors`: eager TensorFlow tensors that share the workers' memory, without `tf.data`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import tensorflow as tf
except ImportError as missing:
    raise ImportError("tensors needs TensorFlow: pip install 'loaderpool[tensorflow]'") from missing

from loaderpool.adapters.conversion import (
    Convert,
    ConvertedBatches,
    TensorConversion,
    dtype_refusal,
    is_ml_dtype,
)
from loaderpool.element.spec import ArraySpec
from loaderpool.errors import ArgumentError, brief
from loaderpool.memory.layout import address_of, aligned_empty
from loaderpool.trainer.loader_core import LoaderCore

# Alignment at which TensorFlow shares memory instead of copying it. At another address its DLPack
# function ends the process (2.21).
_ALIGNMENT_BYTES = 64
# The number of batches that one `unpack` call always splits. TensorFlow compiles a kernel for each
# other number, in 100 us. The start of every group of this size is aligned, whatever the size of a
# batch.
_AT_ONCE = _ALIGNMENT_BYTES

_from_dlpack = tf.experimental.dlpack.from_dlpack
_unpack = tf.raw_ops.Unpack


def tensors(core: LoaderCore, device: str | None, prefetch: int) -> ConvertedBatches:
    check_device(device)

    def move(tensors: Sequence[Any]) -> Sequence[Any]:
        with tf.device(device):
            return [tf.identity(tensor) for tensor in tensors]

    is_far = device is not None
    return ConvertedBatches(
        core, lambda: EagerConversion("tensors", move if is_far else None), prefetch, is_far
    )


class EagerConversion(TensorConversion):
    """Converts arrays to eager tensors through DLPack.

    This takes 1 us per tensor of any size. (`tf.constant` copies.) DLPack does not support
    text, nor the `ml_dtypes`. Of these, bfloat16 is passed as uint16 without a copy. The others are
    copied.
    """

    def convert_of(self, path: str, component: ArraySpec) -> Convert:
        dtype, convert = tensor_dtype(component, path, self._view), _look
        if dtype == tf.bfloat16:
            convert = lambda part: tf.bitcast(_look(part.view(np.uint16)), dtype)  # noqa: E731
        elif component.text is not None or is_ml_dtype(component.dtype):
            convert = lambda part: tf.constant(part, dtype)  # noqa: E731
        if component.ragged:
            join = tf.RaggedTensor.from_row_splits
            return lambda part: join(convert(part.values), _look(part.row_splits), validate=False)
        return convert

    @staticmethod
    def can_take_apart(component: ArraySpec) -> bool:
        """Return True if TensorFlow (2.21) can split the component.

        It cannot split float8 and similar dtypes. For arrays without elements it ends the process.
        """
        is_known = component.dtype.name == "bfloat16" or not is_ml_dtype(component.dtype)
        return is_known and 0 not in component.shape[1:]

    def take_apart(self, convert: Convert, array: npt.NDArray[Any]) -> Sequence[Any]:
        if not array[0].nbytes % _ALIGNMENT_BYTES:  # each batch begins at an aligned address
            return list(map(convert, _aligned(array)))
        count = len(array)
        if count % _AT_ONCE:
            whole = aligned_empty(-(-count // _AT_ONCE) * _AT_ONCE * array[0].nbytes).view(
                array.dtype
            )
            whole = whole.reshape(-1, *array.shape[1:])
            whole[:count] = array
            array = whole
        tensors: list[Any] = []
        for first in range(0, count, _AT_ONCE):
            tensors += _unpack(value=convert(array[first : first + _AT_ONCE]), num=_AT_ONCE, axis=0)
        return tensors[:count]


def _aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array, or a copy of it at an aligned address."""
    if not address_of(array) % _ALIGNMENT_BYTES:
        return array
    copy = aligned_empty(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _look(part: npt.NDArray[Any]) -> tf.Tensor:
    if not part.size:
        return tf.zeros(part.shape, part.dtype)
    return _from_dlpack(_aligned(part).__dlpack__())


def tensor_dtype(component: ArraySpec, path: str, view: str) -> tf.DType:
    """Return the TensorFlow dtype of a component; raise SpecMismatchError if there is none."""
    if component.text is not None:
        return tf.string
    try:
        return tf.dtypes.as_dtype(component.dtype)
    except TypeError:
        raise dtype_refusal(view, path, component.dtype, "TensorFlow") from None


def check_device(device: str | None) -> None:
    """Raise ArgumentError if there is no such device.

    TensorFlow would use another device without a message.
    """
    if device is None:
        return
    there = [
        f"/{each.device_type}:{each.name.rpartition(':')[2]}"
        for each in tf.config.list_logical_devices()
    ]
    with contextlib.suppress(ValueError):  # not the name of a device
        asked = tf.DeviceSpec.from_string(str(device))
        if f"/{asked.device_type}:{asked.device_index or 0}" in there:
            return
    raise ArgumentError(
        f"device must be one of {', '.join(there)}, which TensorFlow has here, got {brief(device)}"
    )
