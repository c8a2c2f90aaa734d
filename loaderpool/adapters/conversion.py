"""How batches become tensors: what all frameworks have in common of it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderpool.element.spec import ArraySpec
from loaderpool.errors import ArgumentError, SpecMismatchError
from loaderpool.memory.batch_form import BatchForm
from loaderpool.settings.checks import whole_number
from loaderpool.trainer.ahead_iterator import AheadIterator
from loaderpool.trainer.engine.delivery import Delivery, address_of, aligned_empty
from loaderpool.trainer.epochs.batch_reader import Conversion, Opened
from loaderpool.trainer.loader_core import FOR_KERAS, LoaderCore
from loaderpool.trainer.loader_iterator import LoaderIterator

# At such an address every framework looks at memory instead of copying it, and TensorFlow ends the process by a CHECK
# where it is handed other memory (DLPack, TensorFlow 2.21).
TENSOR_ALIGNMENT_BYTES = 64

LARGEST_INT64 = 2**63 - 1  # what tf.data counts with

TEXT_CURE = "Let the function return numbers for it, or iterate over the loader itself, whose arrays hold text"

Convert = Callable[[Any], Any]  # of one component of a batch


class TensorConversion(ABC):
    """Makes tensors of batches; they look at the workers' memory where the framework can.

    Tiny batches come several at a time. All of them are made into one tensor for each component, which the framework
    takes apart in C++: a call for each would cost more than all else.

    Args:
        view: the method of a loader that gives such batches, as its errors name it.
        moves: whether the tensors of a batch go through `move` before they are handed out.
    """

    def __init__(self, view: str, moves: bool = False) -> None:
        self._view, self._moves = view, moves
        self._form: BatchForm | None = None  # that `_prepare` has made the others for

    def __call__(self, delivery: Delivery) -> Opened:
        form = delivery.form
        if form is not self._form:
            self._prepare(form)
        if delivery.count > 1 and form.fixed is not None and self._takes_apart:
            joined = delivery.joined()
            columns = [self.take_apart(convert, array) for convert, array in zip(self._converts, joined, strict=True)]
            return zip(itertools.repeat(delivery.rows), zip(*columns, strict=True)), self._finish
        return delivery.batches(), self._assemble_aligned if delivery.has_aligned_parts else self._assemble

    def _prepare(self, form: BatchForm) -> None:
        spec = form.spec
        for path, component in zip(spec.paths, spec.components, strict=True):
            self.check(path, component)
        self._converts = [self.convert_of(component) for component in spec.components]
        self._aligned = [
            convert if 0 in component.shape else self.of_aligned(convert)
            for convert, component in zip(self._converts, spec.components, strict=True)
        ]
        self._takes_apart = all(0 not in component.shape[1:] for component in spec.components) and all(
            map(self.can_take_apart, spec.components)
        )
        self._form, unflatten = form, spec.structure.unflatten
        self._finish = (lambda tensors: unflatten(self.move(tensors))) if self._moves else unflatten

    def _assemble(self, parts: Sequence[Any]) -> Any:
        return self._finish([convert(part) for convert, part in zip(self._converts, parts, strict=True)])

    def _assemble_aligned(self, parts: Sequence[Any]) -> Any:
        # By number, not by a strict zip: that is 3 us, not 11, behind a wait that left no cache warm.
        return self._finish([convert(parts[at]) for at, convert in enumerate(self._aligned)])

    def move(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors of a batch where they are wanted."""
        raise NotImplementedError

    def check(self, path: str, component: ArraySpec) -> None:  # noqa: B027  # most frameworks have something to refuse
        """Raise SpecMismatchError where the framework has no such tensors."""

    @abstractmethod
    def convert_of(self, component: ArraySpec) -> Convert:
        """Return what makes a tensor of one component of a batch; it is given an array, or a `RaggedArray`."""

    def of_aligned(self, convert: Convert) -> Convert:
        """Return what does the same for arrays, none of them empty, that need not be asked where they begin."""
        return convert

    def can_take_apart(self, component: ArraySpec) -> bool:
        """Whether `take_apart` works for the component, and is cheaper than to convert each batch."""
        return False

    def take_apart(self, convert: Convert, array: npt.NDArray[Any]) -> Sequence[Any]:
        """Return the tensors of all batches of one component, which lie in the array as `dtype[count, rows, ...]`."""
        raise NotImplementedError

    def refuse(self, path: str, what: str, cure: str) -> SpecMismatchError:
        """An error that says which component has no tensor, and what to do about it."""
        component = f"component {path}" if path else "the batch"
        return SpecMismatchError(f"{self._view}: {component} is {what}. {cure}")


