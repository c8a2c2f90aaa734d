"""Conversion of batches to tensors: the parts common to all frameworks."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.checks import whole_number
from loaderpool.element.spec import ArraySpec
from loaderpool.engine.delivery import Delivery
from loaderpool.errors import SpecMismatchError
from loaderpool.memory.layout import BatchForm
from loaderpool.trainer.loader_core import FOR_KERAS, LoaderCore
from loaderpool.trainer.loader_iterator import AheadIterator, Conversion, LoaderIterator, Opened

TEXT_CURE = (
    "Return numbers for it from the function, or iterate over the loader itself, which supports "
    "strings."
)

Convert = Callable[[Any], Any]  # converts one component of a batch
Move = Callable[[Sequence[Any]], Sequence[Any]]


class TensorConversion(ABC):
    """Converts batches to tensors that share the workers' memory, if the framework can do that.

    Tiny batches arrive several at a time. For these it makes one tensor per component, which the
    framework splits in C++, because a call for each batch would cost more than all other work.

    Args:
        view: Name of the loader's method that returns such batches, for errors.
        move: Moves the tensors of a batch to their device; None: they stay.
    """

    def __init__(self, view: str, move: Move | None = None) -> None:
        self._view, self._move = view, move
        # Form of batches for which `_prepare` has set the other fields.
        self._form: BatchForm | None = None

    def __call__(self, delivery: Delivery) -> Opened:
        form = delivery.form
        if form is not self._form:
            self._prepare(form)
        is_whole = form.has_equal_batches and not delivery.row_failures
        if delivery.count > 1 and is_whole and self._takes_apart:
            columns = map(self.take_apart, self._converts, delivery.joined())
            return zip(itertools.repeat(delivery.rows), zip(*columns, strict=True)), self._finish
        converts, finish = self._converts, self._finish
        # Index the parts. A strict zip takes 11 us instead of 3 us after a wait that left the CPU's
        # caches cold.
        return delivery.batches(), lambda parts: finish(
            [convert(parts[at]) for at, convert in enumerate(converts)]
        )

    def _prepare(self, form: BatchForm) -> None:
        spec = form.spec
        self._converts = list(map(self.convert_of, spec.paths, spec.components))
        self._takes_apart = all(map(self.can_take_apart, spec.components))
        # Keras and its backends flatten dicts and tuples, but not all classes derived from them.
        unflatten = spec.structure.unflatten if self._view == "for_keras" else form.rebuild
        self._form, move = form, self._move
        self._finish = unflatten if move is None else lambda tensors: unflatten(move(tensors))

    @abstractmethod
    def convert_of(self, path: str, component: ArraySpec) -> Convert:
        """Return the function that converts a component, an array or a `RaggedArray`.

        Called by `_prepare`. Raise `refuse` if the framework has no such tensors.
        """

    def can_take_apart(self, component: ArraySpec) -> bool:
        """Return True if `take_apart` works for the component and costs less than single calls."""
        return False

    def take_apart(self, convert: Convert, array: npt.NDArray[Any]) -> Sequence[Any]:
        """Return the tensors of all batches of one component.

        The array has these batches as `dtype[count, rows, ...]`.
        """
        raise NotImplementedError

    def refuse(self, path: str, what: str, cure: str) -> SpecMismatchError:
        """Return an error with the component that has no tensor, and with what to change."""
        return refusal(self._view, path, what, cure)


class HostConversion(TensorConversion):
    """Keeps the arrays as NumPy arrays, and refuses those that `framework` cannot convert.

    With `has_equal_shapes` it also refuses samples of varied shape, because in JAX all processes
    must have the same shape.
    """

    def __init__(
        self, view: str, framework: str, move: Move | None = None, has_equal_shapes: bool = False
    ) -> None:
        super().__init__(view, move)
        self._framework, self._has_equal_shapes = framework, has_equal_shapes

    def convert_of(self, path: str, component: ArraySpec) -> Convert:
        if component.text is not None:
            what = f"text ({component.text}), and {self._framework} has no string arrays"
            raise self.refuse(path, what, TEXT_CURE)
        if component.ragged:
            cure = "Set pad=True instead of ragged=True to pad to the longest sample of each batch."
            raise self.refuse(path, f"ragged, and {self._framework} has no ragged arrays", cure)
        if self._has_equal_shapes and None in component.shape[1:]:
            what = (
                f"of varied shape {component.shape}, and processes would pad it to different "
                "lengths"
            )
            raise self.refuse(path, what, "Pass an element_spec with the lengths to pad to.")
        return lambda array: array


def is_ml_dtype(dtype: np.dtype[Any]) -> bool:
    """Return True for dtypes of `ml_dtypes`, such as bfloat16, which have no NumPy buffers."""
    return dtype.type.__module__ != "numpy"


def refusal(view: str, path: str, what: str, cure: str) -> SpecMismatchError:
    """Return the error for a component that cannot become a tensor."""
    component = f"component {path}" if path else "the batch"
    return SpecMismatchError(f"{view}: {component} is {what}. {cure}")


def dtype_refusal(view: str, path: str, dtype: np.dtype[Any], framework: str) -> SpecMismatchError:
    """Return the error for a component of a dtype of `ml_dtypes` that a framework lacks."""
    wider = (
        "uint8"
        if dtype.name.startswith("uint")
        else "int8"
        if dtype.name.startswith("int")
        else "float32"
    )
    cure = (
        f"Return for example x.astype('{wider}') from the function, or iterate over the loader "
        "itself."
    )
    return refusal(view, path, f"{dtype.name}, and {framework} has no such tensors", cure)


class ConvertedBatches:
    """Iterable over a loader's batches, converted. Each iterator is one pass.

    Its iterators have the methods of the loader's, such as `state_dict`. If the batches go to
    another device (`is_far`), `prefetch` batches are converted ahead.
    """

    def __init__(
        self, core: LoaderCore, convert: Callable[[], Conversion], prefetch: int, is_far: bool
    ) -> None:
        core.check_usable()
        prefetch = whole_number(
            "prefetch", prefetch, at_least=0, hint="batches that are on their way to the device"
        )
        self._core, self._convert, self._ahead = core, convert, prefetch if is_far else 0

    def __iter__(self) -> LoaderIterator:
        core, convert = self._core, self._convert()
        core.check_usable()
        return (
            AheadIterator(core, convert, self._ahead)
            if self._ahead
            else LoaderIterator(core, convert)
        )

    def __len__(self) -> int:
        """Return the number of batches in an epoch, as `len(loader)` does."""
        return self._core.batches_per_epoch()

    def __bool__(self) -> bool:
        # Without this, `bool()` would call `__len__`, which raises if the length is unknown.
        return True

    def __repr__(self) -> str:
        return f"<batches as tensors of {self._core.description}; {FOR_KERAS}>"


def check_epochs(core: LoaderCore, epochs: int | None) -> int | None:
    """Return the checked number of passes in an iteration.

    None means no end. An endless sequence always has no end.
    """
    if epochs is not None:
        epochs = whole_number(
            "epochs", epochs, at_least=1, at_most=2**31, hint="None: repeat forever"
        )
    return None if core.tracker.plan.is_endless else epochs
