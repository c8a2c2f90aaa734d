"""`Loader.as_dataset`: `tf.data.Dataset.from_generator` over arrays that look at the workers' memory.

from_generator costs some hundred microseconds an element, all under the GIL, whatever the element's size. So an element
is a whole batch, or for tiny batches a chunk of them, which tf.data takes apart again in C++:

    chunks:  from_generator ─▶ prefetch ─▶ unbatch ─▶ (ragged and bitcast put right) ─▶ assert_cardinality
    batches: from_generator ─────────────────────────▶ (ragged and bitcast put right) ─▶ assert_cardinality ─▶ prefetch

TensorFlow aliases a C-contiguous array of the exact dtype at a 64-byte-aligned address, so a batch is copied nowhere
between the worker and the tensor; `unbatch` copies, which for tiny batches is the lesser cost.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

try:
    import tensorflow as tf
except ImportError as missing:
    raise ImportError(
        "as_dataset needs TensorFlow, which is not installed: pip install 'loaderpool[tensorflow]'"
    ) from missing

from loaderpool.adapters.epochs import Epochs, check_epochs, read_whole
from loaderpool.adapters.exit_gate import exit_gate
from loaderpool.adapters.loader_state import LoaderState
from loaderpool.adapters.tensor_format import TensorFormat, check_device
from loaderpool.errors import ClosedError, SpecMismatchError, StateError
from loaderpool.memory.adoption import LEAST_BYTES
from loaderpool.system import ctrl_c, malloc
from loaderpool.trainer.epochs.batch_reader import BatchReader
from loaderpool.trainer.epochs.position import IterationLog

if TYPE_CHECKING:
    from loaderpool.trainer.epochs.epoch_tracker import EpochTracker
    from loaderpool.trainer.loader_core import LoaderCore

__all__ = ["LoaderState", "as_dataset", "restore_malloc"]


def as_dataset(core: LoaderCore, *, epochs: int | None, prefetch: int, device: str | None) -> Any:
    is_endless = core.tracker.plan.is_endless
    epochs = check_epochs(core, epochs)
    prefetch = read_whole(
        "prefetch", prefetch, "a number of batches from 0 on, or tf.data.AUTOTUNE", at_least=tf.data.AUTOTUNE
    )
    check_device(device)
    ctrl_c.watch()
    form = core.running_engine().form()
    wire = TensorFormat.of(form, core.running_engine().spec(), form.max_chunk)
    first_pass = core.tracker.next_log()
    skips = core.config.on_error.action == "skip"
    tells_length = not skips and not core.tracker.is_backed_up and not core.tracker.plan.is_open
    source = _Elements(core, wire, Epochs(epochs), first_pass.batches, tells_length and epochs is not None)
    dataset = tf.data.Dataset.from_generator(source, output_signature=wire.signature)
    if wire.in_chunks:
        if prefetch:
            dataset = dataset.prefetch(prefetch)
        dataset = dataset.unbatch()
    if wire.needs_restoring:
        dataset = dataset.map(tf.autograph.experimental.do_not_convert(wire.restore))
    if tells_length or is_endless:
        count = tf.data.INFINITE_CARDINALITY
        if epochs is not None:
            count = first_pass.batches + (epochs - 1) * core.batches_per_epoch()
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
    dataset = dataset.with_options(_options(wire))
    if device is not None:
        dataset = dataset.apply(tf.data.experimental.prefetch_to_device(device, prefetch or None))
    elif prefetch and not wire.in_chunks:
        dataset = dataset.prefetch(prefetch)
    # TensorFlow's registry may keep the generator for ever, so that holds the loader weakly; the dataset holds it, and
    # every dataset made from this one holds this one.
    dataset._loaderpool_loader = core
    if core.tracker.is_backed_up and epochs is not None and not skips and not core.tracker.plan.is_open:
        # `BackupCallback` ends the epoch in which a training goes on before Keras would. An assertion in C++ would make
        # an error of that, where Keras fetches several steps at once.
        length = tf.constant(epochs * core.batches_per_epoch(), tf.int64)
        dataset.cardinality = lambda: length
    return dataset


_restores_malloc = False


def restore_malloc() -> bool:
    """Large NumPy arrays are as cheap again as before another `from_generator` ran; a switch for the whole process.

    The first `from_generator` of a process has glibc return every block above 128 KiB to the system at once
    (TensorFlow's answer to memory growth, its issue 65675), so that each new array or tensor of that size pays a page
    fault per page. Where that one is a loader's, `as_dataset` puts the thresholds back. Where it was another one, or
    where the environment sets malloc's thresholds (`MALLOC_MMAP_THRESHOLD_` and its like, `GLIBC_TUNABLES`), they stay,
    unless this is called once, before `as_dataset` or after. The price: memory that was freed stays with the process
    for longer.

    Returns:
        Whether there was something to set; False without glibc (musl, macOS).
    """
    global _restores_malloc
    _restores_malloc = True
    return malloc.keep_freed_blocks()


def _options(wire: TensorFormat) -> Any:
    """Options hold for the user's own stages too, so there are as few as can be: no threading, no autotune.

    Auto-sharding is off: by it every host would make all batches and throw most away. tf.data puts a prefetch of its
    own behind a pipeline that ends without one. It lets a user's last `map` overlap with training (without it 1.7 times
    the time, tried), so it stays; but behind the unbatch of chunks it adds a third to the cost of a batch (tried).
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    if wire.in_chunks:
        options.experimental_optimization.inject_prefetch = False
    return options


