"""How batches travel through `from_generator`: plain arrays, put right in C++ where TensorFlow wants another form.

A ragged component goes as its values and row splits, for a ragged leaf would send the whole element down a slow path
that copies; a dtype that tf.data does not take goes as its bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from loaderpool.adapters.conversion import is_ml_dtype
from loaderpool.element.ragged import RaggedArray
from loaderpool.element.spec import ArraySpec, ElementSpec, mismatch, widening_code
from loaderpool.element.structure import Structure
from loaderpool.errors import ArgumentError, ArgumentTypeError, SpecMismatchError
from loaderpool.memory.batch_form import BatchForm
from loaderpool.trainer.engine.delivery import Delivery
from loaderpool.trainer.epochs.batch_reader import Opened

# No tf.data graph can have it (TensorFlow 2.21: "Converting f8E5M2 to DataType"). Its bits are the upper half of a
# float16's, so it travels as bytes and arrives as tf.float16, which has the very same values.
_E5M2 = "float8_e5m2"


@dataclasses.dataclass(frozen=True)
class TensorFormat:
    """How elements travel through from_generator: a flat tuple of plain arrays, put right by `restore` in C++."""

    spec: ElementSpec  # what TensorFlow is told of all batches
    in_chunks: bool  # an element is a chunk of batches, which `unbatch` takes apart
    may_differ: bool  # a call makes a whole batch, of which nothing has seen that it is as the spec says

    @staticmethod
    def of(form: BatchForm, spec: ElementSpec, max_chunk: int) -> TensorFormat:
        """The way for a loader's batches, up to `max_chunk` at once where that is possible.

        Args:
            form: of the batches.
            spec: what they are known to be like.
            max_chunk: the most at once.

        Raises:
            SpecMismatchError: TensorFlow has no such element; names the component or the dict.
        """
        _check_keys(spec.structure)
        can_unbatch = all(map(_can_unbatch, spec.components))
        in_chunks = form.fixed is not None and max_chunk > 1 and can_unbatch
        return TensorFormat(spec, in_chunks, may_differ=form.unit != "sample")

    @property
    def signature(self) -> Any:
        """The output_signature."""
        specs: list[Any] = []
        for component in self.spec.components:
            if component.ragged:
                specs += [
                    tf.TensorSpec((None, *component.shape[2:]), _wire_dtype(component)),
                    tf.TensorSpec((None,), tf.int64),
                ]
            else:
                specs.append(self._prefixed(tf.TensorSpec(component.shape, _wire_dtype(component))))
        return tuple(specs) if self.needs_restoring else self.spec.structure.unflatten(specs)

    @property
    def needs_restoring(self) -> bool:
        """Whether a component travels in another form than the user sees."""
        return any(component.ragged or _travels_as_bytes(component) for component in self.spec.components)

    def open(self, delivery: Delivery) -> Opened:
        """Batches as the generator yields them."""
        return delivery.batches(), self.element

    def element(self, parts: Sequence[Any]) -> Any:
        """What the generator yields for a batch's (or chunk's) components.

        Raises:
            SpecMismatchError: a whole batch has a length that the dataset's spec does not allow.
        """
        self._check(parts)
        return tuple(self._apart(parts)) if self.needs_restoring else self.spec.structure.unflatten(parts)

    def _apart(self, parts: Sequence[Any]) -> list[Any]:
        flat: list[Any] = []
        for part, component in zip(parts, self.spec.components, strict=True):
            if isinstance(part, RaggedArray):
                values = part.values.view("uint8") if _travels_as_bytes(component) else part.values
                flat += [values, part.row_splits]
            else:
                flat.append(part.view("uint8") if _travels_as_bytes(component) else part)
        return flat

    def restore(self, *flat: Any) -> Any:
        """Runs in tf.data: the element as the user sees it."""
        parts, rest = [], list(flat)
        for component in self.spec.components:
            values = rest.pop(0)
            if _travels_as_bytes(component):
                upper = tf.bitwise.left_shift(tf.cast(values, tf.uint16), tf.constant(8, tf.uint16))
                values = tf.bitcast(upper, tf.float16)
            if component.ragged:
                values = tf.RaggedTensor.from_row_splits(values, rest.pop(0), validate=False)
            parts.append(values)
        structure = self.spec.structure
        return structure.unflatten(parts)

    def _check(self, parts: Sequence[Any]) -> None:
        """TensorFlow would name neither the component nor the way out."""
        if not self.may_differ:
            return
        for number, (part, component) in enumerate(zip(parts, self.spec.components, strict=True)):
            if component.ragged or all(n in (None, got) for n, got in zip(component.shape, part.shape, strict=True)):
                continue
            cure = widening_code(self.spec, number, part.shape)
            raise mismatch(self.spec.paths[number], None, component, part.shape, part.dtype, "whole", cure)

    def _prefixed(self, spec: Any) -> Any:
        return tf.TensorSpec((None, *spec.shape), spec.dtype) if self.in_chunks else spec


def _can_unbatch(component: ArraySpec) -> bool:
    if 0 in component.shape[1:]:  # TensorFlow's unbatch ends the process by SIGSEGV or SIGFPE (2.21)
        return False
    # Of other float8s and the like it says "Unhandled data type".
    return not is_ml_dtype(component.dtype) or component.dtype.name in ("bfloat16", _E5M2)


def _check_keys(structure: Structure) -> None:
    try:
        sorted(structure.keys)  # type: ignore[type-var]  # as tf.nest does, to go through a dict
    except TypeError:
        keys = ", ".join(f"{key!r} ({type(key).__name__})" for key in structure.keys)
        raise SpecMismatchError(
            f"as_dataset: the function returns a dict whose keys cannot be sorted, which TensorFlow does: {keys}. "
            "Give all keys of a dict one type, such as str (iterating over the loader itself takes any)"
        ) from None
    for child in structure.children:
        _check_keys(child)


def _travels_as_bytes(component: ArraySpec) -> bool:
    return bool(component.dtype.name == _E5M2)


def _wire_dtype(component: ArraySpec) -> Any:
    return tf.uint8 if _travels_as_bytes(component) else tensor_dtype(component)


def tensor_dtype(component: ArraySpec) -> Any:
    """The dtype of its tensors.

    Raises:
        SpecMismatchError: TensorFlow has none.
    """
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
        raise ArgumentTypeError(f'device must be a name such as "/GPU:0", got {device!r}')
    there = [f"/{each.device_type}:{each.name.rpartition(':')[2]}" for each in tf.config.list_logical_devices()]
    try:
        asked = tf.DeviceSpec.from_string(device)
    except ValueError as error:
        raise ArgumentError(f'device must be a name such as "/GPU:0", got {device!r}: {error}') from None
    if f"/{asked.device_type}:{asked.device_index or 0}" not in there:
        raise ArgumentError(f"device={device!r}: TensorFlow has no such device here, it has {', '.join(there)}")
