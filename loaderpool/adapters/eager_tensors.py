"""`Loader.tensors`: eager TensorFlow tensors that look at the workers' memory, without `tf.data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    import tensorflow as tf
except ImportError as missing:
    raise ImportError(
        "tensors needs TensorFlow, which is not installed: pip install 'loaderpool[tensorflow]'"
    ) from missing

from loaderpool.adapters.conversion import (
    TENSOR_ALIGNMENT_BYTES,
    BatchView,
    Convert,
    TensorConversion,
    aligned_array,
    is_ml_dtype,
    ragged,
)
from loaderpool.element.spec import ArraySpec
from loaderpool.errors import ArgumentError, SpecMismatchError, brief, shortened
from loaderpool.trainer.engine.delivery import aligned_empty
from loaderpool.trainer.loader_core import LoaderCore

# So many batches are one call's, always: TensorFlow makes a kernel for each other number, in 100 us. They begin
# at an aligned address, whatever the size of each.
_AT_ONCE = TENSOR_ALIGNMENT_BYTES

_from_dlpack = tf.experimental.dlpack.from_dlpack
_unpack = tf.raw_ops.Unpack


def tensors(core: LoaderCore, device: Any, ahead: Any) -> BatchView:
    check_device(device)
    return BatchView(core, lambda: EagerConversion(device=device), ahead, device is not None)


class EagerConversion(TensorConversion):
    """Makes eager tensors, through DLPack: 1 us each, whatever their size (`tf.constant` copies).

    Of what DLPack does not know text and the smaller floats of `ml_dtypes` are copied, and bfloat16 is not.
    """

    def __init__(self, view: str = "tensors", device: str | None = None) -> None:
        super().__init__(view, moves=device is not None)
        self._device = device

    def move(self, tensors: Sequence[Any]) -> Sequence[Any]:
        with tf.device(self._device):
            return [tf.identity(tensor) for tensor in tensors]

    def convert_of(self, component: ArraySpec) -> Convert:
        dtype = tensor_dtype(component)
        if component.text is not None:
            convert: Convert = lambda part: tf.constant(part, tf.string)  # noqa: E731
        elif component.dtype.name == "bfloat16":
            convert = _bfloat16
        elif is_ml_dtype(component.dtype):
            convert = lambda part: tf.constant(part, dtype)  # noqa: E731
        else:
            convert = _look
        if component.ragged:
            return ragged(convert, lambda values, splits: tf.RaggedTensor.from_row_splits(values, splits, False), _look)
        return convert

    def of_aligned(self, convert: Convert) -> Convert:
        return _look_aligned if convert is _look else convert

    def can_take_apart(self, component: ArraySpec) -> bool:
        return component.dtype.name == "bfloat16" or not is_ml_dtype(component.dtype)

    def take_apart(self, convert: Convert, array: npt.NDArray[Any]) -> Sequence[Any]:
        if not array[0].nbytes % TENSOR_ALIGNMENT_BYTES:  # all are at an address that can be looked at
            array = aligned_array(array)
            convert = self.of_aligned(convert)
            return [convert(part) for part in array]
        count = len(array)
        if count % _AT_ONCE:
            whole = aligned_empty(-(-count // _AT_ONCE) * _AT_ONCE * array[0].nbytes).view(array.dtype)
            whole = whole.reshape(-1, *array.shape[1:])
            whole[:count] = array
            array = whole
        tensors: list[Any] = []
        for first in range(0, count, _AT_ONCE):
            tensors += _unpack(value=convert(array[first : first + _AT_ONCE]), num=_AT_ONCE, axis=0)
        return tensors[:count]


def _look(part: npt.NDArray[Any]) -> Any:
    if not part.size:
        return tf.zeros(part.shape, part.dtype)
    return _from_dlpack(aligned_array(part).__dlpack__())


def _look_aligned(part: npt.NDArray[Any]) -> Any:
    return _from_dlpack(part.__dlpack__())


def _bfloat16(part: npt.NDArray[Any]) -> Any:
    return tf.bitcast(_look(part.view(np.uint16)), tf.bfloat16)


def tensor_dtype(component: ArraySpec) -> Any:
    """The dtype of its tensors."""
    if component.text is not None:
        return tf.string
    try:
        return tf.dtypes.as_dtype(component.dtype)
    except TypeError as error:
        raise SpecMismatchError(
            f"TensorFlow {tf.__version__} has no dtype {component.dtype}; let the function return .astype('float16'), "
            "or give an element_spec with another dtype"
        ) from error


def check_device(device: Any) -> None:
    """TensorFlow would put a dataset for a device that is not there on one that is, in silence."""
    if device is None:
        return
    if not isinstance(device, str):
        raise ArgumentError(f'device must be a name such as "/GPU:0", got {brief(device)}')
    there = [f"/{each.device_type}:{each.name.rpartition(':')[2]}" for each in tf.config.list_logical_devices()]
    try:
        asked = tf.DeviceSpec.from_string(device)
    except ValueError as error:
        raise ArgumentError(
            f'device must be a name such as "/GPU:0", got {brief(device)}: {shortened(str(error))}'
        ) from None
    if f"/{asked.device_type}:{asked.device_index or 0}" not in there:
        raise ArgumentError(f"device={brief(device)}: TensorFlow has no such device here, it has {', '.join(there)}")
