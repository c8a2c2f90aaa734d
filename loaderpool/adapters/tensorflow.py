"""`Loader.as_dataset`: `tf.data.Dataset.from_generator` over arrays that look at the workers' memory.

from_generator costs some hundred microseconds an element, all under the GIL, whatever the element's size. So an element
is a whole batch, or for tiny batches a chunk of them, which tf.data takes apart again in C++:

    chunks:  from_generator ─▶ prefetch ─▶ unbatch ─▶ (ragged and bitcast put right) ─▶ assert_cardinality
    batches: from_generator ─────────────────────────▶ (ragged and bitcast put right) ─▶ assert_cardinality ─▶ prefetch

TensorFlow aliases a C-contiguous array of the exact dtype at a 64-byte-aligned address, so a batch is copied nowhere
between the worker and the tensor; `unbatch` copies, which for tiny batches is the lesser cost.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from loaderpool.clock import monotonic_s
from loaderpool.errors import ArgumentError, ArgumentTypeError, ClosedError
from loaderpool.memory.form import BatchForm
from loaderpool.passes import Pass
from loaderpool.ragged import RaggedArray
from loaderpool.spec import ArraySpec

if TYPE_CHECKING:
    from loaderpool.loader import Loader

try:
    import tensorflow as tf
except ImportError as missing:
    raise ImportError(
        "as_dataset needs TensorFlow, which is not installed: pip install 'loaderpool[tensorflow]'"
    ) from missing

__all__ = ["as_dataset", "tensor_spec"]

# After the last call has returned to C++ its thread still has a few bytecodes of TensorFlow's wrapper to go. Too short
# risks an exit that hangs, longer is only felt at exit.
_QUIET_S = 0.02
# from_generator cannot carry these in every version; they travel as bytes and get their type back in C++.
_AS_BYTES = ("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz")


def as_dataset(loader: Loader, *, epochs: int | None, prefetch: int, device: str | None, checkpointable: bool) -> Any:
    """See `Loader.as_dataset`."""
    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int)):
        raise ArgumentTypeError(f"epochs must be a whole number or None (without end), got {epochs!r}")
    if epochs is not None and epochs < 1:
        raise ArgumentError(f"epochs must be at least 1, or None for a stream without end, got {epochs}")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise ArgumentTypeError(f"prefetch must be a number of batches, got {prefetch!r}")
    if prefetch < 0:
        raise ArgumentError(f"prefetch must be at least 0, got {prefetch}")
    if device is not None and not isinstance(device, str):
        raise ArgumentTypeError(f'device must be a name such as "/GPU:0", got {device!r}')
    form = loader.form
    wire = _Wire(form, in_chunks=_goes_in_chunks(form))
    source = _Elements(loader, wire, epochs)
    if checkpointable:
        raise ArgumentError("checkpointable=True is not there yet; it comes with exact resume")
    dataset = tf.data.Dataset.from_generator(source, output_signature=wire.signature)
    if wire.in_chunks:
        dataset = _quiet(dataset)
        if prefetch:
            dataset = dataset.prefetch(prefetch)
        dataset = dataset.unbatch()
    if wire.needs_restoring:
        dataset = dataset.map(wire.restore)
    if loader.config.on_error.action != "skip":
        count = tf.data.INFINITE_CARDINALITY if epochs is None else epochs * len(loader)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    dataset = _quiet(dataset)
    if device is not None:
        dataset = dataset.apply(tf.data.experimental.prefetch_to_device(device, prefetch or None))
    elif prefetch and not wire.in_chunks:
        dataset = dataset.prefetch(prefetch)
    # TensorFlow's registry may keep the generator for ever, so that holds the loader weakly; the dataset holds it, and
    # every dataset made from this one holds this one.
    dataset._loaderpool_loader = loader
    return dataset


def _goes_in_chunks(form: BatchForm) -> bool:
    return form.fixed is not None and form.max_chunk > 1


def _quiet(dataset: Any) -> Any:
    """No second copy of the data on other hosts, and no prefetch that holds slots behind our back."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def tensor_spec(component: ArraySpec) -> Any:
    """The `tf.TypeSpec` of a component as the user's dataset has it."""
    dtype = tf.string if component.text is not None else tf.dtypes.as_dtype(component.dtype)
    if component.ragged:
        return tf.RaggedTensorSpec(component.shape, dtype, ragged_rank=1, row_splits_dtype=tf.int64)
    return tf.TensorSpec(component.shape, dtype)