class _Elements:
    """The callable that from_generator calls for each new iterator. Holds the loader weakly."""

    def __init__(
        self, core: LoaderCore, wire: TensorFormat, epochs: Epochs, first_batches: int, has_length: bool
    ) -> None:
        self._core = weakref.ref(core)
        self._wire = wire
        self._epochs = epochs
        self._first_batches = first_batches  # of its first epoch, as its length has it
        self._has_length = has_length
        self._leaves_malloc = malloc.keeps_freed_blocks()

    def __call__(self) -> Iterator[Any]:
        core = self._core()
        if core is None:
            raise ClosedError("the Loader and all datasets made from it were dropped, so it is closed: keep one")
        # By now TensorFlow has set the thresholds, see `restore_malloc`.
        if _restores_malloc:
            malloc.keep_freed_blocks()
        elif self._leaves_malloc:  # arrays that can be adopted in place must not come from the heap
            malloc.keep_freed_blocks(LEAST_BYTES, LEAST_BYTES)
        self._check_length(core)
        return _Stream(_generate(core, self._wire, self._epochs))

    def _check_length(self, core: LoaderCore) -> None:
        """A dataset has one length: after `load_state_dict` the first one's is shorter than the others'."""
        now = core.tracker.next_log().batches
        if not self._has_length or now == self._first_batches:
            return
        if now < self._first_batches:
            raise StateError(
                "this dataset was made before load_state_dict(); make another one, for the rest of the epoch"
            )
        raise StateError(
            "this dataset is the rest of the epoch that load_state_dict() went on with, and that is over: make another "
            "one with as_dataset() for whole epochs"
        )


def _generate(core: LoaderCore, wire: TensorFormat, epochs: Epochs) -> Iterator[Any]:
    """Elements of one iterator. Runs in: threads of tf.data, a different one for each element."""
    tracker = core.tracker
    iteration = IterationLog()
    tracker.note_iteration(iteration, is_dataset=True)
    tracker.live_datasets[id(iteration)] = iteration
    try:
        yield from _epochs_of(tracker, iteration, wire, epochs)
    finally:
        tracker.live_datasets.pop(id(iteration), None)


def _epochs_of(tracker: EpochTracker, iteration: IterationLog, wire: TensorFormat, epochs: Epochs) -> Iterator[Any]:
    done = 0
    while done != epochs.count and not exit_gate.is_shut:
        reader = BatchReader(tracker, iteration, wire.open, epochs.is_followed(done))
        take = functools.partial(reader.take_joined, wire.element) if wire.in_chunks else reader.take
        done += 1
        try:
            while not exit_gate.is_shut:
                yield take()  # by no local variable: while we are suspended its slot would stay lent
        except StopIteration:
            pass
        except ClosedError:
            if not exit_gate.is_shut:  # else the interpreter ends: end quietly, this is read no more
                raise
        except SpecMismatchError as error:  # a whole batch is not as the dataset says
            tracker.note_error(error)
            raise
        finally:
            reader.close()
            if not exit_gate.is_shut:
                tracker.settle_ends()  # the last batch was handed over; the consumer may not have asked for more
    epochs.was_ended = True


class _Stream:
    """What from_generator iterates: the elements, each asked for through the exit gate."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> Any:
        with exit_gate:
            try:
                return next(self._elements)
            except StopIteration:
                exit_gate.ending.add(id(self))
                raise

    def __del__(self) -> None:
        exit_gate.ending.discard(id(self))