class HostConversion(TensorConversion):
    """Leaves the arrays as they are, for a `framework` that takes NumPy's, and refuses what it has no arrays of."""

    def __init__(self, view: str, framework: str, moves: bool = False) -> None:
        super().__init__(view, moves)
        self._framework = framework

    def check(self, path: str, component: ArraySpec) -> None:
        if component.text is not None:
            what = f"text ({component.text}), of which {self._framework} has no arrays"
            raise self.refuse(path, what, TEXT_CURE)
        if component.ragged:
            cure = "pad=True in place of ragged=True fills rows up to the longest of their batch"
            raise self.refuse(path, f"ragged, of which {self._framework} has no arrays", cure)

    def convert_of(self, component: ArraySpec) -> Convert:
        return as_it_is


def as_it_is(part: Any) -> Any:
    """Return a component as it came: an array, or a `RaggedArray`."""
    return part


def aligned_array(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, or a copy of it at an address at which tensors may look."""
    if not address_of(array) % TENSOR_ALIGNMENT_BYTES:
        return array
    copy = aligned_empty(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def is_ml_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether it is one of `ml_dtypes`, such as bfloat16, of which NumPy exports no buffer."""
    return dtype.type.__module__ != "numpy"


def ragged(convert: Convert, join: Callable[[Any, Any], Any], of_splits: Convert) -> Convert:
    """Return what makes a ragged tensor: `join` has the tensor of its values, and that of its row splits."""
    return lambda part: join(convert(part.values), of_splits(part.row_splits))


class BatchView:
    """Gives a loader's batches as tensors, an epoch each time it is iterated.

    Each iterator is one pass over the loader, and tells where it stands as the loader's own do (`state_dict`).

    Args:
        core: of the loader, which this keeps alive.
        make_conversion: called for each pass.
        ahead: batches that are converted before they are asked for, where they go `is_far`, to another device.
    """

    def __init__(self, core: LoaderCore, make_conversion: Callable[[], Conversion], ahead: Any, is_far: bool) -> None:
        core.check_usable()
        ahead = whole_number("ahead", ahead, at_least=0, hint="batches that are on their way to the device")
        self._core, self._make_conversion, self._ahead = core, make_conversion, ahead if is_far else 0

    def __iter__(self) -> Iterator[Any]:
        core, convert = self._core, self._make_conversion()
        core.check_usable()
        return AheadIterator(core, convert, self._ahead) if self._ahead else LoaderIterator(core, convert)

    def __len__(self) -> int:
        """Batches of an epoch, as the loader's length has it."""
        return self._core.batches_per_epoch()

    def __bool__(self) -> bool:
        return True  # its length may be unknown

    def __repr__(self) -> str:
        return f"<batches as tensors of {self._core.description}; {FOR_KERAS}>"


def check_epochs(core: LoaderCore, epochs: Any) -> int | None:
    """How many passes over a loader an iteration has; None: no end, as of every endless sequence."""
    plan = core.tracker.plan
    if epochs is None:
        return None
    epochs = whole_number("epochs", epochs, at_least=1, hint="None is a stream without end")
    if epochs * plan.batches_per_epoch > LARGEST_INT64 and not plan.is_open:
        raise ArgumentError(
            f"epochs={epochs} with {plan.batches_per_epoch} batches each are more than 2**63 batches: epochs=None is a "
            "stream without end"
        )
    if plan.is_endless and epochs > 1:
        raise ArgumentError(
            f"epochs={epochs} of an endless sequence: the first would never end. Leave epochs away, and say "
            "steps_per_epoch to fit, which then goes on with the next index in each epoch"
        )
    return None if plan.is_endless else epochs