@dataclasses.dataclass(frozen=True)
class _Wire:
    """How elements travel through from_generator: a flat tuple of plain arrays, put right by `restore` in C++."""

    form: BatchForm
    in_chunks: bool

    @property
    def signature(self) -> Any:
        """The output_signature."""
        if not self.needs_restoring:
            specs = [self._prefixed(tensor_spec(component)) for component in self.form.spec.components]
            return self.form.spec.structure.pack(specs)
        specs = []
        for component in self.form.spec.components:
            if component.ragged:
                specs += [
                    tf.TensorSpec((None, *component.shape[2:]), _wire_dtype(component)),
                    tf.TensorSpec((None,), tf.int64),
                ]
            else:
                specs.append(self._prefixed(tf.TensorSpec(component.shape, _wire_dtype(component))))
        return tuple(specs)

    @property
    def needs_restoring(self) -> bool:
        """Whether a component travels in another form than the user sees."""
        return any(component.ragged or _travels_as_bytes(component) for component in self.form.spec.components)

    def element(self, parts: list[Any]) -> Any:
        """What the generator yields for a batch's (or chunk's) components."""
        if not self.needs_restoring:
            return self.form.spec.structure.pack(parts)
        flat: list[Any] = []
        for part, component in zip(parts, self.form.spec.components, strict=True):
            if isinstance(part, RaggedArray):
                values = part.values.view("uint8") if _travels_as_bytes(component) else part.values
                flat += [values, part.row_splits]
            else:
                flat.append(part.view("uint8") if _travels_as_bytes(component) else part)
        return tuple(flat)

    def restore(self, *flat: Any) -> Any:
        """Runs in tf.data: the element as the user sees it."""
        parts, rest = [], list(flat)
        for component in self.form.spec.components:
            values = rest.pop(0)
            if _travels_as_bytes(component):
                values = tf.bitcast(values, tf.dtypes.as_dtype(component.dtype))
            if component.ragged:
                values = tf.RaggedTensor.from_row_splits(values, rest.pop(0), validate=False)
            parts.append(values)
        structure = self.form.spec.structure
        return structure.pack(parts)

    def _prefixed(self, spec: Any) -> Any:
        return tf.TensorSpec((None, *spec.shape), spec.dtype) if self.in_chunks else spec


def _travels_as_bytes(component: ArraySpec) -> bool:
    return component.dtype.name in _AS_BYTES


def _wire_dtype(component: ArraySpec) -> Any:
    if component.text is not None:
        return tf.string
    return tf.uint8 if _travels_as_bytes(component) else tf.dtypes.as_dtype(component.dtype)


class _Elements:
    """The callable that from_generator calls for each new iterator. Holds the loader weakly."""

    def __init__(self, loader: Loader, wire: _Wire, epochs: int | None) -> None:
        self._loader = weakref.ref(loader)
        self._wire = wire
        self._epochs = epochs

    def __call__(self) -> Iterator[Any]:
        loader = self._loader()
        if loader is None:
            raise ClosedError("the Loader and all datasets made from it were dropped, so it is closed: keep one")
        return _Stream(_generate(loader, self._wire, self._epochs))


def _generate(loader: Loader, wire: _Wire, epochs: int | None) -> Iterator[Any]:
    """Elements of one iterator. Runs in: threads of tf.data, a different one for each element."""
    book = loader._book
    tally = book.tally
    skips = loader.config.on_error.action == "skip"
    left = epochs
    while (left is None or left > 0) and not _exit_gate.is_shut:
        left = None if left is None else left - 1
        one_pass = Pass(book)
        try:
            while True:
                delivery = _next_delivery(one_pass)
                if delivery is None:
                    break
                tally.tick(delivery)
                # Nothing of an element may stay in a local variable while we are suspended: its slot would stay, too.
                if wire.in_chunks:
                    tally.batches += delivery.count
                    tally.samples += delivery.count * delivery.rows
                    elements = [wire.element(delivery.joined())]
                    del delivery
                    yield elements.pop()
                    continue
                batches = [batch for batch in delivery.batches() if batch[0] or not skips]
                del delivery
                while batches:
                    tally.batches += 1
                    tally.samples += batches[0][0]
                    yield wire.element(batches.pop(0)[1])
        finally:
            one_pass.close()


def _next_delivery(one_pass: Pass) -> Any:
    if _exit_gate.is_shut:
        return None
    try:
        return one_pass.next_delivery()
    except StopIteration:
        return None
    except ClosedError:
        if _exit_gate.is_shut:  # the interpreter ends: end quietly, nobody reads this any more
            return None
        raise


class _Stream:
    """What from_generator iterates: the elements, each asked for through the exit gate."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> Any:
        with _exit_gate:
            try:
                return next(self._elements)
            except StopIteration:
                _exit_gate.ending.add(id(self))
                raise

    def __del__(self) -> None:
        _exit_gate.ending.discard(id(self))


class _ExitGate:
    """Keeps the interpreter's end from coming while a tf.data thread is inside Python code.

    tf.data cannot cancel a call into Python, and a thread that is in one when the interpreter is torn down never comes
    back, so that the destructor of its iterator waits for it for ever. `atexit` runs before that: it closes the pools,
    which wakes every wait; then it waits until the last call has left, until the iterators that ended so are forgotten
    by TensorFlow (a call into Python of its own), and until no new call has come for a moment.
    """

    def __init__(self) -> None:
        self.is_shut = False
        self.ending: set[int] = set()
        self._inside = 0
        self._calls = 0
        self._turn = threading.Lock()

    def __enter__(self) -> None:
        with self._turn:
            self._inside += 1
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._inside -= 1

    def shut(self) -> None:
        """Let nobody in any more and wait until all are out, 2 s at most."""
        from loaderpool.session import live_sessions

        self.is_shut = True
        for session in live_sessions():
            session.close()
        if not self._calls:
            return
        gone_by = monotonic_s() + 2.0
        calls = -1
        while monotonic_s() < gone_by and (self._inside or self.ending or calls != self._calls):
            calls = self._calls
            threading.Event().wait(_QUIET_S)


_exit_gate = _ExitGate()
atexit.register(_exit_gate.shut)
